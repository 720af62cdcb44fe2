# SPDX-License-Identifier: Apache-2.0
"""Tensors of no library: DLPack capsules that a test fills itself.

They are the producers that no library on the test machine is: other devices, several lanes, byte
offsets, versions to come, and memory of a GPU where torch has no CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

F32, BF16, F16, I64 = (2, 32, 1), (4, 16, 1), (2, 16, 1), (0, 64, 1)
U8, F8_E4M3 = (1, 8, 1), (10, 8, 1)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class RawTensor:
    """A tensor described field by field.

    Attributes:
        num_deleted: How often a consumer has given it back.
        streams: The `stream` of each export.
    """

    def __init__(
        self,
        data: int,
        shape: Sequence[int],
        *,
        dtype: tuple[int, int, int] = F32,
        strides: Sequence[int] | None = None,
        byte_offset: int = 0,
        device: tuple[int, int] = (1, 0),
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        keep: Any = None,
    ) -> None:
        """Describes memory at an address.

        Args:
            data: The address.
            shape: The size of each axis.
            dtype: Code, bits and lanes.
            strides: In elements; None: the field is null.
            byte_offset: Bytes from the address to the first element.
            device: Type and id.
            version: Of the capsule; None: one from before DLPack 1, as a library from then gives.
            flags: 1: read-only.
            keep: What owns the memory.
        """
        self.device = device
        self.version = version
        self.num_deleted = 0
        self.streams: list[Any] = []
        self._keep = keep
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        tensor = _Tensor(data, *device, len(shape), *dtype, self._shape, None, byte_offset)
        if self._strides is not None:
            tensor.strides = self._strides
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        self._managed: ctypes.Structure
        if version is None:
            self._managed = _Managed(tensor, None, deleter)
        else:
            self._managed = _Versioned(*version, None, deleter, flags, tensor)

    def _delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self._managed)
        self.num_deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        if self.version is None and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.streams.append(arguments.get("stream"))
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return _new_capsule(ctypes.addressof(self._managed), name, None)


def of_numpy(array: Any, **changes: Any) -> RawTensor:
    """A float32 array of numpy as a `RawTensor`."""
    strides = [step // array.itemsize for step in array.strides]
    values = {"strides": strides, "keep": array} | changes
    return RawTensor(array.ctypes.data, array.shape, **values)
