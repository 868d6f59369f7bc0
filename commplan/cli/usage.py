"""Checks of argument combinations that argparse cannot express."""

from __future__ import annotations

import argparse


def check_usage(root: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with status 2 for invalid combinations of arguments.

    For `trace`, this also sets `args.summarize`, and removes the word `summarize` from `args.records`.
    """
    if args.verb == "diff" and len(args.topology) > 2:
        root.error("diff: two machines at most: --topology A.toml --topology B.toml")
    if args.verb == "diff" and args.b is None and len(args.topology) < 2:
        root.error("diff: give a second file, or a second --topology")
    if args.verb == "simulate" and args.trace and len(args.topology) + len(args.scale) > 1:
        root.error("simulate: --trace is of one machine: give one --topology and no --scale")
    if args.verb == "calibrate" and args.step and args.file is None:
        root.error("calibrate: --step is a step of a plan: give FILE, the plan")
    if args.verb in ("explain", "simulate", "report"):
        _check_step_flags(root, args)
    if args.verb == "trace":
        args.summarize = args.records[:1] == ["summarize"]
        if args.summarize:
            args.records = args.records[1:]
        elif args.output is None:
            root.error("trace: give -o OUT.json, or `trace summarize REC...`")
    if args.verb == "feeds" and args.watch and args.format != "human":
        root.error(f"feeds: --format {args.format} is one document, and --watch would write many")
    if args.verb == "check":
        _check_flags_of_check(root, args)
    if args.verb != "verify":
        return
    algorithm_flags = (args.algorithm, args.collective, args.ranks)
    if args.file is None and None in algorithm_flags:
        root.error("verify: give a plan or a schedule, or --algorithm, --collective and --ranks")
    if args.file is not None and (*algorithm_flags, args.root) != (None,) * 4:
        root.error("verify: give a file or --algorithm, not both")


def _check_flags_of_check(root: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the combinations of `check`."""
    if args.watch and "-" in args.files:
        root.error("check: --watch needs files, and - is standard input")
    if args.watch and args.format not in ("human", "concise"):
        root.error(f"check: --format {args.format} is one document, and --watch would write many")
    if args.diff and args.format not in ("human", "concise"):
        root.error(f"check: --diff prints text, and --format {args.format} has the repairs as `fix`")
    if args.fix and "-" in args.files and args.format not in ("human", "json"):
        root.error(f"check: --fix writes the plan to stdout, and so does --format {args.format}")


def _check_step_flags(root: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check that --step has a --target."""
    if args.step and not args.target:
        root.error(
            f"{args.verb}: --step is estimated for --target NAME:HOSTSxDEVICES; or measure it with"
            " `commplan calibrate --step` and give --step-profile"
        )
