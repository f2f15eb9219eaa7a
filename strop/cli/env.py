"""`strop env`: versions, devices, and what works here."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement


def main(argv: Sequence[str]) -> int:
    """Print the report; the exit code is 1 if an installed package has a version that strop doesn't support."""
    parser = argparse.ArgumentParser(prog="strop env", description="Versions, devices, and what works here.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)
    found = report()
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    packages = [*found["packages"].values(), *found["optional"].values()]
    return int(any(package["verdict"].startswith("needs") for package in packages))


def report() -> dict[str, Any]:
    """Everything that `strop env` prints."""
    requirements = [Requirement(line) for line in metadata.requires("strop") or []]
    needed = [requirement for requirement in requirements if requirement.marker is None]
    optional = [r for r in requirements if r.marker and r.name != "strop" and "dev" not in str(r.marker)]
    return {
        "strop": metadata.version("strop"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": device(),
        "packages": {requirement.name: package(requirement) for requirement in needed},
        "optional": {requirement.name: package(requirement) for requirement in optional},
    }


def package(requirement: Requirement) -> dict[str, str | None]:
    """The installed version of a package, the versions that strop supports, and what follows."""
    supported = str(requirement.specifier) or "any"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return {"version": None, "supported": supported, "verdict": f"not installed: pip install {extra(requirement)}"}
    if not requirement.specifier.contains(version, prereleases=True):
        return {"version": version, "supported": supported, "verdict": f"needs {supported}"}
    return {"version": version, "supported": supported, "verdict": "ok"}


def extra(requirement: Requirement) -> str:
    """What to install to get an optional package, e.g. "strop[deepspeed]"."""
    marker = str(requirement.marker or "")
    return (
        f"strop[{marker.split(chr(34))[1]}]"
        if 'extra == "' in marker
        else f"'{requirement.name}{requirement.specifier}'"
    )


def device() -> dict[str, Any]:
    """Where training would run here, and in which precisions."""
    import torch

    from strop.trainer.config import mixed_precision_of

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else "cpu"
    return {
        "trains on": kind,
        "mixed precision if nothing is said": mixed_precision_of(kind),
        "cpu cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "cpu bf16 instructions": torch.cpu._is_avx512_bf16_supported(),
        "cpu bf16 matrix units (AMX)": torch.cpu._is_amx_tile_supported(),
        "gpus": [gpu(index) for index in range(torch.cuda.device_count())],
    }


def gpu(index: int) -> dict[str, Any]:
    """A CUDA or ROCm device: name, memory in GiB, and whether it computes in bfloat16."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"name": properties.name, "memory": round(properties.total_memory / 2**30, 1), "bf16": bf16}


def as_text(found: dict[str, Any]) -> str:
    """The report as aligned lines."""
    lines = [f"strop {found['strop']}, Python {found['python']}, {found['platform']}", "", "device"]
    facts = {name: value for name, value in found["device"].items() if name != "gpus"}
    lines += [f"  {name:<36}{_yes_no(value)}" for name, value in facts.items()]
    for number, facts in enumerate(found["device"]["gpus"]):
        bf16 = "bf16" if facts["bf16"] else "no bf16"
        lines.append(f"  {f'gpu {number}':<36}{facts['name']}, {facts['memory']} GiB, {bf16}")
    for title in ("packages", "optional"):
        lines += ["", title]
        for name, facts in found[title].items():
            lines.append(f"  {name:<20}{facts['version'] or '-':<16}{facts['supported']:<16}{facts['verdict']}")
    return "\n".join(lines)


def _yes_no(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
