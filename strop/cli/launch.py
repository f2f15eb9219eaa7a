"""Starting a training command through `accelerate launch`: which configuration, which command line."""

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from strop.compat import suggestion

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
ALIASES = {"zero1": "deepspeed_zero1", "zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3"}

END_WITH_PARENT = "STROP_END_WITH_PARENT"
"""Environment variable of the stages of a pipeline, and of the processes that these start."""


def end_with_parent() -> None:
    """In a stage of a pipeline, have this process and its group killed as soon as what started it is gone."""
    if END_WITH_PARENT not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def shipped_configs() -> dict[str, Path]:
    """Name -> path of the configurations in the package, the short names of other libraries included."""
    found = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    return found | {alias: found[name] for alias, name in ALIASES.items()}


def config_path(name: str) -> Path:
    """The file that `name`, a shipped configuration or a path, stands for. Raises ValueError if there is none."""
    shipped = shipped_configs()
    path = shipped.get(name.removesuffix(".yaml"), Path(name).expanduser())
    if not path.is_file():
        raise ValueError(
            f"accelerate_config={name!r} is neither a file nor one of {', '.join(shipped)}.{suggestion(name, shipped)}"
        )
    return path


def is_launched() -> bool:
    """Whether this process was started by `accelerate launch` or torchrun."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launch_words(module: str, launch: dict[str, Any], words: list[str], use_cpu: bool) -> list[str]:
    """What follows `accelerate launch` to run `python -m module words...`.

    Raises ValueError for an unknown configuration, and for one that needs DeepSpeed where that isn't installed.
    """
    command: list[str] = []
    if launch.get("accelerate_config") is not None:
        path = config_path(launch["accelerate_config"])
        require_backend(path)
        command += ["--config_file", str(path)]
    elif launch.get("num_processes", 1) > 1:
        command += ["--multi_gpu"]  # also what starts several processes on CPUs, which --cpu would make one
        use_cpu = False
    for name, value in launch.items():
        if name != "accelerate_config" and value is not None:
            command += [f"--{name}", str(value)]
    return [*command, *["--cpu"] * use_cpu, "-m", module, *words]


def require_backend(path: Path) -> None:
    """Refuse a configuration for DeepSpeed without DeepSpeed, before any process starts."""
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} is no accelerate configuration; write one with `accelerate config --config_file {path}`."
        )
    if content.get("distributed_type") == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(f"{path.stem} needs DeepSpeed, which is not installed: pip install strop[deepspeed]")


def start(words: list[str]) -> int:
    """Run `accelerate launch` with these words in this process, which has loaded most of what that needs."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(words))
    return 0
