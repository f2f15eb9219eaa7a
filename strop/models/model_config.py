"""`ModelConfig`: which model, in which precision, with which adapter, as options of a command."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from strop.compat import accepts_old_names, suggestion

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


@accepts_old_names
@dataclass
class ModelConfig:
    """The model, its precision and its adapter.

    Raises ValueError for unknown dtypes, both quantisations at once, and options of an adapter or a quantisation that
    is not asked for.
    """

    model_name_or_path: str | None = None
    """The model to train: a hub id, a folder, a folder with an adapter, or a .gguf file."""

    model_revision: str = "main"
    """Branch, tag or commit of a model on the hub."""

    dtype: str = "float32"
    """Precision of the weights: "float32", "bfloat16", "float16", or "auto" for that of the saved weights."""

    attn_implementation: str | None = None
    """Attention of the padded layout, e.g. "sdpa" or "flash_attention_2"; chosen by the trainer if not set."""

    use_peft: bool = False
    """Train a LoRA adapter (arXiv:2106.09685) instead of the weights."""

    lora_r: int = 16
    """Rank of the adapter's matrices."""

    lora_alpha: int = 32
    """The adapter's output is scaled by lora_alpha / lora_r."""

    lora_dropout: float = 0.05
    """Dropout on the adapter's input."""

    lora_target_modules: list[str] | str | None = None
    """Modules that get an adapter, by the end of their names, or "all-linear"; the model's usual ones if not set."""

    lora_target_parameters: list[str] | None = None
    """Parameters that get an adapter, for weights that are not modules, such as the experts of a mixture."""

    lora_modules_to_save: list[str] | None = None
    """Modules trained in full beside the adapter and saved with it."""

    lora_task_type: str = "CAUSAL_LM"
    """The adapter's task: "CAUSAL_LM", or "SEQ_CLS" for reward models."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r) instead (arXiv:2312.03732)."""

    use_dora: bool = False
    """Train magnitude and direction apart (arXiv:2402.09353)."""

    load_in_8bit: bool = False
    """Keep the base model's weights in 8 bits (bitsandbytes); only with an adapter."""

    load_in_4bit: bool = False
    """Keep the base model's weights in 4 bits (QLoRA, arXiv:2305.14314); only with an adapter."""

    bnb_4bit_quant_type: str = "nf4"
    """Code book of the 4-bit weights: "nf4" or "fp4"."""

    use_bnb_nested_quant: bool = False
    """Quantise the scales of the 4-bit blocks too."""

    bnb_4bit_quant_storage: str | None = None
    """Dtype in which the 4-bit weights are stored; "bfloat16" lets FSDP shard them."""

    def __post_init__(self):
        self._check_choices()
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit=True and load_in_4bit=True contradict each other; keep one of them.")
        self._refuse_unused("use_peft", ("lora_", "use_rslora", "use_dora"))
        self._refuse_unused("load_in_4bit", ("bnb_4bit_", "use_bnb_"))
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[
                0
            ]  # peft takes "all-linear" and patterns as a string only

    def _check_choices(self):
        for name, known in {"dtype": DTYPES, "bnb_4bit_quant_type": ("nf4", "fp4")}.items():
            value = getattr(self, name)
            if value not in known and value is not None:
                hint = suggestion(value, known)
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}.{hint}")
        if self.lora_r < 1:
            raise ValueError(f"lora_r={self.lora_r} is out of range; the rank of an adapter is at least 1.")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout} is out of range; it must be at least 0 and below 1.")

    def _refuse_unused(self, switch: str, prefixes: tuple[str, ...]) -> None:
        """Options that only matter with `switch` on must be at their defaults while it is off."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not getattr(self, switch) and field.name.startswith(prefixes) and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no effect with {switch}=False; set {switch}=True or remove it."
                )


def get_peft_config(model_args: ModelConfig) -> "LoraConfig | None":
    """The adapter that `model_args` describes, None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    experts = {"target_parameters": model_args.lora_target_parameters} if model_args.lora_target_parameters else {}
    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        modules_to_save=model_args.lora_modules_to_save,
        task_type=model_args.lora_task_type,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
        **experts,
    )


def get_quantization_config(model_args: ModelConfig) -> "BitsAndBytesConfig | None":
    """The quantisation that `model_args` describes, None for full weights.

    4-bit layers compute in `dtype`; with "auto", in bfloat16.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype="bfloat16" if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Places a quantised model on this process's own GPU; None on a CPU."""
    import torch
    from accelerate import PartialState

    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None


def init_kwargs(model_args: ModelConfig, own: dict[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that `model_args` says, under the user's `own`."""
    said = {"dtype": model_args.dtype}
    if model_args.model_revision != "main":
        said["revision"] = model_args.model_revision
    if model_args.attn_implementation is not None:
        said["attn_implementation"] = model_args.attn_implementation
    return said | (own or {})
