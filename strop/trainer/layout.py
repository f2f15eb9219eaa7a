"""Which layout a run uses: chosen by what the model can do, trusted only after a comparison on the first batch."""

import logging

from torch.nn import Module

from strop.data.collate import Batch, Layout
from strop.models.forward import choose_layout, use_packed_attention
from strop.models.verify import layouts_agree, padded_from_packed

logger = logging.getLogger(__name__)


def settle_layout(model: Module, wanted: str = "auto", padding_free: bool = False) -> Layout:
    """The layout to collate into; `model` is made ready for it. Refuses a packed layout that the model cannot have."""
    possible, reason = choose_layout(model)
    if possible == "padded" and (wanted == "packed" or padding_free):
        asked = "padding_free=True" if padding_free else "layout='packed'"
        raise ValueError(
            f"{asked} can't be had for {type(model).__name__}: {reason}. Use layout='auto' without padding_free."
        )
    layout: Layout = "padded" if wanted == "padded" else possible
    if layout == "packed":
        use_packed_attention(model)
    logger.info("layout: %s (%s)", layout, reason if layout == possible else "as asked for")
    return layout


class LayoutGuard:
    """Compares the packed layout with the padded one on the first packed batch; on a mismatch all batches are padded."""

    def __init__(self):
        self.is_trusted: bool | None = None
        """None until a batch was compared."""

    def __call__(self, model: Module, batch: Batch) -> Batch:
        if "segments" not in batch:
            return batch
        if self.is_trusted is None:
            self.is_trusted = self._compare(model, batch)
        return batch if self.is_trusted else padded_from_packed(batch)

    def _compare(self, model: Module, batch: Batch) -> bool:
        difference, agree = layouts_agree(model, batch)
        if agree:
            logger.info("layout: packed equals padded on the first batch (largest difference %.1e)", difference)
        else:
            logger.warning(
                "layout: the packed layout gives %s other log-probabilities than padded rows (largest difference %.1e), so this run "
                "pads its rows. The model's attention doesn't go through transformers' AttentionInterface as expected.",
                type(model).__name__,
                difference,
            )
        return agree
