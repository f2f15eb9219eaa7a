"""`python -m strop.scripts.kto`, the form that torchrun and `accelerate launch -m` take; the same as `strop kto`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("kto", sys.argv[1:]))
