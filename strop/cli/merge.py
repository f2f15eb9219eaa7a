"""`strop merge`: an adapter and the model it was trained on as one whole model."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.cli.chat import LoadArguments, load, read
from strop.cli.score import loading_of


@dataclass
class MergeArguments(LoadArguments):
    """What is merged, and where to."""

    output_dir: str | None = None
    """Folder for the whole model; `merged` in the adapter's own folder if not set."""


def main(argv: list[str]) -> int:
    """`strop merge ADAPTER`: save the whole model that an adapter makes of its base. The exit code."""
    instances = read("strop merge", [MergeArguments], argv)
    if instances is None:
        return 0
    (args,) = instances
    print(f"the whole model is in {merge(args)}")
    return 0


def merge(args: MergeArguments) -> Path:
    """Save the whole model, its tokenizer and the record of the run that trained it; where they are."""
    from strop.models.adapters import is_adapter
    from strop.models.forward import base_model
    from strop.models.load import task_of
    from strop.models.quantize import is_quantized
    from strop.runs.record import RUN_FILE

    if not is_adapter(args.model, {}):
        raise ValueError(f"{args.model} is a whole model already; there is nothing to merge.")
    loaded: tuple[Any, Any] = load(args, **loading_of(task_of(args.model)))
    model, tokenizer = loaded
    if is_quantized(base_model(model)):
        raise ValueError(
            f"the base of {args.model} is quantised, and what is merged into it would be rounded to its few levels. "
            "Name the same model unquantised with --base_model."
        )
    folder = Path(args.output_dir or Path(args.model, "merged"))
    model.merge_and_unload().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = Path(args.model, RUN_FILE)
    if record.is_file():
        shutil.copy(record, folder)
    return folder
