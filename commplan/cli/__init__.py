"""The command `commplan`. Each verb is a module of `verbs`, which is imported only when it runs."""
# PYTHON_ARGCOMPLETE_OK: enables argcomplete's global completion.

from collections.abc import Sequence

INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    SIGINT ends it without a traceback, also during imports.

    Args:
        argv: the arguments, by default those of the process.
    """
    try:
        _import_msgspec()
        from commplan.cli.command import run

        return run(argv)
    except KeyboardInterrupt:
        import sys

        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _import_msgspec() -> None:
    """Import msgspec without `typing_extensions`, which has nothing for it that Python 3.11 lacks.

    `typing_extensions` imports `inspect` and `tokenize`, an eighth of the time of `commplan check`.
    """
    import sys

    name = "typing_extensions"
    if name not in sys.modules:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]  imports of it fail
        try:
            import msgspec as msgspec
        finally:
            del sys.modules[name]
