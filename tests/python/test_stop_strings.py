# SPDX-License-Identifier: Apache-2.0
"""Stop strings: the output depends only on the tokens, not on how events divide them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline import SamplingParams, _core
from paceline.detokenizer import IncrementalDetokenizer
from paceline.dispatcher import Dispatcher
from paceline.stop_strings import StopStringFilter
from paceline.stream import Request, RequestStream

# ---- the specification -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expected:
    """The required output of a request."""

    text: str
    num_tokens: int
    stop_string: str | None


def specified(
    pieces: Sequence[str], stop: Sequence[str], *, min_tokens: int = 0, includes_stop: bool = False
) -> Expected:
    """The specification, computed from the whole text at once.

    Args:
        pieces: The text that each token adds; the last entry is the text that the end adds.
        stop: The stop strings.
        min_tokens: Number of tokens; a stop string must end in the text of a later token.
        includes_stop: Whether the text ends after the stop string.
    """
    num_tokens = len(pieces) - 1
    text = "".join(pieces)
    first_end = len("".join(pieces[:min_tokens])) if num_tokens > min_tokens else len(text)
    found = [
        (start + len(string), -len(string), string)
        for string in stop
        for start in range(len(text))
        if text.startswith(string, start) and start + len(string) > first_end
    ]
    if not found:
        return Expected(text, num_tokens, None)
    end, negated_len, string = min(found)
    num_needed = next(n for n in range(len(pieces) + 1) if len("".join(pieces[:n])) >= end)
    cut = end if includes_stop else end + negated_len
    return Expected(text[:cut], min(num_needed, num_tokens), string)


def test_the_specification_agrees_with_examples_by_hand() -> None:
    assert specified(["aaab", ""], ["aab"]) == Expected("a", 1, "aab")
    assert specified(["aaab", ""], ["aab"], includes_stop=True) == Expected("aaab", 1, "aab")
    assert specified([*"xabcy", ""], ["abc", "b"]) == Expected("xa", 3, "b")
    assert specified([*"xabcy", ""], ["c", "abc", "bc"]) == Expected("x", 4, "abc")
    assert specified([*"abab", ""], ["ab"], min_tokens=2) == Expected("ab", 4, "ab")
    assert specified([*"abab", ""], ["ab"], min_tokens=1) == Expected("", 2, "ab")
    assert specified([*"abab", ""], ["ab"], min_tokens=4) == Expected("abab", 4, None)
    assert specified(["", "", "ab"], ["ab"]) == Expected("", 2, "ab")
    assert specified([*"ab", ""], ["ba"]) == Expected("ab", 2, None)


# ---- the filter --------------------------------------------------------------------------------

texts = st.text(alphabet="ab", max_size=24) | st.text(alphabet="abc\n", max_size=24)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, positions: Sequence[int]) -> list[str]:
    """Divides a text into pieces, some of which may be empty."""
    ends = sorted(position % (len(text) + 1) for position in positions)
    return [text[a:b] for a, b in pairwise([0, *ends, len(text)])]


@settings(deadline=None, max_examples=600)
@given(texts, stops, st.lists(st.integers(0, 99), max_size=8), st.integers(0, 4), st.booleans())
@example("aaab", ["aab"], [1, 2, 3], 0, False)
@example("abababac", ["abac", "baba"], [4], 0, False)
@example("aabaaab", ["aab"], [3], 1, False)
def test_the_filter_follows_the_specification(
    text: str, stop: list[str], positions: list[int], min_pieces: int, includes_stop: bool
) -> None:
    pieces = cut(text, positions)
    expected = specified([*pieces, ""], stop, min_tokens=min_pieces, includes_stop=includes_stop)
    stop_filter = StopStringFilter(stop, includes_stop=includes_stop)
    seen = ""
    returned = ""
    for num, piece in enumerate(pieces, start=1):
        seen += piece
        returned += stop_filter.push(piece, may_stop=num > min_pieces)
        assert expected.text.startswith(returned)
        if stop_filter.found is not None:
            assert num == expected.num_tokens
            break
        # The filter holds back the longest end of the text that a stop string begins with.
        held = 0
        if not includes_stop:
            held = max(
                n for n in range(len(seen) + 1)
                if any(len(s) > n and s.startswith(seen[len(seen) - n :]) for s in stop)
            )  # fmt: skip
        assert returned == seen[: len(seen) - held]
    else:
        returned += stop_filter.flush()
    assert (returned, stop_filter.found) == (expected.text, expected.stop_string)


def test_long_stop_strings_do_not_slow_the_filter() -> None:
    stop = ["a" * n + "b" for n in range(240, 256)]
    stop_filter = StopStringFilter(stop, includes_stop=False)
    text = stop_filter.push("a" * 100_000 + "b")
    assert (len(text), stop_filter.found) == (100_000 - 255, stop[-1])


# ---- requests ----------------------------------------------------------------------------------

# Tokens below 256 are single bytes, which divide characters; the others are several bytes.
_MERGED = [b"aa", b"ab", b"aab", b"\n\n", "é".encode(), "x中".encode(), b"b\xe4"]
_TOKENS = [bytes([i]) for i in range(256)] + _MERGED
_SPECIAL = len(_TOKENS)  # has no text
_STOP_TOKEN = _SPECIAL + 1


def decode(token_ids: Sequence[int]) -> str:
    joined = b"".join(_TOKENS[token] for token in token_ids if token < _SPECIAL)
    return joined.decode(errors="replace")


def pieces_of(token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds, and the text that the end adds."""
    detokenizer = IncrementalDetokenizer(decode)
    return [
        *("" if token == _STOP_TOKEN else detokenizer.push(token) for token in token_ids),
        detokenizer.flush(),
    ]


def make_request(params: SamplingParams, index: int = 0) -> Request:
    return Request(
        index,
        None,
        [1],
        params,
        sampling={"stop_token_ids": [_STOP_TOKEN]},
        detokenizer=IncrementalDetokenizer(decode),
    )


class _Event:
    """Has the attributes of `_core.RequestEvent`."""

    logits = None
    sample = 0
    arrival_us, first_token_us, finish_us = 1000, 2000, 3000
    num_cached_tokens = 0

    def __init__(self, token_ids: list[int], finish_reason: str | None = None, id: int = 0) -> None:
        self.id = id
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.error = ""
        self.num_drafted, self.num_accepted = 4, len(token_ids) % 5
        self.drafter = "draft_model"
        self.counters: dict[str, Any] = {}


_LETTERS = st.sampled_from([ord("a"), ord("b"), 10, *range(256, _SPECIAL + 1)])
_BYTES = st.sampled_from([*"é中😀a".encode(), 256 + 6])


@settings(deadline=None, max_examples=600)
@given(
    token_ids=st.lists(_LETTERS | _BYTES, max_size=24),
    stop=st.lists(st.text(alphabet="ab\né中�", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    includes_stop=st.booleans(),
    ends_with_stop_token=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_events_of_any_size_give_the_specified_output(
    token_ids: list[int],
    stop: list[str],
    min_tokens: int,
    includes_stop: bool,
    ends_with_stop_token: bool,
    seed: int,
) -> None:
    if ends_with_stop_token:
        token_ids = [*token_ids, _STOP_TOKEN]
    expected = specified(
        pieces_of(token_ids), stop, min_tokens=min_tokens, includes_stop=includes_stop
    )
    params = SamplingParams(
        max_tokens=64,
        stop=stop,
        min_tokens=min_tokens,
        include_stop_str_in_output=includes_stop,
    )
    cuts = random.Random(seed)
    for longest in (1, 2, 17):
        request = make_request(params)
        rest = list(token_ids)
        shown, shown_ids = "", []
        while True:
            num = cuts.randint(1, longest)
            event = _Event(rest[:num])
            rest = rest[num:]
            if not rest:
                event.finish_reason = "stop" if ends_with_stop_token else "length"
            new_ids, text = request.push(event)  # type: ignore[arg-type]
            shown += text
            shown_ids += new_ids
            assert expected.text.startswith(shown)
            if event.finish_reason is not None:
                break
        request.finish(event)  # type: ignore[arg-type]
        output = request.completion()
        assert (output.text, len(output.token_ids)) == (expected.text, expected.num_tokens)
        assert output.token_ids == shown_ids == token_ids[: expected.num_tokens]
        assert shown == output.text
        assert output.stop_reason == expected.stop_string
        is_stopped = ends_with_stop_token or expected.stop_string is not None
        assert output.finish_reason == ("stop" if is_stopped else "length")


def test_an_incomplete_character_at_the_end_may_be_a_stop_string() -> None:
    request = make_request(SamplingParams(stop="a�"))
    ids = [ord("x"), ord("a"), "é".encode()[0]]
    assert request.push(_Event(ids, "length")) == (ids, "x")  # type: ignore[arg-type]
    assert request.stop_string == "a�"


# ---- a stream ----------------------------------------------------------------------------------


class _ScriptedSession:
    """Delivers scripted events of several requests by turns.

    A cancelled request ends after `lateness` further events.
    """

    make_request = None  # see Dispatcher

    def __init__(self, scripts: list[list[list[int]]], lateness: int = 0) -> None:
        self.lateness = lateness
        self.pending = [[_Event(ids, id=i) for ids in script] for i, script in enumerate(scripts)]
        for events in self.pending:
            events[-1].finish_reason = "length"
        self.num_delivered = [0] * len(scripts)
        self.num_requests = 0
        self.cancelled: list[int] = []
        self.turn = 0

    def open(self) -> _ScriptedSession:
        return self

    def add_requests(self, requests: list[Any]) -> list[int]:
        first = self.num_requests
        self.num_requests += len(requests)
        return list(range(first, self.num_requests))

    def check_usable(self) -> None:
        pass

    def get(self) -> _Event:
        self.turn = next(
            i % len(self.pending)
            for i in range(self.turn + 1, self.turn + 99)
            if self.pending[i % len(self.pending)]
        )
        event = self.pending[self.turn].pop(0)
        self.num_delivered[self.turn] += event.num_drafted > 0
        if event.finish_reason is not None:
            event.counters = _counters(self.num_delivered[self.turn])
        return event

    def cancel(self, id: int, sample: int) -> None:
        assert sample == 0
        self.cancelled.append(id)
        if len(self.pending[id]) > self.lateness:
            end = _Event([], "cancelled", id=id)
            end.num_drafted = 0
            self.pending[id] = [*self.pending[id][: self.lateness], end]

    def close(self) -> None:
        pass


def _counters(num_iterations: int) -> dict[str, Any]:
    return {
        "num_iterations": num_iterations,
        "num_draft_tokens": 4 * num_iterations,
        "num_accepted_tokens": 0,
        "num_discarded_tokens": 0,
        "accepted_per_position": [0] * 4,
        "drafted_per_position": [num_iterations] * 4,
    }


def stream_of(session: _ScriptedSession, params: SamplingParams) -> RequestStream:
    requests = [make_request(params, index) for index in range(len(session.pending))]
    return RequestStream(
        session,  # type: ignore[arg-type]
        requests,
        owner=None,
    )


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("lateness", [0, 1, 3, 9])
def test_a_stop_string_cancels_and_later_tokens_are_dropped(lateness: int) -> None:
    script = [ids("abc"), ids("deS"), ids("TOPxyz"), *[ids("more")] * 9]
    session = _ScriptedSession([script], lateness)
    chunks = list(stream_of(session, SamplingParams(max_tokens=99, stop=["never", "STOP"])))
    assert [chunk.text for chunk in chunks] == ["abc", "de", "", ""]
    assert [chunk.token_ids for chunk in chunks] == [ids("abc"), ids("deS"), ids("TOP"), []]
    assert [chunk.finished for chunk in chunks] == [False, False, False, True]
    assert session.cancelled == [0]
    output = chunks[-1].output
    assert output is not None and output.error is None
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("abcde", ids("abcdeSTOP"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")
    assert output.metrics.num_output_tokens == 9
    speculative = output.metrics.speculative_decoding
    assert speculative is not None
    # The counters include the events whose tokens were dropped.
    assert speculative["num_spec_steps"] == 3 + lateness
    assert sum(speculative["acceptance_histogram"]) == 3 + lateness


def test_an_end_and_a_stop_string_in_one_event() -> None:
    session = _ScriptedSession([[ids("ab"), ids("cSTOPd")]])
    (first, last) = stream_of(session, SamplingParams(stop="STOP"))
    assert (first.text, last.text, last.finished) == ("ab", "c", True)
    assert last.token_ids == ids("cSTOP")
    assert last.output is not None
    assert last.output.outputs[0].stop_reason == "STOP"
    assert session.cancelled == []


def test_the_first_event_counts_only_its_output_tokens() -> None:
    session = _ScriptedSession([[ids("STOPabc"), ids("d")]])
    *_, last = stream_of(session, SamplingParams(stop="ST"))
    assert last.output is not None
    metrics = last.output.metrics
    assert (metrics.num_output_tokens, metrics.tokens_per_second) == (2, None)


def test_a_stop_string_does_not_affect_other_requests() -> None:
    scripts = [[ids("ab"), ids("xy")], [ids("a"), ids("bS"), ids("cd"), ids("e")], [ids("S")] * 3]
    session = _ScriptedSession(scripts, lateness=1)
    outputs = {c.index: c.output for c in stream_of(session, SamplingParams(stop="S")) if c.output}
    assert [outputs[i].outputs[0].text for i in range(3)] == ["abxy", "ab", ""]
    assert [outputs[i].outputs[0].finish_reason for i in range(3)] == ["length", "stop", "stop"]
    assert sorted(session.cancelled) == [1, 2]


def test_a_failure_after_the_stop_string_is_ignored() -> None:
    session = _ScriptedSession([[ids("aS"), ids("b")]], lateness=9)
    session.pending[0][-1].finish_reason = "error"
    *_, last = stream_of(session, SamplingParams(stop="S"))
    assert last.output is not None and last.output.error is None
    assert last.output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(("stop_token_ids", "reason"), [((), None), ((_STOP_TOKEN,), _STOP_TOKEN)])
def test_the_stop_reason_of_a_stop_token(
    stop_token_ids: tuple[int, ...], reason: int | None
) -> None:
    request = make_request(SamplingParams(stop_token_ids=stop_token_ids))
    event: Any = _Event([*ids("ab"), _STOP_TOKEN], "stop")
    request.push(event)
    request.finish(event)
    completion = request.completion()
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert completion.stop_reason == reason


def test_a_cancelled_sample_still_gets_its_last_event() -> None:
    class Executor:
        def __init__(self) -> None:
            self.events: list[_Event] = []

        def add_requests(self, requests: list[Any], ids: list[int]) -> bool:
            ids.append(7)
            return True

        def poll(self, timeout_ms: int) -> list[_Event]:
            events, self.events = self.events, []
            return events

        def cancel(self, id: int, sample: int | None) -> bool:
            self.events.append(_Event([], "cancelled", id=id))
            return True

        def close(self) -> None:
            pass

    executor = Executor()
    dispatcher = Dispatcher(executor)  # type: ignore[arg-type]
    session = dispatcher.open()
    assert session.add_requests([_core.Request([1])]) == [7]
    session.cancel(7, 0)
    assert session.get().finish_reason == "cancelled"
    executor.cancel = None  # type: ignore[assignment, method-assign]
    session.cancel(7, 0)  # has ended: the executor is not called
    dispatcher.close()
