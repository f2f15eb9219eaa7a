"""The README, the pages of docs/ and the examples do what they say, on a tiny model in place of a real one."""

import io
import json
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest

from strop.cli import main, quickstart
from strop.cli.args import Options

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")])
STAND_IN = re.compile(r"HuggingFaceTB/SmolLM2-135M-Instruct|path/or/hub-id")
"""What documents call the model; a tiny one takes its place."""


def snippets(markdown: str) -> list[tuple[str, str]]:
    """("python", code) of each fenced block and ("strop", command) of each command line, in the order of the page."""
    found, fence, block = [], None, []
    for line in markdown.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            if fence == "python":
                found.append(("python", "\n".join(block)))
            fence, block = (None, []) if fence is not None else (line[3:], [])
        elif fence == "python":
            block.append(line)
        elif match := re.match(r"(?:    )?(?:\.venv/bin/)?(strop \S.*)$", line if fence or line[:4] == "    " else ""):
            found.append(("strop", match[1]))
    return found


@pytest.fixture
def workplace(tmp_path, monkeypatch, chat_rows, tiny_folder):
    """A folder with the files that documents speak of, as the working directory; nothing is typed."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows))
    (tmp_path / "gsm8k_train.jsonl").write_text(json.dumps({"question": "What is 1 + 2?", "answer": "3"}) + "\n")
    pair = {"prompt": "Is ice hot?", "chosen": " Ice is cold.", "rejected": " Yes."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (tmp_path / "triples.jsonl").write_text(json.dumps(pair | {"reference": " No."}) + "\n")
    labelled = [
        {"prompt": f"Is ice {what}?", "completion": " Yes.", "label": what == "cold"} for what in ("cold", "hot")
    ]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    steps = {"prompt": "Is ice hot?", "completions": ["Ice is cold.", "So yes."], "labels": [True, False]}
    (tmp_path / "steps.jsonl").write_text(json.dumps(steps) + "\n")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Is ice hot?"}\n')
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "train.jsonl").write_text(json.dumps(pair) + "\n")
    page = (REPOSITORY / "docs" / "pipeline.md").read_text()
    (stages,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pipeline.yaml").write_text(STAND_IN.sub(str(tiny_folder), stages))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p.read_text())], ids=lambda page: page.name)
def test_every_snippet_of_a_page_runs(page, workplace, tiny_folder, monkeypatch):
    script = types.ModuleType("script_of_a_page")  # a real module, so that its functions can be saved by name
    monkeypatch.setitem(sys.modules, script.__name__, script)
    for kind, text in snippets(page.read_text()):
        text = STAND_IN.sub(str(tiny_folder), text)
        if kind == "python":
            exec(compile(text, page.name, "exec"), script.__dict__)
        else:
            run_command(shlex.split(text.split(" > ")[0], comments=True)[1:])


def run_command(words: list[str]) -> None:
    """Run a command of the docs; quickstart and pipelines, which have tests of their own, up to where they begin."""
    if "..." in words:
        return
    if words[0] == "quickstart":
        options = Options("strop quickstart", [quickstart.QuickstartArguments])
        options.build(options.read(words[1:]))
        return
    if words[0] == "chat" and words[1].startswith("quickstart"):
        return
    words = [*words, "--dry_run"] if words[0] == "run" else words
    assert main.main(words) == 0, words


def test_the_example_in_python_runs(workplace, tiny_folder):
    example = runpy.run_path(str(REPOSITORY / "examples" / "sft.py"))
    example["main"](str(tiny_folder), "out")
    assert (workplace / "out" / "adapter_model.safetensors").exists()


def test_the_example_config_runs(workplace, tiny_folder):
    config = str(REPOSITORY / "examples" / "sft.yaml")
    assert main.main(["sft", "--config", config, "--model", str(tiny_folder), "--data", "rows.jsonl"]) == 0
    assert (workplace / "sft-from-yaml" / "adapter_model.safetensors").exists()


def test_the_example_pipeline_is_ready_to_run(workplace, tiny_folder, capsys):
    runpy.run_path(str(REPOSITORY / "examples" / "reviews.py"))["main"](["reviews"])
    pipeline = str(REPOSITORY / "examples" / "rlhf.yaml")
    assert main.main(["run", pipeline, f"defaults.model={tiny_folder}", "--dry_run"]) == 0
    assert " ppo " in capsys.readouterr().out


def test_the_example_of_ppo_runs(workplace, tiny_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    example = runpy.run_path(str(REPOSITORY / "examples" / "ppo_sentiment.py"))
    example["main"](["--model", str(tiny_folder), "--updates", "1", "--num_pairs", "16", "--output_dir", "out"])
    assert "KL from the model it was, nats a continuation: " in capsys.readouterr().out
    assert (workplace / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(("method", "options"), [("dpo", ["--test_pairs", "1"]), ("reward", [])])
def test_the_example_on_preferences_runs(workplace, tiny_folder, method, options, capsys):
    example = runpy.run_path(str(REPOSITORY / "examples" / "preferences.py"))
    files = ["--train", "pairs.jsonl", "--test", "pairs.jsonl", "--output_dir", "out"]
    example["main"]([method, "--model", str(tiny_folder), *files, *options])
    assert "of 1 held-out pairs are in the right order" in capsys.readouterr().out
    assert (workplace / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_the_example_on_preferences_measures_long_pairs_too(method, workplace, tiny_folder, capsys):
    example = runpy.run_path(str(REPOSITORY / "examples" / "preferences.py"))
    pair = json.loads((workplace / "pairs.jsonl").read_text())
    rows = [pair, {**pair, "chosen": " Ice is cold." * 200}]
    (workplace / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example["main"]([method, "--model", str(tiny_folder), "--train", "pairs.jsonl", "--test", "long.jsonl"])
    assert "of 2 held-out pairs are in the right order" in capsys.readouterr().out


def test_the_intervals_of_the_example_are_those_of_the_textbook():
    example = runpy.run_path(str(REPOSITORY / "examples" / "preferences.py"))
    # Wilson 1927 at 8 of 10: (0.8 + 0.19208) / 1.38416 -+ 1.96 / 1.38416 * sqrt(0.016 + 0.009604)
    assert example["wilson"](0.8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-4)
    alike = example["over_questions"]([1.0] * 50 + [0.0] * 50, ["a"] * 50 + ["b"] * 50)
    assert alike == (0.0, 1.0)  # two questions, however many pairs
    low, high = example["over_questions"]([1.0, 0.0] * 200, [str(i) for i in range(400)])
    assert (low, high) == pytest.approx(example["wilson"](0.5, 400), abs=0.01)


def test_the_pairs_of_the_example_are_right_against_wrong(tmp_path):
    example = runpy.run_path(str(REPOSITORY / "examples" / "gsm8k_pairs.py"))
    solutions = [("four", True), ("4", True), ("five", False)]
    row = {"question": "2+2?", "ground_truth": "4"}
    row |= {f"model {i}": {"is_correct": right, "solution": text} for i, (text, right) in enumerate(solutions)}
    (tmp_path / "solutions.jsonl").write_text(json.dumps(row) + "\n")
    example["main"](str(tmp_path / "solutions.jsonl"), str(tmp_path / "pairs"))
    pairs = [json.loads(line) for line in (tmp_path / "pairs" / "test.jsonl").read_text().splitlines()]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("four", "five"), ("4", "five")]
    assert (tmp_path / "pairs" / "train.jsonl").read_text() == ""


def test_the_example_of_an_agent_runs(workplace):
    example = runpy.run_path(str(REPOSITORY / "examples" / "calculator_agent.py"))
    assert example["calculator"]("37 * 48") == 1776
    trainer = example["agent"](example["imitate"]("out", num=64, steps=1), "out", steps=1, heldout=2)
    trainer.args.max_completion_length = 12
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0  # so soon


def test_the_example_of_short_answers_runs(workplace, tiny_folder, capsys):
    example = runpy.run_path(str(REPOSITORY / "examples" / "grpo_short_answers.py"))
    said = [
        "A kite flies on a string.",
        "A kite.",
        "A kite flies. It is light.",
        "Kites fly high up in",
        "Ask in a toy shop!",
        "A kite is a kite.",
    ]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    assert example["short"](completions) == [1, 0, 0, 0, 1, 1]
    assert example["on_subject"](completions, ["kite"] * 6) == [1, 1, 1, 1, 0, 0]
    assert not set(example["TRAINED"].split()) & set(example["HELDOUT"].split())
    example["main"](["--model", str(tiny_folder), "--output_dir", "out", "--steps", "1", "--num_heldout", "3"])
    assert "3 questions about things never trained" in capsys.readouterr().out
    assert (workplace / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_in_the_index():
    index = (REPOSITORY / "docs" / "README.md").read_text()
    assert not [page.name for page in (REPOSITORY / "docs").glob("*.md") if page.name not in index + "README.md"]


def test_every_extra_of_the_readme_exists():
    import tomllib

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.search(r"Extras: (.*?);", (REPOSITORY / "README.md").read_text(), re.S)
    assert set(re.findall(r"`([\w-]+)`", listed[1])) == extras.keys() - {"dev", "quickstart"}
