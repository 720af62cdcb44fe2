# SPDX-License-Identifier: Apache-2.0
"""Receipts of programs in C++ are those of Python, character by character; tests/cpp/c_api_test.cc
compares those of C with C++."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from errors import raises
from paceline import LLM, SamplingParams, _core, cli
from paceline.console import EXIT_OK
from paceline.receipts.receipt import shown
from paceline.receipts.replay import verify
from receipt_jobs import VOCAB, target_dir

SEED = int(os.environ.get("PACELINE_SEED", "20261128"))
TEMPLATE = "{% for message in messages %}\u00e9{{ message['content'] }}{% endfor %}"

pytestmark = pytest.mark.usefixtures("digest_cache")


@pytest.fixture(scope="module", params=["jinja", "config", "named", "none"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder with a chat template in one of the places where there may be one."""
    out = tmp_path_factory.mktemp(request.param) / "out"
    assert cli.main(["convert", str(target_dir()), str(out), "-q"]) == EXIT_OK
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    if request.param == "jinja":
        (out / "chat_template.jinja").write_text(TEMPLATE)
    elif request.param != "none":
        config = {"chat_template": TEMPLATE if request.param == "config" else named}
        tiny_models.write_json(out / "tokenizer_config.json", config)
    return out


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=8, max_model_len=128, device="cpu") as llm:
        yield llm


def random_params(chosen: random.Random) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": chosen.choice([0, 1, 0.7, 1e-5, chosen.random()]),
        "max_tokens": chosen.randrange(1, 30),
        "seed": chosen.choice([0, 7, 2**64 - 1, chosen.randrange(2**64)]),
        "n": chosen.choice([1, 3]),
    }
    for name, value in {
        "top_k": chosen.randrange(1, 50),
        "top_p": chosen.choice([0.5, 1 - chosen.random() / 2]),
        "min_p": chosen.random() * 1e-4,
        "repetition_penalty": chosen.choice([2, 1 + chosen.random()]),
        "presence_penalty": chosen.choice([-2, chosen.random()]),
        "frequency_penalty": chosen.choice([0.25, -chosen.random()]),
        "min_tokens": chosen.randrange(1 + given["max_tokens"]),
        "stop_token_ids": chosen.sample(range(1, VOCAB), 3),
        "ignore_eos": True,
        "bad_words": [[3], [5, 6], [3]],
        "allowed_token_ids": chosen.sample(range(VOCAB), 200),
        # As 32-bit floats they are the same.
        "logit_bias": {
            token: chosen.choice([-2.5, 3, 0.125]) for token in chosen.sample(range(9), 3)
        },
    }.items():
        if chosen.random() < 0.3:
            given[name] = value
    return SamplingParams(**given)


def test_cpp_and_python_make_the_same_receipt(llm: LLM, folder: Path) -> None:
    print(f"PACELINE_SEED={SEED}")
    chosen = random.Random(SEED)
    for turn in range(25):
        with_text = turn % 2 == 0
        params = random_params(chosen)
        prompt = [chosen.randrange(VOCAB) for _ in range(chosen.randrange(1, 20))]
        asked = replace(params, receipt="with_text" if with_text else True)
        (prepared, *_) = llm._requests.prepare([prompt], asked)
        request = _core.Request(prompt, **{**prepared.sampling, "seed": params.seed})
        (output,) = llm.generate([prompt], asked)
        for one in output.outputs:
            assert one.receipt is not None and one.finish_reason in ("stop", "length")
            made = llm._executor.folder_receipt(
                str(folder), request, one.index, one.token_ids, one.finish_reason, with_text
            )
            assert made == shown(one.receipt), f"turn {turn}"
    (verdict,) = verify(llm, [("r", one.receipt)] if with_text else [])
    assert verdict.verdict == "equal"


def test_what_cpp_refuses(llm: LLM, folder: Path, tmp_path: Path) -> None:
    make = llm._executor.folder_receipt
    good = _core.Request([1, 2], max_tokens=4)
    with raises(ValueError, "sample is 1; allowed: 0 to 0"):
        make(str(folder), good, 1, [3], "length", False)
    with raises(ValueError, f"output token 1 is {VOCAB}; allowed: 0 to {VOCAB - 1}"):
        make(str(folder), good, 0, [3, VOCAB], "length", False)
    with raises(ValueError, "score_prompt or hidden_layers and emits nothing"):
        make(str(folder), _core.Request([1], score_prompt=True), 0, [], "length", False)
    with raises(ValueError, "num_resumed_tokens is 2; allowed: 0 to 1"):
        make(str(folder), _core.Request([1, 2], num_resumed_tokens=2), 0, [], "length", False)
    other = tiny_models.make(tiny_models.TinySpec("llama", seed=1))
    assert cli.main(["convert", str(other), str(tmp_path / "other"), "-q"]) == EXIT_OK
    with raises(ValueError, f"executor has a vocabulary of {VOCAB} tokens", "allowed"):
        make(str(tmp_path / "other"), good, 0, [3], "length", False)


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_acceptance_that_depends_on_drafts_has_no_receipts(folder: Path, method: str) -> None:
    config: dict[str, Any] = {
        "method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": method,
    }  # fmt: skip
    if method == "synthetic":
        config["synthetic_acceptance_length"] = 2.0
    with LLM(folder, speculative_config=config, device="cpu") as llm:
        make = llm._executor.folder_receipt
        with raises(ValueError, f"'{method}' at temperature 1 depends on the drafts", "'coupled'"):
            make(str(folder), _core.Request([1, 2]), 0, [3], "length", False)
        greedy = _core.Request([1, 2], temperature=0)
        if method == "synthetic":
            with raises(ValueError, "synthetic"):
                make(str(folder), greedy, 0, [3], "length", False)
        else:
            assert '"temperature":0' in make(str(folder), greedy, 0, [3], "length", False)
