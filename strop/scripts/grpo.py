"""`python -m strop.scripts.grpo`, the form that torchrun and `accelerate launch -m` take; the same as `strop grpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("grpo", sys.argv[1:]))
