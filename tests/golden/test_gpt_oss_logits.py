# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS and weights of fewer bits against transformers, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logits_golden import (
    PROMPT_TOKENS,
    assert_close,
    check_that_a_tensor_shows,
    check_that_it_shows,
    logits_of,
    prompt_of,
)
from paceline import LLM, SamplingParams
from tiny_models import (
    FULL,
    SLIDING,
    TinySpec,
    copy_checkpoint,
    describe,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    plain_copy,
    reference_logits,
    save_tensors,
)

pytestmark = pytest.mark.golden

GPT_OSS = TinySpec("gpt_oss")
HEADS = ((4, 4, 16), (4, 2, 32), (8, 1, 64))  # query heads, kv heads, head size

SPECS = [
    *(
        replace(GPT_OSS, seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for seed, (heads, kv_heads, head_dim) in enumerate(HEADS)
    ),
    # One expert a token, all of them, and numbers that are no powers of two.
    replace(GPT_OSS, seed=3, top_k=1),
    replace(GPT_OSS, seed=4, top_k=8),
    replace(GPT_OSS, seed=5, num_experts=11, top_k=3, hidden_size=72, intermediate_size=88),
    # Windows, and the other order of layers.
    *(replace(GPT_OSS, seed=6, window=window) for window in (1, PROMPT_TOKENS, 128)),
    replace(GPT_OSS, seed=7, layer_types=(FULL, SLIDING, SLIDING, FULL)),
    # The published limit, which no value of so small a model exceeds; and one that most do.
    replace(GPT_OSS, seed=8, swiglu_limit=7.0),
    replace(GPT_OSS, seed=8, swiglu_limit=0.5),
    replace(GPT_OSS, seed=9, old_spelling=True, shards=3, vocab_size=131),
    *(replace(GPT_OSS, seed=10, dtype=dtype) for dtype in ("float16", "bfloat16")),
    replace(GPT_OSS, seed=11, quantization="mxfp4", num_layers=4),
]


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_logits_equal_transformers(spec: TinySpec) -> None:
    # The longest window ends within the prompt, too.
    length = 150 if spec.window == 128 else PROMPT_TOKENS
    path, prompt = make(spec), prompt_of(spec, length)
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_every_way_to_a_position_gives_its_bits(quantization: str | None) -> None:
    """Prefill at once, in chunks, and decoding; a window of 128 that the sequence outgrows."""
    spec = replace(GPT_OSS, seed=12, window=128, quantization=quantization)
    path, prompt = make(spec), prompt_of(spec, 120)
    whole = logits_of(path, prompt)
    for chunk in (1, 50):
        np.testing.assert_array_equal(logits_of(path, prompt, prefill_chunk_size=chunk), whole)
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3)
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=2, show_progress=False) as llm:
        (output,) = llm.generate([prompt], params)[0].outputs
        logits = llm.logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
    assert output.token_ids == list(logits.argmax(1))
    expected = torch.tensor(logits).double().log_softmax(1)
    assert output.logprobs is not None
    for row, entries in zip(expected, output.logprobs, strict=True):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)


# ---- one wrong fact at a time ------------------------------------------------------------------


def _apply_yarn_factor_once(config: dict[str, Any]) -> None:
    """As if only q, or only k, were multiplied by it: scores gain it once."""
    for rope in config["ropes"]:
        assert rope["scale"] > 1.3
        rope["scale"] **= 0.5


def _keep_frequencies(config: dict[str, Any]) -> None:
    for rope in config["ropes"]:
        count = len(rope["inv_freq"])
        rope["inv_freq"] = [150_000.0 ** (-i / count) for i in range(count)]


def _set_mlp(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            layer["mlp"] |= changes

    return change


def _widen_windows(config: dict[str, Any]) -> None:
    for layer in config["layers"]:
        layer["attention"]["window"] += layer["attention"]["kind"] == "sliding"


WRONG_FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "yarn factor once": _apply_yarn_factor_once,
    "frequencies without yarn": _keep_frequencies,
    "gate and up apart": _set_mlp(interleaved=False),
    "alpha": _set_mlp(alpha=1.0),
    "limit": _set_mlp(limit=2.5),
    "one expert less": _set_mlp(top_k=3),
    "window + 1": _widen_windows,
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_it_shows(replace(GPT_OSS, seed=1), WRONG_FACTS[fact], monkeypatch)


WRONG_TENSORS: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "sinks scaled": lambda name, t: t / 4 if name.endswith("sinks") else t,
    "experts permuted": lambda name, t: t.flip(0) if "experts.down_proj" in name else t,
    "router bias": lambda name, t: t * 0 if name.endswith("router.bias") else t,
    "up bias": lambda name, t: t * 0 if name.endswith("experts.gate_up_proj_bias") else t,
}


@pytest.mark.parametrize("fact", WRONG_TENSORS)
def test_a_wrong_tensor_shows(fact: str, tmp_path: Path) -> None:
    spec = replace(GPT_OSS, seed=1)
    path, prompt = make(spec), prompt_of(spec)
    check_that_a_tensor_shows(
        path, prompt, reference_logits(path, prompt), WRONG_TENSORS[fact], tmp_path
    )


# ---- weights of fewer bits ---------------------------------------------------------------------


def test_mxfp4_is_decoded_as_transformers_decodes_it(tmp_path: Path) -> None:
    """All bytes and many scales; the values of transformers, stored plainly, give the same bits."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    spec = replace(GPT_OSS, seed=13, quantization="mxfp4", hidden_size=96, intermediate_size=160)
    path = copy_checkpoint(make(spec), tmp_path / "mxfp4")
    generator = torch.Generator().manual_seed(0)

    def randomise(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("_blocks"):
                tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator))
                assert tensor.unique().numel() == 256
            elif name.endswith("_scales"):
                tensor.copy_(torch.randint(108, 126, tensor.shape, generator=generator))

    edit_tensors(path, randomise)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    plain = copy_checkpoint(path, tmp_path / "plain")
    edit_config(plain, quantization_config=...)
    save_tensors(plain, {name: t.float() for name, t in model.state_dict().items()})
    prompt = prompt_of(spec)
    seen = logits_of(path, prompt)
    np.testing.assert_array_equal(seen, logits_of(plain, prompt))
    assert_close(seen, reference_logits(plain, prompt))


# q, k and v, or gate and up, begin within a block of 128 rows; the last block is cut.
FP8 = TinySpec(
    "llama", seed=14, hidden_size=192, intermediate_size=224, heads=6, kv_heads=2, head_dim=32
)
FP8_SPECS = [
    replace(spec, quantization=method, exact_scales=is_exact)
    for spec in (FP8, replace(FP8, family="qwen3"), replace(FP8, family="gemma3"))
    for method in ("fp8_block", "fp8_row", "fp8_tensor")
    for is_exact in (False, True)
]


@pytest.mark.parametrize("spec", FP8_SPECS, ids=describe)
def test_fp8_equals_dequantised_values(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec)
    seen = logits_of(path, prompt)
    assert_close(seen, reference_logits(path, prompt))
    if spec.exact_scales:  # multiplication by them rounds nothing
        np.testing.assert_array_equal(seen, logits_of(plain_copy(path), prompt))


def test_fp8_values_are_those_of_transformers() -> None:
    """The reference dequantises as transformers does, whose loader needs more packages."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    spec = replace(FP8, quantization="fp8_block", hidden_size=256, intermediate_size=384)
    spec = replace(spec, heads=8, head_dim=64)
    path = make(replace(spec, kv_heads=2))
    stored, plain = load_tensors(path), load_tensors(plain_copy(path))
    dequantize = Fp8Dequantize(hf_quantizer=None)._dequantize_one
    matrices = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(matrices) == 2 * 7
    for name in matrices:
        values = dequantize(stored[name], stored[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(values, plain[name]), name
