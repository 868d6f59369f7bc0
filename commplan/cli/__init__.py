"""The command `commplan`. `verbs` has a file for each, which loads what it needs when it runs."""
# PYTHON_ARGCOMPLETE_OK: shells with argcomplete's global completion may ask it, too.

from collections.abc import Sequence

INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit code.

    Ctrl-C ends it without a traceback, also while its own parts are still being loaded.
    """
    try:
        from commplan.cli.command import run

        return run(argv)
    except KeyboardInterrupt:
        import sys

        if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stderr.write("interrupted\n")
        return INTERRUPTED
