"""`python -m strop.scripts.xpo`, for torchrun and `accelerate launch -m`; the same as `strop xpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("xpo", sys.argv[1:]))
