"""Models of workers and servers, small enough to try everything that can happen.

A model has few of each, and units of one element: what happens to one unit does not depend on how many
elements there are, and workers are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from commplan.diagnostics import Span, plural
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType, ServedMode
from commplan.protocol.sites import Buffer, Chunk, Kind, Site, Sites
from commplan.protocol.units import layout_weights


@dataclasses.dataclass(frozen=True)
class Model:
    """The explored model.

    Attributes:
        units: units of each server.
        acknowledged: pushes that a token acknowledges.
        requests: requests of each worker after the initial put; `puts` of them in all, evenly distributed.
    """

    kind: Literal["exchange", "elastic"] = "exchange"
    mode: ServedMode | None = None
    workers: int = 2
    servers: int = 1
    units: int = 1
    requests: int = 2
    staleness: int | None = None
    acknowledged: bool = False
    gets: bool = False
    puts: int = 1
    deaths: int = 0

    def __str__(self) -> str:
        mode = f"exchange, staleness {self.staleness or 0}" if self.mode is None else f"{self.mode}"
        if self.mode is not None and self.staleness is not None:
            mode += f", staleness {self.staleness}"
        extra = [plural(self.requests, "request"), *(["acknowledged"] if self.acknowledged else [])]
        extra += ["gets"] * self.gets + [f"{self.puts} puts"] * (self.puts > 1)
        extra += [f"up to {plural(self.deaths, 'death')}"] * (self.deaths > 0)
        counts = {"worker": self.workers, "server": self.servers, "unit": self.units}
        size = ", ".join(plural(count, word) for word, count in counts.items())
        return f"{mode}: {size}, {', '.join(extra)}"


def sites_of(model: Model) -> Sites:
    """The sites of a model: a put, the exchange or meeting, and a get."""
    total = model.servers * model.units
    layout = layout_weights((Leaf("", (total,), DType.F32),), (0,), model.servers, 4)
    tags = iter(range(16, 10_000))

    def data() -> Buffer:
        chunks = tuple(Chunk(u.server, u.start, u.size, next(tags), u.number) for u in layout.units)
        return Buffer("data", DType.F32, total, chunks, "w", (0,))

    def token() -> Buffer:
        chunks = tuple(Chunk(j, 0, 1, next(tags)) for j in range(model.servers))
        return Buffer("token", DType.I32, 1, chunks)

    def site(number: int, kind: Kind, up: Buffer, *down: Buffer, **more: Any) -> Site:
        result, server = f"{kind}.{number}", ("hub", 0, layout.servers, (), ("state",), (layout,))
        return Site(number, kind, "step", result, Span(1, 1, 1, 1), *server, (up,), down, **more)

    down = token() if model.acknowledged else data()
    met = site(1, model.kind, data(), down, mode=model.mode, staleness=model.staleness)
    put = site(0, "put", data(), token=(token(),))
    get = site(2, "get", token(), data())
    return Sites((put, met, get), (("worker", model.workers),), model.servers)


def program(model: Model) -> tuple[int, ...]:
    """The sites of a worker: a put, then requests with the other puts between."""
    numbers = [0]
    for number in range(model.requests):
        numbers += [1, 2] if model.gets else [1]
        if number < model.puts - 1:
            numbers.append(0)
    return tuple(numbers)


# Workers, servers, units of each server, requests of each worker.
Size = tuple[int, int, int, int]
QUICK: tuple[Size, ...] = (
    (2, 1, 2, 2), (2, 1, 1, 3), (3, 1, 1, 2), (4, 1, 1, 1), (2, 2, 1, 2), (3, 2, 1, 1)
)  # fmt: skip
WHOLE: tuple[Size, ...] = (
    *QUICK, (3, 1, 2, 2), (3, 1, 1, 3), (3, 2, 1, 2), (4, 1, 1, 3), (4, 1, 2, 2), (4, 2, 1, 1), (4, 2, 1, 2)
)  # fmt: skip
_MODES: tuple[ServedMode, ...] = ("round_robin", "async", "hogwild")


def models(sizes: Sequence[Size] = QUICK) -> tuple[Model, ...]:
    """The explored models: every order of service in every size, each with the deaths of up to all
    workers."""
    models: list[Model] = []
    for workers, servers, units, requests in sizes:
        plain = Model(workers=workers, servers=servers, units=units, requests=requests, deaths=workers)
        for staleness in (0, 1):
            stale = dataclasses.replace(plain, staleness=staleness)
            models += [stale, dataclasses.replace(stale, acknowledged=True)]
        models.append(dataclasses.replace(plain, gets=True))
        for mode in _MODES:
            meeting = dataclasses.replace(plain, kind="elastic", mode=mode)
            models += [meeting, dataclasses.replace(meeting, staleness=1)]
    twice = Model(puts=2, deaths=2)
    models += [twice, dataclasses.replace(twice, kind="elastic", mode="async", gets=True)]
    return tuple(models)
