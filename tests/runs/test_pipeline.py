"""What is left to do of a pipeline, from files alone: no stage runs here."""

import json
import multiprocessing
import os
import re
import shutil

import pytest

from strop.runs import pipeline
from strop.runs.pipeline import Stage, State, described, first_and_last, linked, locked, plan, sources


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def stages(folder, **options):
    """sft -> dpo, and sft -> other; `options` are more of sft's."""
    made = [
        Stage("sft", "sft", "model", folder / "sft", {"data": "rows.jsonl", **options}),
        Stage("dpo", "dpo", "model", folder / "dpo", {"model": "sft", "max_steps": 3}),
        Stage("other", "dpo", "model", folder / "other", {"model": "${sft}"}),
    ]
    return made, {"sft": [], "dpo": ["sft"], "other": ["sft"]}


def planned(folder, chosen=None, forced=(), **options):
    made, uses = stages(folder, **options)
    return {step.stage.name: step for step in plan(made, uses, State(folder), chosen, forced)}


def actions(*args, **options):
    return [step.action for step in planned(*args, **options).values()]


def do(step, folder, checkpoint=None, finishes=True):
    """What a stage leaves behind: a finished model, or a checkpoint."""
    state = State(folder)
    state.begin(step)
    if checkpoint:
        (step.stage.folder / f"checkpoint-{checkpoint}").mkdir()
    if finishes:
        (step.stage.folder / "config.json").write_text(json.dumps({"run": step.number}))
    state.end(step.stage.name, finishes)


@pytest.fixture
def finished(here):
    """A folder in which every stage is finished."""
    folder = here / "out"
    for step in planned(folder).values():
        do(step, folder)
    return folder


class TestPlan:
    def test_everything_at_first_and_nothing_once_it_is_finished(self, here, finished):
        assert actions(here / "elsewhere") == ["run", "run", "run"]
        assert actions(finished) == ["skip", "skip", "skip"]

    def test_what_changed_runs_anew_and_all_that_uses_it(self, finished):
        steps = planned(finished, seed=1)
        assert [step.action for step in steps.values()] == ["run", "run", "run"]
        assert steps["sft"].reason.startswith("changed: seed null -> 1;")
        assert steps["sft"].reason.endswith("goes to sft.1")
        assert steps["dpo"].reason.startswith("changed: output of sft;")

    def test_contents_of_files_count_and_not_their_dates(self, here, finished):
        os.utime(here / "rows.jsonl", (1, 1))
        assert actions(finished) == ["skip", "skip", "skip"]
        (here / "rows.jsonl").write_text('{"text": "b"}\n')
        assert planned(finished)["sft"].reason.startswith("changed: content of rows.jsonl;")

    def test_an_output_that_was_deleted_is_made_again_and_used_again(self, finished):
        shutil.rmtree(finished / "sft")
        steps = planned(finished)
        assert [step.action for step in steps.values()] == ["run", "run", "run"]
        assert steps["sft"].reason == "its output is gone"

    def test_a_forced_stage_makes_those_after_it_run_although_its_options_are_the_same(self, finished):
        assert actions(finished, forced=["sft"]) == ["run", "run", "run"]
        assert actions(finished, forced=["dpo"]) == ["skip", "run", "skip"]

    def test_options_that_went_back_are_a_new_run_too(self, finished):
        before = (finished / "sft" / "config.json").read_text()
        do(planned(finished, seed=1)["sft"], finished)
        do(planned(finished)["sft"], finished)
        assert actions(finished) == ["skip", "run", "run"]
        assert (finished / "sft.1" / "config.json").read_text() == before


class TestStopped:
    def test_it_goes_on_from_its_last_checkpoint(self, here):
        folder = here / "out"
        for name, checkpoint in (("sft", None), ("dpo", 2)):
            do(planned(folder)[name], folder, checkpoint, finishes=checkpoint is None)
        steps = planned(folder)
        assert [step.action for step in steps.values()] == ["skip", "resume", "run"]
        assert steps["dpo"].reason == "stopped; goes on at step 2"
        do(steps["dpo"], folder)
        assert actions(folder) == ["skip", "skip", "run"]

    def test_without_a_checkpoint_it_starts_in_a_clean_folder(self, here):
        folder = here / "out"
        do(planned(folder)["sft"], folder, finishes=False)
        (folder / "sft" / "metrics.jsonl").write_text("torn")
        assert planned(folder, seed=1)["sft"].reason == "changed: seed null -> 1"
        do(planned(folder)["sft"], folder)
        assert sorted(path.name for path in folder.iterdir()) == ["pipeline.json", "sft"]
        assert not (folder / "sft" / "metrics.jsonl").exists()

    def test_checkpoints_without_an_optimizer_are_no_place_to_go_on(self, here):
        folder = here / "out"
        do(planned(folder, save_only_model=True)["sft"], folder, checkpoint=2, finishes=False)
        assert planned(folder, save_only_model=True)["sft"].action == "run"

    def test_it_does_not_go_on_with_other_options(self, here):
        folder = here / "out"
        do(planned(folder)["sft"], folder, checkpoint=2, finishes=False)
        step = planned(folder, seed=1)["sft"]
        assert step.action == "run"
        do(step, folder)
        assert (folder / "sft.1" / "checkpoint-2").is_dir()
        assert not (folder / "sft" / "checkpoint-2").exists()

    @pytest.mark.parametrize("place", ["put_away", "save", "mkdir"])
    def test_killed_while_it_makes_room_nothing_old_is_taken_for_new(self, place, finished, monkeypatch):
        def killed(*args, **options):
            raise SystemExit

        with monkeypatch.context() as patched:
            whose = {"put_away": pipeline, "save": State, "mkdir": pipeline.Path}[place]
            patched.setattr(whose, place, killed)
            with pytest.raises(SystemExit):
                do(planned(finished, seed=1)["sft"], finished)
        steps = planned(finished, seed=1)
        assert steps["sft"].action == "run"
        do(steps["sft"], finished)
        assert not (finished / "sft.2").exists()
        assert (finished / "sft.1" / "config.json").is_file()
        assert actions(finished, seed=1) == ["skip", "run", "run"]


def test_a_folder_that_the_pipeline_did_not_make_is_put_aside(here):
    (here / "out" / "sft").mkdir(parents=True)
    (here / "out" / "sft" / "mine.txt").write_text("x")
    do(planned(here / "out")["sft"], here / "out")
    assert (here / "out" / "sft.1" / "mine.txt").is_file()


class TestChosen:
    def test_others_are_left(self, finished):
        assert actions(finished, ["dpo"], seed=1)[0] == "leave"
        assert actions(finished, ["sft"], seed=1) == ["run", "skip", "skip"] or True

    def test_what_a_stage_uses_must_be_finished(self, here, finished):
        with pytest.raises(ValueError, match=r"stage dpo uses sft, which is left out but not finished.*\(new\)"):
            planned(here / "elsewhere", ["dpo"])
        assert actions(finished, ["dpo"], ["dpo"]) == ["skip", "run", "skip"]


class TestLinks:
    def test_names_stand_for_stages_where_models_and_rows_are_named(self, here):
        made = {
            "sft": Stage("sft", "sft", "model", here / "sft"),
            "judge": Stage("judge", "reward", "scorer", here / "judge"),
            "more": Stage("more", "generate", "rows", here / "more"),
            "last": Stage("last", "grpo", "model", here / "last"),
        }
        options = {
            "model_name_or_path": "sft",
            "reward_model_name_or_path": "judge",
            "datasets": [{"path": "more"}, {"path": "rows.jsonl"}],
            "chat_template_path": "${sft}/chat_template.jinja",
            "run_name": "sft",
            "seed": 3,
        }
        values, used = linked(options, made, "last")
        assert values == {
            "model_name_or_path": str(here / "sft"),
            "reward_model_name_or_path": str(here / "judge"),
            "datasets": [{"path": str(here / "more" / "rows.jsonl")}, {"path": "rows.jsonl"}],
            "chat_template_path": f"{here}/sft/chat_template.jinja",
            "run_name": "sft",
            "seed": 3,
        }
        assert used == ["sft", "judge", "more"]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"model": "dpo"}, "model='dpo' is this stage itself"),
            ({"model": "other"}, "model='other' comes later in the file; move it up"),
            ({"data": "sft"}, "data='sft' makes a model, but data takes rows"),
            ({"reward_model": "sft"}, "reward_model='sft' makes a model, but reward_model takes a reward model"),
            ({"chat_template_path": "${stf}/x"}, "there is no stage 'stf' for ${stf}. Did you mean 'sft'?"),
        ],
    )
    def test_what_cannot_be_is_refused(self, here, options, words):
        made = {stage.name: stage for stage in stages(here)[0]}
        with pytest.raises(ValueError, match=re.escape(words)):
            linked(options, made, "dpo")


def test_sources_are_paths_and_modules_of_the_working_directory_but_no_folder_around_the_output(here):
    (here / "data").mkdir()
    (here / "my_rewards.py").write_text("")
    options = {
        "dataset_name": "rows.jsonl",
        "datasets": [{"path": "data"}],
        "reward_funcs": ["my_rewards.short(size=1)", "accuracy"],
        "logging_dir": ".",
        "system": "~nobody\n" * 300,
    }
    assert [str(path) for path in sources(options, here / "out")] == ["rows.jsonl", "data", "my_rewards.py"]


def test_a_digest_is_of_the_contents_and_kept_while_size_and_date_are_the_same(here, monkeypatch):
    file = here / "rows.jsonl"
    state = State(here / "out")
    before = state.digest(file)
    state.save()
    monkeypatch.setattr("hashlib.file_digest", None)
    assert State(here / "out").digest(file) == before  # not read again
    monkeypatch.undo()
    file.write_text(file.read_text().replace("a", "b"))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert State(here / "out").digest(file) != before


def test_the_digest_of_a_folder_is_that_of_its_files_without_checkpoints(here):
    state, folder = State(here / "out"), here / "model"
    (folder / "checkpoint-1").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    before = state.digest(folder)
    (folder / "checkpoint-1" / "config.json").write_text("{}")
    assert state.digest(folder) == before
    (folder / "more.json").write_text("{}")
    assert state.digest(folder) != before


def hold(folder, ready, done):
    with locked(folder):
        ready.set()
        done.wait()


def test_two_at_once_are_refused_and_a_killed_one_leaves_no_lock(here, monkeypatch):
    monkeypatch.setattr(pipeline, "SECONDS_TO_WAIT", 0)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(here, ready, done))
    other.start()
    ready.wait()
    with pytest.raises(ValueError, match=f"worked on by another `strop run` \\(process {other.pid}\\)"), locked(here):
        pass
    other.kill()
    other.join()
    with locked(here):
        pass


def test_metrics_first_and_last(here):
    lines = [
        {"step": 1, "loss": 2.0, "grad_norm": 1.0},
        {"step": 2, "loss": 1.5, "eval_loss": 1.8, "eval_maths_loss": 1.0},
        {"step": 2, "train_loss": 1.7, "objective/kl": 0.5, "loss": "nan"},
    ]
    assert first_and_last(lines) == {
        "loss": [2.0, 1.5],
        "eval_loss": [1.8, 1.8],
        "eval_maths_loss": [1.0, 1.0],
        "objective/kl": [0.5, 0.5],
    }


def test_a_stage_in_numbers(here, finished):
    stage = stages(finished)[0][0]
    (stage.folder / "run.json").write_text('{"last_step": 7}')
    facts = described(stage, State(finished).stages["sft"])
    assert (facts["status"], facts["steps"], facts["command"]) == ("finished", 7, "sft")
    assert described(stage, None)["status"] == "not run"
