# SPDX-License-Identifier: Apache-2.0
"""The command-line options that all training programs share: the corpus, the device, the plan."""

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
    """Returns a parser with the corpus, the device, and an option for each field of the plan."""
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
    """Adds the option for the time limit of a training."""
    parser.add_argument(
        "--minutes",
        type=float,
        help="train for this long, whatever the numbers of rounds and steps",
    )


def plan_from(arguments: argparse.Namespace, plan: type[PlanT]) -> PlanT:
    """Returns the plan with the values of the options."""
    return plan(**{f.name: getattr(arguments, f.name) for f in fields(plan)})  # type: ignore[arg-type]


def corpus_from(arguments: argparse.Namespace) -> Corpus:
    """Loads the corpus; exits with a message if it is not the pinned one."""
    try:
        return load_corpus(arguments.stdlib)
    except CorpusError as error:
        sys.exit(str(error))
