"""Tokenizers made to fit a model: special tokens, chat templates, new tokens, one vocabulary."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strop.models.adapters import base_model, is_peft


def inner_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer itself, of a tokenizer or of a multimodal processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def prepare_tokenizer(processing_class: Any, model: nn.Module, args: Any) -> list[int]:
    """Brings tokenizer and model in line, in place: chat template, end and padding tokens. Returns ids new to the model.

    Reads `chat_template_path`, `eos_token` and `pad_token` of `args`, where it has them. The padding token is the first
    there is of: the argument, the tokenizer's own, its end-of-sequence token. All are written to the model's
    configuration and generation configuration, which are saved with it. Refused: tokens outside the vocabulary, a
    vocabulary larger than the model's.
    """
    tokenizer = inner_tokenizer(processing_class)
    new_token_ids = apply_chat_template_path(processing_class, model, getattr(args, "chat_template_path", None))
    if getattr(args, "eos_token", None) is not None:
        use_eos_token(tokenizer, model, args.eos_token)
    use_pad_token(tokenizer, model, getattr(args, "pad_token", None) or tokenizer.pad_token or tokenizer.eos_token)
    check_vocabulary(tokenizer, model)
    return new_token_ids


def apply_chat_template_path(processing_class: Any, model: nn.Module, path: str | None) -> list[int]:
    """Adopts the template in the file at `path`, or template and tokens of the tokenizer at `path`. Returns ids that are new."""
    if path is None:
        return []
    if path.endswith((".jinja", ".j2", ".jinja2")):
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"chat_template_path={path!r}: there is no such file.")
        processing_class.chat_template = file.read_text(encoding="utf-8")
        return []
    return clone_chat_template(model, inner_tokenizer(processing_class), path)[2]


def clone_chat_template(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[nn.Module, PreTrainedTokenizerBase, list[int]]:
    """(model, tokenizer, ids of the tokens added), both changed in place to speak another tokenizer's chat template.

    Template, end-of-sequence token and the added tokens that are missing are taken over. The embedding grows to a
    multiple of `resize_to_multiple_of` where the tokens don't fit; it never shrinks, and no filler tokens are made up.
    New rows start near the mean of the old ones, so that they neither attract nor repel at first.
    """
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if source.chat_template is None:
        raise ValueError(
            f"the tokenizer at {source_tokenizer_path!r} has no chat template to clone; name one that chats."
        )
    tokenizer.chat_template = source.chat_template
    new_token_ids = add_missing_tokens(tokenizer, source)
    if new_token_ids and is_peft(model):
        raise ValueError(
            f"{source_tokenizer_path!r} brings {len(new_token_ids)} tokens that are new to the model, but the model "
            "already has an adapter, whose shape is settled. Clone the template onto the base model first, then add "
            "the adapter."
        )
    grow_embeddings(model, max(tokenizer.get_vocab().values()) + 1, resize_to_multiple_of)
    if source.eos_token is not None:
        use_eos_token(tokenizer, model, source.eos_token, keep_others=False)
    return model, tokenizer, new_token_ids


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


def new_token_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> list[int]:
    """Ids of `tokenizer` that the tokenizer saved beside the model's weights lacks: tokens the model has never seen.

    Looks into a local folder only; a model by a hub id counts as having no new tokens.
    """
    folder = Path(base_model(model).config._name_or_path)
    if not (folder / "tokenizer_config.json").is_file():
        return []
    known = AutoTokenizer.from_pretrained(folder).get_vocab()
    return sorted(index for token, index in tokenizer.get_vocab().items() if token not in known)


def use_eos_token(tokenizer: PreTrainedTokenizerBase, model: nn.Module, token: str, keep_others: bool = True) -> None:
    """Makes `token` the end of a sequence, for the tokenizer and for generation (before those that end it already)."""
    tokenizer.eos_token = checked_token(tokenizer, "eos_token", token)
    base = base_model(model)
    base.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if base.generation_config is None:
        return
    others = base.generation_config.eos_token_id if keep_others else None
    others = others if isinstance(others, list) else [others]
    ends = [tokenizer.eos_token_id, *(index for index in others if index not in (None, tokenizer.eos_token_id))]
    base.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]


def use_pad_token(tokenizer: PreTrainedTokenizerBase, model: nn.Module, token: str | None) -> None:
    """Makes `token` the padding, for the tokenizer and for generation. No loss depends on it: padding is masked."""
    if token is None:
        raise ValueError(
            "the tokenizer has neither a padding nor an end-of-sequence token. Choose one of its vocabulary: "
            'pad_token="...".'
        )
    tokenizer.pad_token = checked_token(tokenizer, "pad_token", token)
    base = base_model(model)
    base.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if base.generation_config is not None:
        base.generation_config.pad_token_id = tokenizer.pad_token_id


def checked_token(tokenizer: PreTrainedTokenizerBase, option: str, token: str) -> str:
    """`token`, if it is one of the vocabulary; refused otherwise, with the nearest special token."""
    if token in tokenizer.get_vocab():
        return token
    special = [*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values())]
    close = get_close_matches(token, special, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else f" Its special tokens are {special[:10]}."
    raise ValueError(f"{option}={token!r} is not in the tokenizer's vocabulary of {len(tokenizer)} tokens.{hint}")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for: a row that uses one would break the run."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    rows = base_model(model).get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ValueError(
            f"the tokenizer has ids up to {largest} ({token!r}), but the model's embedding has {rows} rows: they don't "
            "belong together, or tokens were added. In the latter case call "
            f"model.resize_token_embeddings({largest + 1}) first."
        )
