"""`python -m strop.scripts.bco`, the form that torchrun and `accelerate launch -m` take; the same as `strop bco`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("bco", sys.argv[1:]))
