"""The `strop` command: finds the subcommand and imports only what that needs."""

import importlib
import logging
import sys
from collections.abc import Sequence

from strop import __version__
from strop.compat import suggestion

TRAINING = {
    "sft": "fine-tune a model on texts, conversations or prompts with completions",
    "dpo": "direct preference optimisation on pairs of a better and a worse completion",
    "kto": "Kahneman-Tversky optimisation on completions labelled as good or bad",
    "bco": "binary classifier optimisation on completions labelled as good or bad",
    "cpo": "contrastive preference optimisation on pairs, without a reference model",
    "simpo": "SimPO: pairs compared by their average log-probability and a margin",
    "orpo": "fine-tuning and odds ratio preference in one, without a reference model",
    "tpo": "pairs with a gold completion that is learnt from as well",
    "grpo": "group-relative policy optimisation: completions of a prompt, scored and compared",
    "ppo": "proximal policy optimisation: completions scored, each token against an expected value",
    "online_dpo": "DPO on pairs that the policy writes itself, told apart by rewards",
    "nash_md": "Nash-MD: the policy plays against a mixture of itself and the reference",
    "xpo": "exploratory preference optimisation: online DPO against completions of the reference",
    "rloo": "REINFORCE leave-one-out: completions of a prompt against the mean of the others",
    "reward": "a reward model from pairs, or from ranked completions",
    "prm": "a process reward model from solutions whose steps are judged",
}
COMMANDS = {
    "quickstart": (
        "strop.cli.quickstart:main",
        "train a small real model by SFT, DPO and GRPO on embedded data, measured after each",
    ),
    "run": ("strop.cli.run:main", "several commands as the stages of one pipeline, from a file"),
    "inspect": (
        "strop.cli.inspect:main",
        "show rows as the trainer sees them: which tokens are trained, context, padding",
    ),
    "estimate": ("strop.cli.estimate:main", "say how much memory a run will take, without loading the model"),
    "chat": ("strop.cli.chat:main", "talk to a model or a trained folder"),
    "generate": ("strop.cli.chat:generate_main", "answer prompts from a file with a model or a trained folder"),
    "score": ("strop.cli.score:main", "score answers with a reward model"),
    "eval": ("strop.cli.eval:main", "measure a model on rows: loss, rewards, pass@k, against another model"),
    "merge": ("strop.cli.merge:main", "make one whole model of an adapter and its base"),
    "rewards": ("strop.cli.rewards:main", "rewards try: see what reward functions say of stored completions"),
    "env": ("strop.cli.env:main", "print versions, devices, and what works here"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the words after its name; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports what it lacks whenever peft is imported
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, rest = words[0], words[1:]
    if name in ("--version", "version"):
        print(f"strop {__version__}")
        return 0
    if name in TRAINING:
        from strop.cli import train

        return train.main(name, rest)
    if name not in COMMANDS:
        known = [*TRAINING, *COMMANDS]
        print(f"strop: error: there is no command {name!r}.{suggestion(name, known)}\n\n{usage()}", file=sys.stderr)
        return 2
    return explained(name, rest)


def explained(name: str, words: list[str]) -> int:
    """Run a command that is no training; an error of ours is its text, without a traceback."""
    from strop.cli.launch import end_with_parent

    end_with_parent()
    module, function = COMMANDS[name][0].split(":")
    try:
        return getattr(importlib.import_module(module), function)(words)
    except ValueError as error:
        from strop.cli.train import is_explained

        if not is_explained(error):
            raise
        print(f"strop {name}: error: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    """What `strop --help` prints."""
    lines = ["usage: strop COMMAND [options]", "", "training"]
    lines += [f"  {name:<12}{text}" for name, text in TRAINING.items()]
    lines += ["", "other"]
    lines += [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "`strop COMMAND --help` lists its options, `strop --version` prints the version."])
