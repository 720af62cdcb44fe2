# SPDX-License-Identifier: Apache-2.0
"""The configuration of an engine, checked once and frozen.

Every error names the key, the value and the values allowed. No value is silently rewritten.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from paceline.checks import check_choice, quoted, shorten
from paceline.engine_options import EngineFields
from paceline.option_schema import ARGUMENTS, argument_docs

DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16")
LOAD_FORMATS: Final = ("auto", "dummy")


def check_device(device: Any) -> None:
    """Checks a `device` argument against this build and this machine.

    Args:
        device: The value.

    Raises:
        NotImplementedError: The GPU cannot be used; the message says why.
        ValueError: It is not the name of a device.
    """
    if isinstance(device, str) and device.startswith("cuda:"):
        raise NotImplementedError(
            f"device is {shorten(device)}; allowed: {quoted(DEVICES)}: 'cuda' is the first GPU "
            "that CUDA_VISIBLE_DEVICES leaves visible"
        )
    check_choice("device", device, DEVICES)
    if device == "cuda":
        from paceline import _core

        status = _core.cuda_status()
        if not status["is_usable"]:
            raise NotImplementedError(f"device is 'cuda': {status['reason']}")


def check_dtype(dtype: Any) -> None:
    """Checks the name of a dtype.

    Raises:
        NotImplementedError: 16-bit floats other than bfloat16.
        ValueError: It is another value that is not allowed.
    """
    if isinstance(dtype, str) and dtype in ("half", "float16"):
        raise NotImplementedError(
            f"dtype {dtype!r} is not supported yet; this version has: {quoted(DTYPES)}. With "
            "'auto', a checkpoint in float16 is loaded as float32, which is lossless"
        )
    check_choice("dtype", dtype, DTYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineFields):
    """How the engine runs: the keyword arguments of `LLM`.

    Attributes:
    """

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtype(self.dtype)
        for option in ARGUMENTS.values():
            value = getattr(self, option.name)
            object.__setattr__(self, option.name, option.check(value))
        if self.gpu_memory_utilization is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization} and kv_cache_bytes is "
                f"{self.kv_cache_bytes}; allowed: one of them, because both set the size of the KV "
                "pool"
            )
        if self.chat_template is not None:
            from paceline.chat_template import read_given_template

            object.__setattr__(self, "chat_template", read_given_template(self.chat_template))


EngineConfig.__doc__ = f"{EngineConfig.__doc__}    {argument_docs('        ').lstrip()}\n    "
