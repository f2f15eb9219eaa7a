"""`python -m strop.scripts.prm`, the form that torchrun and `accelerate launch -m` take; the same as `strop prm`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("prm", sys.argv[1:]))
