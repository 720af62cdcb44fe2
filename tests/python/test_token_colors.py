# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a stream come from, and the colours that `generate --color` gives them."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import test_stop_strings as requests
from paceline import LLM, SamplingParams, StreamChunk, cli
from paceline.commands import colors

PROMPT = "x = "
ESCAPE = re.compile(r"\x1b\[\d*m")
ACCEPTED, CORRECTED, BONUS, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[36m", ""


def read_colors(painted: str) -> list[tuple[str, str]]:
    """Each visible character with its colour, as a terminal shows it; a newline has none."""
    color, result = PLAIN, []
    for part in re.split(r"(\x1b\[\d*m)", painted):
        if ESCAPE.fullmatch(part):
            color = PLAIN if part == "\x1b[0m" else part
        else:
            result += [(char, PLAIN if char == "\n" else color) for char in part]
    assert color == PLAIN, "a colour is still on"
    return result


def test_chunks_say_where_tokens_come_from(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=64)))
    output = chunks[-1].output
    assert output is not None and output.metrics.speculative_decoding is not None
    metrics = output.metrics.speculative_decoding
    assert sum(chunk.num_drafted for chunk in chunks) == metrics["num_draft_tokens"]
    assert sum(chunk.num_accepted for chunk in chunks) == metrics["num_accepted_draft_tokens"] > 0
    for chunk in chunks:
        # An iteration emits the accepted drafts and at most one token of the target.
        assert chunk.num_accepted <= chunk.num_drafted
        assert len(chunk.token_ids) - chunk.num_accepted in (0, 1)
        assert len(chunk.text_offsets) == len(chunk.token_ids)
    offsets = [offset for chunk in chunks for offset in chunk.text_offsets]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    text = output.outputs[0].text
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    # A token whose text is whole characters stands at its offset.
    ends = [*offsets[1:], len(text)]
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    whole = [
        (start, piece)
        for token, start, end in zip(tokens, offsets, ends, strict=True)
        if (piece := tokenizer.decode([token])) and "\ufffd" not in piece and end > start
    ]
    assert len(whole) > 20
    assert all(text[start:].lstrip(" ").startswith(piece.lstrip(" ")) for start, piece in whole)


def origin(position: int, num_drafted: int, num_accepted: int) -> str:
    """The colour of the token at a position of an iteration."""
    if position < num_accepted:
        return ACCEPTED
    if num_drafted == 0:
        return PLAIN
    return CORRECTED if num_accepted < num_drafted else BONUS


@settings(deadline=None, max_examples=400)
@given(
    token_ids=st.lists(requests._LETTERS | requests._BYTES, min_size=1, max_size=24),
    stop=st.lists(st.text(alphabet="ab\né中", min_size=1, max_size=4), max_size=2),
    includes_stop=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_each_character_has_the_colour_of_its_token(
    token_ids: list[int], stop: list[str], includes_stop: bool, seed: int
) -> None:
    """Also characters that several tokens share, and text that a stop string holds back."""
    choose = random.Random(seed)
    params = SamplingParams(max_tokens=64, stop=stop, include_stop_str_in_output=includes_stop)
    request = requests.make_request(params)
    painter = colors.TokenColors()
    painted, text, of_tokens = "", "", []
    rest = list(token_ids)
    while rest and request.stop_string is None:
        num_accepted = choose.randint(0, 3)
        event = requests._Event(rest[: num_accepted + 1])
        rest = rest[num_accepted + 1 :]
        event.num_accepted = min(num_accepted, len(event.token_ids))
        event.num_drafted = choose.randint(event.num_accepted, 3)
        event.finish_reason = None if rest else "length"
        num_before = len(request.token_ids)
        new_ids, new_text = request.push(event)  # type: ignore[arg-type]
        text += new_text
        of_tokens += [
            origin(position, event.num_drafted, event.num_accepted)
            for position in range(len(new_ids))
        ]
        chunk = StreamChunk(
            0, new_text, new_ids, False, None, num_drafted=event.num_drafted,
            num_accepted=event.num_accepted, text_offsets=request.text_offsets[num_before:],
        )  # fmt: skip
        painted += painter.paint(chunk)
    *pieces, last = requests.pieces_of(token_ids)
    expected = [
        (char, PLAIN if char == "\n" else color)
        for piece, color in zip(pieces, of_tokens, strict=False)
        for char in piece
    ]
    if not rest:
        expected += [(char, of_tokens[-1]) for char in last]
    assert read_colors(painted) == expected[: len(text)]


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def generate(target_dir: Path, speculative_config: dict[str, Any]) -> list[str]:
    config = json.dumps(speculative_config)
    return ["generate", PROMPT, "--model", str(target_dir), "--speculative-config", config]


def test_colours_on_a_pipe(
    generate: list[str], llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    chunks = list(llm.stream(PROMPT, params))
    text = "".join(chunk.text for chunk in chunks)
    assert cli.main([*generate, "--color", "always"]) == 0
    streamed, report = capsys.readouterr().out.split("-" * 50)
    assert ESCAPE.sub("", streamed) == PROMPT + text + "\n"
    shown = {color for char, color in read_colors(streamed) if char.strip()}
    assert shown == {PLAIN, ACCEPTED, CORRECTED} | ({BONUS} if BONUS in streamed else set())
    assert f"{ACCEPTED}drafted and accepted\x1b[0m" in report
    # Outputs that are printed at the end have the same colours.
    assert cli.main([*generate, "--color", "always", "--no-stream"]) == 0
    assert read_colors(capsys.readouterr().out.split("-" * 50)[0]) == read_colors(streamed)
    assert cli.main([*generate, "--color", "always", "--n", "2", "-q"]) == 0
    assert ACCEPTED in capsys.readouterr().out


@pytest.mark.parametrize("choice", [[], ["--color", "auto"], ["--color", "never"]])
def test_a_pipe_has_no_colours_unless_asked(
    choice: list[str], generate: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*generate, *choice, "--max-tokens", "5"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_when_a_terminal_has_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert [colors.wants_color(c) for c in colors.COLOR_CHOICES] == [True, True, False]
    monkeypatch.setenv("NO_COLOR", "1")
    assert [colors.wants_color(c) for c in colors.COLOR_CHOICES] == [False, True, False]
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not colors.wants_color("auto")
