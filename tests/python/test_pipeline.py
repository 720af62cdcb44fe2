# SPDX-License-Identifier: Apache-2.0
"""One sampling pipeline for every row: with a drafter and without, whatever the parameters.

A reference in numpy says what each parameter does to the model's logits (docs/sampling.md); plain
decoding has to follow it, and speculative decoding has to be plain decoding.
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
    """Logits after everything that comes before the temperature, in the engine's precision.

    Args:
        params: The parameters.
        logits: [vocab_size], of the model.
        llm: Where the request runs.
        ids: Prompt and output so far.
        n: How many of them are the prompt.
    """
    told = engine_arguments(params, llm.target)
    result = logits.astype(np.float32)
    for token, bias in told.get("logit_bias", ()):
        result[token] += np.float32(bias)
    counts = Counter(ids[n:])
    repetition, frequency, presence = np.float32(
        [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    )
    for token in set(ids):
        old = result[token]
        result[token] = old / repetition if old > 0 else old * repetition
        if counts[token]:
            # One rounding for product and difference.
            result[token] = np.float64(result[token]) - np.float64(frequency) * counts[token]
            result[token] -= presence
    if params.allowed_token_ids:
        ruled_out = np.ones(len(result), bool)
        ruled_out[list(params.allowed_token_ids)] = False
        result[ruled_out] = -np.inf
    for *before, last in told.get("bad_words", ()):
        if ids[len(ids) - len(before) :] == before:
            result[last] = -np.inf
    if len(ids) - n < params.min_tokens:
        result[told["stop_token_ids"]] = -np.inf
    return result


def weights(params: SamplingParams, logits: Logits) -> npt.NDArray[np.float64]:
    """Weights of the tokens at the temperature; the most probable one weighs 1."""
    scaled = logits.astype(np.float64) / params.temperature
    return np.asarray(np.exp(scaled - scaled.max()))


def is_kept(params: SamplingParams, logits: Logits, *, slack: float = 0.0) -> npt.NDArray[np.bool_]:
    """Tokens that top-k, then top-p, then min-p leave; with `slack`, also those near the border."""
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
    """Parameters by name; taken from what the model writes, so that they all matter."""
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
    """All mixes side by side, each for another text, then each for the next one."""
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
    """A demo's target with its drafter and alone."""

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
    """The demos' two targets."""
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
    # Drafts are still kept: they go through the same pipeline.
    totals = [output.metrics.speculative_decoding or {} for output in outputs]
    drafted = sum(total["num_draft_tokens"] for total in totals)
    accepted = sum(total["num_accepted_draft_tokens"] for total in totals)
    assert accepted > (0.02 if pair.name == "ngram" else 0.1) * drafted
    assert pair.speculative._executor.check_integrity() == ""


def test_every_mix_matters(plain: LLM) -> None:
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


def test_streaming_is_generating(pair: Pair) -> None:
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


def test_stop_strings_cut_what_plain_decoding_writes(pair: Pair) -> None:
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
        time.sleep(0.01)  # what was under way
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
        # Room for one sequence and hardly another: some are preempted, and computed again.
        {"max_num_seqs": 8, "kv_cache_bytes": 200 << 10, "max_model_len": 128, "block_size": 4},
    ):
        with LLM(target_dir, speculative_config=speculative_config, device="cpu", **changes) as llm:
            assert completions(llm, texts, params) == expected, changes
            if "kv_cache_bytes" in changes:
                assert llm._executor.stats()["num_preemptions"] > 0


# ---- plain decoding follows the reference ------------------------------------------------------


def steps(llm: LLM, text: str, completion: CompletionOutput) -> Iterator[tuple[Any, ...]]:
    """Each output token with the model's logits for it, and what was known before it."""
    prompt = llm.generate(text, SamplingParams(max_tokens=1))[0].prompt_token_ids
    ids = prompt + completion.token_ids
    logits = llm.logits(ids)
    for position in range(len(prompt), len(ids)):
        yield ids[position], logits[position - 1], ids[:position], len(prompt)


def test_greedy_tokens_are_the_reference_s(pair: Pair) -> None:
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


def test_drawn_tokens_are_among_those_the_reference_keeps(pair: Pair) -> None:
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


# Of what the demo's target finds likely after the first text; each changes the probabilities.
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
def test_frequencies_are_the_reference_s(plain: LLM, shape: str) -> None:
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
    # Pearson's statistic; what is expected less than five times is one class.
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


def test_bad_words_and_allowed_ids_hold_in_every_output(pair: Pair) -> None:
    texts, params = batch(pair.plain, 1.2, max_tokens=64)
    for text, param, completion in zip(
        texts, params, completions(pair.speculative, texts, params), strict=True
    ):
        told = engine_arguments(param, pair.speculative.target)
        ids = completion.token_ids
        if param.allowed_token_ids:
            assert set(ids) <= set(param.allowed_token_ids), text
        for word in told.get("bad_words", ()):
            assert all(ids[i : i + len(word)] != word for i in range(len(ids)))
        if completion.finish_reason == "stop":
            assert len(ids) > param.min_tokens
            assert not set(told["stop_token_ids"]).intersection(ids[: param.min_tokens])


def test_a_bad_word_that_the_prompt_has_begun_is_not_completed(pair: Pair) -> None:
    prompt = pair.plain.generate(TEXTS[0], SamplingParams(max_tokens=1))[0].prompt_token_ids
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    token = completions(pair.plain, prompt, greedy)[0].token_ids[0]
    params = dataclasses.replace(greedy, bad_words=[[*prompt[-2:], token]])
    assert completions(pair.speculative, prompt, params)[0].token_ids[0] != token


def test_what_leaves_no_token_fails_that_request_alone(pair: Pair) -> None:
    # Only two tokens, neither of which may follow the other or itself.
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
