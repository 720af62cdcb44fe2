# SPDX-License-Identifier: Apache-2.0
"""LLM: generate, score and report; test_stream.py has streams."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from paceline import (
    LLM,
    ModelNotFoundError,
    RequestOutput,
    SamplingParams,
    _core,
)
from paceline.loader import load_checkpoint

K = 4  # num_speculative_tokens of the fixture
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS: list[Any] = ["def read(", [1, 2, 3], "x = 1\ny", [40] * 33]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---- generate ----------------------------------------------------------------------------------


def test_one_prompt_or_several(llm: LLM) -> None:
    many = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in many] == ["def read(", None, "x = 1\ny", None]
    assert [output.prompt_token_ids for output in many][1] == [1, 2, 3]
    for prompt, output in zip(PROMPTS, many, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs == output.outputs
        completion = output.outputs[0]
        assert len(completion.token_ids) == 24
        assert completion.finish_reason == "length"
        assert completion.logprobs is completion.cumulative_logprob is None
        assert output.prompt_logprobs is None
        assert completion.text


def test_arrays_are_token_ids(llm: LLM) -> None:
    expected = tokens_of(llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY))
    assert tokens_of(llm.generate(np.array([[1, 2, 3], [4, 5, 6]]), GREEDY)) == expected
    assert tokens_of(llm.generate(np.array([1, 2, 3]), GREEDY)) == expected[:1]
    assert tokens_of(llm.generate((1, 2, 3), GREEDY)) == expected[:1]


def test_tensors_are_token_ids(llm: LLM) -> None:
    import torch

    ids = torch.tensor([[5], [6]])
    assert tokens_of(llm.generate(ids, GREEDY)) == tokens_of(llm.generate([[5], [6]], GREEDY))
    assert tokens_of(llm.generate(ids[:, 0], GREEDY)) == tokens_of(llm.generate([5, 6], GREEDY))


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(ids) for ids in tokens_of(outputs)] == [1, 2, 3]


def test_default_parameters(llm: LLM) -> None:
    assert len(tokens_of(llm.generate("a"))[0]) == 16


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_speculative_output_is_plain_output(llm: LLM, plain_llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=11)
    assert tokens_of(llm.generate(PROMPTS, params)) == tokens_of(
        plain_llm.generate(PROMPTS, params)
    )


def test_output_does_not_depend_on_driver_blocks_or_chunks(
    llm: LLM, target_dir: Path, speculative_config: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=5)
    expected = tokens_of(llm.generate(PROMPTS, params))
    target = load_checkpoint(target_dir)
    draft = load_checkpoint(speculative_config["model"])
    for driver, block_size, chunk in (("replay", 8, None), ("eager", 32, 16)):
        config = speculative_config | {"x": {"draft_driver": driver}}
        with LLM.from_loaded(
            target,
            draft,
            speculative_config=config,
            block_size=block_size,
            prefill_chunk_size=chunk,
            max_num_seqs=3,
        ) as other:
            assert tokens_of(other.generate(PROMPTS, params)) == expected


def test_same_seed_same_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, seed=7)
    first, second = llm.generate(["a", "a"], params)
    assert first.outputs == second.outputs
    other = llm.generate("a", SamplingParams(max_tokens=24, seed=8))[0]
    assert other.outputs != first.outputs


def test_requests_without_a_seed_are_numbered(target_dir: Path) -> None:
    with LLM(target_dir, seed=5, max_num_seqs=2) as llm:
        with pytest.raises(ValueError):
            llm.generate(["a", []])  # uses up no numbers
        unseeded = llm.generate(["a", "a"], SamplingParams(max_tokens=24))
        unseeded += llm.generate("a", SamplingParams(max_tokens=24))
        seeded = [
            llm.generate("a", SamplingParams(max_tokens=24, seed=5 * 2**32 + n))[0]
            for n in range(3)
        ]
    assert tokens_of(unseeded) == tokens_of(seeded)


def test_stop_tokens_end_a_request(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3)
    free = llm.generate("a", params)[0].outputs[0]
    stop = free.token_ids[10]
    cut = free.token_ids.index(stop) + 1
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3, stop_token_ids=[stop])
    stopped = llm.generate("a", params)[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:cut]
    assert stopped.text == free.text[: cut - 1]  # this tokenizer has one token per character


def test_end_of_sequence_ends_a_request(target_dir: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3)
    with LLM(target_dir) as llm:
        free = llm.generate("a", params)[0].outputs[0]
    folder = tiny_models.copy_checkpoint(target_dir, tmp_path / "model")
    tiny_models.edit_config(folder, eos_token_id=free.token_ids[5])
    cut = free.token_ids.index(free.token_ids[5]) + 1
    with LLM(folder) as llm:
        ended = llm.generate("a", params)[0].outputs[0]
        params = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)
        ignored = llm.generate("a", params)[0].outputs[0]
    assert (ended.finish_reason, ended.token_ids) == ("stop", free.token_ids[:cut])
    assert ignored == free


def test_the_maximum_length_ends_a_request(
    target_dir: Path, speculative_config: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1000)
    with LLM(target_dir, speculative_config=speculative_config, max_model_len=40) as llm:
        outputs = llm.generate([[5] * 10, [5] * 39], params)
    assert [len(ids) for ids in tokens_of(outputs)] == [30, 1]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_progress_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    captured = capfd.readouterr()
    assert "2/2" in captured.err and captured.out == ""
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr() == ("", "")


# ---- metrics -----------------------------------------------------------------------------------


def test_metrics(llm: LLM, plain_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50)
    output = llm.generate([1, 2, 3], params)[0]
    metrics = output.metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (3, 50)
    assert metrics.time_to_first_token_ms is not None and metrics.generation_time_ms is not None
    assert metrics.total_time_ms == pytest.approx(
        metrics.time_to_first_token_ms + metrics.generation_time_ms
    )
    assert metrics.tokens_per_second is not None and metrics.mean_itl_ms is not None
    assert metrics.tokens_per_second == pytest.approx(1e3 / metrics.mean_itl_ms)
    speculative = metrics.speculative_decoding
    assert speculative is not None
    num_steps, num_accepted = (
        speculative["num_spec_steps"],
        speculative["num_accepted_draft_tokens"],
    )
    histogram = speculative["acceptance_histogram"]
    assert len(histogram) == K + 1 and sum(histogram) == num_steps
    assert sum(i * count for i, count in enumerate(histogram)) == num_accepted
    assert speculative["num_spec_tokens"] == K
    assert speculative["mean_acceptance_length"] == pytest.approx(1 + num_accepted / num_steps)
    assert speculative["draft_acceptance_rate"] == pytest.approx(
        num_accepted / speculative["num_draft_tokens"]
    )
    by_length = speculative["acceptance_histogram_by_draft_length"]
    assert all(len(row) == int(length) + 1 for length, row in by_length.items())
    assert sum(map(sum, by_length.values())) == num_steps
    assert len(speculative["acceptance_per_position"]) == K
    assert (
        0 < num_accepted < speculative["num_draft_tokens"]
    )  # the fixture's drafter is right only sometimes
    assert json.loads(json.dumps(metrics.to_dict()))["speculative_decoding"] == speculative
    plain = plain_llm.generate([1, 2, 3], params)[0]
    assert plain.metrics.speculative_decoding is None
    assert "speculative_decoding" not in plain.metrics.to_dict()


def test_a_request_with_one_token_has_no_rates(llm: LLM) -> None:
    metrics = llm.generate("a", SamplingParams(max_tokens=1))[0].metrics
    assert metrics.tokens_per_second is None and metrics.mean_itl_ms is None
    assert metrics.speculative_decoding is not None
    assert metrics.speculative_decoding["num_spec_steps"] == 0
    assert metrics.speculative_decoding["mean_acceptance_length"] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_is_its_own_drafter_accepts_every_draft(
    target_dir: Path, temperature: float
) -> None:
    config = {
        "model": str(target_dir),
        "num_speculative_tokens": 5,
        "x": {"adaptive": False},
    }
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=1)
    with LLM(target_dir, speculative_config=config) as llm:
        speculative = llm.generate("a", params)[0].metrics.speculative_decoding
    assert speculative is not None
    assert speculative["draft_acceptance_rate"] == 1.0
    assert set(speculative["acceptance_per_position"]) == {1.0}


# ---- with torch ----------------------------------------------------------------------------------


def test_torch_in_the_same_process(llm: LLM) -> None:
    import torch

    params = SamplingParams(temperature=1.0, max_tokens=60, seed=4)
    expected = tokens_of(llm.generate(PROMPTS, params))
    num_threads = torch.get_num_threads()
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    product = matrix @ matrix
    stop = threading.Event()
    wrong: list[int] = []

    def multiply() -> None:
        while not stop.is_set():
            if not torch.equal(matrix @ matrix, product):
                wrong.append(1)

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        for _ in range(3):
            assert tokens_of(llm.generate(PROMPTS, params)) == expected
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert torch.get_num_threads() == num_threads


# ---- logits and reports ------------------------------------------------------------------------


def test_logits_agree_with_greedy_decoding(llm: LLM) -> None:
    prompt = llm.generate("x = ", GREEDY)[0].prompt_token_ids
    token_ids = tokens_of(llm.generate(prompt, GREEDY))[0]
    logits = llm.logits(prompt + token_ids)
    assert logits.dtype == np.float32
    assert logits.shape == (len(prompt) + len(token_ids), llm.target.vocab_size)
    assert logits.flags.writeable
    assert logits[len(prompt) - 1 : -1].argmax(axis=1).tolist() == token_ids


def test_logits_take_a_prompt_of_the_maximum_length(target_dir: Path) -> None:
    with LLM(target_dir, max_model_len=32) as llm:
        assert llm.logits([3] * 32).shape[0] == 32
        with pytest.raises(ValueError, match="33 tokens; allowed: at most 32"):
            llm.logits([3] * 33)


def test_reports_are_plain_data(llm: LLM) -> None:
    report = json.loads(json.dumps(llm.memory_report()))
    assert report["kv_pool_bytes"] > 0
    assert (report["device"], report["graph_bytes"]) == ("cpu", 0)
    for group in report["groups"]:
        tokens = group["max_bytes"] / group["block_bytes"] * group["block_size"]
        window = group["window"]
        assert tokens == 8 * (-(-(window + 16) // 16) * 16 if window else llm.max_model_len)
    assert "8 sequences of 2048 tokens" in report["kv_cache_rule"]
    kinds = [(group["owner"], group["kind"]) for group in report["groups"]]
    assert kinds == [
        ("target", "sliding"),
        ("target", "full"),
        ("draft", "sliding"),
        ("draft", "full"),
    ]
    abilities = json.loads(json.dumps(llm.capabilities()))
    assert abilities["draft_sample_methods"] == ["probabilistic", "greedy"]
    assert abilities["max_draft_proposals"] == 256
    with_a_model = ["draft_model", "eagle", "eagle3", "mtp", "gemma4_mtp", "dflash"]
    with_a_model += ["dflash2", "dspark"]
    assert abilities["methods"] == [*with_a_model, "ngram", "custom"]
    assert abilities["later_methods"] == ["suffix"]
    assert abilities["draft_positions"] == ["last", "next"]
    assert abilities["draft_feedbacks"] == ["normed", "raw"]
    assert abilities["max_num_speculative_tokens"] == 16
    assert abilities["configured"]["num_speculative_tokens"] == K
    assert "Gemma3ForCausalLM" in abilities["architectures"]
    assert abilities["configured"]["device"] == "cpu" and "cpu" in abilities["devices"]
    assert abilities["draft_drivers"] == ["unrolled", "replay", "while", "eager"]
    assert "k=4" in repr(llm) and "Gemma3ForCausalLM" in repr(llm)


def test_the_use_of_memory_is_logged(target_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline"), LLM(target_dir, max_num_seqs=2):
        pass
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [message for message in messages if "memory in MiB" in message]
    for part in ("cpu memory in MiB: weights", "KV pool", "target sliding 8 x 2: up to",
                 "target full x 1: up to", "workspace", "graphs 0.0"):  # fmt: skip
        assert part in message


def test_an_engine_runs_on_the_device_of_its_models(target_dir: Path) -> None:
    loaded = load_checkpoint(target_dir)
    with LLM.from_loaded(loaded, device="cpu", max_num_seqs=1) as llm:
        assert llm.capabilities()["configured"]["device"] == "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "cuda_status", lambda: {"is_usable": True})
        with pytest.raises(ValueError, match="device is 'cuda', but the target is on 'cpu'"):
            LLM.from_loaded(loaded, device="cuda")


# ---- dummy weights -----------------------------------------------------------------------------


def test_dummy_weights_need_only_a_configuration(target_dir: Path, tmp_path: Path) -> None:
    shutil.copy(target_dir / "config.json", tmp_path)
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        LLM(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(target_dir / "config.json", other)
    tiny_models.edit_config(other, vocab_size=120, dtype="bfloat16")
    outputs = []
    config = {"model": str(other), "num_speculative_tokens": 2}
    for speculative_config in (None, config):
        with LLM(
            tmp_path, load_format="dummy", speculative_config=speculative_config, max_num_seqs=2
        ) as llm:
            assert llm.target.is_dummy and llm.target.weight_dtype == "float32"
            outputs.append(tokens_of(llm.generate([[1, 2, 3]], GREEDY)))
            with pytest.raises(ValueError, match=r"is a string.*no tokenizer.json.*token ids"):
                llm.generate("text")
    assert outputs[0] == outputs[1] and len(outputs[0][0]) == 24
    assert llm.draft is not None and llm.draft.weight_dtype == "bfloat16"


def test_dummy_weights_keep_the_tokenizer(target_dir: Path) -> None:
    with LLM(target_dir, load_format="dummy", dtype="bfloat16", max_num_seqs=1) as llm:
        assert llm.target.weight_dtype == "bfloat16"
        assert len(llm.generate("text", GREEDY)[0].outputs[0].token_ids) == 24


def test_load_formats_are_listed(target_dir: Path) -> None:
    with pytest.raises(ValueError, match="load_format is 'gguf'; allowed: 'auto', 'dummy'"):
        LLM(target_dir, load_format="gguf")
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        LLM(target_dir / "nonesuch", load_format="dummy")


# ---- drafting that stops early -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stopping_early_changes_no_token(
    target_dir: Path,
    plain_llm: LLM,
    speculative_config: dict[str, Any],
    temperature: float,
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=5)
    expected = tokens_of(plain_llm.generate(PROMPTS, params))
    drafted = {}
    for threshold in (0.0, 0.5, 0.99):
        nested = {
            "draft_driver": "while",
            "draft_stop_threshold": threshold,
            "adaptive": False,
        }
        config = speculative_config | {"x": nested}
        with LLM(target_dir, speculative_config=config, max_num_seqs=8) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert tokens_of(outputs) == expected
        counters = [output.metrics.speculative_decoding for output in outputs]
        assert all(counter is not None for counter in counters)
        drafted[threshold] = sum(c["num_draft_tokens"] for c in counters if c) / sum(
            c["num_spec_steps"] for c in counters if c
        )
    # At least one draft is verified in each iteration, except near the length limit.
    assert 0.8 < drafted[0.99] < drafted[0.5] < drafted[0.0] <= K


def test_a_given_pool_is_not_resized(target_dir: Path) -> None:
    with LLM(target_dir, kv_cache_bytes=5 << 20) as llm:
        report = llm.memory_report()
        assert report["kv_cache_rule"] == "as given"
        assert report["kv_pool_bytes"] <= 5 << 20


def test_the_default_pool_holds_all_sequences(target_dir: Path) -> None:
    with LLM(target_dir, max_num_seqs=4, max_model_len=256) as llm:
        llm.generate([[7] * 128] * 4, SamplingParams(temperature=0.0, max_tokens=128))
        assert llm._executor.stats()["num_preemptions"] == 0


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("limits", [{}, {"prefill_chunk_size": 700}])
def test_the_default_pool_holds_the_longest_prompt_with_windows(
    max_num_seqs: int, limits: dict[str, int]
) -> None:
    spec = tiny_models.TinySpec(
        family="gemma3", num_layers=6, window=512, max_position=16384, head_dim=64, vocab_size=64,
        hidden_size=32, intermediate_size=32,
    )  # fmt: skip
    path = tiny_models.make(spec)
    with LLM(path, max_num_seqs=max_num_seqs, max_model_len=16384, **limits) as llm:
        assert f"enough for {max_num_seqs} sequences" in llm.memory_report()["kv_cache_rule"]
        stream = llm.stream(
            [[1] * 16383], SamplingParams(max_tokens=1)
        )  # refused if it does not fit
        stream.close()
