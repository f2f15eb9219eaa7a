"""`python -m strop.scripts.cpo`, the form that torchrun and `accelerate launch -m` take; the same as `strop cpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("cpo", sys.argv[1:]))
