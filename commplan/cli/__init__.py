"""The command `commplan`. Verbs live in a file each and load what they need when they run."""

from commplan.cli.main import main as main
