# SPDX-License-Identifier: Apache-2.0
"""Parts of the layers of draft heads: RMSNorm and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RmsNorm(nn.Module):
    """RMSNorm with a weight, computed in the weight's type: float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rope`, each `[*positions.shape, head_dim / 2]`."""
    half = head_dim // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions.float().unsqueeze(-1) * theta**-exponents
    return angles.cos(), angles.sin()


def rope(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the halves of the last dimension of `x`, `[..., head_dim]`."""
    cos, sin = by
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
