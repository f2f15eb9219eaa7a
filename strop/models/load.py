"""A model and its tokenizer from a name or a folder: dtype, device, class, quantisation; errors say what to do."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from huggingface_hub import is_offline_mode
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from strop.compat import suggestion
from strop.models.adapters import is_adapter, load_adapter
from strop.models.arguments import ModelInitArguments
from strop.models.gguf import forget_gguf, repair_gguf_tokenizer, split_gguf, unpacked
from strop.models.quantize import as_quantization_config, is_quantized, prepare_quantized, quantization_name

logger = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "half": torch.float16}
DOWNLOAD_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")
LOADING_OPTIONS = (
    *DOWNLOAD_OPTIONS,
    *("dtype", "device_map", "attn_implementation", "quantization_config", "trust_remote_code", "gguf_file"),
    *("max_memory", "offload_folder", "use_safetensors", "variant", "use_kernels", "config", "num_labels"),
)


def load_model(
    model: str | Path | nn.Module,
    args: ModelInitArguments,
    quantization_config: Any = None,
    auto_class: type = AutoModelForCausalLM,
    **defaults: Any,
) -> nn.Module:
    """The model that `model` names, in float32 unless `model_init_kwargs` says otherwise; a ready model as it is.

    `model` is a hub id, a folder, an adapter's id or folder (its base is loaded too, the adapter goes on training) or a
    `.gguf` file. The class is the one the checkpoint was saved with if that one writes text, else what `auto_class`
    chooses. `defaults` are keyword arguments of `from_pretrained` under the user's own, e.g. num_labels=1. Refused:
    options without effect, quantisation given twice, weights that the checkpoint lacks.
    """
    if isinstance(model, nn.Module):
        refuse_loading_options(args, quantization_config)
        return model
    path, kwargs = loading_options(str(model), args, quantization_config)
    kwargs = {**defaults, **kwargs}
    check_reachable(path, kwargs)
    if is_adapter(path, picked(kwargs, DOWNLOAD_OPTIONS)):
        return load_adapter(path, lambda base: load_model(base, args, quantization_config, auto_class, **defaults))
    loaded = load_weights(path, kwargs, auto_class)
    if "gguf_file" in kwargs:
        forget_gguf(loaded)
    return prepare_quantized(loaded) if is_quantized(loaded) else loaded


def load_tokenizer(path: str | Path, args: ModelInitArguments) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path`, of the same revision."""
    path, kwargs = loading_options(str(path), args, None)
    check_reachable(path, kwargs)
    options = picked(kwargs, (*DOWNLOAD_OPTIONS, "gguf_file", "trust_remote_code"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer could be loaded from {path!r} ({first_line(error)}). Pass one as processing_class, e.g. "
            f'AutoTokenizer.from_pretrained("the original model").'
        ) from error
    if "gguf_file" in kwargs:
        repair_gguf_tokenizer(
            tokenizer, Path(cached_file(path, kwargs["gguf_file"], **picked(kwargs, DOWNLOAD_OPTIONS)))
        )
    return tokenizer


SCORING = ("SEQ_CLS", "TOKEN_CLS")
"""Tasks, in peft's words, of models that score: whole answers, or steps."""


def task_of(name: str) -> str:
    """What the saved model or adapter does, in peft's words; "CAUSAL_LM" for everything but classifiers."""
    path, kwargs = loading_options(name, ModelInitArguments(), None)
    check_reachable(path, kwargs)
    if is_adapter(name, {}):
        from peft import PeftConfig

        task = PeftConfig.from_pretrained(name).task_type
        return getattr(task, "value", task) or "CAUSAL_LM"
    (architecture, *_) = read_config(path, kwargs).architectures or [""]
    endings = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
    return next((task for ending, task in endings.items() if architecture.endswith(ending)), "CAUSAL_LM")


def load_to_use(
    name: str, dtype: str | None = None, base_model: str | None = None, **loading: Any
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model `name` in evaluation mode, and its tokenizer: an adapter's own if it brings one, else its base's.

    `dtype` is that of the saved weights on an accelerator, float32 on a CPU, if None. `base_model` is what an adapter
    goes on if its base has moved. `loading` goes to `load_model`.
    """
    chosen = dtype or ("auto" if torch.accelerator.is_available() else "float32")
    init = ModelInitArguments(model_init_kwargs={"dtype": chosen})
    adapted = is_adapter(name, {})
    if base_model is not None and not adapted:
        raise ValueError(f"base_model={base_model!r} is for adapters, but {name} is a whole model. Drop it.")
    if not adapted:
        return load_model(name, init, **loading).eval(), load_tokenizer(name, ModelInitArguments())
    bases: list[str] = []

    def load_base(path: str) -> nn.Module:
        bases.append(base_model or path)
        try:
            return load_model(bases[0], init, **loading)
        except ValueError as error:
            hint = "" if base_model else " The adapter names it as its base; if it has moved, say where: --base_model."
            raise ValueError(f"{error}{hint}") from error

    model = load_adapter(name, load_base).eval()
    own = Path(name, "tokenizer_config.json").is_file()
    return model, load_tokenizer(name if own else bases[0], ModelInitArguments())


def refuse_loading_options(args: ModelInitArguments, quantization_config: Any) -> None:
    """Refuses what only matters while a model is loaded: on one that is loaded it would silently do nothing."""
    if args.model_init_kwargs:
        raise ValueError(
            f"model_init_kwargs={args.model_init_kwargs!r} can't apply to a model that is already loaded. Pass the "
            "model's name or folder instead of the object, or give these options to from_pretrained yourself."
        )
    if quantization_config is not None:
        raise ValueError(
            "quantization_config can't apply to a model that is already loaded. Pass the model's name or folder "
            "instead of the object, or give quantization_config to from_pretrained yourself."
        )


def loading_options(path: str, args: ModelInitArguments, quantization_config: Any) -> tuple[str, dict[str, Any]]:
    """Where to load from, and the keyword arguments of `from_pretrained`: the user's, with our defaults filled in."""
    kwargs = args.model_init_kwargs or {}
    kwargs = dict(json.loads(kwargs) if isinstance(kwargs, str) else kwargs)
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    kwargs["dtype"] = resolve_dtype(chosen_dtype(kwargs))
    kwargs.setdefault("device_map", default_device_map())
    path, gguf_file = split_gguf(path, kwargs.pop("gguf_file", None))
    own = kwargs.pop("quantization_config", None)
    if own is not None and quantization_config is not None:
        raise ValueError(
            "quantization_config is given twice, to the trainer and in model_init_kwargs; which one is meant? Keep "
            "one of them."
        )
    quantization = as_quantization_config(quantization_config if own is None else own)
    if gguf_file is not None:
        if quantization is not None:
            raise ValueError(
                f"{gguf_file} is quantised already, and training unpacks it; quantization_config can't apply on top. "
                "Save the unpacked model once with save_pretrained and load that folder with quantization_config."
            )
        kwargs["gguf_file"], quantization = gguf_file, unpacked()
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    return path, kwargs


def chosen_dtype(kwargs: dict[str, Any]) -> Any:
    """Takes `dtype` (or `torch_dtype`, its old name) out of `kwargs`; float32 if neither is there."""
    new, old = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
    if new is not None and old is not None and new != old:
        raise ValueError(f"dtype={new!r} and torch_dtype={old!r}, its old name, contradict each other; keep dtype.")
    return next((value for value in (new, old) if value is not None), torch.float32)


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A torch dtype, or "auto" (that of the saved weights). Names may be short ("bf16") or long ("torch.bfloat16")."""
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    name = str(dtype).removeprefix("torch.").lower()
    if name not in DTYPES:
        hint = suggestion(name, ["auto", *DTYPES])
        raise ValueError(f"unknown dtype {dtype!r}.{hint} Known are auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def default_device_map() -> str | None:
    """ "auto" on the accelerator of a lone process; None on a CPU and where every rank places its own copy or shard."""
    state = PartialState()
    alone = state.distributed_type == DistributedType.NO
    return "auto" if alone and state.device.type not in ("cpu", "mps") else None


def check_reachable(path: str, kwargs: dict[str, Any]) -> None:
    """Refuses at once a folder or file that isn't there, and offline a hub id that isn't in the cache."""
    here = Path(path).expanduser()
    files = ("config.json", "adapter_config.json") if "gguf_file" not in kwargs else (kwargs["gguf_file"],)
    files = [here / kwargs.get("subfolder", "") / file for file in files]
    if here.is_dir():
        if not any(file.is_file() for file in files):
            wanted = " nor ".join(file.name for file in files)
            raise ValueError(f"{path} is a folder without {wanted}, so no model. It holds: {listing(here)}.")
    elif here.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or "gguf_file" in kwargs:
        hint = suggestion(here, [str(folder) for folder in here.parent.glob("*") if folder.is_dir()])
        raise ValueError(
            f"there is no folder {path}.{hint} Give a folder with a config.json, a .gguf file or a hub id."
        )
    elif is_offline_mode() or kwargs.get("local_files_only"):
        options = picked(kwargs, DOWNLOAD_OPTIONS) | {
            "local_files_only": True,
            "_raise_exceptions_for_missing_entries": False,
        }
        names = [file.name for file in files]
        if not any(cached_file(path, name, _raise_exceptions_for_connection_errors=False, **options) for name in names):
            raise ValueError(
                f"{path!r} is neither a folder here nor a model in the cache, and hub access is off (HF_HUB_OFFLINE). "
                f"Give the path of a downloaded model, or run once with access (`hf download {path}`)."
            )


def load_weights(path: str, kwargs: dict[str, Any], auto_class: type) -> PreTrainedModel:
    """The model at `path`; every weight of a model that writes text comes from the checkpoint."""
    try:
        config = read_config(path, kwargs)
        cls = checkpoint_class(config, auto_class)
        check_labels(path, config, cls, kwargs.get("num_labels"))
        with without_load_report() if kwargs.get("num_labels") else nullcontext():
            model, report = cls.from_pretrained(path, output_loading_info=True, **kwargs)
    except OSError as error:
        raise ValueError(f"the model {path!r} can't be loaded: {first_line(error)}") from error
    except TypeError as error:
        raise explained(error, kwargs) from error
    missing = sorted(report["missing_keys"])
    if not issubclass(type(model), GenerationMixin):  # a new head, and what is between it and the model
        if missing:
            logger.info("new in %s, drawn by the seed: %s", type(model).__name__, ", ".join(missing))
        missing = [name for name in missing if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name]
    if missing and "GenerativeModel" not in cls.__name__:
        raise ValueError(
            f"{path!r} lacks {len(missing)} weights of {type(model).__name__}, e.g. {missing[0]}, which would start "
            f"from random numbers. It was saved as {config.architectures}; load the model it was made from."
        )
    return model


@contextmanager
def without_load_report() -> Iterator[None]:
    """Without transformers' table of the weights that a new head lacks, as it must, and an old head had."""
    chatter = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    chatter.addFilter(is_other)
    try:
        yield
    finally:
        chatter.removeFilter(is_other)


def read_config(path: str, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The configuration that belongs to the weights at `path`."""
    if isinstance(kwargs.get("config"), PreTrainedConfig):
        return kwargs["config"]
    options = picked(kwargs, (*DOWNLOAD_OPTIONS, "gguf_file", "trust_remote_code"))
    try:
        return AutoConfig.from_pretrained(path, **options)
    except OSError as error:
        raise ValueError(f"the model {path!r} can't be loaded: {first_line(error)}") from error


def checkpoint_class(config: PreTrainedConfig, auto_class: type) -> type:
    """The class named in the checkpoint if it writes text and a language model is wanted, else `auto_class`."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if auto_class is AutoModelForCausalLM and named is not None and issubclass(named, GenerationMixin):
        return named
    return auto_class


def check_labels(path: str, config: PreTrainedConfig, auto_class: type, num_labels: int | None) -> None:
    """Refuses a family without the class that is wanted, and a head that was saved with another number of outputs."""
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is None or num_labels is None:
        return
    if type(config) not in mapping and auto_class.__name__ not in (getattr(config, "auto_map", None) or {}):
        raise ValueError(
            f"{path!r} is a {config.model_type}, and transformers has no {auto_class.__name__} for this family. Choose "
            "a model of another one, or pass an object with a head of your own, called `score`, and num_labels in its "
            "config."
        )
    saved = (config.architectures or [""])[0]
    if saved.endswith(("ForSequenceClassification", "ForTokenClassification")) and config.num_labels != num_labels:
        raise ValueError(
            f"{path!r} is a {saved}, saved with num_labels={config.num_labels}, but num_labels={num_labels} is wanted "
            "here; start from the language model it was made from, which gets a new head."
        )


def explained(error: TypeError, kwargs: dict[str, Any]) -> Exception:
    """The error for an option that no one takes, naming the nearest known one; other errors as they are."""
    unknown = [name for name in kwargs if f"'{name}'" in str(error)]
    if "unexpected keyword argument" not in str(error) or not unknown:
        return error
    hint = suggestion(unknown[0], LOADING_OPTIONS)
    return ValueError(f"model_init_kwargs: neither from_pretrained nor the model knows {unknown[0]!r}.{hint}")


def describe_precision(model: nn.Module, args: Any) -> str:
    """The precisions of a run: "weights float32, autocast bfloat16, optimizer state float32, device cpu"."""
    weights = quantization_name(model) or named_dtypes(model.parameters())
    autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else "off"
    trained = named_dtypes(p for p in model.parameters() if p.requires_grad)
    optim = str(getattr(args.optim, "value", args.optim))
    state = "int8" if "8bit" in optim else "int4" if "4bit" in optim else trained
    return f"weights {weights}, autocast {autocast}, optimizer state {state}, device {args.device}"


def named_dtypes(parameters: Any) -> str:
    """The dtypes of `parameters`, the commonest (by elements) first, joined by +."""
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return "+".join(name for name, _ in sizes.most_common()) or "none"


def picked(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The entries of `options` under `names`."""
    return {name: options[name] for name in names if name in options}


def listing(folder: Path) -> str:
    """The first names in `folder`."""
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0]
