# SPDX-License-Identifier: Apache-2.0
"""A Ray Serve application; needs the extra [ray]. docs/replicas.md describes it."""

from paceline.ray.application import build_app
from paceline.ray.router import PrefixRequestRouter

__all__ = ["PrefixRequestRouter", "build_app"]
