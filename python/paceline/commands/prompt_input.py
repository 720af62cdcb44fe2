# SPDX-License-Identifier: Apache-2.0
"""The prompts of `generate`: arguments, standard input, or a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from paceline.checks import check_path, parse_json, shorten
from paceline.prompts import check_prompt_text

# A prompt or token ids.
Input = str | list[int]

_KEYS: Final = ("prompt", "prompt_token_ids")


def read_prompts(args: argparse.Namespace) -> list[Input]:
    """Reads the prompts that the command line names, and checks what needs no model.

    Returns:
        At least one prompt.

    Raises:
        ValueError: There is none, or one is empty, not valid Unicode or not valid JSON.
        OSError: The file cannot be read.
    """
    if args.prompts_file is None:
        if not args.prompt:
            raise ValueError("there is no prompt; give one or several, - or --prompts-file FILE")
        prompts: list[Input] = []
        for index, prompt in enumerate(args.prompt):
            is_input = prompt == "-"
            text = _read("standard input", "-") if is_input else prompt
            name = "standard input" if is_input else _name(index, len(args.prompt))
            check_prompt_text(name, text)
            prompts.append(text)
        return prompts
    if args.prompt:
        raise ValueError(
            f"--prompts-file is {shorten(args.prompts_file)} and there is a PROMPT too; "
            "allowed: one of the two"
        )
    path = check_path("--prompts-file", args.prompts_file, "a file with prompts")
    text = _read(path, path)
    is_jsonl = path.endswith(".jsonl")
    listed = [
        _from_line(f"{path}, line {number}", line, is_jsonl=is_jsonl)
        for number, line in enumerate(text.splitlines() if is_jsonl else text.split("\n"), start=1)
        if line.strip()
    ]
    if not listed:
        raise ValueError(f"--prompts-file is {shorten(path, 200)}, which has no prompt")
    return listed


def _name(index: int, num_prompts: int) -> str:
    return "prompt" if num_prompts == 1 else f"prompt {index}"


def _read(name: str, path: str) -> str:
    """Reads a file, or standard input for "-", as UTF-8."""
    try:
        if path != "-":
            return Path(path).read_text("utf-8")
        if sys.stdin is None:
            raise ValueError("standard input is closed; allowed: text in UTF-8")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}") from None


def _from_line(name: str, line: str, *, is_jsonl: bool) -> Input:
    if not is_jsonl:
        line = line.removesuffix("\r")
        check_prompt_text(name, line)
        return line
    value = parse_json(name, line)
    if isinstance(value, dict) and len(keys := [key for key in _KEYS if key in value]) == 1:
        (key,) = keys
        value = value[key]
        if key == "prompt_token_ids":
            return _token_ids(name, value)
    if not isinstance(value, str):
        raise ValueError(
            f"{name} is {shorten(line)}; allowed: a string, or an object with one of the keys "
            "prompt (text) and prompt_token_ids (integers)"
        )
    check_prompt_text(name, value)
    return value


def _token_ids(name: str, value: Any) -> list[int]:
    is_list = isinstance(value, list)
    if not is_list or not all(type(token) is int for token in value):
        raise ValueError(
            f"{name}: prompt_token_ids is {shorten(json.dumps(value))}; allowed: a list of integers"
        )
    token_ids: list[int] = value
    return token_ids
