"""Docstrings as the reference shows them."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="the tools of the manual are not installed: make docs-test")

from docs.tools.docstrings import rewritten

TEXT = """Batches of `member`.

member: whose; epochs: how many,
all of them without. start: where.
Raises CommplanError (CP0901).

>>> f(1); epochs: int = 2  # not CP0901
>>> g()
3
"""

SHOWN = """Batches of `member`.


- `member`: whose;
- `epochs`: how many,
    all of them without.
- `start`: where.

Raises CommplanError ([CP0901](../errors/CP0901.md)).


```pycon
>>> f(1); epochs: int = 2  # not CP0901
>>> g()
3
```

"""


def test_parameters_are_items_codes_are_links_and_examples_stay_as_they_are() -> None:
    assert rewritten(TEXT, ["member", "epochs", "start"]) == SHOWN


SECTIONS = """Compute.

Args:
    x: first,
        in bytes.
    y: second.

Returns:
    The sum,
    or None.

Raises:
    CommplanError: CP0901 if it fails.
"""

LISTED = """Compute.

**Args**

- `x`: first,
    in bytes.
- `y`: second.

**Returns**

The sum,
or None.

**Raises**

- `CommplanError`: [CP0901](../errors/CP0901.md) if it fails."""


def test_items_of_sections_are_list_items() -> None:
    assert rewritten(SECTIONS, ["x", "y"]) == LISTED
