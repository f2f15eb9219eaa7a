"""Models from `.gguf` files: weights unpacked to a plain model, and a tokenizer that cuts text as in training."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
GPT2_SPLITTERS = frozenset({"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


def split_gguf(path: str, gguf_file: str | None) -> tuple[str, str | None]:
    """`folder/name.gguf` as (folder, name.gguf); anything else unchanged."""
    if gguf_file is None and path.endswith(".gguf"):
        file = Path(path)
        return str(file.parent), file.name
    return path, gguf_file


def unpacked():
    """The setting that has transformers unpack a GGUF file's weights, packed ones can't be trained."""
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def forget_gguf(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, whose weights are unpacked, without the marks of quantisation that would keep it from being saved."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    model.hf_quantizer = None
    for mark in ("quantization_method", "is_quantized"):
        model.__dict__.pop(mark, None)
    return model


def repair_gguf_tokenizer(tokenizer: PreTrainedTokenizerFast, file: Path) -> PreTrainedTokenizerFast:
    """`tokenizer` with digits cut one by one where the file says so; transformers' reader leaves that out.

    A byte-level vocabulary is refused if neither transformers nor we know the rule that the file names: a wrong rule
    gives other tokens than the model has seen, and nothing else would show it.
    """
    from tokenizers import pre_tokenizers

    rule = splitting_rule(file)
    current = tokenizer.backend_tokenizer.pre_tokenizer
    if rule is None or rule in GPT2_SPLITTERS or not isinstance(current, pre_tokenizers.ByteLevel):
        return tokenizer
    if rule not in DIGIT_SPLITTERS:
        raise ValueError(
            f"{file.name} cuts text by the rule {rule!r}, which is not known here; any other rule gives tokens that "
            "the model was not trained on. Pass the original model's tokenizer as processing_class."
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


def splitting_rule(file: Path) -> str | None:
    """Name of the rule by which a byte-level vocabulary's text is cut, as the file has it; None if it has none."""
    fields = read_gguf(file).fields
    if "tokenizer.ggml.pre" not in fields or fields["tokenizer.ggml.model"].contents() != "gpt2":
        return None
    return fields["tokenizer.ggml.pre"].contents()


def read_gguf(file: Path):
    """A `gguf.GGUFReader` of the file. Raises ValueError if the gguf package is missing."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"reading {file.name} needs the gguf package: pip install strop[gguf]") from error
    return GGUFReader(file)


def dequantized(tensor):
    """The values of a reader's tensor as a writable float32 array."""
    import numpy as np
    from gguf.quants import dequantize

    return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
