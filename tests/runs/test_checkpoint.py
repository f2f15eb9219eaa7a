"""A checkpoint has its name only while it is whole."""

from pathlib import Path

import pytest

from strop.runs import checkpoint


def stage(run: Path, name: str, text: str = "weights") -> None:
    folder = checkpoint.staging_folder(run) / name
    folder.mkdir(parents=True)
    (folder / "model").write_text(text)


def named(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))


def test_nothing_has_the_name_before_it_is_published(tmp_path):
    stage(tmp_path, "checkpoint-1")
    assert named(tmp_path) == []
    assert checkpoint.publish(tmp_path, "checkpoint-1") == tmp_path / "checkpoint-1"
    assert (tmp_path / "checkpoint-1" / "model").read_text() == "weights"


def test_publishing_again_replaces(tmp_path):
    for text in ("old", "new"):
        stage(tmp_path, "checkpoint-1", text)
        checkpoint.publish(tmp_path, "checkpoint-1")
    assert (tmp_path / "checkpoint-1" / "model").read_text() == "new"


def test_leftovers_of_a_killed_save_go_away(tmp_path):
    stage(tmp_path, "checkpoint-1", "half")
    checkpoint.clear_staging(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    stage(tmp_path, "checkpoint-1")
    checkpoint.publish(tmp_path, "checkpoint-1")
    seen = []
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, **kw: seen.append(named(tmp_path)))
    checkpoint.discard(tmp_path / "checkpoint-1")
    assert seen[-1] == []


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [(None, None, [1, 2, 3, 10]), (2, None, [3, 10]), (2, 1, [1, 10]), (1, 2, [2, 10]), (3, 10, [2, 3, 10])],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, best, left):
    for step in (1, 2, 3, 10):
        stage(tmp_path, f"checkpoint-{step}")
        checkpoint.publish(tmp_path, f"checkpoint-{step}")
    checkpoint.rotate(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert named(tmp_path) == sorted(f"checkpoint-{step}" for step in left)
