"""A slice of the campaign of mutants: every one is refused, with a counter-example that really happens."""

from __future__ import annotations

import random

import pytest
from support.matching import prove as prove_projection
from support.mutation import MUTATIONS, Draft, mutate, same_as_project, some_program
from support.program_replay import correct, replay

from bench.mutants import __main__ as mutants
from commplan.collectives.registry import program
from commplan.verify.programs.counterexample import CODES
from commplan.verify.programs.proof import prove

BLOCK = 20


@pytest.mark.parametrize("first", range(0, 160, BLOCK))
def test_mutants_are_refused_and_their_counterexamples_replay(first: int) -> None:
    judged = [mutants.one(seed, 16) for seed in range(first, first + BLOCK)]
    bad = [text for _, outcome, _, text in judged if outcome in (mutants.ESCAPED, mutants.UNREPLAYED)]
    assert not bad
    assert sum(outcome == mutants.REJECTED for _, outcome, _, _ in judged) > BLOCK // 2


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_kind_of_mistake_is_made_and_found(kind: str) -> None:
    rng, count = random.Random(kind), 0
    while not count:
        mutant = mutate(rng, some_program(rng, 8))
        count = mutant.kind == kind and bool(prove_projection(mutant.projection))


def test_drafts_that_nobody_changed_are_the_programs() -> None:
    rng = random.Random(5)
    for _ in range(20):
        program = some_program(rng, 12)
        assert same_as_project(program)
        assert prove_projection(Draft(program).projection()) == ()
        assert correct(Draft(program).projection())


def test_what_is_still_a_program_is_refused_for_the_same_reason() -> None:
    rng, failures = random.Random(7), set[str]()
    while len(failures) < 4:
        mutant = mutate(rng, some_program(rng, 8))
        if mutant.program is not None:
            (by_program, by_projection) = (prove(mutant.program), prove_projection(mutant.projection))
            assert [counterexample.failure for counterexample in by_program] == [
                counterexample.failure for counterexample in by_projection
            ]
            assert all(replay(mutant.projection, counterexample) for counterexample in by_program)
            failures |= {counterexample.failure for counterexample in by_program}


def test_counterexamples_of_one_program_do_not_replay_on_another() -> None:
    """The replay is no rubber stamp: on a sound program nothing that is claimed happens."""
    rng, failures = random.Random(11), set[str]()
    sound = Draft(program("ring", "all_reduce", 5)).projection()
    for _ in range(150):
        mutant = mutate(rng, program("ring", "all_reduce", 5))
        for claim in prove_projection(mutant.projection):
            assert replay(mutant.projection, claim)
            assert not replay(sound, claim), claim
            failures.add(claim.failure)
    assert {"mismatch", "hang", "wrong", "double"} <= failures <= set(CODES)


def test_the_campaign_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--count", "30", "--seed", "500", "--most", "8"]) == 0
    output = capsys.readouterr().out
    assert "30 of 30 rejected with a counter-example that replays" in output
    assert mutants.main(["--valid", "--most", "5"]) == 0
    assert "valid programs proved, 1 to 5 ranks" in capsys.readouterr().out


def test_an_escaped_mutant_fails_the_campaign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prove", "prove_projection"):
        monkeypatch.setattr(mutants, name, lambda _: ())  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    assert mutants.main(["--count", "5", "--seed", "0", "--most", "6"]) == 1
    assert "escaped: seed" in capsys.readouterr().out
