# SPDX-License-Identifier: Apache-2.0
"""The formats of the matrices of Qwen3.5 and Qwen3-Next: what a file's rule gives scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .formats import NO_FORMATS, LayerFormats
from .layer_types import FULL
from .quantization import Quantization


@dataclass(frozen=True)
class Formats:
    """The formats of a layer's matrices.

    Attributes:
        own: Of attention or the delta net, and of the MLP or each expert. That of q, k and v is
            also that of the output gate, or of z.
        shared: Of the shared expert's gate and up, and of its down.
    """

    own: LayerFormats = NO_FORMATS
    shared: LayerFormats = NO_FORMATS


PLAIN: Final = Formats()


def read_formats(
    quantization: Quantization,
    layer: str,
    prefixes: Sequence[str],
    *,
    layer_type: str,
    num_experts: int,
    is_interleaved: bool,
) -> Formats:
    """Reads the formats of a layer.

    Args:
        quantization: What the file says.
        layer: The path of the layer after the prefix, such as "layers.0.".
        prefixes: Prefixes that the path may have in the file.
        layer_type: Its kind of attention.
        num_experts: The experts of its mixture; 0: a dense MLP.
        is_interleaved: The projections of a delta net are those of Qwen3-Next.

    Raises:
        NotImplementedError: Matrices that are one in memory differ, or one has scales for which
            there is no format.
    """

    def joined(*names: str) -> LayerFormats:
        return LayerFormats(qkv=quantization.joined(names, layer, prefixes))

    if layer_type == FULL:
        part = "self_attn."
        inputs = tuple(f"{part}{name}_proj" for name in ("q", "k", "v"))
        output, plain = f"{part}o_proj", []
    else:
        part = "linear_attn."
        names = ("in_proj_qkvz",) if is_interleaved else ("in_proj_qkv", "in_proj_z")
        inputs, output = tuple(part + name for name in names), f"{part}out_proj"
        plain = ["in_proj_ba"] if is_interleaved else ["in_proj_b", "in_proj_a"]
        plain = [part + name for name in plain]
    if num_experts > 0:
        plain.append("mlp.shared_expert_gate")
    check_plain(quantization, [layer + name for name in plain], prefixes)

    def mlp(unit: str) -> LayerFormats:
        return LayerFormats(
            gate_up=joined(f"{unit}gate_proj", f"{unit}up_proj").qkv,
            down=joined(f"{unit}down_proj").qkv,
        )

    units = mlp("mlp.")
    shared = NO_FORMATS
    if num_experts > 0:
        units = LayerFormats(
            gate_up=quantization.of_experts(("gate_proj", "up_proj"), num_experts, layer, prefixes),
            down=quantization.of_experts(("down_proj",), num_experts, layer, prefixes),
        )
        shared = mlp("mlp.shared_expert.")
    own = LayerFormats(joined(*inputs).qkv, joined(output).qkv, units.gate_up, units.down)
    return Formats(own, shared)


def check_plain(
    quantization: Quantization, modules: Sequence[str], prefixes: Sequence[str]
) -> None:
    """Refuses scales of Linears that can have none.

    Args:
        quantization: What the file says.
        modules: Their paths after the prefix.
        prefixes: Prefixes that the paths may have in the file.

    Raises:
        NotImplementedError: The file's rule does not leave one of them out.
    """
    for module in modules:
        if not quantization.excludes(module, prefixes):
            raise quantization.section.refusal(
                quantization.excluded_key, f"a list that leaves out {module}, as published"
            )
