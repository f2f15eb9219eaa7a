"""`python -m strop.scripts.simpo`, the form that torchrun and `accelerate launch -m` take: `strop simpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("simpo", sys.argv[1:]))
