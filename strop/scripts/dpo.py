"""`python -m strop.scripts.dpo`, the form that torchrun and `accelerate launch -m` take; the same as `strop dpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("dpo", sys.argv[1:]))
