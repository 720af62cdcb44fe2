# SPDX-License-Identifier: Apache-2.0
"""What a grammar may cost: it is refused within seconds, in bounded memory, and can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from errors import raises
from hostile_grammars import (
    children,
    resident_bytes,
    slow_schema,
    trial_pid,
    wait_for_children,
)
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.demo import find_demo
from paceline.grammar_text import check_params
from paceline.outputs import RequestError
from paceline.running_llm import internals
from paceline.structured_outputs import StructuredOutputsParams

DEMO = find_demo("eagle3")
# A grammar has 2 s of CPU time; a machine that is busy gives it those in several seconds.
REFUSED_S = 15


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO.target), max_num_seqs=8) as llm:
        llm.generate("x", params(regex="warm"))
        yield llm


def params(max_tokens: int = 16, **structured: Any) -> SamplingParams:
    return SamplingParams(
        seed=1, temperature=1.0, max_tokens=max_tokens, structured_outputs=structured
    )


def wide_schema(width: int) -> dict[str, Any]:
    """A schema whose grammar grows with its width."""
    properties = {f"{i}_{width}": {"enum": [f"{i}{j}" for j in range(8)]} for i in range(width)}
    return {"type": "object", "properties": properties}


def text(llm: LLM, **structured: Any) -> str:
    (output,) = llm.generate("x = ", params(**structured))
    return output.outputs[0].text


@pytest.mark.serial
def test_what_takes_long_to_compile_is_refused_in_bounded_time_and_memory(llm: LLM) -> None:
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.02):
            tried = children(trial_pid(llm))
            most = max(most, sum(map(resident_bytes, tried)) + resident_bytes() - before)

    before = resident_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    with raises(ValueError, "structured_outputs is a grammar that takes more than 2 s of CPU time"):
        llm.generate("x", params(json=slow_schema(0)))
    assert time.monotonic() - begin < REFUSED_S
    # Its memory ends it, or its time does; it took 17 GB and minutes.
    with raises(ValueError, "structured_outputs is"):
        llm.generate("x", params(json={"type": "integer", "multipleOf": 604_800}))
    is_done.set()
    watcher.join()
    assert most < 400 << 20
    # What was refused is refused at once.
    begin = time.monotonic()
    with raises(ValueError, "allowed: a smaller one"):
        llm.generate("x", params(json=slow_schema(0)))
    assert time.monotonic() - begin < 0.5
    assert text(llm, choice=["fine"]) == "fine"


@pytest.mark.parametrize(
    ("structured", "expected"),
    [
        (
            {"json": {"type": "integer", "multipleOf": 99_400_891}},
            "json.multipleOf is 99400891; allowed: at most 100000, not counting",
        ),
        (
            {"json": {"properties": {"a": {"items": [{"multipleOf": 0.1234567}]}}}},
            "json.properties.a.items[0].multipleOf is 0.1234567; allowed",
        ),
        ({"json": {"maxLength": 2**31}}, "json.maxLength is 2147483648; allowed: 0 to 2147483647"),
        ({"json": {"minItems": -1}}, "json.minItems is -1; allowed: 0 to"),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            "json.minimum is 5 and json.maximum is 3, so no value is allowed",
        ),
        ({"json": {"enum": list(range(10_001))}}, "json.enum has 10001 values; allowed: at most"),
        ({"json": {"pattern": "a{9999999999}"}}, "json.pattern has the repetition '{9999999999}'"),
        (
            {"regex": "((a{100}){100}){100}"},
            "regex matches only texts of at least 1000000 characters; allowed: at most 100000",
        ),
        ({"regex": "x|([ab]{1000}(c|dd){2}){99}" + "y?" * 9}, ""),
        ({"regex": "([ab](c|dd){400}){999}|[[a-z]&&[^x]]{200000}"}, "at least 200000 characters"),
        ({"regex": "a{2147483648}"}, "regex has the repetition '{2147483648}'; allowed: numbers"),
    ],
)
def test_numbers_are_refused_with_their_name(structured: dict[str, Any], expected: str) -> None:
    if expected:
        with raises(ValueError, expected):
            check_params(StructuredOutputsParams(**structured))
    else:
        check_params(StructuredOutputsParams(**structured))


def test_what_users_send_is_compiled(llm: LLM) -> None:
    fine: list[dict[str, Any]] = [
        *({"type": "number", "multipleOf": number} for number in (0.01, 0.5, 0.001, 2.5)),
        *({"type": "integer", "multipleOf": number} for number in (5, 60, 1024, 3600, 1_000_000)),
        {"type": "string", "maxLength": 100_000},
        {"type": "string", "minLength": 1000, "maxLength": 2_147_483_647},
        {"type": "array", "items": {"type": "number"}, "maxItems": 100_000},
        {"enum": [f"word {number}" for number in range(4000)]},
        # Names and data that look like keywords.
        {"type": "object", "properties": {"multipleOf": {"type": "integer"}}},
        {"const": {"multipleOf": 99_400_891, "minimum": 2, "maximum": 1}},
    ]
    grammars = internals(llm).requests.grammars
    for schema in fine:
        assert grammars.compile(StructuredOutputsParams(json=schema)).text
    for regex in (r"(.{1,1000}\n){1,1000}", r"[a-z]{1,63}(\.[a-z]{1,63}){0,100}", r"\{a*?\}+?"):
        assert grammars.compile(StructuredOutputsParams(regex=regex)).text


def test_classes_mean_what_json_schema_means(llm: LLM) -> None:
    r"""\d and \w are ASCII, and \s is any whitespace, in expressions, grammars and schemas."""

    def allows(sample: str, **structured: Any) -> bool:
        grammars = internals(llm).requests.grammars
        matcher = grammars.compile(StructuredOutputsParams(**structured)).matcher.deep_copy()
        tokens = llm.get_tokenizer().encode(sample, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    arabic, umlaut, space = "\u0665", "\u00e4", "\u00a0"
    samples = {r"\d": ("5", arabic), r"\w": ("b", umlaut), r"[\d_]": ("_", arabic)}
    for regex, (right, wrong) in samples.items():
        for structured in ({"regex": regex}, {"grammar": f"start: /{regex}/"}):
            assert allows(right, **structured) and not allows(wrong, **structured), structured
    for regex in (r"\D", r"\W"):
        assert allows(arabic, regex=regex) and allows(arabic, grammar=f"start: A\nA: /{regex}/")
    assert allows(space, regex=r"\s") and allows(space, grammar=r"start: /\s/")
    number = {"type": "string", "pattern": r"^\d$"}
    assert allows('"5"', json=number) and not allows(f'"{arabic}"', json=number)
    word = {"type": "string", "pattern": r"^\w$"}
    assert allows('"b"', json=word) and not allows(f'"{umlaut}"', json=word)
    assert allows(f'"{space}"', json={"type": "string", "pattern": r"^\s$"})
    # What only looks like an expression stays as it is.
    assert allows(r"\d/", grammar='start: "\\\\d/" // /\\d/\n')
    assert allows("a/5", regex=r"a/\d") and allows("a/5", grammar=r"start: /a\/\d/")


def test_a_limit_that_one_output_reaches_is_not_that_of_the_next(llm: LLM) -> None:
    patterns = [f"^.*{chr(97 + i)}.{{{i}}}x$" for i in range(26)]
    schema = {"anyOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    errors = []
    for seed in range(40):
        many = SamplingParams(
            seed=seed, temperature=2.0, max_tokens=40, structured_outputs={"json": schema}
        )
        try:
            llm.generate("x = ", many)
        except RequestError as error:
            errors.append(str(error))
            break
    assert (
        errors and "structured_outputs is a grammar that this output makes too costly" in errors[0]
    )
    grammars = internals(llm).requests.grammars
    assert grammars.find(StructuredOutputsParams(json=schema)) is None
    with contextlib.suppress(RequestError):
        (output,) = llm.generate("x = ", params(2, json=schema))
        assert len(output.outputs[0].token_ids) == 2
    assert grammars.find(StructuredOutputsParams(json=schema)) is not None


def test_the_process_starts_again_when_the_system_has_ended_it(llm: LLM) -> None:
    assert text(llm, choice=["one"]) == "one"
    os.kill(trial_pid(llm), signal.SIGKILL)
    assert text(llm, choice=["two"]) == "two"


def test_an_llm_takes_many_grammars_and_an_async_llm_as_many_as_its_memory_allows(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small grammar is counted as small, although its trial needs far more while it compiles."""
    grammars = internals(llm).requests.grammars
    small = [grammars.compile(StructuredOutputsParams(regex=f"{i}[a-z]+")) for i in range(8)]
    large = grammars.compile(StructuredOutputsParams(json=wide_schema(400)))
    assert all(0 <= one.num_bytes < 2 << 20 for one in small)
    assert large.num_bytes > 2 * max(one.num_bytes for one in small)

    used = large.num_bytes
    monkeypatch.setattr("paceline.grammar_queue._MAX_BYTES", used)

    async def run() -> None:
        async with AsyncLLM.from_llm(llm) as allm:
            with raises(RuntimeError, "the grammars in use take"):
                await anext(allm.generate("x", params(json=wide_schema(401))))

    asyncio.run(run())
    assert large.matcher is not None  # in use until here
    outputs = llm.generate(["x"] * 2, [params(json=wide_schema(401 + i)) for i in range(2)])
    assert all(output.outputs[0].text.startswith("{") for output in outputs)


@pytest.mark.serial
def test_tasks_share_a_compilation_and_end_it_with_the_last(llm: LLM) -> None:
    async def run() -> None:
        allm = AsyncLLM.from_llm(llm)
        structured = params(json=slow_schema(1))
        begin = time.monotonic()
        tasks = [asyncio.create_task(anext(allm.stream("x", structured))) for _ in range(5)]
        await asyncio.to_thread(wait_for_children, llm, 1)
        for task in tasks[:4]:
            task.cancel()
        (plain,) = [output async for output in allm.generate("x", SamplingParams(max_tokens=1))]
        assert plain.finished and len(children(trial_pid(llm))) == 1
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(wait_for_children, llm, 0)
        assert time.monotonic() - begin < REFUSED_S
        # Nobody has judged it.
        structured_outputs = structured.structured_outputs
        assert structured_outputs is not None
        assert internals(llm).requests.grammars.find(structured_outputs) is None
        await asyncio.to_thread(allm.close)

    asyncio.run(run())


@pytest.mark.serial
def test_closing_ends_a_compilation() -> None:
    with LLM(str(DEMO.target)) as other:
        other.generate("x", params(regex="warm"))
        failures: list[BaseException] = []

        def generate() -> None:
            try:
                other.generate("x", params(json=slow_schema(2)))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        wait_for_children(other, 1)
        pid = trial_pid(other)
        begin = time.monotonic()
        other.close()
        thread.join(10)
        assert time.monotonic() - begin < 5
    # It was not judged.
    (failure,) = failures
    assert isinstance(failure, RuntimeError) and "this LLM is closed" in str(failure)
    assert resident_bytes(pid) == 0


@pytest.mark.serial
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_compiles(number: signal.Signals) -> None:
    code = f"""
import json, sys
from paceline import LLM, SamplingParams
llm = LLM({str(DEMO.target)!r})
llm.generate("x", SamplingParams(max_tokens=1, structured_outputs={{"regex": "ab"}}))
print("compiles", llm._requests.grammars._trials._process.pid, flush=True)
llm.generate("x", SamplingParams(structured_outputs={{"json": json.loads(sys.argv[1])}}))
"""
    arguments = [sys.executable, "-c", code, json.dumps(slow_schema(3))]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        deadline = time.monotonic() + 10
        while not children(pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) != 0
        assert time.monotonic() - begin < 5
    deadline = time.monotonic() + 10
    while resident_bytes(pid):  # it ends with the process
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- no input is an internal error ---------------------------------------------------------------

_ATOMS = ("a", ".", r"\d", r"\W", "[a-c]", "(?:x|yy)", r"\p{L}", "(ab", "[", "{3", "\\", r"\x{41}")
_KEYS = ("type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "pattern",
         "minLength", "maxLength", "items", "prefixItems", "minItems", "maxItems", "properties",
         "required", "additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref",
         "format", "x-guidance", "not", "$defs")  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**31, 2**63, 10**40, 0.1, 1e-300, 1e300, "", "string", "integer",
    "number", "a{3}", "#", "#/$defs/a", "date", [], {}, [1, "a"], ["a", "b"],
)  # fmt: skip


def random_regex(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 6)):
        suffix = rng.choice(("", "", "*", "+?", "{2}", "{1,99999}", "{5,1}", "{,3}", "|", "**"))
        parts.append(rng.choice(_ATOMS) + suffix)
    return "".join(parts)


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or rng.random() < 0.2:
        return rng.choice(_VALUES)
    schema: dict[str, Any] = {}
    for key in rng.sample(_KEYS, rng.randint(0, 4)):
        kind = rng.randrange(4)
        if kind == 0:
            schema[key] = random_schema(rng, depth + 1)
        elif kind == 1:
            schema[key] = [random_schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        elif kind == 2:
            schema[key] = {"a": random_schema(rng, depth + 1), "b": {"type": "integer"}}
        else:
            schema[key] = rng.choice(_VALUES)
    return schema


def random_lark(rng: random.Random) -> str:
    words = ("start:", "a:", "A:", "/a/", "/[/", '"x"', "|", "*", "+", "(", ")", "a", "A", "{3}",
             "\n", "%json {}", "%ignore /\\s/", "~", "&", "[1-9]", "<a>", "%regex {}", "root ::= ",
             "::=", "%import common.INT", "@", "-> b", "%llguidance {}")  # fmt: skip
    return "start: " + " ".join(rng.choice(words) for _ in range(rng.randint(1, 12)))


@pytest.mark.parametrize("seed", range(4))
def test_random_input_ends_in_a_text_or_a_refusal(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        structured: dict[str, Any] = rng.choice(
            (
                {"json": random_schema(rng)},
                {"json": random_schema(rng), "whitespace_pattern": random_regex(rng)},
                {"regex": random_regex(rng)},
                {"grammar": random_lark(rng)},
                {"choice": [random_regex(rng), rng.choice(_VALUES)]},
            )
        )
        try:
            text(llm, **structured)
        except (ValueError, RequestError) as error:
            message = str(error)
            assert re.search(
                r"structured_outputs|no token can be drawn|^(json|regex|choice|grammar|whitesp)",
                message,
            ), (structured, message)
    assert text(llm, choice=["fine"]) == "fine"
