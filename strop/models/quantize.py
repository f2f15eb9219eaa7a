"""Quantised base models for adapter training: bitsandbytes' settings, names, and its CPU path made differentiable.

The only module that imports bitsandbytes.
"""

from typing import Any

from torch import nn

from strop.compat import suggestion


def require_bitsandbytes():
    """The bitsandbytes module; refuses where it isn't installed."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            "4-bit and 8-bit models need bitsandbytes, which is not installed: pip install strop[quantization]"
        ) from error
    return bitsandbytes


def as_quantization_config(config: Any) -> Any:
    """`config` as transformers takes it: a dict such as {"load_in_4bit": true} becomes a `BitsAndBytesConfig`."""
    if config is None:
        return None
    if isinstance(config, dict) and "quant_method" not in config:
        config = bitsandbytes_config(config)
    if type(config).__name__ == "BitsAndBytesConfig":
        require_bitsandbytes()
    return config


def bitsandbytes_config(options: dict[str, Any]):
    """A `BitsAndBytesConfig` from its keyword arguments, none of which may be unknown."""
    from transformers import BitsAndBytesConfig

    known = [name for name in BitsAndBytesConfig().to_dict() if not name.startswith("_")]
    for name in options:
        if name not in known:
            hint = suggestion(name, known) or f" Known are {', '.join(known)}."
            raise ValueError(f"quantization_config has the unknown option {name!r}.{hint}")
    config = BitsAndBytesConfig.from_dict({name: value for name, value in options.items() if name != "quant_method"})
    if not (config.load_in_4bit or config.load_in_8bit):
        raise ValueError(f"quantization_config={options} quantises nothing: set load_in_4bit or load_in_8bit to true.")
    return config


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights are stored in few-bit integers, so that only an adapter on them can be trained."""
    return getattr(model, "hf_quantizer", None) is not None


def quantization_name(model: nn.Module) -> str | None:
    """E.g. "4-bit nf4", "8-bit"; the method's name for other quantisers; None for a plain model."""
    if not is_quantized(model):
        return None
    config = model.hf_quantizer.quantization_config
    if getattr(config, "load_in_4bit", False):
        return f"4-bit {config.bnb_4bit_quant_type}"
    if getattr(config, "load_in_8bit", False):
        return "8-bit"
    return str(getattr(config.quant_method, "value", config.quant_method))


def prepare_quantized(model: nn.Module) -> nn.Module:
    """`model`, frozen, and with 4-bit layers that stay differentiable on a CPU.

    On CPUs with AVX512-BF16 bitsandbytes re-packs a layer's weight in its first forward pass without gradients in
    evaluation mode, for a product that has no backward: from then on the layer's input gets no gradient. An evaluation
    or a generation in the middle of training would end the training of every adapter below. So re-packing is switched
    off and undone.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    keep_cpu_layers_differentiable(model)
    return model


def keep_cpu_layers_differentiable(model: nn.Module) -> None:
    """Switches bitsandbytes' CPU re-packing off in every 4-bit layer, and undoes what it has re-packed already."""
    if not (quantization_name(model) or "").startswith("4-bit"):
        return
    bitsandbytes = require_bitsandbytes()
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            layer.support_avx512bf16_for_cpu = False
            unpack(bitsandbytes, layer.weight)


def unpack(bitsandbytes: Any, weight: nn.Parameter) -> None:
    """Brings a 4-bit weight that was re-packed for the CPU back into the layout that has a backward."""
    if getattr(weight.quant_state, "packing_format_for_cpu", False):
        unpacked = bitsandbytes.functional._convert_weight_packed_for_cpu_inverse(weight.data, weight.quant_state)
        weight.data, weight.quant_state = unpacked
