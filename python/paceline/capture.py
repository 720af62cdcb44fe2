# SPDX-License-Identifier: Apache-2.0
"""`Capture`: served token ids and what became of their drafts, as shards of safetensors.

A thread of its own writes, so a request never waits for the disk. A shard gets its name once all of
it is on the disk, so a process that is killed leaves whole shards only.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from paceline.checks import check_int, check_path
from paceline.loader.safetensors_writer import NewTensor, float_bytes, write_safetensors
from paceline.outputs import RequestOutput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_logger = logging.getLogger("paceline")

DEFAULT_MAX_BYTES: Final = 2**30
MIN_MAX_BYTES: Final = 2**20
MAX_MAX_BYTES: Final = 2**50
FORMAT: Final = "paceline.capture"
VERSION: Final = "1"
PATTERN: Final = "capture-*.safetensors"
#: What `finish_reasons` of a shard indexes. Outputs that end otherwise are not captured.
FINISH_REASONS: Final = ("stop", "length", "abort")
ON: Final = "on"
#: The states of a capture, as `Capture.stats` names them.
STATES: Final = (ON, "full", "failed", "closed")

# A shard is written when it has this size, or when its first request is this old.
_SHARD_BYTES: Final = 16 * 2**20
_MAX_AGE_S: Final = 60.0
# What waits for the disk has at most this many times the size of a shard.
_MAX_WAITING_SHARDS: Final = 4
# Longest wait of `close` for a disk that hangs.
_LAST_SHARD_S: Final = 30.0
# Of a header: names, dtypes, shapes and offsets of the tensors, and its padding.
_HEADER_BYTES: Final = 2048
# Of an element, and of an offset.
_ITEM: Final = 4
_OFFSET: Final = 8
_LOCK: Final = ".lock"


class Step(NamedTuple):
    """An iteration of an output.

    Attributes:
        num_tokens: Tokens that it added to the output.
        num_drafted: Drafts that it verified.
        num_accepted: Drafts that it accepted; the first of its tokens are these. More than
            `num_tokens` where a stop string cut the output.
    """

    num_tokens: int
    num_drafted: int
    num_accepted: int


class HiddenLayers(NamedTuple):
    """Hidden states that a capture has too.

    Attributes:
        layers: As `LLM.hidden_states` numbers them.
        hidden_size: Elements of one.
        dtype: "F32" or "BF16".
        compute: Returns those of token ids, `[layers, n, hidden_size]`.
    """

    layers: list[int]
    hidden_size: int
    dtype: str
    compute: Callable[[Sequence[int]], npt.NDArray[np.float32]]

    @property
    def token_bytes(self) -> int:
        """The bytes of one token."""
        return len(self.layers) * self.hidden_size * (_ITEM if self.dtype == "F32" else _ITEM // 2)

    def tensors(self, records: Sequence[_Record]) -> list[NewTensor]:
        """Computes those of all outputs, each after its prompt."""
        texts = [record.prompt + one.token_ids for record in records for one in record.outputs]
        lengths = [len(text) // _ITEM for text in texts]
        states = [
            float_bytes(self.compute(_ids(text)).transpose(1, 0, 2), self.dtype) for text in texts
        ]
        shape = (sum(lengths), len(self.layers), self.hidden_size)
        return [
            NewTensor("hidden_states", self.dtype, shape, lambda: states),
            _offsets("hidden_offsets", lengths),
        ]


class _Output(NamedTuple):
    """An output as it is written: bytes of little-endian int32."""

    token_ids: bytes
    finish_reason: int
    steps: tuple[bytes, bytes, bytes]


class _Record(NamedTuple):
    """A request as it is written."""

    prompt: bytes
    temperature: float
    drafter: str
    outputs: list[_Output]

    @property
    def num_bytes(self) -> int:
        """How much longer it makes a shard, without the header and hidden states."""
        of_outputs = sum(
            len(one.token_ids) + sum(map(len, one.steps)) + 2 * _OFFSET + 2 * _ITEM
            for one in self.outputs
        )
        return len(self.prompt) + _OFFSET + 2 * _ITEM + of_outputs

    def hidden_bytes(self, hidden: HiddenLayers) -> int:
        """How much longer its hidden states make it."""
        return sum(
            (len(self.prompt) + len(one.token_ids)) // _ITEM * hidden.token_bytes + _OFFSET
            for one in self.outputs
        )


class Capture:
    """Writes requests that have ended to a folder, up to a number of bytes. Thread-safe.

    `LLM.start_capture` makes it. Closing it writes what is left; a process that ends closes it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        hidden: HiddenLayers | None = None,
        shard_bytes: int = _SHARD_BYTES,
        max_age_s: float = _MAX_AGE_S,
    ) -> None:
        """Takes a folder for this process alone, and starts to write what `add` gets.

        Args:
            folder: The folder. It is created if its parent exists. Shards that it has stay there
                and count towards `max_bytes`.
            max_bytes: Bytes that all shards in the folder have at most, from 1 MiB on.
            hidden: The hidden states to write too; None = none.
            shard_bytes: Bytes of requests after which a shard is written.
            max_age_s: Seconds after which a request that has ended is written in any case.

        Raises:
            ValueError: An argument is not allowed, another process captures there, the folder has
                `max_bytes` already or cannot be written, or its disk is full.
            RuntimeError: The system refuses a thread.
        """
        self.folder = Path(check_path("folder", folder, "a folder"))
        self.max_bytes = check_int("max_bytes", max_bytes, MIN_MAX_BYTES, MAX_MAX_BYTES)
        self._shard_bytes = shard_bytes
        self._max_age_s = max_age_s
        self._hidden = hidden
        self._metadata: dict[str, str] = {}
        if hidden is not None:
            self._metadata["hidden_layers"] = ",".join(map(str, hidden.layers))
        self._pid = os.getpid()
        # The condition guards all that follows.
        self._changed = threading.Condition()
        self._state = ON
        self._is_closing = False
        self._waiting: list[_Record] = []
        self._waiting_bytes = 0
        self._waiting_since = 0.0  # time.monotonic()
        self._writing_bytes = 0
        self._num_requests = 0
        self._num_outputs = 0
        self._num_tokens = 0
        self._num_dropped = 0
        self._thread = threading.Thread(
            target=self._write_all, name="paceline-capture", daemon=True
        )
        try:
            self._lock = _locked(self.folder)
            try:
                self._num_bytes, self._next_shard = self._existing()
                self._thread.start()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ValueError(
                f"the capture folder {self.folder} cannot be written: {error.strerror}; allowed: a "
                "folder that this process may write, or a new one in such a folder"
            ) from None
        atexit.register(self.close)

    def _existing(self) -> tuple[int, int]:
        """The bytes of the folder's shards, and the number of the next one.

        Raises:
            ValueError: There is no room for another one.
        """
        for part in self.folder.glob(f".{PATTERN}.part"):
            part.unlink()  # of a process that was killed
        shards = sorted(self.folder.glob(PATTERN))
        num_bytes = sum(shard.stat().st_size for shard in shards)
        room = self.max_bytes - num_bytes
        if room < MIN_MAX_BYTES:
            raise ValueError(
                f"the capture folder {self.folder} has {num_bytes} bytes of shards, and max_bytes "
                f"is {self.max_bytes}; allowed: room for {MIN_MAX_BYTES} bytes more. Choose a "
                "larger limit or another folder, or move shards away"
            )
        free = shutil.disk_usage(self.folder).free
        if free < min(room, self._shard_bytes):
            raise ValueError(
                f"the disk of the capture folder {self.folder} has {free} bytes left; allowed: at "
                f"least {min(room, self._shard_bytes)}. Make room there or choose another folder"
            )
        return num_bytes, 1 + max((_number_of(shard) for shard in shards), default=-1)

    def describe(self, **facts: str) -> None:
        """Adds strings to the metadata of the shards that are written from now on."""
        with self._changed:
            self._metadata |= facts

    def add(
        self,
        output: RequestOutput,
        steps: Sequence[Sequence[Step]],
        *,
        temperature: float,
        drafter: str | None,
    ) -> None:
        """Takes a request that has ended. It does not wait for the disk and raises nothing.

        Outputs without tokens and those that failed are left out.

        Args:
            output: The request.
            steps: The iterations of each of its outputs.
            temperature: With which its tokens were chosen.
            drafter: The method that drafted; None = none.
        """
        outputs = [
            _Output(
                _int32(one.token_ids),
                FINISH_REASONS.index(one.finish_reason),
                (
                    _int32(step.num_tokens for step in of_output),
                    _int32(step.num_drafted for step in of_output),
                    _int32(step.num_accepted for step in of_output),
                ),
            )
            for one, of_output in zip(output.outputs, steps, strict=True)
            if one.token_ids and one.finish_reason in FINISH_REASONS
        ]
        if not outputs:
            return
        record = _Record(_int32(output.prompt_token_ids), temperature, drafter or "", outputs)
        size = record.num_bytes
        if self._hidden is not None:
            size += record.hidden_bytes(self._hidden)
        with self._changed:
            if self._state != ON or self._is_closing:
                self._num_dropped += 1
                return
            waiting = self._writing_bytes + self._waiting_bytes + size
            # One shard is written while another one grows.
            if self._num_bytes + waiting + 2 * self._header_bytes() > self.max_bytes:
                self._state = "full"
                self._num_dropped += 1
                self._changed.notify_all()
                return
            if waiting > _MAX_WAITING_SHARDS * self._shard_bytes and self._waiting:
                self._num_dropped += 1  # the disk is too slow
                return
            if not self._waiting:
                self._waiting_since = time.monotonic()
                self._changed.notify_all()
            self._waiting.append(record)
            self._waiting_bytes += size
            if self._waiting_bytes >= self._shard_bytes:
                self._changed.notify_all()

    def stats(self) -> dict[str, Any]:
        """Counts what was captured.

        Returns:
            A dict of plain JSON types: the "state" ("on"; "full", at `max_bytes`; "failed", after
            an error of the disk; "closed"); "num_bytes" of all shards in the folder and
            "max_bytes"; "num_requests", "num_outputs" and "num_tokens" (of outputs) that this
            process has written; "num_dropped_requests", which ended after the capture did or while
            the disk was too slow.
        """
        with self._changed:
            return {
                "state": self._state,
                "num_bytes": self._num_bytes,
                "max_bytes": self.max_bytes,
                "num_requests": self._num_requests,
                "num_outputs": self._num_outputs,
                "num_tokens": self._num_tokens,
                "num_dropped_requests": self._num_dropped,
            }

    def close(self) -> None:
        """Writes what is left and gives the folder back. Closing twice is fine."""
        if os.getpid() != self._pid:
            return  # a forked child: the parent goes on
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LAST_SHARD_S)
        atexit.unregister(self.close)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- in the thread that writes -------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            while self._write_some():
                pass
        finally:
            os.close(self._lock)

    def _write_some(self) -> bool:
        """Waits until a shard is due and writes it. Returns whether the capture goes on."""
        with self._changed:
            while not self._is_due():
                self._changed.wait(self._wait_s())
            is_last = self._state != ON or self._is_closing
            records, self._waiting = self._waiting, []
            self._writing_bytes, self._waiting_bytes = self._waiting_bytes, 0
            metadata = dict(self._metadata)
        error: Exception | None = None
        num_bytes = 0
        if records:
            try:
                num_bytes = self._write(records, metadata)
            except Exception as failure:
                error = failure
        with self._changed:
            self._writing_bytes = 0
            self._num_bytes += num_bytes
            if error is None:
                self._num_requests += len(records)
                outputs = [one for record in records for one in record.outputs]
                self._num_outputs += len(outputs)
                self._num_tokens += sum(len(one.token_ids) // _ITEM for one in outputs)
            else:
                self._num_dropped += len(records) + len(self._waiting)
                self._waiting, self._waiting_bytes = [], 0
                self._state = "failed"
            if is_last and self._state == ON:
                self._state = "closed"
            state = self._state
        if error is not None:
            _logger.warning("the capture to %s has stopped: %s; requests go on", self.folder, error)
        elif is_last and state == "full":
            _logger.warning(
                "the capture to %s has stopped at its limit of %d bytes; requests go on",
                self.folder,
                self.max_bytes,
            )
        return not is_last and error is None

    def _is_due(self) -> bool:
        if self._state != ON or self._is_closing or self._waiting_bytes >= self._shard_bytes:
            return True
        return bool(self._waiting) and self._age_s() >= self._max_age_s

    def _wait_s(self) -> float | None:
        return self._max_age_s - self._age_s() if self._waiting else None

    def _age_s(self) -> float:
        return time.monotonic() - self._waiting_since

    def _header_bytes(self) -> int:
        """The most that a header can have."""
        return _HEADER_BYTES + len(json.dumps(self._metadata))

    def _write(self, records: Sequence[_Record], metadata: Mapping[str, str]) -> int:
        """Writes a shard and returns its size."""
        shard = self.folder / f"capture-{self._next_shard:06}.safetensors"
        part = shard.with_name(f".{shard.name}.part")
        drafters = sorted({record.drafter for record in records})
        tensors = _tensors(records, drafters)
        if self._hidden is not None:
            tensors += self._hidden.tensors(records)
        try:
            write_safetensors(
                part,
                tensors,
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "finish_reasons": ",".join(FINISH_REASONS),
                    "drafters": ",".join(drafters),
                    **metadata,
                },
            )
            _sync(part)
            num_bytes = part.stat().st_size
            part.replace(shard)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._next_shard += 1
        _sync(self.folder)
        return num_bytes


def _tensors(records: Sequence[_Record], drafters: Sequence[str]) -> list[NewTensor]:
    """The tensors of a shard."""
    outputs = [one for record in records for one in record.outputs]
    owners = [i for i, record in enumerate(records) for _ in record.outputs]
    return [
        _joined("prompt_ids", [record.prompt for record in records]),
        _offsets("prompt_offsets", [len(record.prompt) // _ITEM for record in records]),
        _joined("drafters", [_int32(drafters.index(record.drafter) for record in records)]),
        _joined(
            "temperatures",
            [array.array("f", [record.temperature for record in records]).tobytes()],
            "F32",
        ),
        _joined("output_ids", [one.token_ids for one in outputs]),
        _offsets("output_offsets", [len(one.token_ids) // _ITEM for one in outputs]),
        _joined("output_requests", [_int32(owners)]),
        _joined("finish_reasons", [_int32(one.finish_reason for one in outputs)]),
        _offsets("step_offsets", [len(one.steps[0]) // _ITEM for one in outputs]),
        *(
            _joined(f"step_{name}", [one.steps[i] for one in outputs])
            for i, name in enumerate(("tokens", "drafted", "accepted"))
        ),
    ]


def _joined(name: str, parts: list[bytes], dtype: str = "I32") -> NewTensor:
    """A tensor [n] of four-byte elements."""
    count = sum(map(len, parts)) // _ITEM
    return NewTensor(name, dtype, (count,), lambda: parts)


def _offsets(name: str, lengths: Iterable[int]) -> NewTensor:
    """A tensor [n + 1]: where each part begins in the joined tensor, and where the last one
    ends."""
    values = array.array("q", [0, *itertools.accumulate(lengths)])
    return NewTensor(name, "I64", (len(values),), lambda: [values.tobytes()])


def _ids(data: bytes) -> list[int]:
    return array.array("i", data).tolist()


def _int32(values: Iterable[int]) -> bytes:
    return array.array("i", values).tobytes()


def _number_of(shard: Path) -> int:
    """The number in a shard's name; -1 if it has none."""
    digits = shard.stem.removeprefix("capture-")
    return int(digits) if digits.isascii() and digits.isdigit() else -1


def _locked(folder: Path) -> int:
    """Makes sure of a folder, and locks it until the returned descriptor is closed.

    Raises:
        ValueError: Another process, or another capture of this one, has locked it.
        OSError: It cannot be written.
    """
    # Only the user of this process may read the prompts.
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"the capture folder {folder} is that of another engine, which runs; allowed: one "
            "folder for each engine"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
