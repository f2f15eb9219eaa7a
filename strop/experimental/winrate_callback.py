"""An import path that users know."""

from strop.callbacks.win_rate import WinRateCallback

__all__ = ["WinRateCallback"]
