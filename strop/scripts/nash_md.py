"""`python -m strop.scripts.nash_md`, for torchrun and `accelerate launch -m`; the same as `strop nash_md`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("nash_md", sys.argv[1:]))
