"""Tokenizers made to fit a model: special tokens, chat templates, new tokens, one vocabulary."""

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strop.compat import suggestion
from strop.models.adapters import base_model, is_peft

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 64
"""Embeddings that grow do so to a multiple of this: matrix products of odd sizes are slow on GPUs."""


def inner_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer itself, of a tokenizer or of a multimodal processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def prepare_tokenizer(processing_class: Any, args: Any) -> None:
    """Gives the tokenizer, in place, the template, end and padding token that `args` ask for. Needs no model.

    Reads `chat_template_path`, `eos_token` and `pad_token`, where `args` has them. The padding token is the first there
    is of: the argument, the tokenizer's own, its end-of-sequence token. Refused: tokens outside the vocabulary.
    """
    tokenizer = inner_tokenizer(processing_class)
    if getattr(args, "chat_template_path", None) is not None:
        adopt_template(processing_class, args.chat_template_path)
    if getattr(args, "eos_token", None) is not None:
        tokenizer.eos_token = checked_token(tokenizer, "eos_token", args.eos_token)
    pad_token = getattr(args, "pad_token", None) or tokenizer.pad_token or tokenizer.eos_token
    if pad_token is None:
        raise ValueError(
            "the tokenizer has neither a padding nor an end-of-sequence token. Choose one of its vocabulary: "
            'pad_token="...".'
        )
    tokenizer.pad_token = checked_token(tokenizer, "pad_token", pad_token)


def fit_model(model: nn.Module, processing_class: Any, may_grow: bool = False) -> None:
    """Makes the model, in place, fit a prepared tokenizer.

    Its configuration and generation configuration get the padding and end-of-sequence token, and are saved with them;
    what ended a generation so far goes on ending it. With `may_grow`, for tokens that a chat template brought, its
    embedding gets the rows that it lacks. Refused: a tokenizer with ids that the model has no rows for.
    """
    tokenizer = inner_tokenizer(processing_class)
    if may_grow and not is_peft(model):
        grow_embeddings(model, max(tokenizer.get_vocab().values()) + 1, ROW_MULTIPLE)
    check_vocabulary(tokenizer, model)
    use_eos_token(tokenizer, model)
    use_pad_token(tokenizer, model)


def new_token_ids(processing_class: Any, model: nn.Module) -> list[int]:
    """Ids that the model has to learn: those it has never seen, padding aside."""
    tokenizer = inner_tokenizer(processing_class)
    return [index for index in unseen_token_ids(tokenizer, model) if index != tokenizer.pad_token_id]


def is_template_file(path: str) -> bool:
    """Whether `path` names a template alone, which brings no tokens."""
    return path.endswith((".jinja", ".j2", ".jinja2"))


def adopt_template(processing_class: Any, path: str) -> list[int]:
    """Takes over the template in the file at `path`, or template and tokens of the tokenizer there. Returns new ids."""
    if is_template_file(path):
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"chat_template_path={path!r}: there is no such file.")
        processing_class.chat_template = file.read_text(encoding="utf-8")
        return []
    source = AutoTokenizer.from_pretrained(path)
    if source.chat_template is None:
        raise ValueError(f"the tokenizer at {path!r} has no chat template to take over; name one that chats.")
    tokenizer = inner_tokenizer(processing_class)
    processing_class.chat_template = source.chat_template
    added = add_missing_tokens(tokenizer, source)
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    return added


def clone_chat_template(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = ROW_MULTIPLE,
) -> tuple[nn.Module, PreTrainedTokenizerBase, list[int]]:
    """(model, tokenizer, ids of the tokens added), both changed in place to speak another tokenizer's chat template.

    Template, end-of-sequence token and the added tokens that are missing are taken over. The embedding grows to a
    multiple of `resize_to_multiple_of` where the tokens don't fit; it never shrinks, and no filler tokens are made up.
    New rows start near the mean of the old ones, so that they neither attract nor repel at first.
    """
    if is_peft(model):
        raise ValueError(
            "the model already has an adapter, whose shape is settled, and a chat template may bring new tokens. Clone "
            "the template onto the base model first, then add the adapter."
        )
    added = adopt_template(tokenizer, source_tokenizer_path)
    grow_embeddings(model, max(tokenizer.get_vocab().values()) + 1, resize_to_multiple_of)
    use_eos_token(tokenizer, model, alone=True)
    return model, tokenizer, added


def add_missing_tokens(tokenizer: PreTrainedTokenizerBase, source: PreTrainedTokenizerBase) -> list[int]:
    """Adds the added tokens of `source` that `tokenizer` lacks. Returns their ids."""
    known = tokenizer.get_vocab()
    missing = [token for _, token in sorted(source.added_tokens_decoder.items()) if token.content not in known]
    tokenizer.add_tokens(missing)
    return tokenizer.convert_tokens_to_ids([token.content for token in missing])


def grow_embeddings(model: nn.Module, num_tokens: int, multiple: int | None) -> None:
    """Gives the model at least `num_tokens` rows in embedding and head; a model that has them keeps its shape."""
    if num_tokens > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(num_tokens, pad_to_multiple_of=multiple)


def unseen_token_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> list[int]:
    """Ids of the tokens added to the tokenizer that was saved beside the model's weights; empty for any other one.

    The saved one is looked for in the model's folder or the cache, without a network.
    """
    name = base_model(model).config._name_or_path
    try:
        known = AutoTokenizer.from_pretrained(name, local_files_only=True).get_vocab() if name else None
    except (OSError, ValueError):
        known = None
    if known is None or not known.items() <= tokenizer.get_vocab().items():
        return []
    return sorted(index for index, token in tokenizer.added_tokens_decoder.items() if token.content not in known)


def use_eos_token(tokenizer: PreTrainedTokenizerBase, model: nn.Module, alone: bool = False) -> None:
    """Has the tokenizer's end-of-sequence token end generations, before other tokens that do, or `alone`."""
    if tokenizer.eos_token_id is None:
        return
    base = base_model(model)
    generation = getattr(base, "generation_config", None)  # classifiers have none
    for config in (base.config.get_text_config(), generation):
        if config is None:
            continue
        known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if alone or config is not generation:
            config.eos_token_id = tokenizer.eos_token_id
        elif tokenizer.eos_token_id not in known:
            ends = [tokenizer.eos_token_id, *(index for index in known if index is not None)]
            config.eos_token_id = ends if len(ends) > 1 else ends[0]


def use_pad_token(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Has generation pad with the tokenizer's padding token. No loss depends on it: padding is masked."""
    base = base_model(model)
    base.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.pad_token_id = tokenizer.pad_token_id


def pad_apart_from_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer that pads with the token that ends texts, in place, another special token for padding.

    Classifiers of transformers take the last token that is no padding for the end of a row: with one token for both
    they would read a score one token early. A token that begins texts, or an unknown one, never ends any.
    """
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = [tokenizer.unk_token, tokenizer.bos_token, *added]
    other = next((token for token in special if token and token != tokenizer.eos_token), None)
    if other is None:
        logger.warning(
            "the tokenizer pads with %r, which ends texts too, and has no other special token: outside of strop, "
            "transformers will read padded rows' scores one token early",
            tokenizer.pad_token,
        )
        return
    logger.info("padding with %r instead of %r, which ends texts", other, tokenizer.pad_token)
    tokenizer.pad_token = other


def checked_token(tokenizer: PreTrainedTokenizerBase, option: str, token: str) -> str:
    """`token`, if it is one of the vocabulary; refused otherwise, with the nearest special token."""
    if token in tokenizer.get_vocab():
        return token
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    hint = suggestion(token, special) or f" Its special tokens are {', '.join(special[:10])}."
    raise ValueError(f"{option}={token!r} is not in the tokenizer's vocabulary of {len(tokenizer)} tokens.{hint}")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for: a row with one would break the run."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    rows = base_model(model).get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ValueError(
            f"the tokenizer has ids up to {largest} ({token!r}), but the model's embedding has {rows} rows: they don't "
            "belong together, or tokens were added. In the latter case call "
            f"model.resize_token_embeddings({largest + 1}) first."
        )
