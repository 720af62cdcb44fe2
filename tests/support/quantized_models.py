# SPDX-License-Identifier: Apache-2.0
"""Matrices of fewer bits with scales, as published checkpoints store them, for tests.

    tensors = quantize(tensors, "fp8_block")       # as the tensors of such a checkpoint
    plain = dequantize(tensors)                    # the values that they stand for

`make(TinySpec(quantization="fp8_block"))` of `tiny_models` writes a whole checkpoint, and
`plain_copy` the checkpoint of its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from int4_models import INT4_METHODS, from_int4, int4_config, to_int4

if TYPE_CHECKING:
    import torch

# "mxfp4": the experts of GPT-OSS; the others: the Linears of dense layers and of single experts,
# with a scale for each 128 x 128 block, for each row, or one.
METHODS = ("mxfp4", "fp8_block", "fp8_row", "fp8_tensor")
# Floats of four bits in the Linears that fp8 has: mxfp4 and nvfp4 as compressed-tensors stores
# them, and nvfp4 as modelopt does.
NVFP4_METHODS = ("nvfp4_packed", "modelopt")
FP4_METHODS = ("mxfp4_packed", *NVFP4_METHODS)
BLOCK = 128
MXFP4_COLUMNS = 32
NVFP4_COLUMNS = 16
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0

_LINEAR = re.compile(
    r"(.*\.layers|layers)\.\d+\."
    r"((self_attn|mlp|mlp\.experts\.\d+|mlp\.shared_expert)\.\w+_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj))\.weight"
)
# Modules of Qwen3.5 and Qwen3-Next that files with scales leave out.
_PLAIN = re.compile(
    r".*\.(linear_attn\.(conv1d|in_proj_a|in_proj_b|in_proj_ba)|mlp\.gate|mlp\.shared_expert_gate)"
)
_EXPERTS = re.compile(r".*mlp\.experts\.\w+_proj")


def quantize(
    tensors: Mapping[str, torch.Tensor], method: str, *, exact_scales: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, with the matrices that a method concerns in its format.

    Args:
        tensors: Of a checkpoint without scales.
        method: One of `METHODS`, of `FP4_METHODS` or of `INT4_METHODS`.
        exact_scales: Scales of fp8 are powers of two.

    Returns:
        The tensors. Scales of fp8 have the dtype of the matrix.
    """
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if method == "mxfp4" and _EXPERTS.fullmatch(name):
            # As transformers has it the matrix is [E, columns, rows].
            blocks, scales = to_mxfp4(tensor.transpose(1, 2))
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif method in INT4_METHODS and _LINEAR.fullmatch(name):
            has_bfloat16 = INT4_METHODS[method].layout == "pack-quantized"
            scale_dtype = "bfloat16" if has_bfloat16 else "float16"
            quantized |= to_int4(name.removesuffix(".weight"), tensor, method, scale_dtype)
        elif method in FP4_METHODS and _LINEAR.fullmatch(name):
            quantized |= to_fp4(name.removesuffix(".weight"), tensor, method)
        elif method != "mxfp4" and _LINEAR.fullmatch(name):
            scale_name = "weight_scale_inv" if method == "fp8_block" else "weight_scale"
            weight, scales = to_fp8(tensor, method, exact_scales=exact_scales)
            quantized |= {name: weight, name.removesuffix("weight") + scale_name: scales}
        else:
            quantized[name] = tensor
    return quantized


def quantization_config(method: str, tensors: Iterable[str] = ()) -> dict[str, Any]:
    """The value of "quantization_config", as in published files.

    Args:
        method: One of `METHODS`, of `FP4_METHODS` or of `INT4_METHODS`.
        tensors: Names of the tensors of Qwen3.5 or Qwen3-Next, whose files list every module that
            has no scales; those of other families name none.
    """
    if method in INT4_METHODS:
        return int4_config(method)
    if method in FP4_METHODS:
        return modelopt_config() if method == "modelopt" else fp4_config(method)
    if tensors:
        modules = (name.removesuffix(".weight") for name in tensors)
        plain = [module for module in modules if _PLAIN.fullmatch(module)]
        config = quantization_config(method)
        if method == "fp8_block":
            named = ["lm_head", "model.embed_tokens", *plain, "mtp.fc"]
            gate = ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
            return config | {"modules_to_not_convert": named + gate}
        patterns = ("lm_head", "mlp.gate$", "shared_expert_gate$", "linear_attn.in_proj_[ab]a?$")
        return config | {"ignore": [*(f"re:.*{one}" for one in patterns), "mtp.fc"]}
    if method == "mxfp4":
        return {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }
    if method == "fp8_block":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    by_row = method == "fp8_row"
    common = {"actorder": None, "block_structure": None, "group_size": None, "num_bits": 8}
    inputs = {"dynamic": True, "strategy": "token" if by_row else "tensor", "type": "float"}
    weights = {"dynamic": False, "strategy": "channel" if by_row else "tensor", "type": "float"}
    symmetric = {"observer": None, "observer_kwargs": {}, "symmetric": True}
    return {
        "config_groups": {
            "group_0": {
                "input_activations": common | inputs | symmetric,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": common | weights | symmetric,
            }
        },
        "format": "float-quantized" if by_row else "naive-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def to_mxfp4(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [..., columns / 32, 16] and scales uint8 [..., columns / 32] of matrices."""
    import torch

    values = matrices.float().unflatten(-1, (-1, MXFP4_COLUMNS))
    largest = values.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    exponent = torch.floor(torch.log2(largest)) - 2  # 6 is the largest value, 4 its power of two
    scaled = (values.abs() * torch.exp2(-exponent)).unsqueeze(-1)
    code = (scaled - torch.tensor(MXFP4_VALUES)).abs().argmin(-1) + 8 * (values < 0)
    low, high = code[..., 0::2], code[..., 1::2]
    blocks = (low | (high << 4)).to(torch.uint8).contiguous()
    return blocks, (exponent.squeeze(-1) + 127).to(torch.uint8).contiguous()


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrices of `to_mxfp4`, float32; every value is exact in bfloat16, too."""
    import torch

    table = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (table[codes] * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def to_fp4(module: str, matrix: torch.Tensor, method: str) -> dict[str, torch.Tensor]:
    """The tensors of a matrix in a method of `FP4_METHODS`."""
    if method == "mxfp4_packed":
        blocks, scales = to_mxfp4(matrix)
        return {f"{module}.weight_packed": blocks.flatten(-2), f"{module}.weight_scale": scales}
    packed, scales, factor = to_nvfp4(matrix)
    if method == "modelopt":
        return {
            f"{module}.weight": packed,
            f"{module}.weight_scale": scales,
            f"{module}.weight_scale_2": (1 / factor).reshape(()),
        }
    return {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scales,
        f"{module}.weight_global_scale": factor.reshape(1),
    }


def from_fp4(stored: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """The values of a matrix, float32; each of them is a bfloat16 number."""
    scales = stored[f"{module}.weight_scale"]
    divisor = stored.get(f"{module}.weight_global_scale")
    multiplier = stored.get(f"{module}.weight_scale_2")
    if divisor is None and multiplier is None:
        blocks = stored[f"{module}.weight_packed"].unflatten(1, (-1, MXFP4_COLUMNS // 2))
        return from_mxfp4(blocks, scales)
    if divisor is not None:
        return from_nvfp4(stored[f"{module}.weight_packed"], scales.float() / divisor)
    return from_nvfp4(stored[f"{module}.weight"], scales.float() * multiplier)


def to_nvfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements uint8 [rows, columns / 2], scales e4m3 [rows, columns / 16] and their divisor []."""
    import torch

    values = matrix.float().unflatten(1, (-1, NVFP4_COLUMNS))
    factor = FP8_MAX * MXFP4_VALUES[-1] / values.abs().amax().clamp(min=1e-6)
    scales = (values.abs().amax(2) / MXFP4_VALUES[-1] * factor).to(torch.float8_e4m3fn)
    scaled = values.abs() / (scales.float() / factor).clamp(min=1e-12).unsqueeze(2)
    code = (scaled.unsqueeze(-1) - torch.tensor(MXFP4_VALUES)).abs().argmin(-1) + 8 * (values < 0)
    code = code.flatten(1)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8), scales, factor


def from_nvfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of elements under scales in float32, rounded to bfloat16, as float32."""
    import torch

    table = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    values = table[codes].unflatten(1, (-1, NVFP4_COLUMNS)) * scales.unsqueeze(2)
    return values.flatten(1).bfloat16().float()


def fp4_config(method: str) -> dict[str, Any]:
    """The value of "quantization_config" of compressed-tensors, as in published files."""
    is_mxfp4 = method == "mxfp4_packed"
    name = "mxfp4-pack-quantized" if is_mxfp4 else "nvfp4-pack-quantized"
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": MXFP4_COLUMNS if is_mxfp4 else NVFP4_COLUMNS,
        "num_bits": 4,
        "observer": "minmax",
        "scale_dtype": "torch.uint8" if is_mxfp4 else "torch.float8_e4m3fn",
        "strategy": "group" if is_mxfp4 else "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    return {
        "config_groups": {
            "group_0": {
                "format": name,
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": name,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def modelopt_config() -> dict[str, Any]:
    """The value of "quantization_config" of modelopt, as in published files."""
    numbers = {"dynamic": False, "group_size": NVFP4_COLUMNS, "num_bits": 4, "type": "float"}
    return {
        "config_groups": {
            "group_0": {"input_activations": numbers, "targets": ["Linear"], "weights": numbers}
        },
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }


def to_fp8(
    matrix: torch.Tensor, method: str, *, exact_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 elements of a matrix and their scales, in the shape of the method."""
    import torch

    values = matrix.float()
    rows, columns = values.shape
    if method == "fp8_tensor":
        largest = values.abs().amax().reshape(1)
    elif method == "fp8_row":
        largest = values.abs().amax(1, keepdim=True)
    else:
        padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
        padded[:rows, :columns] = values.abs()
        largest = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
    scales = largest.clamp(min=1e-12) / FP8_MAX
    if exact_scales:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = scales.to(matrix.dtype)
    scaled = values / _spread(scales.float(), rows, columns)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def from_fp8(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of `to_fp8`, float32: each product is rounded once."""
    rows, columns = matrix.shape
    return matrix.float() * _spread(scales.float(), rows, columns)


def _spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales as a matrix that multiplies one of rows x columns."""
    if scales.numel() == 1 or tuple(scales.shape) == (rows, 1):
        return scales
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


_INT4_CODES = (".qweight", ".weight_packed")
_INT4_OTHERS = (
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
)


def dequantize(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint without scales: float32 values, the others as they are.

    Args:
        tensors: Of a checkpoint.
        config: Its "quantization_config", for int4.
    """
    import torch

    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((".weight_packed", ".weight")) and tensor.dtype == torch.uint8:
            module = name.rpartition(".")[0]
            plain[f"{module}.weight"] = from_fp4(tensors, module)
            continue
        if name.endswith(_INT4_CODES) and config is not None:
            module = name.rpartition(".")[0]
            plain[f"{module}.weight"] = from_int4(tensors, module, config)
            continue
        if name.endswith(_INT4_OTHERS):
            continue
        if name.endswith(("_scales", ".weight_scale", ".weight_scale_inv")):
            continue
        if name.endswith((".weight_scale_2", ".weight_global_scale")):
            continue
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            values = from_mxfp4(tensor, tensors[f"{name}_scales"])
            plain[name] = values.transpose(1, 2).contiguous()
        elif tensor.dtype == torch.float8_e4m3fn:
            scales = next(
                tensors[f"{name}_{kind}"]
                for kind in ("scale", "scale_inv")
                if f"{name}_{kind}" in tensors
            )
            plain[name] = from_fp8(tensor, scales)
        else:
            plain[name] = tensor
    return plain
