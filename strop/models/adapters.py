"""Adapters: put one on a model, take up one that is there, say what is trained. The only module to import peft."""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import find_adapter_config_file

from strop.models.forward import base_model
from strop.models.quantize import (
    is_quantized,
    keep_cpu_layers_differentiable,
    prepare_quantized,
    quantization_name,
)

logger = logging.getLogger(__name__)

TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}


def apply_peft(model: nn.Module, peft_config: Any, new_token_ids: Sequence[int] = ()) -> nn.Module:
    """The model to train: with the adapter that `peft_config` describes, or as it came if that is None.

    A ready `PeftModel` keeps exactly its trainable parameters. `new_token_ids` were added to the vocabulary: their
    embedding rows become trainable with the adapter. The weights of an adapter are float32 over a base of any
    precision: in bfloat16 the usual updates are lost, those of DoRA's magnitudes wholly. `model` is changed in place,
    `peft_config` is not. Refused: a second adapter, a model with nothing to train, a quantised model without an
    adapter, new tokens that the adapter can't learn.
    """
    if peft_config is None:
        refuse_untrainable(model, new_token_ids)
        keep_cpu_layers_differentiable(model)
        return model
    check_peft_config(model, peft_config)
    peft_config = with_new_tokens(model, with_task(model, copy.deepcopy(peft_config)), new_token_ids)
    if is_quantized(model):
        prepare_quantized(model)
    return wrap(model, peft_config)


def is_adapter(path: str, options: dict[str, Any]) -> bool:
    """Whether `path`, a folder or a hub id, holds an adapter and no whole model. `options` are those of a download."""
    if Path(path, "config.json").is_file():
        return False
    return find_adapter_config_file(path, **{k: v for k, v in options.items() if k != "force_download"}) is not None


def load_adapter(path: str, load_base: Callable[[str], nn.Module]) -> nn.Module:
    """The adapter at `path` on the model it was made for, to go on training. `load_base` loads a model by name."""
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(path).base_model_name_or_path
    if not base:
        raise ValueError(f"the adapter {path} doesn't say which model it belongs to; load both and pass the PeftModel.")
    model = load_base(base)
    rows = saved_rows(path, token_layers(model)[0])
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    with _old_name_allowed():
        return PeftModel.from_pretrained(model, path, is_trainable=True)


@contextmanager
def _old_name_allowed() -> Iterator[None]:
    """Without the warning that peft asks models for `is_activation_checkpointing` by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def saved_rows(path: str, embedding: str) -> int:
    """Rows of the embedding saved with an adapter, because its vocabulary had grown; 0 if none was."""
    from safetensors import safe_open

    file = Path(path, "adapter_model.safetensors")
    if not file.is_file():
        return 0
    with safe_open(file, "pt") as weights:
        names = [name for name in weights.keys() if f".{embedding}." in name]  # noqa: SIM118
        shapes = [weights.get_slice(name).get_shape() for name in names]
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


def trainable_summary(model: nn.Module) -> str:
    """E.g. "trains 884,736 of 135,399,744 parameters (0.65 %)"."""
    sizes = [(stored_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    return f"trains {trained:,} of {total:,} parameters ({100 * trained / total:.3g} %)"


def stored_elements(parameter: nn.Parameter) -> int:
    """Numbers that `parameter` stands for; a 4-bit one packs several into an element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def wrap(model: nn.Module, peft_config: Any) -> nn.Module:
    """`model` under a new adapter. Parameters that ZeRO-3 has sharded keep their dtype: it can't mix two."""
    from peft import get_peft_model
    from transformers.integrations import is_deepspeed_zero3_enabled

    mixed = is_quantized(model) or not is_deepspeed_zero3_enabled()
    with _old_name_allowed():
        return get_peft_model(model, peft_config, autocast_adapter_dtype=mixed)


def is_peft(model: nn.Module) -> bool:
    """Whether `model` is a `PeftModel`."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def check_peft_config(model: nn.Module, peft_config: Any) -> None:
    """Refuses what is no `PeftConfig`, and a model that has an adapter already."""
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}, not a PeftConfig. Pass e.g. peft.LoraConfig(r=16), or "
            "None for full fine-tuning."
        )
    if is_peft(model):
        raise ValueError(
            f"the model already has the adapter {model.active_adapter!r}, and peft_config asks for another on top. To "
            "go on training the adapter, pass peft_config=None. To start a new one on its result, pass "
            "model.merge_and_unload()."
        )


def with_task(model: nn.Module, peft_config: Any) -> Any:
    """`peft_config` with the task of `model`'s class, and with all that a classifier has behind its states trained and
    saved beside the adapter: peft itself takes the last layer only, and a pooling layer may be as new."""
    name = type(model).__name__
    task = next((task for ending, task in TASKS.items() if name.endswith(ending)), "CAUSAL_LM")
    if model.config.is_encoder_decoder and task == "CAUSAL_LM":
        task = "SEQ_2_SEQ_LM"
    given = getattr(peft_config.task_type, "value", peft_config.task_type)
    if given == "CAUSAL_LM" and task in TASKS.values():  # what configs for language models say, and `ModelConfig`
        logger.info(
            "adapter: task_type=%r is now %r, so that the head of %s is trained and saved too", given, task, name
        )
    elif given is not None and given != task:
        raise ValueError(
            f"peft_config.task_type is {given!r}, but the model is a {name}, so peft would "
            f"save and train the wrong head. Set task_type={task!r}, or leave it out."
        )
    peft_config.task_type = task
    if task in TASKS.values() and hasattr(peft_config, "modules_to_save"):
        given = peft_config.modules_to_save or []
        peft_config.modules_to_save = [*given, *(part for part in head_parts(model) if part not in given)] or None
    return peft_config


def head_parts(model: nn.Module) -> list[str]:
    """Names of the modules of a classifier that stand between the states of its base and its labels."""
    trunk = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if trunk is None:
        return []
    children = dict(model.named_children())
    beside = {name: child for name, child in children.items() if child is not trunk}
    parts = beside | {"pooler": trunk.pooler} if isinstance(getattr(trunk, "pooler", None), nn.Module) else beside
    weights = {name: list(part.parameters()) for name, part in parts.items()}
    return [name for name, own in weights.items() if own and all(weight.is_floating_point() for weight in own)]


def with_new_tokens(model: nn.Module, peft_config: Any, new_token_ids: Sequence[int]) -> Any:
    """`peft_config` under which the rows of `new_token_ids` are trained too, in the embedding and in an untied head."""
    layers = token_layers(model)
    if not new_token_ids or trains_fully(peft_config, layers[0]):
        return peft_config
    if not hasattr(peft_config, "trainable_token_indices"):
        raise ValueError(
            f"{len(new_token_ids)} tokens are new to the model, and {type(peft_config).__name__} can't train their "
            f"embeddings: they would stay random. Use LoraConfig, add {layers} to modules_to_save, or don't add tokens."
        )
    wanted = peft_config.trainable_token_indices
    wanted = wanted if isinstance(wanted, dict) else {layers[0]: wanted or []}
    rows = {
        layer: sorted({*wanted.get(layer, []), *new_token_ids})
        for layer in layers
        if not trains_fully(peft_config, layer)
    }
    peft_config.trainable_token_indices = wanted | rows
    return peft_config


def token_layers(model: nn.Module) -> list[str]:
    """Names of the layers with one row a token: the embedding, and the head unless the two are tied."""
    model = base_model(model)
    layers = [model.get_input_embeddings()]
    if not model.config.get_text_config().tie_word_embeddings and model.get_output_embeddings() is not None:
        layers.append(model.get_output_embeddings())
    return [next(name.split(".")[-1] for name, module in model.named_modules() if module is layer) for layer in layers]


def trains_fully(peft_config: Any, layer: str) -> bool:
    """Whether `peft_config` already has all rows of `layer` trained."""
    return layer in (getattr(peft_config, "modules_to_save", None) or ())


def learned_token_ids(model: nn.Module) -> set[int]:
    """Ids whose embedding rows are trained in a `PeftModel`: all, or those the active adapter holds."""
    config = model.active_peft_config
    embedding = token_layers(model)[0]
    own = [p for name, p in model.named_parameters() if f".{embedding}." in name and "trainable_tokens" not in name]
    if any(parameter.requires_grad for parameter in own):
        return set(range(model.config.get_text_config().vocab_size))
    rows = getattr(config, "trainable_token_indices", None) or []
    return set(rows.get(embedding, []) if isinstance(rows, dict) else rows)


def refuse_untrainable(model: nn.Module, new_token_ids: Sequence[int]) -> None:
    """Refuses a model of which training would change nothing, or not what it must."""
    unlearned = set(new_token_ids) - learned_token_ids(model) if is_peft(model) else ()
    if unlearned:
        raise ValueError(
            f"{len(unlearned)} tokens are new to the vocabulary, but the model already has an adapter, whose shape "
            "is settled. Add the tokens to the base model first, then pass it with peft_config=LoraConfig(...)."
        )
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if is_peft(model):
        raise ValueError(
            "none of the adapter's weights is trainable, so training would change nothing. Load it with "
            "PeftModel.from_pretrained(base, path, is_trainable=True)."
        )
    raise ValueError(
        f"none of the model's weights is trainable ({quantization_name(model) or 'all are frozen'}), so training would "
        "change nothing. Pass a peft_config such as LoraConfig(r=16), or unfreeze the weights with "
        "requires_grad_(True)."
    )
