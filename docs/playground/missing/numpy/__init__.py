"""The playground's stub for NumPy, which has no build for browsers in the bundle.

The checker, the passes and the explanation import modules that use NumPy, without calling it. A call raises
`NeedsNumPyError` with the name.
"""

from __future__ import annotations

from typing import Any


class NeedsNumPyError(RuntimeError):
    """Something of NumPy was called in the browser."""


class Missing:
    """Something of NumPy, by its name. May be named in annotations and made at import, but not used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __getitem__(self, index: Any) -> Missing:
        return self

    def __or__(self, other: Any) -> Missing:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __call__(self, *args: Any, **options: Any) -> Missing:
        if loading:
            return self
        raise NeedsNumPyError(f"numpy.{self.name} is called, and there is no NumPy in the browser")


loading = True  # until all modules have been imported


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)
