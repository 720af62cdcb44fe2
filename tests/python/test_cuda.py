# SPDX-License-Identifier: Apache-2.0
"""The whole way through Python on a GPU: loading, generating, scoring, reporting.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import sampling_jobs
import tiny_models
from cuda_engines import (
    DRIVERS,
    MAX_MODEL_LEN,
    PROMPTS,
    bfloat16_transformers,
    check_a_drafter_agrees_with_itself,
    check_all_accepted,
    check_bfloat16_checkpoints,
    check_float32_logits,
    check_logits_do_not_depend_on_chunks,
    generate,
    gpu,
    open_llm,
    plain_tokens,
    scoring_prompt,
    spec,
)
from paceline import LLM, OutOfMemoryError, SamplingParams, _core, cli
from paceline.demo import demo_names, find_demo
from paceline.loader import load_checkpoint, load_drafter, load_dummy
from paceline.loader.convert import convert

__all__ = ["bfloat16_transformers", "gpu"]  # fixtures

DEMO_PROMPTS = Path(__file__).parents[1] / "support" / "demo_prompts.json"


@pytest.fixture(scope="session")
def target() -> Path:
    """A tiny Gemma 3 in bfloat16: sliding and full layers."""
    return tiny_models.make(spec())


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: some of its drafts are accepted, some are not."""
    out = tmp_path_factory.mktemp("cuda-draft") / "draft"
    return tiny_models.perturbed_copy(target, out, noise=0.03, seed=1)


# ---- starting ----------------------------------------------------------------------------------


def test_auto_is_the_gpu(target: Path, caplog: pytest.LogCaptureFixture, gpu: Any) -> None:
    with (
        caplog.at_level("INFO", logger="paceline"),
        LLM(target, max_num_seqs=4, max_model_len=MAX_MODEL_LEN, show_progress=False) as llm,
    ):
        assert llm.target.model.device == "cuda" and llm.target.weight_dtype == "bfloat16"
        assert llm.capabilities()["configured"]["device"] == "cuda"
        assert "cuda" in llm.capabilities()["devices"] and "cuda" in repr(llm)
        report = json.loads(json.dumps(llm.memory_report()))
    assert report["device"] == "cuda" and report["graph_bytes"] >= 0
    assert 0 < report["kv_pool_bytes"] < gpu["total_bytes"]
    assert "enough for 4 sequences" in report["kv_cache_rule"]
    started, message = (record.getMessage() for record in caplog.records)
    assert started.startswith("The engine has started on cuda: 4 samples of up to 256 tokens")
    assert message.startswith("cuda memory in MiB: weights") and "graphs" in message


def test_captured_programs_are_counted(target: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load_checkpoint(target, device="cuda", progress=False).model
    options = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_bytes": 8 << 20}
    executor = _core.Executor(model, None, options, lambda *seen: calls.append(seen))
    executor.close()
    assert calls and calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_progress_raises_ends_the_start(target: Path, kind: type[BaseException]) -> None:
    def refuse(done: int, total: int) -> None:
        raise kind("enough")

    model = load_checkpoint(target, device="cuda", progress=False).model
    options = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_bytes": 8 << 20}
    for _ in range(3):
        with pytest.raises(kind, match="enough"):
            _core.Executor(model, None, options, refuse)
    executor = _core.Executor(model, None, options)
    assert executor.add_request([1, 2, 3], temperature=0.0, max_tokens=4) is not None
    assert executor.check_integrity() == ""
    executor.close()


def chosen_gpus() -> dict[str, Any]:
    """Options that choose two GPUs, each a rank, or the only one."""
    gpus = list(range(min(_core.cuda_status()["num_gpus"], 2)))
    return {"tensor_parallel_size": len(gpus), "devices": gpus}


@pytest.mark.parametrize("are_chosen", [False, True])
def test_drafters_change_while_requests_run(target: Path, draft: Path, are_chosen: bool) -> None:
    expected = plain_tokens(target, 1.0)
    fixed = {"x": {"adaptive": False}}
    model = {"model": str(draft), "num_speculative_tokens": 4, **fixed}
    lookup = {"method": "ngram", "num_speculative_tokens": 3, **fixed}
    with open_llm(target, draft, **(chosen_gpus() if are_chosen else {})) as llm:
        workspace = llm.memory_report()["workspace"]
        tensors = tiny_models.load_tensors(draft)
        found: list[list[list[int]]] = []
        is_over = threading.Event()

        def load() -> None:
            while not is_over.is_set() or not found:
                found.append(generate(llm, 1.0))

        requests = threading.Thread(target=load)
        requests.start()
        try:
            for config in (lookup, None, model) * 5:
                llm.set_drafter(config, show_progress=False)
                if config is model:
                    llm.update_drafter(tensors)
        finally:
            is_over.set()
            requests.join()
        assert found and all(tokens == expected for tokens in found)
        assert llm.memory_report()["workspace"] == workspace


def test_devices_are_not_mixed(target: Path, draft: Path) -> None:
    on_gpu = load_checkpoint(target, device="cuda", progress=False)
    on_cpu = load_checkpoint(draft, device="cpu", progress=False)
    config = {"model": str(draft), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"cuda.*cpu"):
        LLM.from_loaded(on_gpu, on_cpu, speculative_config=config, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(ValueError, match="device is 'cpu', but the target is on 'cuda'"):
        LLM.from_loaded(on_gpu, device="cpu")


def test_weights_are_those_of_the_cpu(target: Path, draft: Path, tmp_path: Path) -> None:
    def arena(device: str) -> bytes:
        return bytes(load_checkpoint(target, device=device, progress=False).model.arena())

    assert arena("cuda") == arena("cpu")
    folder = convert(target, tmp_path / "folder", draft, progress=False)
    loaded = _core.load_model_folder(str(folder), device="cuda")
    assert loaded.target.device == "cuda" and bytes(loaded.target.arena()) == arena("cpu")
    dummies = [bytes(load_dummy(target, device=d).model.arena()) for d in ("cpu", "cuda")]
    assert dummies[0] == dummies[1]
    # A GPU that is chosen has the same bytes, and each of several GPUs has all of a drafter.
    chosen = load_checkpoint(target, device="cuda", gpus=[0], progress=False).model
    assert chosen.gpus == (0,) and bytes(chosen.arena()) == arena("cpu")
    assert bytes(load_dummy(target, device="cuda", gpus=[0]).model.arena()) == dummies[0]
    gpus = chosen_gpus()["devices"]
    drafter = load_drafter(
        draft,
        load_checkpoint(target, device="cuda", gpus=gpus, progress=False),
        device="cuda",
        gpus=gpus,
        progress=False,
    ).model
    whole = bytes(load_checkpoint(draft, device="cpu", progress=False).model.arena())
    assert drafter.gpus == tuple(gpus) and bytes(drafter.arena()) == whole * len(gpus)


def test_a_model_drafts_for_itself_on_the_chosen_gpus(target: Path) -> None:
    gpus = chosen_gpus()
    model = load_checkpoint(target, device="cuda", gpus=gpus["devices"], progress=False)
    config = {"model": "itself", "num_speculative_tokens": 3, "x": {"adaptive": False}}
    with LLM.from_loaded(
        model, model, speculative_config=config, max_model_len=MAX_MODEL_LEN, show_progress=False,
        **gpus,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, seed=1, max_tokens=20))
        check_all_accepted(outputs)
        assert generate(llm, 1.0) == plain_tokens(target, 1.0)


def test_new_weights_reach_the_chosen_gpus(target: Path, draft: Path) -> None:
    with open_llm(target, **chosen_gpus()) as llm:
        assert generate(llm, 1.0) == plain_tokens(target, 1.0)
        llm.update_weights(tiny_models.load_tensors(draft))
        assert generate(llm, 1.0) == plain_tokens(draft, 1.0) != plain_tokens(target, 1.0)


def test_dummy_weights(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((target / "config.json").read_bytes())
    with open_llm(tmp_path, load_format="dummy") as llm:
        assert llm.target.weight_dtype == "bfloat16"
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=9))
        assert len(output.outputs[0].token_ids) == 9


# ---- generating --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_speculation_changes_no_token(
    target: Path, draft: Path, driver: str, k: int, temperature: float
) -> None:
    with open_llm(target, draft, k, x={"draft_driver": driver}) as llm:
        assert generate(llm, temperature) == plain_tokens(target, temperature)
        stats = llm._executor.stats()
        times = llm._executor.iteration_times()
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    assert stats["num_iterations"] > 0
    assert {len(values) for values in times.values()} == {stats["num_iterations"]}
    assert min(times["us"]) > 0


@pytest.mark.parametrize("driver", DRIVERS)
def test_experts_that_have_rows_are_counted(driver: str, tmp_path: Path) -> None:
    source = tiny_models.make(spec("gpt_oss"))
    path = tiny_models.with_fixed_routing(source, tmp_path / "fixed", [0, 3, 5, 6])
    with open_llm(path, path, 3, x={"draft_driver": driver}) as llm:
        generate(llm, 0.0)
        times, stats = llm._executor.iteration_times(), llm._executor.stats()
    num_iterations = stats["num_iterations"]
    # Two layers of the target, and of each of three draft passes where sequences draft.
    assert times["target_mixture_layers"] == [2] * num_iterations
    assert set(times["draft_mixture_layers"]) <= {0, 2, 2 * 3}
    for model in ("target", "draft"):
        layers, hit = times[f"{model}_mixture_layers"], times[f"{model}_experts_hit"]
        assert stats[f"num_{model}_mixture_layers"] == sum(layers)
        # A pass without rows hits none.
        assert stats[f"num_{model}_experts_hit"] == sum(hit) >= 4 * 2 * num_iterations // 2
        assert all(seen in range(0, 4 * ran + 1, 4) for seen, ran in zip(hit, layers, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_families(family: str, draft: Path) -> None:
    path = tiny_models.make(spec(family))
    with open_llm(path, draft, 3) as llm:
        assert generate(llm, 0.7) == plain_tokens(path, 0.7)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 13},
        {"prefill_chunk_size": 16},
        {"block_size": 32},
        {"max_num_batched_tokens": 64},
        # A pool for one sequence and hardly another: some are preempted.
        {"kv_cache_bytes": 3 << 20},
    ],
    ids=str,
)
def test_nothing_else_changes_a_token(target: Path, draft: Path, changes: dict[str, Any]) -> None:
    with open_llm(target, draft, **changes) as llm:
        assert generate(llm, 0.8) == plain_tokens(target, 0.8)


def logprob_params() -> list[SamplingParams]:
    """Parameters that change logits or leave them alone, with logprobs of every kind."""
    return [
        SamplingParams(
            temperature=0.8 * (i % 3),
            top_k=10 * (i % 2),
            repetition_penalty=1.0 + 0.1 * (i % 4),
            seed=100 + i,
            max_tokens=20 + 5 * (i % 5),
            logprobs=(None, 0, 1, 20)[i % 4],
            prompt_logprobs=(None, 5, 0)[i % 3],
        )
        for i in range(len(PROMPTS))
    ]


@functools.cache
def plain_logprobs(path: Path) -> list[Any]:
    """The reference: no drafter; checked against the model's logits."""
    import torch

    with open_llm(path) as llm:
        outputs = llm.generate(PROMPTS, logprob_params())
        for prompt, params, output in zip(PROMPTS, logprob_params(), outputs, strict=True):
            completion = output.outputs[0]
            ids = [*prompt, *completion.token_ids]
            logits = torch.from_numpy(llm.logits(ids)).double()
            expected = torch.log_softmax(logits, dim=-1)
            nothing: list[Any] = [None] * len(prompt)
            positions = [
                *(output.prompt_logprobs or nothing),
                *(completion.logprobs or [None] * len(completion.token_ids)),
            ]
            assert len(positions) == len(ids) and positions[0] is None
            assert (completion.logprobs is None) == (params.logprobs is None)
            assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
            for row, (token, position) in enumerate(zip(ids[1:], positions[1:], strict=True)):
                if position is None:
                    continue
                assert next(iter(position)) == token
                for other, entry in position.items():
                    assert entry.logprob == pytest.approx(expected[row, other].item(), abs=2e-6)
                    assert entry.rank == 1 + int((logits[row] > logits[row, other]).sum())
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("k", "changes"),
    [
        *((k, {"x": {"draft_driver": driver}}) for k in (1, 7) for driver in DRIVERS),
        (4, {"max_num_seqs": 13}),
        (4, {"prefill_chunk_size": 16}),
        (4, {"kv_cache_bytes": 3 << 20}),
    ],
    ids=str,
)
def test_logprobs_are_those_of_plain_decoding(
    target: Path, draft: Path, k: int, changes: dict[str, Any]
) -> None:
    with open_llm(target, draft, k, **changes) as llm:
        outputs = llm.generate(PROMPTS, logprob_params())
        assert llm._executor.check_integrity() == ""
    seen = [(output.outputs, output.prompt_logprobs) for output in outputs]
    assert seen == plain_logprobs(target)


@functools.cache
def demo_tokens(path: Path, temperature: float) -> list[list[int]]:
    """The reference for trained models: no drafter."""
    with LLM(path, device="cuda", max_num_seqs=8, show_progress=False) as llm:
        return [out.outputs[0].token_ids for out in llm.generate(*demo_requests(temperature))]


def demo_requests(temperature: float) -> tuple[list[str], list[SamplingParams]]:
    """Held-out code for trained models to continue."""
    texts = [entry["text"] for entry in json.loads(DEMO_PROMPTS.read_text())[:16]]
    return texts, [
        SamplingParams(temperature=temperature, seed=i, max_tokens=64) for i in range(len(texts))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", demo_names())
def test_trained_drafters_change_no_token(name: str, driver: str, temperature: float) -> None:
    demo = find_demo(name)
    config = demo.speculative_config() | {"x": {"draft_driver": driver, "adaptive": False}}
    with LLM(
        demo.target,
        speculative_config=config,
        device="cuda",
        max_num_seqs=8,
        show_progress=False,
    ) as llm:
        outputs = llm.generate(*demo_requests(temperature))
        stats = llm._executor.stats()
        assert llm._executor.check_integrity() == ""
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == demo_tokens(demo.target, temperature)
    least = 0.1 if name == "ngram" else 0.25
    assert stats["num_accepted_tokens"] > least * stats["num_draft_tokens"]


@pytest.mark.parametrize("batch", sampling_jobs.BATCHES)
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("drafter", sampling_jobs.DRAFTERS)
def test_sampling_parameters_change_no_token(drafter: str, k: int, batch: int) -> None:
    """200 prompts with different parameters; in the large batch at every temperature."""
    seen = sampling_jobs.check_cell(
        drafter, k, batch, device="cuda", seed=5, is_full=batch > 1, is_tight=k % 2 == 0
    )
    assert 0 < seen.accepted < seen.drafted


@pytest.mark.parametrize("name", demo_names())
def test_outputs_of_a_prompt_equal_separate_requests(name: str) -> None:
    demo = find_demo(name)
    texts, params = demo_requests(0.8)
    several = [dataclasses.replace(param, n=6) for param in params]
    engine: dict[str, Any] = {"device": "cuda", "max_num_seqs": 32, "show_progress": False}
    with LLM(demo.target, **engine) as llm:
        expected = [
            [
                llm.generate(text, dataclasses.replace(param, seed=(param.seed or 0) + i))[0]
                .outputs[0]
                .token_ids
                for i in range(6)
            ]
            for text, param in zip(texts[:4], params, strict=False)
        ]
    with LLM(demo.target, speculative_config=demo.speculative_config(), **engine) as llm:
        outputs = llm.generate(texts, several)
        stats = llm._executor.stats()
        assert llm._executor.check_integrity() == ""
    for output, tokens in zip(outputs, expected, strict=False):
        assert [completion.token_ids for completion in output.outputs] == tokens
        assert len({tuple(ids) for ids in tokens}) > 1
    most_shared = 5 * sum(len(output.prompt_token_ids) - 1 for output in outputs)
    assert most_shared / 2 < stats["num_shared_tokens"] <= most_shared


def test_repeated_runs_agree(target: Path) -> None:
    with open_llm(target) as llm:
        assert generate(llm, 0.8) == generate(llm, 0.8) == plain_tokens(target, 0.8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_drafter_agrees_with_itself(target: Path, driver: str, temperature: float) -> None:
    check_a_drafter_agrees_with_itself(target, driver, temperature)


def test_stopping_early_changes_no_token(target: Path, draft: Path) -> None:
    drafted = []
    for threshold in (0.0, 0.5, 0.99):
        nested = {"draft_driver": "while", "draft_stop_threshold": threshold}
        with open_llm(target, draft, x=nested) as llm:
            assert generate(llm, 0.8) == plain_tokens(target, 0.8)
            drafted.append(llm._executor.stats()["num_draft_tokens"])
    assert drafted[0] > drafted[1] > drafted[2] > 0


def test_cancelling_leaves_no_block_behind(target: Path, draft: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=150)
    with open_llm(target, draft) as llm:
        for _ in range(5):
            with llm.stream([[1] * 20] * 8, params) as stream:
                for _ in zip(range(10), stream, strict=False):
                    pass
        assert llm._executor.check_integrity() == ""
        assert generate(llm, 0.0) == plain_tokens(target, 0.0)


def test_float32_weights(draft: Path) -> None:
    """float32 runs on slow reference kernels, which keep the same promise."""
    path = tiny_models.make(spec(dtype="float32"))
    with open_llm(path) as llm:
        expected = generate(llm, 0.8)
    with open_llm(path, draft, 3, dtype="float32") as llm:
        assert generate(llm, 0.8) == expected


# ---- logits ------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_float32_logits_equal_transformers(family: str) -> None:
    path = tiny_models.make(spec(family, dtype="float32"))
    prompt = scoring_prompt(1)
    check_float32_logits(path, prompt, tiny_models.reference_logits(path, prompt))


@pytest.mark.golden
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(
    family: str, bfloat16_transformers: Any
) -> None:
    """Both are compared with float32 arithmetic on the same weights, over several checkpoints."""

    def checkpoint(seed: int) -> Path:
        return tiny_models.make(spec(family, seed=seed))

    check_bfloat16_checkpoints(family, checkpoint, bfloat16_transformers)


def test_logits_do_not_depend_on_chunks(target: Path) -> None:
    check_logits_do_not_depend_on_chunks(target, scoring_prompt(2))


# ---- command line ------------------------------------------------------------------------------


def test_generate_from_the_command_line(
    target: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"model": str(draft), "num_speculative_tokens": 3})
    argv = ["generate", "x = 1", "--model", str(target), "--speculative-config", config]
    assert cli.main([*argv, "--max-tokens", "24", "--compare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["configured"]["device"] == "cuda" and report["plain"]["is_same"] is True


def test_gpu_memory_utilization(target: Path, draft: Path, gpu: Any) -> None:
    share = 0.25
    parts = ("target_weight", "draft_weight", "kv_pool", "workspace", "graph")
    with open_llm(target, draft, 3, kv_cache_bytes=None, gpu_memory_utilization=share) as llm:
        report = llm.memory_report()
        assert sum(report[f"{part}_bytes"] for part in parts) <= share * gpu["total_bytes"]
        assert "gpu_memory_utilization is 0.25, which allows" in report["kv_cache_rule"]
        assert llm.generate("x", SamplingParams(max_tokens=2))[0].finished
    with pytest.raises(OutOfMemoryError, match=r"gpu_memory_utilization is 0\.001, .*; raise gpu_"):
        open_llm(target, draft, 3, kv_cache_bytes=None, gpu_memory_utilization=0.001)


def test_bench(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    speculative = {
        "model": str(target), "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.3,
    }  # fmt: skip
    argv = ["bench", "latency", "--config", str(target), "--device", "cuda"]
    argv += ["--speculative-config", json.dumps(speculative), "--drivers", "unrolled,replay,while"]
    argv += ["--concurrency", "1,4", "--input-len", "16", "--output-len", "32", "--rounds", "1"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["device"] == "cuda" and report["device_name"]
    assert report["read_bandwidth_gb_per_s"] > 100
    assert [row["configuration"] for row in report["rows"][:4]] == [
        "plain", "k=3 unrolled", "k=3 replay", "k=3 while",
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["iteration_ms"] > 0 and row["idle_us"] >= 0 and 0 < row["floor_share"] < 1
        assert row["floor_share"] <= row["additive_floor_share"] < 1
        # Every driver has NVML; a container may hide it.
        assert row["gpu"] is None or row["gpu"]["sm_clock_mhz"] > 100
    arriving = [*argv, "--request-rate", "50%", "--num-prompts", "8", "--drivers", "unrolled"]
    assert cli.main([*arriving, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["arrivals"]
    assert [(row["configuration"], row["completed"]) for row in rows] == [
        (name, 8) for name in ("plain", "k=3") * 2
    ]


def test_bench_pairs(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"
    argv = ["bench", "pairs", "--device", "cuda", "--concurrency", "1,4", "--input-len", "16"]
    argv += [word for name in "ab" for word in ("--config", f"{name}={target},{target}")]
    assert cli.main([*argv, "--output-len", "32", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["not_measured"] == [] and len(report["rows"]) == 2 * 2 * 2
    for row in report["rows"]:
        assert (row["completed"], row["total_output_tokens"]) == (8, 8 * 32)
        assert 0 < row["floor_share"] <= row["additive_floor_share"] < 1


def test_doctor(capsys: pytest.CaptureFixture[str], gpu: Any) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == ["cpu", "cuda"] and report["cuda"]["name"] == gpu["name"]
    runs = report["self_check"]["runs"]
    assert [run["device"] for run in runs] == ["cpu"] * 2 + ["cuda"] * 2
    assert {run["draft_acceptance_rate"] for run in runs} == {1.0}
