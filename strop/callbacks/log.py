"""What the package logs while a run is prepared (data, precision, layout), shown on stderr."""

import logging
import sys


def show_logs(level: int = logging.INFO) -> None:
    """Messages of `level` and above go to stderr as they are, from now on."""
    logger = logging.getLogger("strop")
    if not logger.handlers:
        logger.addHandler(ToStderr())
        logger.setLevel(level)


def is_set_up() -> bool:
    """Whether the program has said itself what becomes of the package's messages."""
    logger = logging.getLogger("strop")
    return logger.level != logging.NOTSET or logger.hasHandlers()


class ToStderr(logging.Handler):
    """Prints messages as they are to what `sys.stderr` is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
