# SPDX-License-Identifier: Apache-2.0
"""Matrices of int4, packed as published checkpoints store them, for tests.

The packers and unpackers here work code by code, in integers of 64 bits, and share nothing with
the loader. A value is bfloat16((code - zero) * scale), rounded once.
On 2026-11-28 the values were equal to those of compressed-tensors 0.20.0 and AutoAWQ 0.2.9, and the
words of GPTQ to those that auto-round 0.16.1 packs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Int4Method:
    """One way in which files store int4.

    Attributes:
        layout: "gptq", "gptq_v2", "awq" or "pack-quantized".
        group: The columns that share a scale; 0: those of a row.
        is_symmetric: Every zero point is 8.
        has_order: Groups are not of adjacent columns.
    """

    layout: str
    group: int = 32
    is_symmetric: bool = False
    has_order: bool = False


INT4_METHODS: dict[str, Int4Method] = {
    "gptq": Int4Method("gptq"),
    "gptq_sym": Int4Method("gptq", is_symmetric=True),
    "gptq_order": Int4Method("gptq", has_order=True),
    "gptq_sym_order": Int4Method("gptq", is_symmetric=True, has_order=True),
    "gptq_row": Int4Method("gptq", group=0, is_symmetric=True),
    "gptq_v2": Int4Method("gptq_v2"),
    "awq": Int4Method("awq"),
    "awq_row": Int4Method("awq", group=0),
    "w4a16": Int4Method("pack-quantized", is_symmetric=True),
    "w4a16_128": Int4Method("pack-quantized", group=128, is_symmetric=True),
    "w4a16_asym": Int4Method("pack-quantized"),
    "w4a16_row": Int4Method("pack-quantized", group=0, is_symmetric=True),
    "w4a16_row_asym": Int4Method("pack-quantized", group=0),
    "w4a16_order": Int4Method("pack-quantized", has_order=True),
}
# The nibble of a word in which AWQ has each of eight columns.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
# Modules that read the same inputs, which a quantiser orders alike.
_INPUTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


def int4_config(name: str) -> dict[str, Any]:
    """The value of "quantization_config", as in published files."""
    method = INT4_METHODS[name]
    group = method.group or -1
    if method.layout.startswith("gptq"):
        return {
            "bits": 4,
            "checkpoint_format": method.layout,
            "desc_act": method.has_order,
            "group_size": group,
            "lm_head": False,
            "meta": {"quantizer": ["tests:1.0"]},
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": method.is_symmetric,
            "true_sequential": True,
        }
    if method.layout == "awq":
        return {
            "bits": 4,
            "group_size": group,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
    weights = {
        "actorder": "group" if method.has_order else None,
        "block_structure": None,
        "dynamic": False,
        "group_size": method.group or None,
        "num_bits": 4,
        "observer": "minmax",
        "strategy": "group" if method.group else "channel",
        "symmetric": method.is_symmetric,
        "type": "int",
    }
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def to_int4(
    module: str, matrix: torch.Tensor, name: str, scale_dtype: str
) -> dict[str, torch.Tensor]:
    """The tensors of a matrix in a method of `INT4_METHODS`.

    Args:
        module: The path of its module, which their names begin with.
        matrix: [rows, columns].
        name: The method.
        scale_dtype: "float16" or "bfloat16".
    """
    import torch

    method = INT4_METHODS[name]
    columns = matrix.shape[1]
    group = method.group or columns
    groups = torch.arange(columns) // group
    if method.has_order:
        groups = groups[_shuffle(module, columns)]
    # Column after column of the first group, then of the next one.
    order = torch.argsort(groups, stable=True)
    values = matrix.float()[:, order].unflatten(1, (-1, group))
    if method.is_symmetric:
        scales = values.abs().amax(2).clamp(min=1e-4) / 7.5
        zeros = torch.full_like(scales, 8)
    else:
        low, high = values.amin(2).clamp(max=0), values.amax(2).clamp(min=1e-4)
        scales = (high - low) / 15
        zeros = torch.round(-low / scales).clamp(0, 15)
    scales = scales.to(getattr(torch, scale_dtype))
    wide = scales.float().unsqueeze(2)
    ordered = (torch.round(values / wide) + zeros.unsqueeze(2)).clamp(0, 15).long().flatten(1)
    codes = torch.empty_like(ordered)
    codes[:, order] = ordered
    return pack(module, codes, scales, zeros.long(), groups, method)


def pack(
    module: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor,
    method: Int4Method,
) -> dict[str, torch.Tensor]:
    """The tensors of a matrix from its codes.

    Args:
        module: The path of its module.
        codes: [rows, columns], 0 to 15.
        scales: [rows, groups].
        zeros: [rows, groups], 0 to 15.
        groups: [columns] The group of each column.
        method: How they are stored.
    """
    import torch

    g_idx = groups.to(torch.int32)
    if method.layout == "pack-quantized":
        stored = {
            "weight_packed": words(codes, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        if not method.is_symmetric:
            stored["weight_zero_point"] = words(zeros, 0)
        if method.has_order:
            stored["weight_g_idx"] = g_idx
    elif method.layout == "awq":
        stored = {
            "qweight": words(codes.T, 1, AWQ_NIBBLES),
            "qzeros": words(zeros.T, 1, AWQ_NIBBLES),
            "scales": scales.T,
        }
    else:
        as_words = words(zeros.T, 1)
        if method.layout == "gptq":  # v1 stores one less, in the whole word
            as_words = _as_int32((as_words.long() - 0x11111111) % 2**32)
        stored = {
            "qweight": words(codes.T, 0),
            "qzeros": as_words,
            "scales": scales.T,
            "g_idx": g_idx,
        }
    return {f"{module}.{key}": value.contiguous() for key, value in stored.items()}


def from_int4(
    stored: Mapping[str, torch.Tensor], module: str, config: Mapping[str, Any]
) -> torch.Tensor:
    """The values of a matrix, float32; each of them is a bfloat16 number."""
    import torch

    layout = config.get("format") or config.get("checkpoint_format") or config["quant_method"]
    if layout == "pack-quantized":
        weights = config["config_groups"]["group_0"]["weights"]
        rows, columns = (int(size) for size in stored[f"{module}.weight_shape"])
        codes = nibbles(stored[f"{module}.weight_packed"], 1)
        scales = stored[f"{module}.weight_scale"]
        zeros = torch.full(scales.shape, 8)
        if not weights["symmetric"]:
            zeros = nibbles(stored[f"{module}.weight_zero_point"], 0)[:rows]
        groups = stored.get(f"{module}.weight_g_idx")
    else:
        scales = stored[f"{module}.scales"].T
        places = AWQ_NIBBLES if layout == "awq" else tuple(range(8))
        words_of_zeros = stored[f"{module}.qzeros"].long() % 2**32
        if layout == "gptq":
            words_of_zeros = (words_of_zeros + 0x11111111) % 2**32
        zeros = nibbles(words_of_zeros, 1, places).T
        codes = nibbles(stored[f"{module}.qweight"], 1 if layout == "awq" else 0, places).T
        groups = stored.get(f"{module}.g_idx")
        columns = codes.shape[1]
    if groups is None:
        groups = torch.arange(columns) // (columns // scales.shape[1])
    groups = groups.long()
    exact = (codes - zeros[:, groups]).float() * scales.float()[:, groups]
    return exact.bfloat16().float().contiguous()


def words(
    codes: torch.Tensor, axis: int, places: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """Packs eight codes along an axis into a word: code i of the eight into nibble places[i]."""
    import torch

    size = codes.shape[axis]
    padded = torch.zeros(*(-(-n // 8) * 8 if i == axis else n for i, n in enumerate(codes.shape)))
    padded = padded.long()
    padded.narrow(axis, 0, size).copy_(codes)
    parts = padded.unflatten(axis, (-1, 8))
    packed = torch.zeros_like(parts.select(axis + 1, 0))
    for i, place in enumerate(places):
        packed += parts.select(axis + 1, i) << (4 * place)
    return _as_int32(packed)


def nibbles(
    packed: torch.Tensor, axis: int, places: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """The codes of words that `words` packed, with those of padding."""
    import torch

    wide = packed.long() % 2**32
    return torch.stack([(wide >> (4 * place)) & 15 for place in places], axis + 1).flatten(
        axis, axis + 1
    )


def _as_int32(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def _shuffle(module: str, columns: int) -> torch.Tensor:
    import torch

    parent, _, which = module.rpartition(".")
    seed = zlib.crc32(f"{parent} {_INPUTS.get(which, which)} {columns}".encode())
    return torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
