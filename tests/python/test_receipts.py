# SPDX-License-Identifier: Apache-2.0
"""Receipts: what they say, and which requests have none."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from errors import raises
from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.receipts import digests
from paceline.receipts.receipt import chain_of, shown
from receipt_jobs import PARAMS, PROMPT, receipt_of, target_dir, verdict_of

pytestmark = pytest.mark.usefixtures("digest_cache")


def test_a_receipt_says_what_the_request_was(receipt_llm: LLM) -> None:
    params = replace(
        PARAMS, receipt=True, temperature=0.5, top_k=40, stop=["zq"], logit_bias={9: 1.0, 4: -2.5}
    )
    receipt = receipt_of(receipt_llm, params)
    file = target_dir() / "model.safetensors"
    of_file = hashlib.sha256(file.read_bytes()).hexdigest()
    assert receipt["paceline_receipt"] == 1
    of_files = hashlib.sha256(json.dumps([of_file]).encode()).hexdigest()
    assert receipt["model"]["weights"] == f"files:{of_files}"
    tokenizer = (target_dir() / "tokenizer.json").read_bytes()
    assert receipt["model"]["tokenizer"] == hashlib.sha256(tokenizer).hexdigest()
    assert receipt["model"]["template"] is None
    assert receipt["model"]["dtype"] == "float32"
    assert receipt["device"].startswith("cpu ")
    assert receipt["sampling"] == {
        "temperature": 0.5,
        "top_k": 40,
        "max_tokens": 12,
        "stop_token_ids": [0],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    assert receipt["seed"] == "7"
    values = {"prompt": "[5,6,7,8]", "stop": '["zq"]', "logit_bias": "[[4,-2.5],[9,1]]"}
    assert receipt["digests"] == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in values.items()
    }
    # Nothing of the prompt and the texts is in it.
    assert "inputs" not in receipt and "zq" not in shown(receipt)
    assert receipt_of(receipt_llm, replace(params, receipt="with_text")) == receipt | {
        "inputs": {"prompt": PROMPT, "stop": ["zq"], "logit_bias": [[4, -2.5], [9, 1.0]]}
    }


def test_the_chain_is_that_of_the_page(receipt_llm: LLM) -> None:
    receipt = receipt_of(receipt_llm)
    behind = ("tokens", "finish_reason", "chain", "inputs")
    header = {key: value for key, value in receipt.items() if key not in behind}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).replace('e":1.0', 'e":1')
    link = hashlib.sha256(text.encode()).digest()
    first = link.hex()
    for token in receipt["tokens"]:
        link = hashlib.sha256(link + token.to_bytes(8, "little")).digest()
    last = hashlib.sha256(link + b"length").hexdigest()
    assert receipt["chain"] == {"first": first, "last": last}


def test_numbers_have_one_form() -> None:
    values = {"b": [1.0, 2, 0.1, True, None], "a": "\u00e9", "c": (3, 4)}
    text = b'{"a":"\\u00e9","b":[1,2,0.1,true,null],"c":[3,4]}'
    assert digests.canonical(values) == text
    assert digests.canonical(json.loads(text)) == text
    with pytest.raises(ValueError):
        digests.canonical(float("nan"))


def test_each_sample_has_the_seed_with_which_it_is_replayed(receipt_llm: LLM) -> None:
    params = replace(PARAMS, n=3, seed=2**64 - 2)
    (output,) = receipt_llm.generate([PROMPT], params)
    receipts = [one.receipt for one in output.outputs]
    assert [one["seed"] for one in receipts if one] == [str(2**64 - 2), str(2**64 - 1), "0"]
    assert {verdict_of(receipt_llm, one).verdict for one in receipts} == {"equal"}
    # A request without a seed gets one of the LLM.
    receipts = [
        one.outputs[0].receipt
        for one in receipt_llm.generate([PROMPT] * 2, replace(PARAMS, seed=None))
    ]
    assert receipts[0] and receipts[1] and receipts[0]["seed"] != receipts[1]["seed"]
    assert {verdict_of(receipt_llm, one).verdict for one in receipts} == {"equal"}


def test_receipts_share_nothing(receipt_llm: LLM) -> None:
    outputs = receipt_llm.generate(PROMPT, replace(PARAMS, n=2))[0].outputs
    one, other = (output.receipt for output in outputs)
    assert one is not None
    before = copy.deepcopy(other)
    for key in ("model", "digests", "sampling", "inputs"):
        one[key].clear()
    assert other == before and receipt_of(receipt_llm)["model"] == other["model"]


def test_streams_have_receipts_in_the_last_chunk(receipt_llm: LLM) -> None:
    whole = receipt_of(receipt_llm)
    chunks = list(receipt_llm.stream(PROMPT, PARAMS))
    assert [chunk.receipt for chunk in chunks] == [None] * (len(chunks) - 1) + [whole]

    async def run() -> list[RequestOutput]:
        allm = AsyncLLM.from_llm(receipt_llm)
        outputs = [output async for output in allm.generate(PROMPT, PARAMS)]
        allm.close()
        return outputs

    *others, last = asyncio.run(run())
    assert last.outputs[0].receipt == whole
    assert all(output.outputs[0].receipt is None for output in others)
    assert (
        receipt_llm.generate(PROMPT, replace(PARAMS, receipt=False))[0].outputs[0].receipt is None
    )


def test_an_aborted_output_is_compared_until_its_end(receipt_llm: LLM) -> None:
    async def run() -> RequestOutput:
        allm = AsyncLLM.from_llm(receipt_llm)
        last = None
        async for output in allm.generate(
            PROMPT, replace(PARAMS, max_tokens=400, ignore_eos=True), "a"
        ):
            last = output
            await allm.abort("a")
        allm.close()
        assert last is not None
        return last

    receipt = asyncio.run(run()).outputs[0].receipt
    assert receipt is not None and receipt["finish_reason"] == "abort"
    verdict = verdict_of(receipt_llm, receipt)
    assert verdict.verdict == "equal" and "only the tokens until then" in verdict.notes[0]
    receipt["tokens"][-1] ^= 1
    assert verdict_of(receipt_llm, receipt).position == len(receipt["tokens"]) - 1
    # It may have ended before its first token.
    receipt["tokens"] = []
    receipt["chain"] = chain_of(receipt)
    verdict = verdict_of(receipt_llm, receipt)
    assert (verdict.verdict, verdict.num_tokens) == ("equal", 0)


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_outputs_that_depend_on_drafts_have_no_receipts(receipt_llm: LLM, method: str) -> None:
    config: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": method,
    }
    if method == "synthetic":
        config["synthetic_acceptance_length"] = 2.0
    greedy = replace(PARAMS, temperature=0)
    with LLM(target_dir(), speculative_config=config, device="cpu") as llm:
        with raises(ValueError, "receipt is 'with_text'", f"is '{method}'", "allowed", "'coupled'"):
            llm.generate(PROMPT, PARAMS)
        if method == "synthetic":
            with raises(ValueError, "synthetic"):
                llm.generate(PROMPT, greedy)
        else:
            assert verdict_of(receipt_llm, receipt_of(llm, greedy)).verdict == "equal"


@pytest.mark.parametrize("value", [1, "yes", None, b"with_text"])
def test_other_values_are_refused(value: Any) -> None:
    with raises(ValueError, "receipt is", repr(value), "allowed: True, False or 'with_text'"):
        SamplingParams(receipt=value)
