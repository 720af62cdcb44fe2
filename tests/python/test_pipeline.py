# SPDX-License-Identifier: Apache-2.0
"""One sampling pipeline for all rows, with and without a drafter, for all parameters.

A reference in numpy defines the effect of each parameter on the model's logits (docs/sampling.md).
Plain decoding must follow it, and speculative decoding must equal plain decoding.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paceline import LLM, CompletionOutput, RequestError, SamplingParams
from paceline.demo import demo_names, find_demo
from paceline.engine_sampling import engine_arguments

TEXTS = [
    "def read_lines(path):",
    "class Stack:\n    def push(self, item):\n        ",
    "import os\nimport sys\n\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\n",
]
SEED = 7

Logits = npt.NDArray[np.float32]


# ---- the reference -----------------------------------------------------------------------------


def adjusted(params: SamplingParams, logits: Logits, llm: LLM, ids: list[int], n: int) -> Logits:
    """Applies all parameters that come before the temperature, in the engine's precision.

    Args:
        params: The parameters.
        logits: The model's logits [vocab_size].
        llm: The LLM that runs the request.
        ids: Token ids of the prompt and the output so far.
        n: Number of tokens of the prompt.
    """
    arguments = engine_arguments(params, llm.target)
    result = logits.astype(np.float32)
    for token, bias in arguments.get("logit_bias", ()):
        result[token] += np.float32(bias)
    counts = Counter(ids[n:])
    repetition, frequency, presence = np.float32(
        [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    )
    for token in set(ids):
        old = result[token]
        result[token] = old / repetition if old > 0 else old * repetition
        if counts[token]:
            # Product and difference are rounded once.
            result[token] = np.float64(result[token]) - np.float64(frequency) * counts[token]
            result[token] -= presence
    if params.allowed_token_ids:
        excluded = np.ones(len(result), bool)
        excluded[list(params.allowed_token_ids)] = False
        result[excluded] = -np.inf
    for *before, last in arguments.get("bad_words", ()):
        if ids[len(ids) - len(before) :] == before:
            result[last] = -np.inf
    if len(ids) - n < params.min_tokens:
        result[arguments["stop_token_ids"]] = -np.inf
    return result


def weights(params: SamplingParams, logits: Logits) -> npt.NDArray[np.float64]:
    """Returns the softmax weights at the temperature; the most probable token has weight 1."""
    scaled = logits.astype(np.float64) / params.temperature
    return np.asarray(np.exp(scaled - scaled.max()))


def is_kept(params: SamplingParams, logits: Logits, *, slack: float = 0.0) -> npt.NDArray[np.bool_]:
    """Returns which tokens remain after top-k, top-p and min-p, in this order.

    With `slack`, tokens near the boundary remain too.
    """
    weight = weights(params, logits)
    kept = weight > 0
    if 0 < params.top_k < len(weight):
        kept &= weight >= np.sort(weight)[-params.top_k] * (1 - slack)
    order = np.argsort(-weight, kind="stable")
    share = np.where(kept, weight, 0)[order] / weight[kept].sum()
    needed = np.concatenate([[True], np.cumsum(share)[:-1] < params.top_p + slack])
    if params.top_p < 1:
        kept &= weight >= weight[order][needed].min()
    return np.asarray(kept & (weight >= params.min_p * (1 - slack)))


# ---- mixes of parameters -----------------------------------------------------------------------


def mixes(llm: LLM) -> dict[str, dict[str, Any]]:
    """Returns parameters by name, chosen from the model's own output so that each has an effect."""
    free = llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=32))[0].outputs[0]
    token_ids, text = free.token_ids, free.text
    other = llm.target.vocab_size // 2
    allowed = sorted({*token_ids, *range(other, other + other // 4)})
    single: dict[str, dict[str, Any]] = {
        "nothing": {},
        "top_k": {"top_k": 3},
        "top_p": {"top_p": 0.6},
        "min_p": {"min_p": 0.2},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "presence_penalty": {"presence_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": 0.8},
        "encouraged repetition": {
            "repetition_penalty": 0.9,
            "presence_penalty": -0.5,
            "frequency_penalty": -0.2,
        },
        "logit_bias": {"logit_bias": {token_ids[3]: -100, token_ids[5]: 4.5, other: 2}},
        "bad_words": {"bad_words": [token_ids[1:3], token_ids[6:9], text[20:23].strip() or "a"]},
        "allowed_token_ids": {"allowed_token_ids": allowed},
        "min_tokens": {"stop_token_ids": token_ids[2:6], "min_tokens": 20},
        "stop_token_ids": {"stop_token_ids": token_ids[9:11]},
        "stop": {"stop": [text[30:33], "no such text"]},
        "stop after min_tokens": {
            "stop": [text[8:10], "e", "\n"],
            "min_tokens": 9,
            "include_stop_str_in_output": True,
        },
    }
    everything = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {token_ids[3]: -2, other: 1},
        "bad_words": [token_ids[1:3], [token_ids[6]]],
        "allowed_token_ids": allowed,
        "stop_token_ids": token_ids[2:4],
        "min_tokens": 24,
        "stop": ["e", "\n\n", "n\n"],
    }
    return single | {"everything": everything}


def batch(llm: LLM, temperature: float, **changes: Any) -> tuple[list[str], list[SamplingParams]]:
    """Returns each mix twice, with different prompts."""
    texts, params = [], []
    for i, mix in enumerate(mixes(llm).values()):
        for j in range(2):
            texts.append(TEXTS[(i + j) % len(TEXTS)])
            given = {"temperature": temperature, "max_tokens": 48, "seed": SEED + i} | mix | changes
            params.append(SamplingParams(**given))
    return texts, params


def completions(llm: LLM, texts: Any, params: Any) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(texts, params)]


# ---- speculative decoding is plain decoding ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """A demo's target, with its drafter and without."""

    name: str
    speculative: LLM
    plain: LLM


@pytest.fixture(scope="module", params=demo_names())
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    demo = find_demo(request.param)
    config = demo.speculative_config()
    engine: dict[str, Any] = {"max_num_seqs": 8, "device": "cpu"}
    with (
        LLM(demo.target, speculative_config=config, **engine) as speculative,
        LLM.from_loaded(speculative.target, **engine) as plain,
    ):
        yield Pair(demo.name, speculative, plain)


@pytest.fixture(scope="module", params=["draft_model", "gemma4_mtp"])
def plain(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Each of the demos' two targets, without a drafter."""
    with LLM(find_demo(request.param).target, max_num_seqs=64, device="cpu") as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
def test_speculative_output_is_plain_output(pair: Pair, temperature: float) -> None:
    texts, params = batch(pair.plain, temperature)
    expected = completions(pair.plain, texts, params)
    outputs = pair.speculative.generate(texts, params)
    for output, plain, param in zip(outputs, expected, params, strict=True):
        assert output.outputs[0] == plain, param
        assert output.metrics.num_output_tokens == len(plain.token_ids)
        speculative = output.metrics.speculative_decoding
        assert speculative is not None
        assert sum(speculative["acceptance_histogram"]) == speculative["num_spec_steps"]
    # Drafts are still accepted, because they go through the same pipeline.
    totals = [output.metrics.speculative_decoding or {} for output in outputs]
    drafted = sum(total["num_draft_tokens"] for total in totals)
    accepted = sum(total["num_accepted_draft_tokens"] for total in totals)
    assert accepted > (0.02 if pair.name == "ngram" else 0.1) * drafted
    assert pair.speculative._executor.check_integrity() == ""


def test_every_mix_has_an_effect(plain: LLM) -> None:
    settings = [(0.0, 0), *((1.2, seed) for seed in range(6))]

    def written(mix: dict[str, Any]) -> list[CompletionOutput]:
        params = [SamplingParams(temperature=t, seed=s, max_tokens=48, **mix) for t, s in settings]
        return completions(plain, [TEXTS[0]] * len(params), params)

    by_name = mixes(plain)
    free = written(by_name.pop("nothing"))
    for name, mix in by_name.items():
        assert written(mix) != free, name


def test_a_request_is_the_same_alone(pair: Pair) -> None:
    texts, params = batch(pair.plain, 0.7)
    together = completions(pair.speculative, texts, params)
    for i in range(0, len(texts), 3):
        assert completions(pair.speculative, texts[i], params[i]) == [together[i]]


def test_stream_returns_what_generate_returns(pair: Pair) -> None:
    texts, params = batch(pair.plain, 0.7)
    expected = completions(pair.plain, texts, params)
    shown = [""] * len(texts)
    token_ids: list[list[int]] = [[] for _ in texts]
    for chunk in pair.speculative.stream(texts, params):
        shown[chunk.index] += chunk.text
        token_ids[chunk.index] += chunk.token_ids
        assert expected[chunk.index].text.startswith(shown[chunk.index])
        if chunk.output is not None:
            assert chunk.output.outputs[0] == expected[chunk.index]
    assert shown == [completion.text for completion in expected]
    assert token_ids == [completion.token_ids for completion in expected]


def test_stop_strings_truncate_the_output_of_plain_decoding(pair: Pair) -> None:
    given = {"temperature": 0.8, "max_tokens": 64, "seed": SEED}
    (free,) = completions(pair.plain, TEXTS[0], SamplingParams(**given))
    for start, length in ((3, 1), (20, 4), (41, 12)):
        stop = free.text[start : start + length]
        at = free.text.index(stop)
        for includes in (False, True):
            params = SamplingParams(**given, stop=[stop], include_stop_str_in_output=includes)
            (cut,) = completions(pair.speculative, TEXTS[0], params)
            assert cut.text == free.text[: at + (length if includes else 0)]
            assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    for _ in range(500):
        stats = pair.speculative._executor.stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            break
        time.sleep(0.01)  # iterations in flight
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert pair.speculative._executor.check_integrity() == ""


def test_the_same_in_other_engines(target_dir: Path, speculative_config: dict[str, Any]) -> None:
    with LLM(target_dir, max_num_seqs=32, device="cpu") as plain:
        texts, params = batch(plain, 0.8)
        expected = completions(plain, texts, params)
    for changes in (
        {"max_num_seqs": 1},
        {"prefill_chunk_size": 16, "max_num_seqs": 8},
        {"block_size": 32, "max_num_seqs": 5},
        # A pool for little more than one sequence: some are preempted and recomputed.
        {"max_num_seqs": 8, "kv_cache_bytes": 200 << 10, "max_model_len": 128, "block_size": 4},
    ):
        with LLM(target_dir, speculative_config=speculative_config, device="cpu", **changes) as llm:
            assert completions(llm, texts, params) == expected, changes
            if "kv_cache_bytes" in changes:
                assert llm._executor.stats()["num_preemptions"] > 0


# ---- plain decoding follows the reference ------------------------------------------------------


def steps(llm: LLM, text: str, completion: CompletionOutput) -> Iterator[tuple[Any, ...]]:
    """Yields each output token, its logits, and the tokens before it."""
    prompt = llm.generate(text, SamplingParams(max_tokens=1))[0].prompt_token_ids
    ids = prompt + completion.token_ids
    logits = llm.logits(ids)
    for position in range(len(prompt), len(ids)):
        yield ids[position], logits[position - 1], ids[:position], len(prompt)


def test_greedy_tokens_equal_the_reference(pair: Pair) -> None:
    texts, params = batch(pair.plain, 0.0, max_tokens=24)
    num_changed = 0
    for text, param, completion in zip(
        texts, params, completions(pair.speculative, texts, params), strict=True
    ):
        for token, logits, before, prompt_len in steps(pair.plain, text, completion):
            wanted = adjusted(param, logits, pair.plain, before, prompt_len)
            assert token == wanted.argmax(), param
            num_changed += token != logits.argmax()
    assert num_changed > 100


def test_sampled_tokens_are_among_those_of_the_reference(pair: Pair) -> None:
    texts, params = batch(pair.plain, 1.2, max_tokens=24)
    num_kept, num_steps = 0, 0
    for text, param, completion in zip(
        texts, params, completions(pair.speculative, texts, params), strict=True
    ):
        for token, logits, before, prompt_len in steps(pair.plain, text, completion):
            wanted = adjusted(param, logits, pair.plain, before, prompt_len)
            kept = is_kept(param, wanted, slack=1e-5)
            assert kept[token], param
            num_kept += int(kept.sum())
            num_steps += 1
    assert num_kept < 0.9 * num_steps * pair.plain.target.vocab_size


# Parameters from the most likely tokens of the demo's target; each changes the probabilities.
_SHAPES: dict[str, Callable[[Sequence[int]], dict[str, Any]]] = {
    "free": lambda best: {},
    "top_k": lambda best: {"top_k": 5},
    "top_p": lambda best: {"top_p": 0.7},
    "min_p": lambda best: {"min_p": 0.05},
    "chain": lambda best: {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
    "bias": lambda best: {"logit_bias": {best[0]: -1.5, best[5]: 1.0}, "top_k": 8},
    "bans": lambda best: {"bad_words": [[best[1]]], "allowed_token_ids": best[:12]},
    "repetition": lambda best: {"repetition_penalty": 1.3, "top_p": 0.8},
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_frequencies_follow_the_reference(plain: LLM, shape: str) -> None:
    num_draws = 2500
    prompt = plain.generate("x = ", SamplingParams(max_tokens=1))[0].prompt_token_ids
    logits = plain.logits(prompt)[-1]
    best = np.argsort(-logits)[:16].tolist()
    given = {"temperature": 1.1, "max_tokens": 1} | _SHAPES[shape](best)
    params = [SamplingParams(seed=seed, **given) for seed in range(num_draws)]
    drawn = Counter(
        completion.token_ids[0] for completion in completions(plain, [prompt] * num_draws, params)
    )
    wanted = adjusted(params[0], logits, plain, prompt, len(prompt))
    probability = np.where(is_kept(params[0], wanted), weights(params[0], wanted), 0)
    probability /= probability.sum()
    assert all(probability[token] > 0 for token in drawn)
    # Pearson's chi-squared statistic. Tokens expected fewer than five times form one class.
    expected = probability * num_draws
    is_common = expected >= 5
    observed = np.array([drawn[token] for token in range(len(expected))], float)
    statistic = (((observed - expected) ** 2) / np.where(is_common, expected, np.inf)).sum()
    num_classes = int(is_common.sum())
    rest = expected[~is_common].sum()
    if rest >= 5:
        statistic += (observed[~is_common].sum() - rest) ** 2 / rest
        num_classes += 1
    freedom = num_classes - 1
    assert freedom >= 1
    # Five standard deviations.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_every_output_respects_bad_words_and_allowed_ids(pair: Pair) -> None:
    texts, params = batch(pair.plain, 1.2, max_tokens=64)
    for text, param, completion in zip(
        texts, params, completions(pair.speculative, texts, params), strict=True
    ):
        arguments = engine_arguments(param, pair.speculative.target)
        ids = completion.token_ids
        if param.allowed_token_ids:
            assert set(ids) <= set(param.allowed_token_ids), text
        for word in arguments.get("bad_words", ()):
            assert all(ids[i : i + len(word)] != word for i in range(len(ids)))
        if completion.finish_reason == "stop":
            assert len(ids) > param.min_tokens
            assert not set(arguments["stop_token_ids"]).intersection(ids[: param.min_tokens])


def test_a_bad_word_that_begins_in_the_prompt_is_not_completed(pair: Pair) -> None:
    prompt = pair.plain.generate(TEXTS[0], SamplingParams(max_tokens=1))[0].prompt_token_ids
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    token = completions(pair.plain, prompt, greedy)[0].token_ids[0]
    params = dataclasses.replace(greedy, bad_words=[[*prompt[-2:], token]])
    assert completions(pair.speculative, prompt, params)[0].token_ids[0] != token


def test_a_request_without_possible_tokens_fails_alone(pair: Pair) -> None:
    # Two allowed tokens, neither of which may follow the other or itself.
    pairs = [[a, b] for a in (300, 301) for b in (300, 301)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(max_tokens=4, allowed_token_ids=[300, 301], bad_words=pairs),
    ]
    with pytest.raises(RequestError, match="prompt 1: ") as failed:
        pair.speculative.generate(TEXTS[:2], params)
    good, bad = failed.value.outputs
    assert good.error is None and len(good.outputs[0].token_ids) == 4
    assert len(bad.outputs[0].token_ids) == 1 and bad.outputs[0].finish_reason == "error"
