"""Replay of counter-examples: execute the projection, message by message, and search for the claim.

It uses nothing of the prover. Ranks run one after another, each as far as possible; any other order has the
same result (see `matching`). A slot holds, per rank, the count of that rank's contribution, and a number
computed by an addition that is commutative but, like that of floating-point numbers, not associative.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from commplan.collectives.postcondition import postcondition, sources
from commplan.collectives.program import Ints
from commplan.verify.programs.counterexample import Counterexample, terms

from .projection import Posts, Projection

_MOST = 1 << 40  # counts stop here: two and more are all too many
_MIX = np.uint64(0x9E3779B97F4A7C15)

Write = tuple[int, int, int, int]  # rank, its round, sender, chunk


class Post(NamedTuple):
    """One end of a message: the `number`-th from or to `peer`, in the order of posting."""

    peer: int
    chunk: int
    size: int
    number: int
    reduce: bool = False


class LocalRound(NamedTuple):
    """One round of one rank."""

    round: int
    sends: tuple[Post, ...]
    receives: tuple[Post, ...]


class Meeting(NamedTuple):
    """A matched send and receive: their rounds, and the chunks (first, count) of each."""

    src: int
    dst: int
    sent_in: int
    received_in: int
    sent: tuple[int, int]
    wanted: tuple[int, int]


class Waiting(NamedTuple):
    """A rank that never leaves `round`: the peers it waits for, to take (True) or bring how many messages."""

    round: int
    peers: tuple[tuple[int, bool, int], ...]


class Execution(NamedTuple):
    """The result of an execution.

    Attributes:
        counts: [ranks, chunks, ranks], the count of each rank's contribution in each slot at the end.
        digests: [ranks, chunks], the sums in their order.
        written: after each write: (rank, its round, sender, chunk) -> the counts.
        unset: reads of empty slots: rank, round, peer, chunk.
        waiting: the ranks that did not reach their end.
        left: their remaining rounds, including the current one.
    """

    counts: Ints
    digests: Any
    meetings: tuple[Meeting, ...]
    written: dict[Write, dict[int, int]]
    unset: tuple[tuple[int, int, int, int], ...]
    waiting: dict[int, Waiting]
    left: dict[int, tuple[LocalRound, ...]]


class _Open(NamedTuple):
    """A posted end: its round, and for a send the contents of the slots."""

    post: Post
    round: int
    counts: Any = None
    digests: Any = None


def rounds_of(projection: Projection, rank: int) -> tuple[LocalRound, ...]:
    """The rounds of one rank in the order of execution."""
    sends = _posts(projection.sends, rank)
    receives = _posts(projection.receives, rank)
    return tuple(
        LocalRound(number, tuple(sends.get(number, ())), tuple(receives.get(number, ())))
        for number in sorted({*sends, *receives})
    )


def _posts(posts: Posts, rank: int) -> dict[int, list[Post]]:
    mine = posts.take(posts.rank == rank)
    posts_of: dict[int, list[Post]] = {}
    numbers: dict[int, int] = {}
    for number, peer, chunk, size, reduce in zip(
        mine.round.tolist(), mine.peer.tolist(), mine.chunk.tolist(), mine.size.tolist(),
        mine.reduce.tolist(), strict=True,
    ):  # fmt: skip
        place = numbers[peer] = numbers.get(peer, -1) + 1
        posts_of.setdefault(number, []).append(Post(peer, chunk, size, place, reduce))
    return posts_of


class _Machine:
    def __init__(self, projection: Projection, without: Write | None, last_first: bool) -> None:
        n, k = projection.ranks, projection.chunks
        self.projection, self.without, self.last_first = projection, without, last_first
        starts, _ = postcondition(projection.kind, n, k, projection.root)
        self.counts = np.zeros((n, k, n), np.int64)
        rank, chunk = np.nonzero(starts)
        self.counts[rank, chunk, rank] = 1
        leaves = ((rank * k + chunk + 1).astype(np.uint64)) * _MIX
        self.digests = np.zeros((n, k), np.uint64)
        self.digests[rank, chunk] = leaves ^ (leaves >> np.uint64(29))
        self.rounds = [rounds_of(projection, number) for number in range(n)]
        self.at = [0] * n
        self.missing = [0] * n  # ends of the open round that have not met
        self.sends: dict[tuple[int, int], deque[_Open]] = {}
        self.receives: dict[tuple[int, int], deque[_Open]] = {}
        self.meetings: list[Meeting] = []
        self.written: dict[Write, dict[int, int]] = {}
        self.unset: list[tuple[int, int, int, int]] = []

    def run(self) -> Execution:
        ready = deque(range(self.projection.ranks))
        for rank in range(self.projection.ranks):
            self._open(rank)
        while ready:
            rank = ready.popleft()
            while self.at[rank] < len(self.rounds[rank]):
                ready.extend(self._meet(rank))
                if self.missing[rank]:
                    break
                self.at[rank] += 1
                self._open(rank)
        return Execution(
            self.counts, self.digests, tuple(self.meetings), self.written, tuple(self.unset), self._waiting(),
            {rank: self.rounds[rank][at:] for rank, at in enumerate(self.at) if at < len(self.rounds[rank])},
        )  # fmt: skip

    def _open(self, rank: int) -> None:
        """Post all ends of the rank's next round; sends read the current contents of its slots."""
        if self.at[rank] == len(self.rounds[rank]):
            return
        now = self.rounds[rank][self.at[rank]]
        self.missing[rank] = len(now.sends) + len(now.receives)
        for post in now.sends:
            part = slice(post.chunk, post.chunk + post.size)
            counts = self.counts[rank, part].copy()
            for empty in np.flatnonzero(~counts.any(axis=1)).tolist():
                self.unset.append((rank, now.round, post.peer, post.chunk + empty))
            opened = _Open(post, now.round, counts, self.digests[rank, part].copy())
            self.sends.setdefault((rank, post.peer), deque()).append(opened)
        for post in now.receives:
            self.receives.setdefault((post.peer, rank), deque()).append(_Open(post, now.round))

    def _meet(self, rank: int) -> list[int]:
        """Let all ends meet that can; gives back the peers."""
        now = self.rounds[rank][self.at[rank]]
        pairs = [(rank, post.peer) for post in now.sends] + [(post.peer, rank) for post in now.receives]
        met: list[int] = []
        for pair in reversed(pairs) if self.last_first else pairs:
            sends, receives = self.sends.get(pair, ()), self.receives.get(pair, ())
            while sends and receives:
                self._deliver(*pair, sends.popleft(), receives.popleft())
                met.append(pair[0] if pair[1] == rank else pair[1])
        return met

    def _deliver(self, src: int, dst: int, send: _Open, receive: _Open) -> None:
        self.missing[src] -= 1
        self.missing[dst] -= 1
        sent, expected = (send.post.chunk, send.post.size), (receive.post.chunk, receive.post.size)
        self.meetings.append(Meeting(src, dst, send.round, receive.round, sent, expected))
        for index in range(min(sent[1], expected[1])):
            write = (dst, receive.round, src, expected[0] + index)
            if write != self.without:
                self._write(write, send.counts[index], send.digests[index], receive.post.reduce)

    def _write(self, write: Write, counts: Any, digest: Any, reduce: bool) -> None:
        rank, time, src, chunk = write
        before = self.counts[rank, chunk]
        if not reduce:
            self.counts[rank, chunk], self.digests[rank, chunk] = counts, digest
        else:
            if not before.any():
                self.unset.append((rank, time, src, chunk))
            self.counts[rank, chunk] = np.minimum(before + counts, _MOST)
            self.digests[rank, chunk] = _added(self.digests[rank, chunk], digest)
        self.written[write] = _counted(self.counts[rank, chunk])

    def _waiting(self) -> dict[int, Waiting]:
        waits: dict[int, Waiting] = {}
        for rank, at in enumerate(self.at):
            if at == len(self.rounds[rank]):
                continue
            now = self.rounds[rank][at].round
            to = [
                (dst, True, len(queue)) for (src, dst), queue in self.sends.items() if src == rank and queue
            ]
            of = [
                (src, False, len(queue))
                for (src, dst), queue in self.receives.items()
                if dst == rank and queue
            ]
            waits[rank] = Waiting(now, (*to, *of))
        return waits


def _added(first: Any, second: Any) -> Any:
    """Commutative, not associative: a square mixes the sum before the next is added (modulo 2**64)."""
    with np.errstate(over="ignore"):
        total = first + second
        return (total ^ (total >> np.uint64(31))) * _MIX


def _counted(counts: Any) -> dict[int, int]:
    return {rank: int(counts[rank]) for rank in np.flatnonzero(counts).tolist()}


def execute(projection: Projection, *, without: Write | None = None, last_first: bool = False) -> Execution:
    """Run all ranks. `without` omits the writes of one chunk of one message; `last_first` matches the ends of
    a round in the opposite order, if several are possible."""
    return _Machine(projection, without, last_first).run()


def correct(projection: Projection) -> bool:
    """Whether an execution, independent of the prover, gives exactly the postcondition of the collective.

    All ranks reach their end, and every slot that matters holds every contribution once, with equal sums on
    all.
    """
    done = execute(projection)
    if done.waiting or done.unset or any(meeting.sent != meeting.wanted for meeting in done.meetings):
        return False
    return _kept(projection, done) and _same(done, execute(projection, last_first=True), projection)


def _promised(projection: Projection) -> tuple[Any, Any]:
    starts, ends = postcondition(projection.kind, projection.ranks, projection.chunks, projection.root)
    if projection.kind == "swap":
        return np.eye(projection.ranks, dtype=np.int64)[sources(projection.head)], ends
    return starts.T.astype(np.int64), ends  # [(ranks,) chunks, ranks] counts wanted; [ranks, chunks] where


def _kept(projection: Projection, done: Execution) -> bool:
    promised, ends = _promised(projection)
    if not np.array_equal(done.counts[ends], np.broadcast_to(promised, done.counts.shape)[ends]):
        return False
    if projection.kind == "swap":
        return True  # nothing is the same on two ranks
    digests = np.where(ends, done.digests, 0)
    return bool((~ends | (digests == digests.max(axis=0))).all())


def _same(first: Execution, second: Execution, projection: Projection) -> bool:
    """Whether two executions have the same results, bit by bit."""
    _, ends = _promised(projection)
    return (
        not second.waiting
        and np.array_equal(first.counts[ends], second.counts[ends])
        and np.array_equal(first.digests[ends], second.digests[ends])
    )


def replay(projection: Projection, claim: Counterexample) -> bool:
    """Whether the situation described by `claim` really occurs when the ranks of `projection` run."""
    return _SHOWN[claim.failure](projection, claim)


def _range(projection: Projection, claim: Counterexample) -> bool:
    n, k, ends = projection.ranks, projection.chunks, (projection.sends, projection.receives)
    if not claim.ranks:
        return n < 1 or k < 1 or not 0 <= projection.root < n or bool(k % n)
    return any(
        not (0 <= peer < n and peer != rank and 0 <= chunk < chunk + count <= k)
        for posts in ends
        for rank, peer, chunk, count in zip(posts.rank, posts.peer, posts.chunk, posts.size, strict=True)
        if rank == claim.ranks[0] and chunk == claim.chunk
    )


def _mismatch(projection: Projection, claim: Counterexample) -> bool:
    return any(
        (meeting.src, meeting.dst) == claim.ranks
        and (meeting.sent_in, meeting.received_in) == claim.rounds
        and meeting.sent != meeting.wanted
        and meeting.wanted[0] == claim.chunk
        for meeting in execute(projection).meetings
    )


def _hang(projection: Projection, claim: Counterexample) -> bool:
    """The rank is left waiting for the peer, which has no fitting end left in all its rounds to come."""
    done = execute(projection)
    rank, peer = claim.ranks
    waiting = done.waiting.get(rank)
    if waiting is None or waiting.round != claim.rounds[0]:
        return False
    for other, takes, open_ends in waiting.peers:
        later = [
            post
            for each in done.left.get(peer, ())[1:]
            for post in (each.receives if takes else each.sends)
            if post.peer == rank
        ]
        if other == peer and len(later) < open_ends:
            return True
    return False


def _deadlock(projection: Projection, claim: Counterexample) -> bool:
    done = execute(projection)
    for rank, time, following in zip(
        claim.ranks, claim.rounds, (*claim.ranks[1:], claim.ranks[0]), strict=True
    ):
        waiting = done.waiting.get(rank)
        if waiting is None or waiting.round != time or following not in {peer for peer, *_ in waiting.peers}:
            return False
    return True


def _race(projection: Projection, claim: Counterexample) -> bool:
    """Two messages are received into the slot in one round: both are open at once."""
    rank, *peers = claim.ranks
    senders = [peer for number, time, peer, chunk in _received(projection, rank) if (number, time, chunk) == (
        rank, claim.rounds[0], claim.chunk
    )]  # fmt: skip
    return sorted(senders) == sorted(peers) or (len(senders) > 1 and set(peers) <= set(senders))


def _received(projection: Projection, rank: int) -> list[Write]:
    return [
        (rank, each.received_in, each.src, chunk)
        for each in execute(projection).meetings
        if each.dst == rank
        for chunk in range(each.wanted[0], sum(each.wanted))
    ]


def _unset(projection: Projection, claim: Counterexample) -> bool:
    return (claim.ranks[0], claim.rounds[0], claim.ranks[1], claim.chunk) in execute(projection).unset


def _double(projection: Projection, claim: Counterexample) -> bool:
    written = execute(projection).written
    counts = written.get((claim.ranks[0], claim.rounds[0], claim.ranks[1], claim.chunk or 0), {})
    return any(count > 1 for count in counts.values()) and terms(counts) == claim.found


def _wrong(projection: Projection, claim: Counterexample) -> bool:
    counts = _counted(execute(projection).counts[claim.ranks[0], claim.chunk or 0])
    return terms(counts) == claim.found != claim.expected


def _order(projection: Projection, claim: Counterexample) -> bool:
    done = execute(projection)
    first, second = (done.digests[rank, claim.chunk or 0] for rank in claim.ranks)
    counts = [done.counts[rank, claim.chunk or 0] for rank in claim.ranks]
    return bool(first != second) and np.array_equal(*counts)


def _useless(projection: Projection, claim: Counterexample) -> bool:
    """Without it the results are the same."""
    write = (claim.ranks[0], claim.rounds[0], claim.ranks[1], claim.chunk or 0)
    done = execute(projection)
    return write in done.written and _same(done, execute(projection, without=write), projection)


_SHOWN: dict[str, Callable[[Projection, Counterexample], bool]] = {
    "range": _range,
    "mismatch": _mismatch,
    "hang": _hang,
    "deadlock": _deadlock,
    "race": _race,
    "unset": _unset,
    "double": _double,
    "wrong": _wrong,
    "order": _order,
    "redundant": _useless,
}
