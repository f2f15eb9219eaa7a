"""`python -m strop.scripts.online_dpo`, for torchrun and `accelerate launch -m`; the same as `strop online_dpo`."""

import sys

from strop.cli.train import main

if __name__ == "__main__":
    sys.exit(main("online_dpo", sys.argv[1:]))
