# SPDX-License-Identifier: Apache-2.0
"""The prompts of `generate`: arguments, standard input, or a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_path, parse_json, shorten, wrong_value
from paceline.commands.text_files import MAX_PROMPT_BYTES, read_text_file
from paceline.prompts import Prompt, check_prompt_text, encode_chats

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.loader import LoadedModel
    from paceline.tokenizer import Tokenizer

# A prompt, token ids, or with --chat the messages of a conversation.
Input = str | list[int] | list[dict[str, Any]]

_KEYS: Final = ("prompt", "prompt_token_ids", "messages")


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
        _from_line(f"{path}, line {number}", line, is_jsonl=is_jsonl, is_chat=args.chat)
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
            return read_text_file(Path(path), MAX_PROMPT_BYTES)
        if sys.stdin is None:
            raise ValueError("standard input is closed; allowed: text in UTF-8")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}") from None


def _from_line(name: str, line: str, *, is_jsonl: bool, is_chat: bool) -> Input:
    if not is_jsonl:
        line = line.removesuffix("\r")
        check_prompt_text(name, line)
        return line
    value = parse_json(name, line)
    if isinstance(value, dict) and len(keys := [key for key in _KEYS if key in value]) == 1:
        (key,) = keys
        value = value[key]
        if key == "messages":
            return _messages(name, value, is_chat=is_chat)
        if key == "prompt_token_ids":
            return _token_ids(name, value, is_chat=is_chat)
    if not isinstance(value, str):
        raise ValueError(
            f"{name} is {shorten(line)}; allowed: a string, or an object with one of the keys "
            "prompt (text), prompt_token_ids (integers) and messages (with --chat)"
        )
    check_prompt_text(name, value)
    return value


def _messages(name: str, value: Any, *, is_chat: bool) -> list[dict[str, Any]]:
    if not is_chat:
        raise ValueError(f"{name} has messages; allowed: with --chat")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise wrong_value(f"{name}: messages", value, "a list of objects")
    return value


def _token_ids(name: str, value: Any, *, is_chat: bool) -> list[int]:
    if is_chat:
        raise ValueError(f"{name} has prompt_token_ids; allowed: without --chat")
    is_list = isinstance(value, list)
    if not is_list or not all(type(token) is int for token in value):
        raise wrong_value(f"{name}: prompt_token_ids", json.dumps(value), "a list of integers")
    token_ids: list[int] = value
    return token_ids


def chat_prompt(llm: LLM, messages: list[dict[str, Any]]) -> Prompt:
    """Makes a prompt of a conversation with the chat template of the LLM.

    Raises:
        ValueError: There is no template, it refuses the messages, or the prompt is too long.
    """
    return render_chat(llm.get_tokenizer(), llm.target, llm.max_model_len, messages)


def render_chat(
    tokenizer: Tokenizer, target: LoadedModel, max_model_len: int, messages: list[dict[str, Any]]
) -> Prompt:
    """Makes a prompt of a conversation with a target's chat template.

    Args:
        tokenizer: The target's.
        target: The target.
        max_model_len: Maximum tokens of a sequence.
        messages: The conversation.

    Raises:
        ValueError: As for `chat_prompt`.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    (prompt,) = encode_chats([text], target, max_model_len)
    return prompt


def as_conversation(prompt: Input, system: str | None) -> list[dict[str, Any]]:
    """Makes the messages of a conversation.

    Args:
        prompt: What the user says, or the messages.
        system: A system message to begin with; None = none.
    """
    if isinstance(prompt, str):
        messages: list[Any] = [{"role": "user", "content": prompt}]
    else:
        messages = list(prompt)
    return messages if system is None else [{"role": "system", "content": system}, *messages]
