# SPDX-License-Identifier: Apache-2.0
"""What every training here is told on its command line: the corpus, the device, the plan."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from corpus import Corpus, CorpusError, load_corpus

REPOSITORY: Final = Path(__file__).resolve().parents[2]
DEMO: Final = REPOSITORY / "python/paceline/demo"

PlanT = TypeVar("PlanT")


def options_for(description: str | None, plan: type[Any]) -> argparse.ArgumentParser:
    """A command line with the corpus, the device, and an option for each field of the plan."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(argparse.__file__).parent,
        help="standard library of the pinned CPython (default: that of this interpreter)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(plan):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    return parser


def add_minutes(parser: argparse.ArgumentParser) -> None:
    """Adds the limit on the time that a training may take."""
    parser.add_argument(
        "--minutes", type=float, help="take this long, whatever the numbers of rounds and steps"
    )


def plan_from(arguments: argparse.Namespace, plan: type[PlanT]) -> PlanT:
    """The plan that the options give."""
    return plan(**{f.name: getattr(arguments, f.name) for f in fields(plan)})  # type: ignore[arg-type]


def corpus_from(arguments: argparse.Namespace) -> Corpus:
    """The corpus; the program ends with a message where it is not the pinned one."""
    try:
        return load_corpus(arguments.stdlib)
    except CorpusError as error:
        sys.exit(str(error))
