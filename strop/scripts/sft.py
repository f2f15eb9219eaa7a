"""`python -m strop.scripts.sft`, the form that torchrun and `accelerate launch -m` take; the same as `strop sft`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("sft", sys.argv[1:]))
