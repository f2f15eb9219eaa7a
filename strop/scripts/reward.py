"""`python -m strop.scripts.reward`, the form that torchrun and `accelerate launch -m` take: `strop reward`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("reward", sys.argv[1:]))
