# SPDX-License-Identifier: Apache-2.0
"""`structured_outputs` and drafters of the caller."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from errors import raises
from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.demo import find_demo
from paceline.outputs import RequestError

DEMO = find_demo("eagle3")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO.target), speculative_config=DEMO.speculative_config(5)) as llm:
        yield llm


def params_of(**structured: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        seed=5,
        max_tokens=120,
        structured_outputs=StructuredOutputsParams(**structured),
    )


def texts(llm: LLM, params: SamplingParams) -> list[str]:
    (output,) = llm.generate("x = ", params)
    assert all(one.finish_reason == "stop" for one in output.outputs)
    return [one.text for one in output.outputs]


def test_every_kind_of_grammar(llm: LLM) -> None:
    (text,) = texts(llm, params_of(regex=r"[a-f]{3}-\d{2,4}"))
    assert re.fullmatch(r"[a-f]{3}-\d{2,4}", text)
    choices = ["positive", "negative", 'a "quoted" one', "line\nbreak"]
    (text,) = texts(llm, params_of(choice=choices))
    assert text in choices
    # Any text is a choice, and any number of them, equal ones too.
    for choice in ("a|b", "(.*)", r"\d+[^a]{2}$", "é \x01\x7f\U0001f600/#&-~", "^"):
        assert texts(llm, params_of(choice=[choice])) == [choice]
    assert texts(llm, params_of(choice=["same"] * 10_000)) == ["same"]
    many = [f"{i:04d}" for i in range(10_000)]
    assert texts(llm, params_of(choice=many))[0] in many
    (text,) = texts(llm, params_of(grammar='start: "a" INT ("," INT)?\nINT: /[0-9]{1,3}/'))
    assert re.fullmatch(r"a\d{1,3}(,\d{1,3})?", text)
    for start in ("?start", "!start"):
        assert texts(llm, params_of(grammar=f'{start}: "a" b\n?b: "c"')) == ["ac"]
    (text,) = texts(llm, params_of(grammar='root ::= "yes" | "no" " "? "!"'))
    assert re.fullmatch(r"yes|no ?!", text)
    schema = {"type": "array", "items": {"enum": [1, "two"]}, "minItems": 2, "maxItems": 3}
    (text,) = texts(llm, params_of(json=json.dumps(schema), whitespace_pattern=" ?"))
    assert 2 <= len(json.loads(text)) <= 3
    output = llm.generate("x = ", params_of(json_object=True, disable_any_whitespace=True))[
        0
    ].outputs[0]
    assert output.text.startswith("{")


def test_samples_have_grammars_of_their_own(llm: LLM) -> None:
    params = SamplingParams(
        n=6, temperature=1.5, seed=1, max_tokens=40, structured_outputs={"regex": "[a-z]{2,9}"}
    )
    together = texts(llm, params)
    assert len(set(together)) > 1
    for i, text in enumerate(together):
        alone = SamplingParams(
            temperature=1.5, seed=1 + i, max_tokens=40, structured_outputs={"regex": "[a-z]{2,9}"}
        )
        assert texts(llm, alone) == [text]


def test_other_parameters_apply_too(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=20, bad_words=["a", "b"], logprobs=2,
        structured_outputs={"choice": ["a", "b", "c"]},
    )  # fmt: skip
    (output,) = llm.generate("x = ", params)
    assert output.outputs[0].text == "c"
    assert output.outputs[0].logprobs is not None
    impossible = SamplingParams(bad_words=["a"], structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="the constraint rule out all tokens"):
        llm.generate("x = ", impossible)


@pytest.mark.serial
def test_refuses_what_is_no_grammar(llm: LLM) -> None:
    def refused(expected: str, **structured: Any) -> None:
        begin = time.monotonic()
        with raises(ValueError, expected):
            llm.generate("x", SamplingParams(structured_outputs=structured))
        assert time.monotonic() - begin < 2

    refused("structured_outputs has no kind; allowed: exactly one of 'json', 'regex'")
    refused("structured_outputs has 'json', 'regex'; allowed: exactly one", json={}, regex="a")
    refused("json is 3; allowed: a JSON schema", json=3)
    refused("json is not valid JSON", json="{")
    refused("unclosed group", regex="a(b")
    refused("choice is []; allowed: a sequence of at least one string", choice=[])
    refused("choice is 'a'; allowed", choice="a")
    refused("regex has 70000 characters; allowed: at most 65536", regex="a" * 70000)
    refused('Unimplemented keys: ["not"]', json={"not": {"type": "string"}})
    refused("whitespace_pattern is ' ', but regex is given", regex="a", whitespace_pattern=" ")
    refused("structured_outputs is no grammar", grammar="start: ((((")
    refused("schema too large", json=_wide())
    refused("structured_outputs is a grammar that no output satisfies", json={"$ref": "#"})
    refused("structured_outputs is a grammar that no output satisfies", regex=r"[^\s\S]")
    deep = '{"type":"array","items":' * 500 + "true" + "}" * 500
    refused("allowed: at most 64 levels", json=deep)
    with raises(TypeError, "has no parameter 'structural_tag' in this version"):
        StructuredOutputsParams(structural_tag="{}")  # type: ignore[call-arg]
    with raises(ValueError, "ignore_eos is True and structured_outputs is given"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})
    with raises(ValueError, "structured_outputs is 'a' (str); allowed"):
        SamplingParams(structured_outputs="a")  # type: ignore[arg-type]


def _wide() -> dict[str, Any]:
    """A short schema that stands for 4 ** 12 objects."""
    return {
        "allOf": [
            {
                "anyOf": [
                    {"required": [f"a{i}{j}"], "properties": {f"a{i}{j}": {}}} for j in range(4)
                ]
            }
            for i in range(12)
        ]
    }


@pytest.mark.serial
def test_hostile_grammars_end_with_an_error_or_a_text(llm: LLM) -> None:
    hostile = [
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(.*a){50}"},
        {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
        {"grammar": 'start: a\na: a "x" | a a | "y"'},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 100000}},
    ]
    begin = time.monotonic()
    for structured in hostile:
        params = SamplingParams(seed=1, max_tokens=24, structured_outputs=structured)
        try:
            (output,) = llm.generate("x", params)
        except (ValueError, RequestError) as error:
            assert "structured_outputs" in str(error) or "no token can be drawn" in str(error)
        else:
            assert output.outputs[0].finish_reason in ("stop", "length")
    assert time.monotonic() - begin < 20
    assert texts(llm, params_of(choice=["still here"])) == ["still here"]


def test_a_tokenizer_that_llguidance_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """What a panic of Rust code becomes, such as for tokens of hundreds of equal characters."""

    def panics(*_: Any, **__: Any) -> None:
        raise PanicException("assertion failed")

    monkeypatch.setattr("llguidance.LLTokenizer", panics)
    expected = "llguidance does not read the tokenizer of"
    with LLM(str(DEMO.target)) as engine, raises(ValueError, expected):
        engine.generate("x", params_of(regex="a"))


def test_says_what_to_install() -> None:
    code = f"""
import sys
sys.modules["llguidance"] = None
from paceline import LLM, SamplingParams
with LLM({str(DEMO.target)!r}) as llm:
    try:
        llm.generate("x", SamplingParams(structured_outputs={{"regex": "a"}}))
    except RuntimeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'paceline[structured]'" in done.stdout


# ---- a drafter of the caller ---------------------------------------------------------------------


def custom(drafter: Any, **options: Any) -> LLM:
    config = {"method": "custom", "drafter": drafter, "num_speculative_tokens": 3, **options}
    return LLM(str(DEMO.target), speculative_config=config)


def test_a_drafter_of_the_caller_changes_no_token(llm: LLM) -> None:
    prompts = ["def f(", "class A:", "import "]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=30, num_speculative_tokens=k)
        for i, k in enumerate((3, 0, 2))
    ]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    truth = {prompt: list(ids) for prompt, ids in zip(prompts, expected, strict=True)}
    encoded = {tuple(llm.get_tokenizer().encode(prompt)): truth[prompt] for prompt in prompts}

    def knows(tokens: list[int]) -> list[int]:
        for prompt, output in encoded.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                done = len(tokens) - len(prompt)
                return [*output[done : done + 2], 0]
        raise AssertionError("a history that no request has")

    for method in ("coupled", "standard", "block"):
        with custom(knows, rejection_sample_method=method) as engine:
            outputs = engine.generate(prompts, params)
        if method != "coupled":
            continue
        assert [output.outputs[0].token_ids for output in outputs] == expected
        first, none, _ = (output.metrics.speculative_decoding for output in outputs)
        assert first is not None and first["mean_acceptance_length"] > 2
        assert none is None


def test_a_failing_drafter_ends_its_own_request_only() -> None:
    calls = {5: [1], 6: "x", 7: [1, 2, 3, 4], 8: [10**6], 9: [-1], 10: 3}

    def drafter(tokens: list[int]) -> Any:
        if tokens[0] == 4:
            raise ZeroDivisionError("of mine")
        return calls[tokens[0]]

    expected = {
        4: "the drafter of speculative_config raised ZeroDivisionError: of mine",
        6: "draft 0 of the drafter of speculative_config is 'x'",
        7: "returned 4 ids; allowed: at most num_speculative_tokens = 3",
        8: "the drafter returned token 1000000 as draft 0; allowed: 0 to 4095",
        9: "draft 0 of the drafter of speculative_config is -1",
        10: "returned 3 (int); allowed: a sequence of token ids",
    }
    with custom(drafter) as engine:
        for token in range(4, 11):
            prompts = [[token, 20], [5, 21]]
            params = SamplingParams(seed=1, max_tokens=8)
            if token == 5:
                engine.generate(prompts, params)
                continue
            with pytest.raises(RequestError, match=re.escape(expected[token])) as raised:
                engine.generate(prompts, params)
            assert raised.value.outputs[1].outputs[0].finish_reason in ("length", "stop")


def test_refuses_what_is_no_drafter() -> None:
    def refused(expected: str, **config: Any) -> None:
        with raises(ValueError, expected):
            LLM(str(DEMO.target), speculative_config={"num_speculative_tokens": 2, **config})

    refused("['drafter'] is None; allowed: a function of token ids", method="custom")
    refused("but method is 'ngram'; allowed: only with 'custom'", method="ngram", drafter=len)
    refused("method is 'custom', which has no 'model'", method="custom", drafter=len, model="a")
