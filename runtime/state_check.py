"""Checks of the state that a caller passes to a phase or returns from a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import jax
import numpy as np

from commplan.diagnostics import Span, type_of
from commplan.runtime.context import CALLS, Context

_BEGIN = "start with state = run.init(), and pass on the state that each phase returns"


def check_state(
    context: Context, state: Any, subject: str, needed: Collection[str] = (), span: Span | None = None
) -> dict[str, Any]:
    """Check `state` and return it as a dict.

    Args:
        context: The context of the run.
        state: The state that the user passed or returned. Its values are not checked.
        subject: The beginning of the message, such as "phase `step` was given".
        needed: The names that the state must have.
        span: The place of the phase in the plan; None for a step of the user.

    Raises:
        CommplanError: CP0812 for a state that is not a mapping, lacks names, or has unknown names.
    """
    names = [*context.states, *([CALLS] if context.counted else [])]
    if not isinstance(state, Mapping):
        message = f"{subject} {type_of(state)}: expected the plan's state as the first argument"
        context.fail("CP0812", message, _BEGIN, span=span)
    entries = dict(cast("Mapping[str, Any]", state))
    missing = [name for name in needed if name not in entries]
    unknown = [name for name in entries if name not in names]
    if missing or unknown:
        wrong = (
            f"lacks {list_names(missing)}"
            if missing
            else f"has {list_names(unknown)}, not a state of the plan"
        )
        states = f"the plan's states: {list_names(names) or 'none, so the state is {}'}"
        uses = f"it uses {list_names([*needed])}" if missing else states
        context.fail("CP0812", f"{subject} a state that {wrong}", uses, _BEGIN, span=span)
    return entries


def check_count(context: Context, counts: Any, name: str, subject: str, span: Span | None = None) -> None:
    """Check that `counts`, the entry `#calls` of a state, has the number of calls of phase `name`.

    Args:
        context: The context of the run.
        counts: The entry.
        name: The name of the phase.
        subject: The beginning of the message, as in `check_state`.
        span: The place of the phase in the plan.

    Raises:
        CommplanError: CP0812 if the count is missing or not an integer.
    """
    expected = f"`{CALLS}` has the number of calls of `{name}` so far, an integer"
    if not isinstance(counts, Mapping):
        message = f"{subject} a state whose `{CALLS}` is {type_of(counts)}"
        context.fail("CP0812", message, expected, _BEGIN, span=span)
    entries = cast("Mapping[str, Any]", counts)
    if name not in entries:
        phases = f"it has {list_names(entries) or 'no counts'}"
        message = f"{subject} a state whose `{CALLS}` has no count of `{name}`"
        context.fail("CP0812", message, phases, expected, _BEGIN, span=span)
    count = entries[name]
    dtype, shape = getattr(count, "dtype", type(count)), getattr(count, "shape", ())
    if shape or not jax.numpy.issubdtype(dtype, np.integer):
        count_type = f"{dtype}{list(shape)}" if hasattr(count, "dtype") else type_of(count)
        message = f"{subject} a state whose count of calls of `{name}` is {count_type}"
        context.fail("CP0812", message, expected, _BEGIN, span=span)


def list_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
