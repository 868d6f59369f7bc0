"""The cost model's prices of `native` on GPUs, against published tables of nccl-tests.

    python -m bench.nccl_tables          # the error of each table
    python -m bench.nccl_tables --rows   # of each size

`nccl_tables.toml` has the tables and their sources. The error is |predicted - published| / published, of bus
bandwidth. Nothing runs.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.harness.arguments import program_parser
from bench.harness.figures import size_text, table
from commplan.cost import CollectiveQuery, Network, collective_time, one_group
from commplan.cost.collective.cost import CostKind, library_algorithm
from commplan.ir.plan import Algorithm
from commplan.topology import Level, Topology

TABLES = Path(__file__).with_name("nccl_tables.toml")
GPUS = 8  # of a node
NVLINK = {"a100": 300e9, "h100": 450e9, "h200": 450e9}  # bytes a second and direction, by the data sheets


class Row(NamedTuple):
    """One size: bytes of the whole buffer, and GB/s of bus bandwidth."""

    nbytes: int
    published: float
    predicted: float
    way: str

    @property
    def error(self) -> float:
        return abs(self.predicted / self.published - 1)


class Table(NamedTuple):
    """A published table. fitted: whether the latency between nodes comes from a row, which `rows` lacks."""

    name: str
    source: str
    hardware: str
    devices: str
    nodes: int
    fitted: bool
    rows: tuple[Row, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("nccl_tables", __doc__)
    parser.add_argument("--rows", action="store_true", help="every size")
    options = parser.parse_args(arguments)
    tables = read()
    heads = ("table", "rows", "largest published", "predicted", "median error", "worst")
    print(table([heads, *map(_line, tables)]))
    for title, some in (
        ("all", tables),
        ("those without a fitted latency", [each for each in tables if not each.fitted]),
    ):
        wrong = errors(some)
        median, most = statistics.median(wrong), ninth(wrong)
        print(f"{title}: {len(wrong)} rows, median error {median:.1%}, nine of ten up to {most:.1%}")
    if options.rows:
        for each in tables:
            print(f"\n{each.name}: {each.hardware}\n{each.source}")
            lines = (
                (size_text(size), f"{published:.2f}", f"{predicted:.2f}", f"{row.error:.0%}", way)
                for row in each.rows
                for size, published, predicted, way in (row,)
            )
            print(table([("size", "published", "predicted", "error", "way"), *lines]))
    return 0


def errors(tables: Sequence[Table]) -> list[float]:
    """Of all rows, in rising order."""
    return sorted(row.error for each in tables for row in each.rows)


def ninth(errors: Sequence[float]) -> float:
    """The error that nine of ten rows do not exceed; errors: in rising order."""
    return errors[int(0.9 * len(errors))]


def read() -> list[Table]:
    """The published tables, each row with the model's prediction."""
    return [_table(content) for content in tomllib.loads(TABLES.read_text(encoding="utf-8"))["table"]]


def cluster(devices: str, nodes: int, network: float = 400e9, latency: float = 6e-6) -> Topology:
    """Nodes of eight GPUs. network: bytes a second of a node, per direction."""
    node = (Level("node", nodes, latency, network),) if nodes > 1 else ()
    return Topology("cluster", (Level("gpu", GPUS, 3e-6, NVLINK[devices]), *node), devices=devices)


def _table(content: dict[str, Any]) -> Table:
    devices, nodes, fitted = content["devices"], content["nodes"], content.get("fitted", False)
    latency = float(content.get("latency", "6us").removesuffix("us")) * 1e-6
    network = Network.for_topology(cluster(devices, nodes, content.get("network", 0) * 1e9, latency))
    kind, ranks = cast("CostKind", content["kind"]), GPUS * nodes
    share = (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    published = content.get("busbw") or [(size, share * size / us / 1e3) for size, us in content["rows"]]

    def row(nbytes: int, rate: float) -> Row:
        layout = one_group(range(ranks))
        native = collective_time(Algorithm("native"), CollectiveQuery(kind, layout, nbytes, network))
        assert native is not None
        predicted = share * nbytes / native.seconds / 1e9
        return Row(nbytes, rate, predicted, library_algorithm(kind, layout, nbytes, network))

    rows = tuple(row(*each) for each in published[fitted:])
    return Table(content["name"], content["source"], content["hardware"], devices, nodes, fitted, rows)


def _line(each: Table) -> tuple[str, ...]:
    largest, wrong = each.rows[-1], [row.error for row in each.rows]
    rates = (f"{largest.published:.1f} GB/s", f"{largest.predicted:.1f} GB/s")
    return each.name, str(len(wrong)), *rates, f"{statistics.median(wrong):.1%}", f"{max(wrong):.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
