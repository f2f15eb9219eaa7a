"""What every trainer's constructor does before `transformers.Trainer` sees a model: checks, tokenizer, model,
adapter."""

import logging
from typing import Any

import datasets
import torch
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from strop.callbacks import log
from strop.data.report import PreparationReport
from strop.models.adapters import apply_peft, is_peft, trainable_summary
from strop.models.checkpointing import wire_checkpointing
from strop.models.forward import base_model, learned_positions, refuse_beyond_positions
from strop.models.load import describe_precision, load_model, load_tokenizer
from strop.models.tokenizers import fit_model, is_template_file, new_token_ids, prepare_tokenizer

logger = logging.getLogger(__name__)

ITERABLE = (datasets.IterableDataset, torch.utils.data.IterableDataset)


def show_logs(args: Any) -> None:
    """What preparation, loading and the choice of a layout have to say appears on stderr, from the main process, unless
    the program has set up logging itself."""
    if args.process_index == 0 and not log.is_set_up():
        log.show_logs(logging.INFO if args.log_level == "passive" else args.get_process_log_level())


def check_datasets(train_dataset: Any, eval_dataset: Any, args: Any) -> None:
    """Refuse, before anything is loaded, data that a run could not use."""
    if train_dataset is None and eval_dataset is None:
        raise ValueError(
            "there is neither a train_dataset nor an eval_dataset: pass at least one, e.g. train_dataset=rows"
        )
    if isinstance(train_dataset, dict):
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__} with the splits {sorted(train_dataset)}; pass one of "
            "them, e.g. train_dataset=data['train']"
        )
    _let_every_rank_read_for_itself(args)
    if isinstance(train_dataset, ITERABLE):
        _refuse_what_needs_a_length(args)


def _refuse_what_needs_a_length(args: Any) -> None:
    """Refuse what can't be had from a stream, whose rows come one by one."""
    if args.max_steps <= 0:
        raise ValueError(
            "the train_dataset is a stream whose length isn't known, so the run needs an end: set max_steps (one "
            f"epoch of n rows is n / {args.per_device_train_batch_size * args.gradient_accumulation_steps} steps on "
            "one device)"
        )
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} would have no effect: the train_dataset is a "
            "stream, whose rows can't be sorted before they are read. Remove it"
        )
    if getattr(args, "dataset_num_proc", None):
        raise ValueError(
            f"dataset_num_proc={args.dataset_num_proc} would have no effect: the train_dataset is a stream, which is "
            "prepared as it is read. Remove it; dataloader_num_workers reads a stream in other processes"
        )


def _let_every_rank_read_for_itself(args: Any) -> None:
    """No process cuts its batches for others, as accelerate does with streams: packed batches can't be cut so."""
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "accelerator_config has dispatch_batches=True, which cuts batches along their first axis, but rows of a "
            "packed batch stand one after another; leave it unset"
        )
    args.accelerator_config.dispatch_batches = False


def ready_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None, model: str | PreTrainedModel, args: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the model's own, with the template and special tokens that `args` ask for."""
    if not (tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase)):
        raise ValueError(
            f"processing_class is a {type(tokenizer).__name__}, not a tokenizer; pass one, e.g. "
            "AutoTokenizer.from_pretrained(...), or nothing for the model's own"
        )
    if tokenizer is None:
        name = model if isinstance(model, str) else base_model(model).config._name_or_path
        if not name:
            raise ValueError("the model has no name to find its tokenizer by; pass processing_class=tokenizer")
        tokenizer = load_tokenizer(name, args)
    prepare_tokenizer(tokenizer, args)
    return tokenizer


def ready_model(
    model: str | PreTrainedModel,
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    quantization_config: Any = None,
    peft_config: Any = None,
    **loading: Any,
) -> Module:
    """The model to train: loaded if it is a name, in line with the tokenizer, with its adapter. `loading` goes to
    `load_model`."""
    set_seed(args.seed)
    model = load_model(model, args, quantization_config, **loading)
    template = args.chat_template_path
    fit_model(model, tokenizer, may_grow=template is not None and not is_template_file(template))
    has_adapter = peft_config is not None or is_peft(model)  # which has to be told what else to train
    model = apply_peft(model, peft_config, new_token_ids(tokenizer, model) if has_adapter else ())
    if args.activation_checkpointing:
        wire_checkpointing(model, args.activation_checkpointing_kwargs)
    logger.info("%s; %s", describe_precision(model, args), trainable_summary(model))
    return model


def check_lengths(model: Module, report: PreparationReport, max_length: int | None) -> None:
    """Warn of rows that are longer than those the model was made for. Raises ValueError where it can't read them."""
    positions = getattr(base_model(model).config.get_text_config(), "max_position_embeddings", None)
    longest = report.percentile(100)
    longest = longest if max_length is None else min(longest, max_length)
    refuse_beyond_positions(model, longest, report.name)
    if positions and longest > positions:
        logger.warning(
            "%s: rows have up to %d tokens, but the model was made for %d (max_position_embeddings); set max_length=%d",
            report.name, longest, positions, positions,
        )  # fmt: skip


def check_completion_length(model: Module, max_completion_length: int) -> None:
    """Raises ValueError for completions that `model` could not read, be the prompt ever so short."""
    known = learned_positions(base_model(model))  # type: ignore[arg-type]
    if known is not None and max_completion_length >= known:
        raise ValueError(
            f"max_completion_length={max_completion_length} and a prompt need more positions than the {known} that "
            f"{type(base_model(model)).__name__} has learned, so a long completion would end the run. Set it lower, "
            f"e.g. to {known // 2}, and max_prompt_length to the rest."
        )


def vocabulary_size(model: Module) -> int:
    """Rows of the embedding: ids the model can read are below."""
    return base_model(model).get_input_embeddings().weight.shape[0]


def router_aux_loss_coef(model: Module, args: Any) -> float:
    """Weight of the load-balancing loss: as asked for, else the model's own; 0 for a model without experts."""
    config = base_model(model).config.get_text_config()
    has_experts = hasattr(config, "output_router_logits")
    if args.router_aux_loss_coef and not has_experts:
        raise ValueError(
            f"router_aux_loss_coef={args.router_aux_loss_coef}, but {type(base_model(model)).__name__} has no experts "
            "to balance; leave it unset"
        )
    if not has_experts:
        return 0.0
    asked = args.router_aux_loss_coef
    coef = asked if asked is not None else getattr(config, "router_aux_loss_coef", 0.0) * config.output_router_logits
    config.output_router_logits = coef > 0
    return coef
