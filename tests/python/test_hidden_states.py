# SPDX-License-Identifier: Apache-2.0
"""Hidden states and logits of prompts: those of transformers, in any chunks, without a copy."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from paceline import LLM, SamplingParams
from tiny_models import TinySpec, make

FAMILIES = {
    "llama": TinySpec("llama", attention_bias=True),
    "qwen3": TinySpec("qwen3"),
    "gemma3": TinySpec("gemma3"),
    "gemma4": TinySpec("gemma4"),
    "glm4_moe_lite": TinySpec("glm4_moe_lite"),
    "qwen3_5": TinySpec("qwen3_5"),
    "qwen3_moe": TinySpec("qwen3_moe"),
    "gemma4_experts": TinySpec("gemma4", has_experts=True),
}
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 3, "max_model_len": 256, "kv_cache_bytes": 16 << 20,
    "show_progress": False,
}  # fmt: skip


def random_ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


@pytest.mark.golden
@pytest.mark.parametrize("family", FAMILIES)
def test_indices_and_values_are_those_of_transformers(family: str) -> None:
    path = make(FAMILIES[family])
    prompt = random_ids(45)
    with torch.no_grad():
        reference = tiny_models._reference_model(path)(
            torch.tensor([prompt]), output_hidden_states=True
        ).hidden_states
    with LLM(path, **ENGINE) as llm:
        layers = list(range(len(reference)))
        states = llm.hidden_states(prompt, layers)
        assert len(llm.target.config["layers"]) == len(reference) - 1
    assert states.shape == (len(layers), 45, 64) and states.dtype == np.float32
    for layer, expected in enumerate(reference):
        ours, theirs = states[layer], expected[0].numpy()
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4 * np.abs(theirs).max())


def test_chunks_and_neighbours_do_not_matter() -> None:
    path = make(FAMILIES["gemma3"])
    prompt = random_ids(201)
    layers = [0, 2, 1, -1, 2]
    whole = None
    for chunk, neighbours in ((None, 0), (64, 0), (7, 2), (1, 0)):
        with LLM(path, prefill_chunk_size=chunk, **ENGINE) as llm:
            # Requests that decode meanwhile share the iterations.
            with llm.stream(
                [random_ids(9, seed) for seed in range(neighbours)] or [[1]],
                SamplingParams(temperature=0.0, max_tokens=200),
            ):
                states = llm.hidden_states(prompt, layers)
            assert llm._executor.check_integrity() == ""
            if whole is None:
                whole = states
            assert states.tobytes() == whole.tobytes(), f"chunks of {chunk}"
            assert states[1].tobytes() == states[4].tobytes()
    assert whole is not None and not np.array_equal(whole[0], whole[1])


def test_a_drafter_changes_nothing(target_dir: Path, speculative_config: dict[str, Any]) -> None:
    prompt = random_ids(90)
    with LLM(target_dir, **ENGINE) as plain:
        states = plain.hidden_states(prompt, [1, -1])
        logits = plain.logits(prompt)
    with LLM(target_dir, speculative_config=speculative_config, **ENGINE) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        before = llm.generate(prompt, params)[0].outputs[0].token_ids
        assert llm.hidden_states(prompt, [1, -1]).tobytes() == states.tobytes()
        assert llm.logits(prompt).tobytes() == logits.tobytes()
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == before


def test_the_last_one_gives_the_logits() -> None:
    path = make(FAMILIES["llama"])
    prompt = random_ids(70)
    with LLM(path, **ENGINE) as llm:
        normed = llm.hidden_states(prompt, [-1])[0]
        logits = llm.logits(prompt)
    head = tiny_models.load_tensors(path)["lm_head.weight"].numpy()
    np.testing.assert_allclose(normed @ head.T, logits, rtol=1e-4, atol=1e-4)


def test_arrays_are_shared_and_outlive_the_llm() -> None:
    prompt = random_ids(33)
    with LLM(make(FAMILIES["qwen3"]), **ENGINE) as llm:
        states = llm.hidden_states(prompt, [0, -1], on_device=True)
        logits = llm.logits(prompt, on_device=True)
        expected = llm.hidden_states(prompt, [0, -1]), llm.logits(prompt)
        assert states.shape == (2, 33, 64) and logits.shape == (33, 128)
        assert (states.dtype, states.device) == ("float32", "cpu")
        assert states.__dlpack_device__() == (1, 0)
        tensor = torch.from_dlpack(states)
        array = np.from_dlpack(states)
        assert tensor.data_ptr() == array.ctypes.data == states.numpy().ctypes.data
        tensor[0, 0, 0] = 7.0  # not read-only: it belongs to the caller
        assert array[0, 0, 0] == 7.0
        tensor[0, 0, 0] = float(expected[0][0, 0, 0])
        from_logits = torch.from_dlpack(logits)
    del states, logits, llm
    gc.collect()
    np.testing.assert_array_equal(tensor.numpy(), expected[0])
    np.testing.assert_array_equal(array, expected[0])
    np.testing.assert_array_equal(from_logits.numpy(), expected[1])


def test_capsules_that_nobody_reads_free_their_memory() -> None:
    with LLM(make(FAMILIES["qwen3"]), **ENGINE) as llm:
        states = llm.hidden_states([1, 2, 3], [0], on_device=True)
        for version, name in ((None, b"dltensor"), ((1, 1), b"dltensor_versioned")):
            capsule = states.__dlpack__(max_version=version)
            is_valid = ctypes.pythonapi.PyCapsule_IsValid
            is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
            assert is_valid(capsule, name) == 1
            del capsule
        with pytest.raises(BufferError, match="copy is True; allowed: None or False"):
            states.__dlpack__(copy=True)
        with pytest.raises(BufferError, match=r"dl_device is \(2, 0\), but the array is on cpu"):
            states.__dlpack__(dl_device=(2, 0))
        del states
        # The memory is given back: 200 times 8 MiB would show.
        before = resident_bytes()
        prompt = random_ids(250)
        for _ in range(200):
            torch.from_dlpack(llm.hidden_states(prompt, [0] * 128, on_device=True))
        assert resident_bytes() - before < 400 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_threads_and_cancellation() -> None:
    with LLM(make(FAMILIES["gemma4"]), prefill_chunk_size=16, **ENGINE) as llm:
        prompts = [random_ids(60 + seed, seed) for seed in range(6)]
        expected = [llm.hidden_states(prompt, [0, 3, -1]) for prompt in prompts]
        found: list[Any] = [None] * len(prompts)

        def run(i: int) -> None:
            found[i] = llm.hidden_states(prompts[i], [0, 3, -1], on_device=bool(i % 2))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, states in enumerate(found):
            np.testing.assert_array_equal(np.from_dlpack(states), expected[i])
        assert llm._executor.check_integrity() == ""


def test_refused_layers(plain_llm: LLM) -> None:
    count = len(plain_llm.target.config["layers"])
    for layers in ([], "01", 1, None, {1}):
        with pytest.raises(ValueError, match=r"^layers is .*; allowed: a list of indices from 0"):
            plain_llm.hidden_states([1], layers)  # type: ignore[arg-type]
    for layer in (count + 1, -count - 2, 1.5, "1", True):
        with pytest.raises(ValueError, match=r"^layers\[1\] is "):
            plain_llm.hidden_states([1], [0, layer])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="on_device"):
        plain_llm.hidden_states([1], [0], on_device=1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="prompt"):
        plain_llm.hidden_states([], [0])
    from paceline import _core

    executor = plain_llm._executor
    for arguments, message in (
        ({"hidden_layers": [0, count + 1]}, r"hidden_layers\[1\] is 4; allowed: 0 \(embeddings\)"),
        ({"hidden_layers": [0], "num_samples": 2}, "a scored prompt has no samples"),
        ({"hidden_layers": [0], "logprobs": 1}, "score_prompt or hidden_layers emits nothing"),
        ({"keeps_logits_on_device": True}, "keeps_logits_on_device is true and score_prompt false"),
    ):
        with pytest.raises(ValueError, match=message):
            executor.add_requests([_core.Request([1, 2], **arguments)], [])
