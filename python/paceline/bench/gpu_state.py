# SPDX-License-Identifier: Apache-2.0
"""Clocks, power and temperature of the GPU while a bench runs, from the driver's NVML."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

_LIBRARY: Final = "libnvidia-ml.so.1"
# Seconds between two samples. Asking the driver more often could disturb what is measured.
_PERIOD_S: Final = 0.2
# NVML's numbers for the clocks of the multiprocessors and of the memory, and for the sensor.
_CLOCK_SM: Final = 1
_CLOCK_MEMORY: Final = 2
_SENSOR_GPU: Final = 0
# Reasons that only say that nothing runs, or what the user asked for.
_IDLE: Final = 0x1
_APPLICATION_CLOCKS: Final = 0x2


@dataclass(frozen=True)
class GpuState:
    """The GPU while a row was measured. A figure that the driver does not give is None.

    Attributes:
        sm_clock_mhz: Median clock of the multiprocessors.
        min_sm_clock_mhz: Lowest of the samples.
        memory_clock_mhz: Median clock of the memory.
        power_w: Mean power.
        temperature_c: Highest temperature.
        is_throttled: Whether a sample named a reason for a lower clock, such as power or heat.
        num_samples: Number of samples.
    """

    sm_clock_mhz: float | None
    min_sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    is_throttled: bool | None
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """Converts to plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class GpuSample:
    """One sample; the figures of `GpuState`, and the driver's reasons for a lower clock as bits."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    reasons: int | None


def gpu_state(samples: Sequence[GpuSample]) -> GpuState | None:
    """Sums up samples; None without any."""
    if not samples:
        return None
    sm = _known(sample.sm_clock_mhz for sample in samples)
    memory = _known(sample.memory_clock_mhz for sample in samples)
    power = _known(sample.power_w for sample in samples)
    heat = _known(sample.temperature_c for sample in samples)
    reasons = [sample.reasons for sample in samples if sample.reasons is not None]
    return GpuState(
        sm_clock_mhz=statistics.median(sm) if sm else None,
        min_sm_clock_mhz=min(sm, default=None),
        memory_clock_mhz=statistics.median(memory) if memory else None,
        power_w=statistics.fmean(power) if power else None,
        temperature_c=max(heat, default=None),
        is_throttled=any(bits & ~(_IDLE | _APPLICATION_CLOCKS) for bits in reasons)
        if reasons
        else None,
        num_samples=len(samples),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


class GpuSampler:
    """Samples the state of the GPU that the engine runs on, while it is asked to.

    Without NVML, as on a machine without a GPU, there are no samples and no error.
    """

    def __init__(self, device: str) -> None:
        """Opens NVML.

        Args:
            device: "cpu", which has nothing to sample, or "cuda".
        """
        self._samples: list[GpuSample] = []
        self._nvml = _open() if device == "cuda" else None

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Samples in a thread of its own until the block ends."""
        if self._nvml is None:
            yield
            return
        nvml, stop = self._nvml, threading.Event()

        def sample() -> None:
            while True:
                self._samples.append(nvml.sample())
                if stop.wait(_PERIOD_S):
                    return

        thread = threading.Thread(target=sample, name="bench-gpu-state", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def take(self) -> list[GpuSample]:
        """The samples since the last call."""
        samples, self._samples = self._samples, []
        return samples


class _Nvml:
    """One GPU in NVML."""

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        self._library = library
        self._device = device

    def sample(self) -> GpuSample:
        power = self._ask("nvmlDeviceGetPowerUsage")
        return GpuSample(
            self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            self._ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
            None if power is None else power / 1e3,
            self._ask("nvmlDeviceGetTemperature", _SENSOR_GPU),
            self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong),
        )

    def _ask(self, name: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        """One number; None if this driver or this GPU does not have it."""
        value = kind()
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return None
        given = [ctypes.c_int(argument) for argument in arguments]
        if function(self._device, *given, ctypes.byref(value)) != 0:
            return None
        return int(value.value)


def _open() -> _Nvml | None:
    """The first GPU that CUDA shows to this process; None without NVML."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        if library.nvmlInit_v2() != 0:
            return None
        device = ctypes.c_void_p()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip() or "0"
        if chosen.isdecimal():
            status = library.nvmlDeviceGetHandleByIndex_v2(
                ctypes.c_uint(int(chosen)), ctypes.byref(device)
            )
        else:  # "GPU-" or "MIG-" and its id
            status = library.nvmlDeviceGetHandleByUUID(
                ctypes.c_char_p(chosen.encode()), ctypes.byref(device)
            )
    except (OSError, AttributeError):
        return None
    return _Nvml(library, device) if status == 0 else None
