"""Proofs of programs whose ranks have separate rounds.

First the sends and receives are matched and all ranks must reach their end; then the prover of programs
checks the messages. Ranks run their rounds one after another, so two rounds of one rank are never open
together. A round completes when it is open and so are the rounds of its peers with the other ends of its
messages. It stays open until it completes, so every round that can complete does, in any order. Therefore the
same rounds complete in every execution, and the result holds for all executions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commplan.collectives.program import Ints
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.proof import check_ranges
from commplan.verify.programs.symbolic_execution import ChunkMessages, follow

from .projection import Posts, Projection

OPEN_LIMIT = 64  # ranks of a circle that are named one by one


class Messages(NamedTuple):
    """Matched messages, one entry each.

    Attributes:
        send, receive: indices in `Projection.sends` and `.receives`.
        read: the time at which the sender's slots are read: after all writes at `read`, before later writes.
        write: the time at which the receiver's slots are written. Times count from 0 (before all).
    """

    send: Ints
    receive: Ints
    read: Ints
    write: Ints


def prove(projection: Projection) -> tuple[Counterexample, ...]:
    """The reason why `projection` violates its postcondition; empty if it is proved.

    Proves the properties of `commplan.verify.programs.proof.prove`, and also that every send matches a
    receive of the same chunks, and that all ranks reach their end although a send completes only when its
    receive is posted.
    """
    messages = check_ranges(projection.head) or match(projection)
    if isinstance(messages, Counterexample):
        return (messages,)
    wrong = follow(projection.head, _units(projection, messages), projection.chunks)
    return () if wrong is None else (wrong,)


def _units(projection: Projection, messages: Messages) -> ChunkMessages:
    order = np.argsort(messages.write, kind="stable")
    messages = Messages(*(column[order] for column in messages))
    sends, receives = projection.sends.take(messages.send), projection.receives.take(messages.receive)
    many = sends.size
    ends = np.cumsum(many)
    within = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(ends - many, many)
    chunk = np.repeat(sends.chunk, many) + within
    k = projection.chunks
    return ChunkMessages(
        np.repeat(sends.rank, many) * k + chunk,
        np.repeat(receives.rank, many) * k + chunk,
        np.repeat(receives.reduce, many),
        np.repeat(messages.read, many),
        np.repeat(messages.write, many),
        np.repeat(sends.round, many),
        np.repeat(receives.round, many),
    )


def match(projection: Projection) -> Messages | Counterexample:
    """The messages with their times, or why some rank never gets to its end."""
    wrong = _out_of_range(projection)
    if wrong is not None:
        return wrong
    sends, receives = projection.sends, projection.receives
    send, out = _by_pair(sends.rank * projection.ranks + sends.peer)
    receive, into = _by_pair(receives.peer * projection.ranks + receives.rank)
    if np.array_equal(out, into):
        sent, received = sends.take(send), receives.take(receive)
        alike = np.array_equal(sent.chunk, received.chunk) and np.array_equal(sent.size, received.size)
        if alike and np.array_equal(sent.round, received.round):
            # All ranks number their rounds alike, and every message has both ends in one round: round t
            # completes once all before it have.
            return Messages(send, receive, sent.round, sent.round + 1)
    return _execute(projection, send, out, receive, into)


def _by_pair(keys: Ints) -> tuple[Ints, Ints]:
    """Places ordered by pair of ranks, then by posting; and the keys in this order."""
    order = np.argsort(keys, kind="stable")
    return order, keys[order]


def _out_of_range(projection: Projection) -> Counterexample | None:
    n, chunks = projection.ranks, projection.chunks
    for posts, verb in ((projection.sends, "sends to"), (projection.receives, "receives from")):
        strange = (posts.peer < 0) | (posts.peer >= n) | (posts.peer == posts.rank)
        strange |= (posts.rank < 0) | (posts.rank >= n)
        outside = (posts.chunk < 0) | (posts.size < 1) | (posts.chunk + posts.size > chunks)
        for place in np.flatnonzero(strange | outside)[:1].tolist():
            rank, peer, time = (int(x[place]) for x in (posts.rank, posts.peer, posts.round))
            first, count = int(posts.chunk[place]), int(posts.size[place])
            actual, expected = (
                f"{count} chunks from {first} on, rank {peer}",
                f"chunks below {chunks}, another rank",
            )
            return Counterexample(
                "range", (rank,), (time,), first, f"{expected} below {n}", actual,
                f"rank {rank} {verb} rank {peer} {count} chunks from chunk {first} on in its round {time}",
            )  # fmt: skip
    return None


class _Rounds:
    """The rounds of all ranks, numbered through: those of rank 0, then of rank 1, ..."""

    def __init__(self, projection: Projection) -> None:
        sends, receives = projection.sends, projection.receives
        both = np.concatenate([sends.rank, receives.rank]), np.concatenate([sends.round, receives.round])
        self.width = int(both[1].max(initial=0)) + 1
        keys, places = np.unique(both[0] * self.width + both[1], return_inverse=True)
        self.rank: list[int] = (keys // self.width).tolist()
        self.round: list[int] = (keys % self.width).tolist()
        self.of_send: list[int] = places[: len(sends.rank)].tolist()
        self.of_receive: list[int] = places[len(sends.rank) :].tolist()

    def first(self, node: int) -> bool:
        return node == 0 or self.rank[node - 1] != self.rank[node]


def _execute(
    projection: Projection, send: Ints, out: Ints, receive: Ints, into: Ints
) -> Messages | Counterexample:
    """Let the ranks run: in every step all rounds complete that can."""
    pairs, loose = _pairs(send, out, receive, into)
    rounds = _Rounds(projection)
    count = len(rounds.rank)
    waits = [1] * count  # the missing conditions: that it opens, and the other end of each message
    tells: list[list[int]] = [[] for _ in range(count)]
    for sent, received in pairs:
        sender, receiver = rounds.of_send[sent], rounds.of_receive[received]
        tells[sender].append(receiver)
        tells[receiver].append(sender)
        waits[sender] += 1
        waits[receiver] += 1
    for is_send, place in loose:  # nobody ever posts the other end
        waits[rounds.of_send[place] if is_send else rounds.of_receive[place]] += 1
    done, opened = [0] * count, [False] * count
    opening: list[int] = [node for node in range(count) if rounds.first(node)]
    step = 0
    while opening:
        step += 1
        completed: list[int] = []
        for node in opening:
            opened[node] = True
            for peer in (node, *tells[node]):
                waits[peer] -= 1
                if not waits[peer]:
                    completed.append(peer)
        opening = []
        for node in completed:
            done[node] = step
            if node + 1 < count and rounds.rank[node + 1] == rounds.rank[node]:
                opening.append(node + 1)
    met = [
        (sent, received)
        for sent, received in pairs
        if opened[rounds.of_send[sent]] and opened[rounds.of_receive[received]]
    ]
    wrong = _unlike(projection, met, rounds)
    if wrong is not None:
        return wrong
    if not all(done):
        return _stuck(projection, rounds, done, opened, pairs, loose)
    read = [
        0 if rounds.first(node) else done[node - 1] for node in (rounds.of_send[sent] for sent, _ in pairs)
    ]
    write = [done[rounds.of_receive[received]] for _, received in pairs]
    table = np.array([(*pair, r, w) for pair, r, w in zip(pairs, read, write, strict=True)], np.int64)
    return Messages(*table.reshape(-1, 4).T)


def _pairs(
    send: Ints, out: Ints, receive: Ints, into: Ints
) -> tuple[list[tuple[int, int]], list[tuple[bool, int]]]:
    """Sends with their receives; and the ends without another: (whether it is a send, its place)."""
    queues: dict[int, tuple[list[int], list[int]]] = {}
    for side, (places, keys) in enumerate(((send, out), (receive, into))):
        for place, key in zip(places.tolist(), keys.tolist(), strict=True):
            queues.setdefault(key, ([], []))[side].append(place)
    pairs: list[tuple[int, int]] = []
    loose: list[tuple[bool, int]] = []
    for ones, receives_of in queues.values():
        pairs += zip(ones, receives_of, strict=False)
        loose += [(True, place) for place in ones[len(receives_of) :]]
        loose += [(False, place) for place in receives_of[len(ones) :]]
    return pairs, loose


def _unlike(projection: Projection, met: list[tuple[int, int]], rounds: _Rounds) -> Counterexample | None:
    """A send that meets a receive of other chunks."""
    sends, receives = projection.sends, projection.receives
    for send, receive in met:
        sent = int(sends.chunk[send]), int(sends.size[send])
        expected = int(receives.chunk[receive]), int(receives.size[receive])
        if sent == expected:
            continue
        src, dst = int(sends.rank[send]), int(receives.rank[receive])
        times = rounds.round[rounds.of_send[send]], rounds.round[rounds.of_receive[receive]]
        return Counterexample(
            "mismatch", (src, dst), times, expected[0], _chunks(*expected), _chunks(*sent),
            f"rank {src} sends {_chunks(*sent)} in its round {times[0]} where rank {dst} receives"
            f" {_chunks(*expected)} in its round {times[1]}",
        )  # fmt: skip
    return None


def _chunks(first: int, count: int) -> str:
    return f"chunk {first}" if count == 1 else f"chunks {first} to {first + count - 1}"


def _stuck(
    projection: Projection,
    rounds: _Rounds,
    done: list[int],
    opened: list[bool],
    pairs: list[tuple[int, int]],
    loose: list[tuple[bool, int]],
) -> Counterexample:
    """Follow the waits, from the lowest rank that is stuck, to a cycle or a missing message."""
    lacks: dict[int, tuple[bool, int]] = {}  # round -> an end without a partner
    awaits: dict[int, tuple[int, bool, int]] = {}  # round -> the round of a peer that has not opened
    for is_send, place in loose:
        lacks.setdefault(rounds.of_send[place] if is_send else rounds.of_receive[place], (is_send, place))
    for sent, received in pairs:
        sender, receiver = rounds.of_send[sent], rounds.of_receive[received]
        if opened[sender] and not opened[receiver]:
            awaits.setdefault(sender, (receiver, True, sent))
        if opened[receiver] and not opened[sender]:
            awaits.setdefault(receiver, (sender, False, received))
    current = {rounds.rank[node]: node for node in range(len(done)) if opened[node] and not done[node]}
    path: list[int] = []
    node = min(current.values())
    while node not in path:
        if node in lacks:
            return _hang(projection, rounds, node, *lacks[node])
        path.append(node)
        node = current[rounds.rank[awaits[node][0]]]
    return _circle(projection, rounds, path[path.index(node) :], awaits)


def _end(projection: Projection, is_send: bool, place: int) -> tuple[Posts, str]:
    return (projection.sends, "to send") if is_send else (projection.receives, "to receive")


def _hang(projection: Projection, rounds: _Rounds, node: int, is_send: bool, place: int) -> Counterexample:
    posts, verb = _end(projection, is_send, place)
    rank, peer, chunk = rounds.rank[node], int(posts.peer[place]), int(posts.chunk[place])
    description = f"{_chunks(chunk, int(posts.size[place]))} {'to' if is_send else 'from'} rank {peer}"
    time = rounds.round[node]
    other = "receive" if is_send else "send"
    return Counterexample(
        "hang", (rank, peer), (time,), chunk, f"a {other} on rank {peer}", "none",
        f"rank {rank} waits forever in its round {time} {verb} {description}, which has no {other} for it",
    )  # fmt: skip


def _circle(
    projection: Projection, rounds: _Rounds, circle: list[int], awaits: dict[int, tuple[int, bool, int]]
) -> Counterexample:
    ranks = tuple(rounds.rank[node] for node in circle)
    times = tuple(rounds.round[node] for node in circle)
    sentences: list[str] = []
    for node in circle[:OPEN_LIMIT]:
        peer, is_send, place = awaits[node]
        posts, verb = _end(projection, is_send, place)
        description = _chunks(int(posts.chunk[place]), int(posts.size[place]))
        description += " to" if is_send else " from"
        sentences.append(
            f"rank {rounds.rank[node]} in its round {rounds.round[node]} {verb} {description}"
            f" rank {rounds.rank[peer]}, which gets there in its round {rounds.round[peer]}"
        )
    who = ", ".join(map(str, ranks[:OPEN_LIMIT])) + (", ..." if len(ranks) > OPEN_LIMIT else "")
    return Counterexample(
        "deadlock", ranks, times, None, "every rank gets to its end", f"a circle of {len(ranks)} ranks",
        f"ranks {who} wait for each other in a circle:\n" + "\n".join(sentences),
    )  # fmt: skip
