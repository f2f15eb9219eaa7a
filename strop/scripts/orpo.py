"""`python -m strop.scripts.orpo`, the form that torchrun and `accelerate launch -m` take; the same as `strop orpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("orpo", sys.argv[1:]))
