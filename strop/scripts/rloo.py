"""`python -m strop.scripts.rloo`, the form that torchrun and `accelerate launch -m` take; the same as `strop rloo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("rloo", sys.argv[1:]))
