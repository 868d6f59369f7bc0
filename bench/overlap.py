"""Communication under computation: an exchange of 4 MiB that could run while 100 ms are computed.

    sudo python -m bench.overlap
    sudo python -m bench.overlap --hosts 4 --nbytes 16MiB --seconds 0.5

Two tensors are all-reduced, as in a backward pass: a large one that is ready at once, and a small one that is
computed during its exchange. Three times are taken: the exchange alone, the computation alone, and both. The
hidden part is the saving of both together, relative to the shorter of the two: 1 is all of it.

commplan: a plan of one line, `{ overlap = backward }`, under jit. XLA and mpi4jax: both calls in one jitted
function. Open MPI and torch: non-blocking calls. Two hosts are the default: with more ranks than cores, the
computations and the exchange compete for the processor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.collectives import SYSTEMS
from bench.harness.cli import in_lab, lab_parser, names, size
from bench.harness.figures import Results, size_text, table, time_text
from bench.harness.stage import Entry, Figure, Stage
from bench.harness.work import ITEM, Work

SMALL = 4096  # elements of the tensor that is computed
HOW = {"commplan": "{{ bucket = {kib} KiB, overlap = backward }}", "xla": "combined"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    def measure(stage: Stage) -> Results:
        figures = stage.compare(entries(options.systems, options.nbytes, options.seconds))
        print(f"\n{size_text(options.nbytes)} beside {time_text(options.seconds)} of computation")
        print(table(rows(figures)))
        return Results("overlap", stage.surroundings, figures)

    return int(in_lab(options, measure, options.systems, rounds=6, budget=1.0) is None)


def entries(systems: Sequence[str], nbytes: int, seconds: float) -> list[Entry]:
    """Of each system the exchange, the computation (in its own framework), and both."""
    counts = (SMALL, nbytes // ITEM)
    listed: list[Entry] = []
    for system in systems:
        how = HOW.get(system, "").format(kib=nbytes >> 10)
        listed += [
            Entry(f"{system} exchange", system, Work("all_reduce", counts, how)),
            Entry(f"{system} computation", system, Work("empty", counts, how, seconds)),
            Entry(f"{system} both", system, Work("all_reduce", counts, how, seconds)),
        ]
    return listed


def rows(figures: Sequence[Figure]) -> list[list[str]]:
    by_label = {figure.label: figure for figure in figures}
    body = [["", "exchange", "computation", "both", "hidden", "cpu of both", "chosen"]]
    for system in dict.fromkeys(figure.system for figure in figures):
        parts = [by_label[f"{system} {part}"] for part in ("exchange", "computation", "both")]
        if not all(part.seconds for part in parts):
            body.append([system, next(part.missing for part in parts if not part.seconds), *[""] * 5])
            continue
        exchange, computation, both = (part.time for part in parts)
        times = [time_text(t) for t in (exchange, computation, both)]
        cpu = sum(parts[2].cpu) / len(parts[2].cpu)
        share = f"{hidden(exchange, computation, both):.2f}"
        body.append([system, *times, share, time_text(cpu), parts[2].note])
    return body


def hidden(exchange: float, computation: float, both: float) -> float:
    """The saving of doing both at once, as a share of the shorter one."""
    return (exchange + computation - both) / min(exchange, computation)


def _parser() -> argparse.ArgumentParser:
    parser = lab_parser("overlap", __doc__)
    parser.set_defaults(hosts=2)
    parser.add_argument("--systems", type=names(SYSTEMS), default=SYSTEMS, help="comma-separated (all)")
    parser.add_argument("--nbytes", type=size, default=4 << 20, help="of the exchange (4MiB)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of the computation (0.1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
