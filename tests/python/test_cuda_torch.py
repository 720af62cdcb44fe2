# SPDX-License-Identifier: Apache-2.0
"""Tensors of the GPU: weights from them, updates in place, logits and hidden states left there.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1. The tensors are
those of `cuda_tensors`, and those of torch too where it has CUDA.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuda_engines import MAX_MODEL_LEN, PROMPTS, generate, gpu, open_llm, random_prompts, spec
from cuda_tensors import on_gpu
from dlpack_tensors import BF16, F8_E4M3, F16, F32, I64, U8, RawTensor
from paceline import LLM, BusyError, ModelFileError, SamplingParams, _core
from paceline.loader import (
    StateDict,
    decoder_config,
    load_checkpoint,
    load_dummy,
    load_pair,
    memory_config,
)
from tiny_models import load_tensors, make, perturbed_copy, read_json

__all__ = ["gpu"]  # the fixture that skips or fails
CODES = {
    torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int64: I64,
    torch.uint8: U8, torch.float8_e4m3fn: F8_E4M3,
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 64 << 20,
    "show_progress": False,
}  # fmt: skip


def to_gpu(tensors: dict[str, torch.Tensor], **changes: Any) -> dict[str, RawTensor]:
    return {name: raw(tensor, **changes) for name, tensor in tensors.items()}


def raw(tensor: torch.Tensor, **changes: Any) -> RawTensor:
    bits = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), tensor.dtype)
    return on_gpu(tensor.view(bits).numpy(), CODES[tensor.dtype], **changes)


def other(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: (t + 0.1 * t.float().abs().mean() * torch.randn(t.shape, generator=generator)).to(
            t.dtype
        )
        if t.is_floating_point()
        else t
        for name, t in tensors.items()
    }


def arena(config: dict[str, Any], tensors: dict[str, Any], device: str) -> memoryview:
    """The weights of a model in memory, as `LLM.from_state_dict` loads it."""
    memory = StateDict(memory_config(config, "config"), tensors, "state_dict")
    model = load_pair(memory, device=device, progress=False)[0].model
    assert model.device == device
    return model.arena()


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4"])
def test_weights_of_the_gpu_equal_the_folder(family: str, dtype: str) -> None:
    path = make(spec(family, dtype=dtype))
    config, tensors = read_json(path / "config.json"), load_tensors(path)
    expected = load_checkpoint(path, device="cuda", progress=False).model.arena()
    for given in (to_gpu(tensors), to_gpu(tensors, padding=3, version=None), tensors):
        assert arena(config, given, "cuda") == expected
    assert arena(config, to_gpu(tensors), "cpu") == expected


@pytest.mark.parametrize(
    ("family", "quantization", "exact_scales"),
    [
        ("gpt_oss", None, False),  # experts' matrices are transposed
        ("gpt_oss", "mxfp4", True),
        ("qwen3", "fp8_block", False),
        ("llama", "fp8_row", True),
        ("gemma3", "fp8_tensor", False),
    ],
)
def test_formats_on_the_gpu_equal_the_cpu(
    family: str, quantization: str | None, exact_scales: bool
) -> None:
    """In bfloat16, a GPU has matrices with scales in an order of its own.

    tests/cuda/packed_weights_test.cc compares that with the CPU.
    """
    path = make(replace(spec(family), quantization=quantization, exact_scales=exact_scales))
    config, tensors = read_json(path / "config.json"), load_tensors(path)

    def loaded(device: str, dtype: str) -> memoryview:
        return load_checkpoint(path, device=device, dtype=dtype, progress=False).model.arena()

    expected = loaded("cuda", "bfloat16")
    assert (expected == loaded("cpu", "bfloat16")) == (quantization is None)
    assert loaded("cuda", "float32") == loaded("cpu", "float32")
    for given in (to_gpu(tensors), to_gpu(tensors, padding=3, version=None), tensors):
        assert arena(config, given, "cuda") == expected
    assert arena(config, to_gpu(tensors), "cpu") == loaded("cpu", "bfloat16")
    for dtype in ("float32", "bfloat16"):
        dummies = [load_dummy(path, device=d, dtype=dtype).model.arena() for d in ("cpu", "cuda")]
        assert (dummies[0] == dummies[1]) == (quantization is None or dtype == "float32")
    if quantization is None:
        return
    scales = next(name for name in sorted(tensors, reverse=True) if "_scale" in name)
    tensors[scales] = tensors[scales].clone()
    tensors[scales].flatten()[-1] = 255 if quantization == "mxfp4" else float("inf")
    with pytest.raises(ModelFileError, match=rf"{scales}.*\] is (255|inf)"):
        arena(config, to_gpu(tensors), "cuda")


def test_streams_views_and_ownership() -> None:
    path = make(spec("llama", dtype="float32"))
    config, tensors = read_json(path / "config.json"), load_tensors(path)
    expected = load_checkpoint(path, device="cuda", progress=False).model.arena()

    def view(tensor: torch.Tensor) -> RawTensor:
        if tensor.ndim == 1:
            wide = np.zeros(3 * len(tensor), np.float32)
            wide[1::3] = tensor.numpy()
            return on_gpu(wide[1::3])
        padded = np.full((tensor.shape[1] + 3, tensor.shape[0] + 5), 9, np.float32)
        padded[2:-1, 4:-1] = tensor.numpy().T
        return on_gpu(padded[2:-1, 4:-1].T)

    for device in ("cuda", "cpu"):
        given = {name: view(tensor) for name, tensor in tensors.items()}
        assert arena(config, given, device) == expected
        streams = {stream for tensor in given.values() for stream in tensor.streams}
        assert len(streams) == 1 and isinstance(streams.pop(), int), "no stream was waited for"
        assert all(tensor.num_deleted == 1 for tensor in given.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_pattern_converts_as_on_the_host(stored: torch.dtype, dtype: str) -> None:
    """NaN, infinities, subnormals and ties included."""
    if stored == torch.float16 and dtype == "bfloat16":
        return  # refused; test_state_dict.py
    path = make(spec("llama", dtype="float32"))
    config = decoder_config(read_json(path / "config.json"), dtype)
    rng = np.random.default_rng(1)
    arenas = []
    patterns: dict[str, np.ndarray[Any, Any]] = {}
    for device in ("cpu", "cuda"):
        builder = _core.ModelBuilder(json.dumps(config), dtype, device)
        names = builder.missing()
        for name in names:
            if name not in patterns:
                patterns[name] = rng.integers(0, 2**32, 512 * 1024, dtype=np.uint32)
            shape = shape_of(config, name)
            count = int(np.prod(shape))
            bits = patterns[name][:count]
            if stored != torch.float32:
                array = bits.astype(np.uint16).reshape(shape)
            else:
                # Half of them near a tie of bfloat16.
                bits = np.where(bits & 1, bits, (bits & 0xFFFF0000) | 0x8000 | (bits & 2))
                array = bits.astype(np.uint32).reshape(shape)
            if device == "cuda":
                tensor = on_gpu(array, CODES[stored])
            else:
                tensor = RawTensor(array.ctypes.data, shape, dtype=CODES[stored], keep=array)
            builder.put_dlpack(name, _core.Tensor(tensor, name))
        arenas.append(bytes(builder.finish().arena()))
    assert arenas[0] == arenas[1]


def shape_of(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """The shape of a weight, from the message about a wrong one."""
    builder = _core.ModelBuilder(json.dumps(config), "float32", "cpu")
    with pytest.raises(ValueError) as caught:
        builder.put_array(name, np.zeros((1, 1, 1), np.float32))
    return tuple(json.loads(str(caught.value).split("allowed: ")[1]))


def test_tied_copies_on_the_gpu() -> None:
    path = make(spec("gemma3"))
    config, tensors = read_json(path / "config.json"), load_tensors(path)
    table = tensors["model.embed_tokens.weight"]
    given = {**to_gpu(tensors), "lm_head.weight": raw(table)}
    assert arena(config, given, "cuda") == arena(config, tensors, "cuda")
    changed = table.clone()
    changed[-1, -1] += 1
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from"):
        arena(config, {**given, "lm_head.weight": raw(changed)}, "cuda")


# ---- updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["unrolled", "while"])
def test_an_update_equals_a_new_llm(driver: str, tmp_path: Path) -> None:
    path = make(spec())
    draft = perturbed_copy(path, tmp_path / "draft", noise=0.03, seed=1)
    tensors, draft_tensors = other(load_tensors(path)), other(load_tensors(draft))
    config = {"num_speculative_tokens": 4, "x": {"draft_driver": driver}}
    with LLM.from_state_dict(
        read_json(path / "config.json"), tensors, draft_config=read_json(draft / "config.json"),
        draft_state_dict=draft_tensors, speculative_config=config, device="cuda", **ENGINE,
    ) as new:  # fmt: skip
        assert new.draft is not None
        arenas = new.target.model.arena(), new.draft.model.arena()
        expected = [generate(new, temperature) for temperature in (0.0, 0.8)]
    with open_llm(path, draft, x={"draft_driver": driver}) as llm:
        assert llm.draft is not None
        old = [generate(llm, temperature) for temperature in (0.0, 0.8)]
        assert old != expected
        for given, given_draft in (
            (to_gpu(tensors), to_gpu(draft_tensors)),
            (tensors, draft_tensors),
        ):
            llm.update_weights(given, draft_state_dict=given_draft)
            assert (llm.target.model.arena(), llm.draft.model.arena()) == arenas
            assert [generate(llm, temperature) for temperature in (0.0, 0.8)] == expected
            llm.update_weights(load_tensors(path), draft_state_dict=load_tensors(draft))
            assert [generate(llm, temperature) for temperature in (0.0, 0.8)] == old
        with (
            llm.stream(PROMPTS * 40, SamplingParams(max_tokens=150)) as stream,
            pytest.raises(BusyError, match="requests run or wait"),
        ):
            next(iter(stream))
            llm.update_weights(tensors)


# ---- hidden states and logits ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_stay_on_the_gpu(dtype: str) -> None:
    path = make(spec("gemma3", dtype=dtype))
    prompt = [token for part in random_prompts(5) for token in part][:200]
    layers = [0, 2, 1, -1, 2]
    whole = None
    for chunk in (None, 64, 7):
        with open_llm(path, prefill_chunk_size=chunk) as llm:
            states = llm.hidden_states(prompt, layers)
            array = llm.hidden_states(prompt, layers, on_device=True)
            logits = llm.logits(prompt)
            on_device = llm.logits(prompt, on_device=True)
            assert llm._executor.check_integrity() == ""
        assert whole is None or states.tobytes() == whole.tobytes(), f"chunks of {chunk}"
        whole = states
        # After the LLM is closed.
        for values, kept in ((states, array), (logits, on_device)):
            assert kept.__dlpack_device__() == (2, 0) and kept.shape == values.shape
            assert kept.device == "cuda" and kept.dtype == "float32"
            assert kept.numpy().tobytes() == values.tobytes()
            tensor = _core.Tensor(kept, "values")
            assert tensor.device == "cuda"
            assert tensor.read(0, values.size) == values.tobytes()
            if torch.cuda.is_available():
                ours = torch.from_dlpack(kept)
                assert ours.is_cuda and ours.cpu().numpy().tobytes() == values.tobytes()
    assert whole is not None
    with LLM(path, dtype="float32", device="cpu", **ENGINE) as llm:
        on_cpu = llm.hidden_states(prompt, layers)
    tolerance = 1e-4 if dtype == "float32" else 0.06
    for ours, theirs in zip(whole, on_cpu, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


def test_a_drafter_and_other_requests_change_nothing(tmp_path: Path) -> None:
    path = make(spec())
    draft = perturbed_copy(path, tmp_path / "draft", noise=0.03, seed=1)
    prompt = PROMPTS[0] * 2
    with open_llm(path) as plain:
        states = plain.hidden_states(prompt, [1, -1])
        expected = generate(plain, 0.0)
    with open_llm(path, draft) as llm:
        assert generate(llm, 0.0) == expected
        with llm.stream(PROMPTS[:6], SamplingParams(temperature=0.0, max_tokens=100)):
            assert llm.hidden_states(prompt, [1, -1]).tobytes() == states.tobytes()
        assert generate(llm, 0.0) == expected


def test_torch_tensors_of_a_side_stream() -> None:
    """torch's work on its current stream is waited for."""
    if not torch.cuda.is_available():
        return  # this build of torch has no CUDA; the driver's tensors above stand for it
    path = make(spec("llama", dtype="float32"))
    config, tensors = read_json(path / "config.json"), load_tensors(path)
    expected = load_checkpoint(path, device="cuda", progress=False).model.arena()
    on_device = {name: tensor.cuda() for name, tensor in tensors.items()}
    late = {name: torch.empty_like(tensor) for name, tensor in on_device.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for name, tensor in on_device.items():
            late[name].copy_(tensor)
        assert arena(config, late, "cuda") == expected
