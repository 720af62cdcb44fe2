# SPDX-License-Identifier: Apache-2.0
"""New weights in place: the output is that of a new LLM, and a refused update changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eagle_pair
from paceline import LLM, BusyError, ModelFileError, SamplingParams, _core
from paceline.loader import load_checkpoint, load_pair
from tiny_models import TinySpec, load_tensors, make, perturbed_copy, read_json

ENGINE: dict[str, Any] = {
    "max_num_seqs": 3, "max_model_len": 128, "kv_cache_bytes": 16 << 20, "show_progress": False,
}  # fmt: skip
PROMPTS = [[3, 14, 15, 92, 6], [5, 35, 89], [79, 32]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.8, seed=4, max_tokens=40, top_p=0.9),
    SamplingParams(temperature=0.0, max_tokens=40),
]
LLAMA = TinySpec("llama", attention_bias=True)


def run(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    """The tokens, and how many drafts were accepted."""
    outputs = llm.generate(PROMPTS, PARAMS)
    assert llm._executor.check_integrity() == ""
    metrics = [output.metrics.speculative_decoding for output in outputs]
    return [output.outputs[0].token_ids for output in outputs], metrics


def other(tensors: dict[str, torch.Tensor], seed: int = 9) -> dict[str, torch.Tensor]:
    """Other weights of the same form, far from the old ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.3 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", ["draft_model", "eagle", "eagle3", "gemma4_mtp", "dflash", "dspark", "ngram"]
)
def test_as_a_new_llm(
    kind: str,
    dtype: str,
    tmp_path: Path,
    pair_of: Callable[[str], tuple[Path, Path]],
) -> None:
    drafter: Path | None = None
    if kind == "ngram":
        path = make(eagle_pair.TARGET)
    else:
        path, drafter = pair_of(kind)
    config: dict[str, Any] = {"num_speculative_tokens": 3, "x": {"adaptive": False}}
    config |= {"method": "ngram"} if drafter is None else {"model": str(drafter)}
    tensors = other(load_tensors(path))
    given: dict[str, Any] = {}
    if drafter is not None:
        given["draft_config"] = read_json(drafter / "config.json")
        given["draft_state_dict"] = other(load_tensors(drafter))
        config.pop("model")
    with LLM.from_state_dict(
        read_json(path / "config.json"), tensors, speculative_config=config, dtype=dtype,
        device="cpu", **given, **ENGINE,
    ) as new:  # fmt: skip
        expected = run(new)
        arenas = [m.model.arena() for m in (new.target, new.draft) if m is not None]
    if drafter is not None:
        config["model"] = str(drafter)
    with LLM(path, speculative_config=config, dtype=dtype, device="cpu", **ENGINE) as llm:
        old = run(llm)
        assert old[0] != expected[0]
        llm.update_weights(tensors, draft_state_dict=given.get("draft_state_dict"))
        assert [m.model.arena() for m in (llm.target, llm.draft) if m is not None] == arenas
        assert run(llm) == expected
        # And back again; a drafter without new weights keeps its own.
        llm.update_weights(load_tensors(path))
        assert run(llm)[0] == old[0]


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec("gpt_oss", quantization="mxfp4", tied=False),
        TinySpec("gpt_oss", tied=False),  # experts' matrices are transposed
        TinySpec("qwen3", quantization="fp8_block", tied=False, hidden_size=160),
        TinySpec("llama", quantization="fp8_tensor", tied=False),
        TinySpec("qwen3_next", tied=False),  # weights are rows of tensors
    ],
    ids=["mxfp4", "experts", "fp8_block", "fp8_tensor", "parts"],
)
def test_experts_and_formats(spec: TinySpec) -> None:
    path, later = make(spec), make(replace(spec, seed=1))
    with LLM(later, device="cpu", **ENGINE) as new:
        expected, arena = run(new), new.target.model.arena()
    with LLM(path, device="cpu", **ENGINE) as llm:
        old = run(llm)
        assert old != expected
        llm.update_weights(load_tensors(later))
        assert llm.target.model.arena() == arena and run(llm) == expected
        bad = load_tensors(path)
        if spec.quantization == "mxfp4":
            bad["model.layers.1.mlp.experts.down_proj_scales"][3, 2, 1] = 255
            expect = pytest.raises(ModelFileError, match=r"down_proj_scales.*\[3, 2, 1\] is 255")
        elif spec.quantization is not None:
            scales = "weight_scale" + ("_inv" if spec.quantization == "fp8_block" else "")
            bad[f"model.layers.1.self_attn.o_proj.{scales}"].fill_(float("inf"))
            expect = pytest.raises(ModelFileError, match=r"o_proj\.weight_scale.* is inf")
        else:
            return
        with expect:
            llm.update_weights(bad)
        assert llm.target.model.arena() == arena


def test_dummy_weights_become_real() -> None:
    path = make(LLAMA)
    with LLM(path, device="cpu", **ENGINE) as new:
        expected = run(new)
    with LLM(path, load_format="dummy", dtype="float32", device="cpu", **ENGINE) as llm:
        assert llm.target.is_dummy and run(llm) != expected
        llm.update_weights(load_tensors(path))
        assert run(llm) == expected and not llm.target.is_dummy


def test_other_dtypes_and_views() -> None:
    path = make(LLAMA)
    tensors = load_tensors(path)
    for dtype in ("float32", "bfloat16"):
        with LLM(path, dtype=dtype, device="cpu", **ENGINE) as llm:
            before = llm.target.model.arena()
            llm.update_weights(other(tensors))
            assert llm.target.model.arena() != before
            # Strided, and parameters that require gradients.
            views = {name: t.t().contiguous().t() for name, t in tensors.items() if t.ndim == 2}
            mixed = {**tensors, **views}
            llm.update_weights({name: torch.nn.Parameter(t) for name, t in mixed.items()})
            assert llm.target.model.arena() == before
            assert llm.target.stored_dtypes == {"F32": 16}
    with (
        LLM(path, dtype="bfloat16", device="cpu", **ENGINE) as llm,
        pytest.raises(ValueError, match=r"of state_dict is stored as F16"),
    ):
        llm.update_weights({name: tensor.half() for name, tensor in tensors.items()})


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = {
    "missing": (lambda t: t.pop(NORM), ModelFileError, r"state_dict: 1 tensor is missing"),
    "unknown": (lambda t: t.update(x=torch.zeros(1)), ModelFileError, r"1 tensor is not part of"),
    "misshapen": (
        lambda t: t.update({NORM: torch.zeros(63)}), ModelFileError, r"has shape \[63\]",
    ),
    "no_tensor": (lambda t: t.update({NORM: 1.0}), ModelFileError, r"is 1.0 \(float\)"),
    "float64": (
        lambda t: t.update({NORM: torch.zeros(64).double()}), NotImplementedError, "as F64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_refused_update_changes_nothing(case: str, tmp_path: Path) -> None:
    edit, error, message = BAD[case]
    path = make(LLAMA)
    draft = perturbed_copy(path, tmp_path / "draft", noise=0.02)
    config = {"model": str(draft), "num_speculative_tokens": 2, "x": {"adaptive": False}}
    with LLM(path, speculative_config=config, device="cpu", **ENGINE) as llm:
        assert llm.draft is not None
        before = llm.target.model.arena(), llm.draft.model.arena()
        expected = run(llm)
        good, bad = other(load_tensors(path)), other(load_tensors(draft))
        edit(bad)
        with pytest.raises(error, match=message):
            llm.update_weights(bad)
        # The target's are fine, the drafter's are not.
        with pytest.raises(error, match=rf"(?s)draft_state_dict.*{message.split(': ')[-1]}"):
            llm.update_weights(good, draft_state_dict=bad)
        assert (llm.target.model.arena(), llm.draft.model.arena()) == before
        assert run(llm) == expected


def test_the_engine_refuses_before_it_writes() -> None:
    """What Python checks beforehand, the library checks again."""
    path = make(LLAMA)
    loaded = load_checkpoint(path, progress=False)
    before = loaded.model.arena()
    tensor = _core.Tensor(np.full(64, 3, np.float32), "ones")
    for tensors, message in (
        ([("final_norm.weight", tensor)], "are missing"),
        ([("final_norm.weight", tensor)] * 2, "is put twice"),
        ([("embed.weight", tensor)], "has shape"),
        ([("nothing", tensor)], "no weight is named"),
    ):
        with pytest.raises(ValueError, match=message):
            _core.update_models([(loaded.model, tensors)])
    assert loaded.model.arena() == before


def test_while_requests_run() -> None:
    path = make(LLAMA)
    new = other(load_tensors(path))
    engine = ENGINE | {"max_model_len": 1024}
    with LLM(path, device="cpu", **engine) as llm:
        expected = run(llm)
        before = llm.target.model.arena()
        # Seconds of work, of which the stream is not closed before the update is refused.
        with llm.stream(PROMPTS * 30, SamplingParams(temperature=0.0, max_tokens=1000)) as stream:
            next(iter(stream))
            with pytest.raises(BusyError, match=r"^update_weights: \d+ requests run or wait; no"):
                llm.update_weights(new)
        assert llm.target.model.arena() == before
        # The streams are closed, but their cancellation may be under way.
        llm._executor.check_integrity()
        assert run(llm) == expected
        llm.update_weights(new)
        assert run(llm) != expected


def test_requests_of_other_threads_wait() -> None:
    """Each of their outputs comes from one set of weights, never from a mixture."""
    path = make(LLAMA)
    sets = [load_tensors(path), other(load_tensors(path))]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    with LLM(path, device="cpu", **ENGINE) as llm:
        allowed = []
        for tensors in sets:
            llm.update_weights(tensors)
            allowed.append(llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids)
        assert allowed[0] != allowed[1]
        stops = threading.Event()
        seen: list[list[int]] = []

        def ask() -> None:
            while not stops.is_set():
                seen.append(llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids)
                stops.wait(0.001)

        thread = threading.Thread(target=ask)
        thread.start()
        num_updates = 0
        while num_updates < 10:
            try:
                llm.update_weights(sets[num_updates % 2])
                num_updates += 1
            except BusyError:
                continue
        stops.set()
        thread.join()
        assert seen and all(tokens in allowed for tokens in seen)
        assert llm._executor.check_integrity() == ""


def test_shared_and_closed() -> None:
    path = make(LLAMA)
    tensors = load_tensors(path)
    loaded, _ = load_pair(path, progress=False)
    before = loaded.model.arena()
    with LLM.from_loaded(loaded, **ENGINE) as llm:
        with (
            LLM.from_loaded(loaded, **ENGINE) as second,
            pytest.raises(ValueError, match=r"are shared by 2 engines; allowed: a model that one"),
        ):
            second.update_weights(other(tensors))
        assert loaded.model.arena() == before
        with pytest.raises(ValueError, match="the LLM has no drafter"):
            llm.update_weights(tensors, draft_state_dict=tensors)
        # Alone again.
        llm.update_weights(other(tensors))
        assert loaded.model.arena() != before
    with pytest.raises(RuntimeError, match="closed"):
        llm.update_weights(tensors)


def test_target_and_drafter_of_one_model() -> None:
    path = make(LLAMA)
    loaded, _ = load_pair(path, progress=False)
    config = {"method": "draft_model", "model": "itself", "num_speculative_tokens": 2}
    tensors = other(load_tensors(path))
    with LLM.from_loaded(loaded, loaded, speculative_config=config, **ENGINE) as llm:
        with pytest.raises(ValueError, match="are the same model"):
            llm.update_weights(tensors, draft_state_dict=tensors)
        llm.update_weights(tensors)
        tokens = run(llm)[0]
    with LLM.from_state_dict(read_json(path / "config.json"), tensors, **ENGINE) as new:
        assert run(new)[0] == tokens
