"""The verdict on commplan, in words: the cases in which it is slower than a peer, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.harness.stage import Figure, Surroundings

PEERS = ("mpi4jax", "xla", "torch")
LARGE = 4 << 20  # bytes from here on should depend on the network alone
SMALL = 16 << 10  # bytes up to here depend on calls and latencies
NOISE = 0.05  # two medians this close are one


def judge(figures: Sequence[Figure], where: Surroundings) -> list[str]:
    """One sentence for each question; it names the sizes that miss the goal."""
    sentences: list[str] = []
    for kind, sizes in by_kind(figures).items():
        sentences += [f"{kind.replace('_', '-')}: {line}" for line in _of_kind(kind, sizes, where)]
    return sentences


def by_kind(figures: Sequence[Figure]) -> dict[str, dict[int, dict[str, Figure]]]:
    """Collective -> nbytes -> label -> figure. An empty call belongs to the collective that it was measured
    with, in turns: that of the figures before it."""
    figures_by_kind: dict[str, dict[int, dict[str, Figure]]] = {}
    kind = ""
    for figure in figures:
        kind = kind if figure.work.kind == "empty" else figure.work.kind
        if figure.seconds and kind:
            figures_by_kind.setdefault(kind, {}).setdefault(figure.work.nbytes, {})[figure.label] = figure
    return figures_by_kind


def _of_kind(kind: str, sizes: dict[int, dict[str, Figure]], where: Surroundings) -> list[str]:
    sentences: list[str] = []
    slower: list[str] = []
    compared = 0
    for size, own in sizes.items():
        peers = [own[peer].time for peer in PEERS if peer in own]
        if "commplan" not in own or not peers:
            continue
        compared += 1
        ratio = own["commplan"].time / min(peers)
        if ratio > 1 + NOISE:
            slower.append(f"{size} B ({ratio:.2f} times the time)")
    if compared:
        where_slower = ", ".join(slower) or "no size"
        sentences.append(f"more than {NOISE:.0%} slower than the best peer at {where_slower} of {compared}")
    large = [own for size, own in sizes.items() if size >= LARGE and "commplan" in own]
    if large and kind == "all_reduce":
        share = min(own["commplan"].bus / where.line for own in large)
        sentences.append(f"at least {share:.3f} of the line rate from 4 MiB up")
        plain = [own["openmpi"].time / own["commplan"].time for own in large if "openmpi" in own]
        if plain:
            sentences.append(f"at least {min(plain):.2f} times Open MPI's bandwidth from 4 MiB up")
    if large and where.shape.racks > 1:
        share = min(where.bound(own["commplan"].work) / own["commplan"].time for own in large)
        sentences.append(f"at least {share:.3f} of the topology's bound from 4 MiB up")
    sentences += _small(sizes)
    sentences += _auto(sizes)
    return sentences


def _small(sizes: dict[int, dict[str, Figure]]) -> list[str]:
    """Against Open MPI from NumPy plus 1.2 empty calls, for short messages."""
    worst = -math.inf
    for size, own in sizes.items():
        if size <= SMALL and {"commplan", "openmpi", "empty call"} <= own.keys():
            allowed = own["openmpi"].time + 1.2 * own["empty call"].time
            worst = max(worst, own["commplan"].time / allowed)
    return (
        [] if worst == -math.inf else [f"up to 16 KiB at most {worst:.2f} times (Open MPI + 1.2 empty calls)"]
    )


def _auto(sizes: dict[int, dict[str, Figure]]) -> list[str]:
    """The compiler's choice against the best alternative."""
    worst, where = 0.0, ""
    for size, own in sizes.items():
        others = {label: f.time for label, f in own.items() if label.startswith("commplan ")}
        if not others or "commplan" not in own:
            continue
        best = min(others, key=others.__getitem__)
        ratio = own["commplan"].time / others[best]
        if ratio > worst:
            worst, where = ratio, f"{size} B: {own['commplan'].note} against {best.removeprefix('commplan ')}"
    return [f"auto takes at most {worst:.2f} times the best algorithm's time ({where})"] if where else []
