# SPDX-License-Identifier: Apache-2.0
"""Prompts for a server: random ones, ones with common beginnings, and those of files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_int, check_text, shorten, wrong_value
from paceline.commands.text_files import MAX_PROMPT_BYTES, read_text_file

if TYPE_CHECKING:
    import numpy as np

DATASETS: Final = ("random", "prefix_repetition", "sharegpt", "custom")
#: Those that read a file.
FILE_DATASETS: Final = ("sharegpt", "custom")


@dataclass(frozen=True)
class Question:
    """A prompt and how much to generate.

    Attributes:
        prompt: A string or token ids.
        output_len: `max_tokens`.
    """

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """The lengths of made prompts, in tokens (or, as text, in words).

    Attributes:
        prefix_len: Common tokens at the beginning.
        num_prefixes: How many different beginnings there are.
        input_len: Tokens after them.
        output_len: Tokens to generate.
        range_ratio: Lengths vary by up to this share, 0 to less than 1.
        token_ids: The lowest and the highest id of prompts.
    """

    prefix_len: int
    num_prefixes: int
    input_len: int
    output_len: int
    range_ratio: float
    token_ids: tuple[int, int]


def make_questions(
    count: int, lengths: Lengths, rng: np.random.Generator, *, is_text: bool
) -> list[Question]:
    """Makes random prompts.

    Args:
        count: How many.
        lengths: Their lengths.
        rng: Where they come from.
        is_text: Make words instead of token ids, for routes that take no ids.
    """
    low, high = lengths.token_ids
    prefixes = [
        rng.integers(low, high + 1, lengths.prefix_len).tolist()
        for _ in range(lengths.num_prefixes)
    ]
    questions = []
    for index in range(count):
        input_len, output_len = (
            int(rng.integers(max(1, round(n * (1 - ratio))), round(n * (1 + ratio)) + 1))
            for n, ratio in (
                (lengths.input_len, lengths.range_ratio),
                (lengths.output_len, lengths.range_ratio),
            )
        )
        ids = prefixes[index % len(prefixes)] + rng.integers(low, high + 1, input_len).tolist()
        prompt = " ".join(f"w{token}" for token in ids) if is_text else ids
        questions.append(Question(prompt, output_len))
    return questions


def read_questions(
    kind: str, path: Path, count: int, output_len: int | None, rng: np.random.Generator
) -> list[Question]:
    """Reads prompts from a file, in a random order; they repeat if the file has too few.

    Args:
        kind: "sharegpt": a JSON list of conversations, whose first message is the prompt; or
            "custom": a JSON object {"prompt": ..., "output_tokens": ...} in each line.
        path: The file.
        count: How many.
        output_len: Tokens to generate; None = as the lines of "custom" say.
        rng: Chooses the order.

    Raises:
        ValueError: The file is not what it should be.
        OSError: It cannot be read.
    """
    text = read_text_file(path, MAX_PROMPT_BYTES)
    found = (
        _custom(path, text, output_len) if kind == "custom" else _sharegpt(path, text, output_len)
    )
    if not found:
        raise ValueError(f"{path} has no prompt")
    order: list[int] = []
    while len(order) < count:
        order += rng.permutation(len(found)).tolist()
    return [found[i] for i in order[:count]]


def _sharegpt(path: Path, text: str, output_len: int | None) -> list[Question]:
    if output_len is None:
        raise ValueError("--dataset-name sharegpt needs --output-len")
    try:
        conversations = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ValueError(f"{path} has {shorten(conversations)}; allowed: a list of conversations")
    found = []
    for one in conversations:
        turns = one.get("conversations", one.get("conversation")) if isinstance(one, dict) else None
        if not isinstance(turns, list):
            raise ValueError(
                f'{path} has {shorten(one)}; allowed: {{"conversations": [{{"value": ...}}, ...]}}'
            )
        # As in vLLM: a conversation has a question and an answer.
        if len(turns) >= 2 and isinstance(turns[0], dict) and turns[0].get("value"):
            prompt = check_text(f"{path}: value", turns[0]["value"])
            found.append(Question(prompt, output_len))
    return found


def _custom(path: Path, text: str, output_len: int | None) -> list[Question]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name = f"line {number} of {path}"
        try:
            given: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name} is not valid JSON: {error}") from None
        if not isinstance(given, dict) or "prompt" not in given:
            raise wrong_value(name, given, '{"prompt": ...}')
        length = output_len if output_len is not None else given.get("output_tokens")
        if length is None:
            raise ValueError(f"{name} has no 'output_tokens'; allowed without it: --output-len")
        found.append(
            Question(
                check_text(f"{name}: prompt", given["prompt"]),
                check_int(f"{name}: output_tokens", length, 1),
            )
        )
    return found
