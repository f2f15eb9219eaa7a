"""`python -m strop.scripts.ppo`, the form that torchrun and `accelerate launch -m` take; the same as `strop ppo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("ppo", sys.argv[1:]))
