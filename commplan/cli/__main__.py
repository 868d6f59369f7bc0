"""`python -m commplan.cli`: the command without its script."""

import sys

from commplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
