"""Checkpoints that appear whole or not at all.

A checkpoint is written into a hidden folder beside its destination, flushed to the disk and renamed into place; one
that is no longer wanted is renamed away before it is deleted. A process killed at any moment leaves no folder
`checkpoint-<step>` that lacks a file.
"""

import os
import shutil
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

STAGING = ".saving"
"""Folder, inside the output folder, where a checkpoint is written before it gets its name."""


def staging_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / STAGING


def clear_staging(output_dir: str | Path) -> None:
    """Remove what a killed process left behind."""
    shutil.rmtree(staging_folder(output_dir), ignore_errors=True)


def publish(output_dir: str | Path, name: str) -> Path:
    """Give the finished checkpoint `name` its place in `output_dir`; one of that name from before goes away."""
    staged, final = staging_folder(output_dir) / name, Path(output_dir) / name
    for folder, _, files in os.walk(staged):
        for path in [*(Path(folder) / file for file in files), Path(folder)]:
            _flush(path)
    if final.exists():
        discard(final)
    staged.rename(final)
    _flush(final.parent)
    return final


def discard(checkpoint: str | Path) -> None:
    """Delete a checkpoint; it loses its name first."""
    checkpoint = Path(checkpoint)
    doomed = staging_folder(checkpoint.parent) / f"{checkpoint.name}.discarded"
    doomed.parent.mkdir(exist_ok=True)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def rotate(output_dir: str | Path, limit: int | None, best: str | None) -> None:
    """Discard the oldest checkpoints beyond `limit`; the newest and the `best` one stay."""
    if not limit or limit < 1:
        return
    checkpoints = [Path(path) for path in sort_checkpoints(str(output_dir))]
    protected = {checkpoints[-1].resolve()} | ({Path(best).resolve()} if best else set())
    expendable = [path for path in checkpoints if path.resolve() not in protected]
    for path in expendable[: len(checkpoints) - max(limit, len(protected))]:
        discard(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
