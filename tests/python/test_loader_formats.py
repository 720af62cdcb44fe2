# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with matrices of fewer bits: mxfp4 and fp8."""

from __future__ import annotations

import pytest

from quantized_models import METHODS, dequantize, from_fp8, from_mxfp4, to_fp8, to_mxfp4
from tiny_models import TinySpec, load_tensors, make

# ---- the tools of these tests -------------------------------------------------------------------


def test_mxfp4_of_the_tests_is_that_of_transformers() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 5, 2), dtype=torch.uint8, generator=generator)
    values = from_mxfp4(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(values.transpose(1, 2), expected)
    assert torch.equal(values, values.bfloat16().float()), "values are exact in bfloat16"
    # Values that mxfp4 holds stay as they are.
    again = from_mxfp4(*to_mxfp4(values))
    assert torch.equal(again, values)


def test_fp8_blocks_of_the_tests_are_those_of_transformers() -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 384, generator=generator)
    weight, scales = to_fp8(matrix, "fp8_block")
    assert scales.shape == (2, 3)
    assert scales.unique().numel() == 6
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales)
    assert torch.equal(from_fp8(weight, scales), expected)
    # 3 bits of mantissa.
    for method, shape in (("fp8_block", (2, 3)), ("fp8_row", (256, 1)), ("fp8_tensor", (1,))):
        for exact in (False, True):
            weight, scales = to_fp8(matrix, method, exact_scales=exact)
            assert scales.shape == shape
            error = (from_fp8(weight, scales) - matrix).abs()
            assert (error <= matrix.abs() / 16 + matrix.abs().amax() / 448 / 256).all()
            is_exact = bool((torch.frexp(scales).mantissa == 0.5).all())
            assert is_exact == exact


@pytest.mark.parametrize("method", METHODS)
def test_tiny_checkpoints_store_matrices_of_fewer_bits(method: str) -> None:
    family = "gpt_oss" if method == "mxfp4" else "qwen3"
    stored = load_tensors(make(TinySpec(family, quantization=method)))
    wide = load_tensors(make(TinySpec(family)))
    plain = dequantize(stored)
    assert plain.keys() == wide.keys()
    narrowed = [name for name in wide if name not in stored or stored[name].dtype.itemsize == 1]
    assert len(narrowed) == 2 * (2 if method == "mxfp4" else 7)
    for name, tensor in wide.items():
        scale = float(tensor.abs().max())
        difference = float((plain[name] - tensor).abs().max())
        assert (0 < difference < scale / 5) if name in narrowed else difference == 0, name
