"""Who plays the episodes of a trainer on rollouts."""

from collections.abc import Callable, Sequence
from typing import Any

from strop.models.forward import base_model
from strop.rollout.environments import Environments
from strop.rollout.episodes import Episodes, SingleTurn
from strop.rollout.episodes_function import FunctionEpisodes
from strop.rollout.episodes_tools import ToolEpisodes
from strop.rollout.rows import end_ids

from . import checks

SETTINGS = {"max_tool_calling_iterations": None, "tool_timeout": None}
"""Of tools, where there are none. A function that plays episodes may read them."""


def episodes_of(
    trainer: Any,
    tools: Sequence[Callable] | None = None,
    rollout_func: Callable | None = None,
    environment_factory: Any = None,
) -> Episodes:
    """Single answers; conversations with `tools` and environments; or what `rollout_func` plays."""
    if rollout_func:
        given = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        several = [name for name, value in given.items() if value]
        if len(several) > 1:
            raise ValueError(f"{' and '.join(several)} are given, but a rollout_func plays whole episodes; keep one.")
        ends = end_ids(trainer.model, trainer.processing_class) | {*trainer.args.sampling.stop_token_ids}
        return FunctionEpisodes(rollout_func, trainer, trainer.encoder, ends)
    if not tools and not environment_factory:
        checks.no_effect(trainer.args, SETTINGS, "no tools and no environment")
        return SingleTurn(trainer.generator, trainer.encoder)
    return ToolEpisodes(
        trainer.generator,
        trainer.encoder,
        tools or (),
        Environments(environment_factory) if environment_factory else None,
        max_turns=trainer.args.max_tool_calling_iterations,
        context_size=getattr(base_model(trainer.model).config.get_text_config(), "max_position_embeddings", None),
        timeout=trainer.args.tool_timeout,
    )
