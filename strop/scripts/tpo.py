"""`python -m strop.scripts.tpo`, the form that torchrun and `accelerate launch -m` take; the same as `strop tpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("tpo", sys.argv[1:]))
