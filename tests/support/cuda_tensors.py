# SPDX-License-Identifier: Apache-2.0
"""Tensors in the memory of a GPU without any library: through the driver, which every GPU has.

They stand for those of torch, whose builds on test machines may have no CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import numpy as np

from dlpack_tensors import F32, RawTensor


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return driver


def _check(status: int, what: str) -> None:
    assert status == 0, f"{what} returned {status}"


class GpuMemory:
    """A copy of bytes in the memory of the GPU.

    Attributes:
        address: Where it lies.
    """

    def __init__(self, contents: bytes) -> None:
        """Allocates the memory and copies the bytes."""
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(len(contents))
        _check(_driver().cuMemAlloc_v2(ctypes.byref(address), size), "cuMemAlloc")
        weakref.finalize(self, _driver().cuMemFree_v2, ctypes.c_uint64(address.value))
        _check(
            _driver().cuMemcpyHtoD_v2(ctypes.c_uint64(address.value), contents, size),
            "cuMemcpyHtoD",
        )
        # It may return while the last bytes are on their way, and other streams do not wait for it.
        _check(_driver().cuCtxSynchronize(), "cuCtxSynchronize")
        self.address = address.value


def on_gpu(
    array: np.ndarray[Any, Any],
    dtype: tuple[int, int, int] = F32,
    *,
    padding: int = 0,
    **changes: Any,
) -> RawTensor:
    """An array of numpy as a tensor on the GPU with the same strides.

    Args:
        array: The array; bfloat16 as uint16.
        dtype: Code, bits and lanes of its elements.
        padding: Elements of other memory before the first, which the tensor's byte offset skips.
        **changes: Fields of `RawTensor`.
    """
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    dense = np.ascontiguousarray(base) if base.flags.c_contiguous else None
    assert dense is not None, "a view of a row-major array"
    first = array.ctypes.data - base.ctypes.data
    memory = GpuMemory(b"\x5a" * (padding * array.itemsize) + dense.tobytes())
    values: dict[str, Any] = {
        "dtype": dtype,
        "strides": [step // array.itemsize for step in array.strides],
        "byte_offset": padding * array.itemsize + first,
        "device": (2, 0),
        "keep": memory,
    }
    return RawTensor(memory.address, array.shape, **(values | changes))
