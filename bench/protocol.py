"""The protocol of workers and servers, explored: every order in which messages can arrive and workers die.

    python -m bench.protocol            # every kind and mode, up to four workers (seconds)
    python -m bench.protocol --whole    # up to four workers and two servers (minutes)

Exit 1 if an order violates a property; the events that lead there are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.harness.arguments import program_parser
from tests.support.server_models.exploration import explore
from tests.support.server_models.models import QUICK, WHOLE, models


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("protocol", __doc__)
    parser.add_argument("--whole", action="store_true", help="up to four workers and two servers")
    options = parser.parse_args(arguments)
    states = 0
    for model in models(WHOLE if options.whole else QUICK):
        explored = explore(model)
        print(f"{model}: {explored.states:,} states", flush=True)
        if explored.wrong:
            print(explored.wrong, *explored.path, sep="\n  ")
            return 1
        states += explored.states
    print(f"no order breaks a promise: {states:,} states")
    return 0


if __name__ == "__main__":
    sys.exit(main())
