"""Which layout a run uses: chosen by what the model can do, trusted only after a comparison on the first batch."""

import logging
import math

from torch.nn import Module

from strop.data.collate import Batch, Layout, leading_rows
from strop.models.forward import choose_layout, use_packed_attention
from strop.models.verify import Reader, layouts_agree, padded_from_packed, target_logps

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
    """Compares the packed layout with the padded one on the first batch in which rows could see each other.

    On a mismatch all batches are padded.
    """

    SAMPLE = 256
    """Tokens to compare; whole rows, so usually some more."""

    def __init__(self, read: Reader = target_logps):
        self.read = read
        """What is compared."""
        self.is_trusted: bool | None = None
        """None until a batch was compared."""

    def __call__(self, model: Module, batch: Batch) -> Batch:
        if "segments" not in batch or len(batch["segments"].lengths) == 1:
            return batch
        if self.is_trusted is None:
            self.is_trusted = self._compare(model, leading_rows(batch, self.SAMPLE))
        return batch if self.is_trusted else padded_from_packed(batch, pad_token_id=0)

    def _compare(self, model: Module, batch: Batch) -> bool:
        agreement = layouts_agree(model, batch, padded_from_packed(batch, pad_token_id=0), self.read)
        if agreement.agrees:
            logger.info("layout: packed equals padded on the first batch (largest difference %.1e)", agreement.largest)
        elif math.isnan(agreement.largest):
            logger.warning("layout: what the model says of the first batch are not numbers; rows are padded")
        else:
            logger.warning(
                "layout: packed rows get other outputs than padded ones from %s (largest difference %.1e), "
                "so this run pads its rows",
                type(model).__name__,
                agreement.largest,
            )
        return agreement.agrees
