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
        from commplan.cli.command import run

        return run(argv)
    except KeyboardInterrupt:
        import sys

        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stderr.write("interrupted\n")
        return INTERRUPTED
