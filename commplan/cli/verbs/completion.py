"""`commplan completion`: print a shell script that completes the command with argcomplete."""

from __future__ import annotations

from argparse import Namespace

from argcomplete.shell_integration import shellcode

from commplan.cli.console import Console


def run(args: Namespace, console: Console) -> int:
    """Print the script for `args.shell`."""
    console.put(shellcode(["commplan"], shell=args.shell) + "\n")  # pyright: ignore[reportUnknownMemberType]
    return 0
