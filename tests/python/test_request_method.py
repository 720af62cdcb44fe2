# SPDX-License-Identifier: Apache-2.0
"""Requests that choose which of the engine's methods drafts for them: the tokens stay the same, and
the figures by drafter are theirs."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import LLM, RequestOutput, SamplingParams
from paceline.replicas.replicated_llm import start_replicas
from paceline.speculative_config import SpeculativeConfig
from running_server import RunningServer

SEED = int(os.environ.get("PACELINE_SEED", "20261128"))
K = 4
ENGINE: dict[str, Any] = {
    "max_num_seqs": 6, "max_model_len": 160, "kv_cache_bytes": 16 << 20, "device": "cpu",
    "show_progress": False, "block_size": 4,
}  # fmt: skip
# Half of them repeat themselves.
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 3, 14, 15], [7, 8] * 6, [11, 12, 13], [21, 22, 23, 24, 25]]
KINDS = ["draft_model", "eagle3", "gemma4_mtp", "dflash"]
NAMES = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
Pair = Callable[[str], tuple[Path, Path]]


def config_of(drafter: Path, **keys: Any) -> dict[str, Any]:
    return {
        "model": str(drafter), "num_speculative_tokens": K, "prompt_lookup_min": 1,
        "prompt_lookup_max": 3, "x": {"adaptive": False}, **keys,
    }  # fmt: skip


def random_requests(kind: str, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    chosen = random.Random(f"{SEED} {kind}")
    print(f"PACELINE_SEED={SEED}")
    prompts = [PROMPTS[chosen.randrange(len(PROMPTS))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=chosen.choice([0, 0.7, 1]),
            seed=chosen.randrange(1 << 30),
            max_tokens=chosen.randrange(1, 60),
            n=chosen.choice([1, 1, 2]),
            ignore_eos=True,
            speculative_method=chosen.choice([None, "ngram", kind]),
            num_speculative_tokens=chosen.choice([None, None, 0, 2]),
        )
        for _ in range(count)
    ]
    return prompts, params


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    assert all(output.finished and output.error is None for output in outputs)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def plain(target: Path, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    same = [
        SamplingParams(
            temperature=of.temperature, seed=of.seed, max_tokens=of.max_tokens, n=of.n,
            ignore_eos=True,
        )
        for of in params
    ]  # fmt: skip
    with LLM(target, **ENGINE) as llm:
        return tokens(llm.generate(prompts, same))


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mix_in_one_batch_gives_the_tokens_of_plain_decoding(
    kind: str, is_adaptive: bool, pair_of: Pair
) -> None:
    target, drafter = pair_of(kind)
    prompts, params = random_requests(kind, 40)
    config = config_of(drafter, x={"adaptive": is_adaptive})
    counted: dict[str, Counter[str]] = {"ngram": Counter(), kind: Counter()}
    num_both = 0
    with LLM(target, speculative_config=config, **ENGINE) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.stats()["speculative_decoding"]["drafters"]
        assert llm._executor.check_integrity() == ""
    assert tokens(outputs) == plain(target, prompts, params)
    for output, asked in zip(outputs, params, strict=True):
        found = output.metrics.speculative_decoding
        if asked.num_speculative_tokens == 0:
            assert found is None
            continue
        assert found is not None and found["drafter"] == (asked.speculative_method or kind)
        drafters = found["drafters"]
        assert set(drafters) <= {asked.speculative_method} or asked.speculative_method is None
        num_both += len(drafters) == 2
        for name in NAMES:
            assert sum(of[name] for of in drafters.values()) == found[name]
        for method, of in drafters.items():
            counted[method].update(of)
    assert stats == counted
    if not is_adaptive:
        assert num_both > 0 and all(of["num_draft_tokens"] > 50 for of in counted.values())


@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_the_drafter_changes_under_requests_that_chose_one(kind: str, pair_of: Pair) -> None:
    target, drafter = pair_of(kind)
    prompts, params = random_requests(kind, 24)
    expected = plain(target, prompts, params)
    only = {"prompt_lookup_min": None, "prompt_lookup_max": None}
    configs: list[dict[str, Any] | None] = [
        {"method": "ngram", "num_speculative_tokens": 2},
        config_of(drafter, **only),
        None,
        config_of(drafter),
    ]
    counted: Counter[str] = Counter()
    with LLM(target, speculative_config=config_of(drafter), **ENGINE) as llm:
        outputs: dict[int, RequestOutput] = {}
        for i, chunk in enumerate(llm.stream(prompts, params)):
            if i % 15 == 14:
                llm.set_drafter(configs[i // 15 % 4])
            if chunk.output is not None:
                outputs[chunk.index] = chunk.output
        llm.set_drafter(configs[-1])
        stats = llm.stats()["speculative_decoding"]["drafters"]
        assert llm._executor.check_integrity() == ""
    assert tokens([outputs[i] for i in range(len(prompts))]) == expected
    for output in outputs.values():
        drafted = output.metrics.speculative_decoding
        for method, of in (drafted or {"drafters": {}})["drafters"].items():
            counted[method] += of["num_draft_tokens"]
    assert {method: of["num_draft_tokens"] for method, of in stats.items()} == counted
    assert set(counted) == {"ngram", kind}


def test_a_request_whose_method_goes_away_has_no_drafts(pair_of: Pair) -> None:
    target, drafter = pair_of("eagle3")
    asked = SamplingParams(
        temperature=0, max_tokens=1500, ignore_eos=True, speculative_method="eagle3"
    )
    engine = {**ENGINE, "max_model_len": 1600}
    with LLM(target, **engine) as llm:
        expected = llm.generate(
            PROMPTS[1], SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        )
    with LLM(target, speculative_config=config_of(drafter), **engine) as llm:
        found: list[int] = []
        with llm.stream(PROMPTS[1], asked) as stream:
            found += next(stream).token_ids
            llm.set_drafter({"method": "ngram", "num_speculative_tokens": K})
            stats = llm.stats()
            assert stats["num_running"] == 1
            for chunk in stream:
                found += chunk.token_ids
        assert found == expected[0].outputs[0].token_ids
        after = llm.stats()["speculative_decoding"]["drafters"]
        assert after == stats["speculative_decoding"]["drafters"]
        assert after["ngram"]["num_draft_tokens"] == 0
        with raises(ValueError, "allowed: 'ngram', or None for all"):
            llm.generate(PROMPTS[0], asked)


def test_refusals(pair_of: Pair) -> None:
    target, drafter = pair_of("eagle3")
    with raises(
        ValueError, "speculative_method is 'magic'; allowed: None, or one of 'draft_model'"
    ):
        SamplingParams(speculative_method="magic")
    with raises(ValueError, "speculative_method is 3"):
        SamplingParams(speculative_method=3)  # type: ignore[arg-type]
    asked = SamplingParams(speculative_method="dspark")
    with LLM(target, speculative_config=config_of(drafter), **ENGINE) as llm:
        with raises(
            ValueError,
            "speculative_method is 'dspark', which is not a method of this LLM; allowed: 'eagle3', "
            "'ngram', or None for all",
        ):
            llm.generate(PROMPTS[0], asked)
        with raises(
            ValueError,
            "speculative_method is 'dspark', which is not a method of this engine; allowed: "
            "'eagle3' or 'ngram', or leave it out for all",
        ):
            llm._executor.add_request([1, 2], speculative_method="dspark")
    with LLM(target, **ENGINE) as llm:
        with raises(ValueError, "speculative_method is 'dspark', but there is no drafter"):
            llm.generate(PROMPTS[0], asked)
        with raises(ValueError, "speculative_method is 'ngram', but there is no drafter; leave it"):
            llm._executor.add_request([1, 2], speculative_method="ngram")


def test_requests_to_the_server_choose_a_method(pair_of: Pair) -> None:
    target, drafter = pair_of("eagle3")
    body = {
        "prompt": PROMPTS[1], "max_tokens": 60, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    config = config_of(drafter)
    counted: Counter[str] = Counter()
    with LLM(target, speculative_config=config, **ENGINE) as llm, RunningServer(llm) as server:
        whole = server.result("/v1/completions", body)
        for method in ("ngram", "eagle3", None):
            given = {"method": method, "num_speculative_tokens": 3}
            answer = server.result("/v1/completions", body | {"speculative": given})
            assert answer["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
            drafted = answer["metrics"]["speculative_decoding"]
            assert drafted["num_spec_tokens"] == 3 and drafted["drafter"] == (method or "eagle3")
            assert set(drafted["drafters"]) <= {method or "ngram", method or "eagle3"}
            counted.update({key: of["num_draft_tokens"] for key, of in drafted["drafters"].items()})
        first = whole["metrics"]["speculative_decoding"]["drafters"]
        counted.update({key: of["num_draft_tokens"] for key, of in first.items()})
        status, answer = server.ask("/v1/completions", body | {"speculative": {"method": "mtp"}})
        assert status == 400 and answer["error"]["param"] == "speculative"
        assert "allowed: 'eagle3', 'ngram', or None for all" in answer["error"]["message"]
        with server.send("/metrics") as response:
            lines = response.read().decode().splitlines()
    name = "paceline_spec_decode_num_draft_tokens_per_drafter_total"
    found = {
        match[1]: int(float(match[2]))
        for line in lines
        if (match := re.match(rf'{name}{{.*drafter="(\w+)".*}} (\S+)', line))
    }
    assert found == counted and set(found) == {"eagle3", "ngram"}


def test_replicas_draft_by_the_chosen_method(pair_of: Pair) -> None:
    target, drafter = pair_of("eagle3")
    config = config_of(drafter)
    prompts, params = random_requests("eagle3", 12)
    arguments = {**ENGINE, "model": str(target), "speculative_config": config, "num_threads": 1}
    with LLM(target, speculative_config=config, **ENGINE) as llm:
        expected = llm.generate(prompts, params)
    replicas = start_replicas(2, arguments, log_level="WARNING")
    try:
        found = replicas.generate(prompts, params)
        with raises(ValueError, "allowed: 'eagle3', 'ngram', or None for all"):
            replicas.generate(prompts[0], SamplingParams(speculative_method="mtp"))
    finally:
        replicas.close()
    assert tokens(found) == tokens(expected)
    for one, same in zip(found, expected, strict=True):
        assert one.metrics.speculative_decoding == same.metrics.speculative_decoding


def test_the_methods_of_a_configuration() -> None:
    given: dict[str, Any] = {"model": "x", "num_speculative_tokens": 2}
    assert SpeculativeConfig(method="eagle3", **given).methods == ("eagle3",)
    both = SpeculativeConfig(method="eagle3", prompt_lookup_max=3, **given)
    assert both.methods == ("eagle3", "ngram")
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=2).methods == ("ngram",)
    assert SpeculativeConfig().methods == ()
