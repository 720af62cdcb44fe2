# SPDX-License-Identifier: Apache-2.0
"""The least time that an iteration can take: the reads and the arithmetic that it cannot avoid.

An iteration is one pass over the target and k passes over the drafter, one after the other. Each
pass reads its matrices and its KV once, and computes its rows. A block drafter has one pass for all
drafts, after one that writes its context, and its Markov head reads matrices for each draft. Of a
mixture of experts a pass reads those that had rows, which the engine has counted. On the CPU, the
bench measures how fast as many bytes are read again and again, since a small drafter stays in the
caches, where reads are faster than from memory, and how fast the vector units compute; a pass takes
the longer of both times. On CUDA, all bytes come from memory, and arithmetic runs at the rate of a
large matrix product.

The additive floor is the same for operations that cannot overlap: the product of each matrix and
the attention of each layer takes the longer of its reads and its arithmetic, and the times add up.
Both floors are sums over the same list of operations. With several GPUs these are those of one
rank, and the least times of its exchanges add up with them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline.bench.costs import layer_attention_flops, layer_kv_bytes
from paceline.bench.models import BenchModel
from paceline.bench.rank_costs import exchange_seconds, rank_part

if TYPE_CHECKING:
    from paceline.bench.measurement import Measurement
    from paceline.bench.workload import Workload

#: Dense bfloat16 operations per second of an H200 in a large matrix product.
CUDA_BF16_FLOPS: Final = 790e12
# The bandwidth of more bytes is that of memory.
_MAX_READ_BYTES: Final = 512 << 20
# Parts of a prompt whose rows count as if they saw as much.
_NUM_PROMPT_PARTS: Final = 64
# Measurements of a number of bytes at its first use.
_NUM_FIRST: Final = 3


class Speed:
    """How fast a device reads, by the number of bytes that it reads again and again, and computes.

    Each number is the best of all measurements, which are repeated beside every cell: machines have
    faster and slower moments.
    """

    def __init__(self, device: str, num_threads: int) -> None:
        """Measures nothing yet.

        Args:
            device: "cpu" or "cuda".
            num_threads: CPU threads; 0 = all cores.
        """
        self._device = device
        self._num_threads = num_threads
        self._best: dict[int, float] = {}
        self._fresh: set[int] = set()

    @property
    def memory(self) -> float:
        """Bytes per second from memory, the best so far; measured at the first use."""
        key = _MAX_READ_BYTES
        return self._best[key] if key in self._best else self.of(key)

    def of(self, num_bytes: int) -> float:
        """Bytes per second when this many bytes are read repeatedly."""
        key = self._key(num_bytes)
        if key not in self._fresh:
            self._measure(key)
        return self._best[key]

    def arithmetic(self, *, is_bfloat16: bool) -> float:
        """Operations per second of the CPU with weights of a dtype; a multiply-add is two."""
        key = -2 if is_bfloat16 else -1  # beside numbers of bytes
        if key not in self._fresh:
            self._keep(key, _core.measure_arithmetic(self._num_threads, is_bfloat16))
        return self._best[key]

    def forget(self) -> None:
        """Makes the next use of each number measure it again."""
        self._fresh.clear()

    def _key(self, num_bytes: int) -> int:
        """CUDA has one speed; on the CPU, sizes within a sixteenth share a measurement."""
        if self._device == "cuda" or num_bytes >= _MAX_READ_BYTES:
            return _MAX_READ_BYTES
        step = 1 << max(0, num_bytes.bit_length() - 5)
        return max(num_bytes // step * step, 1)

    def _measure(self, key: int) -> None:
        """Measures a size, several times at first, since another process may disturb one."""
        for _ in range(1 if key in self._best else _NUM_FIRST):
            try:
                if self._device == "cuda":
                    speed = _core.measure_cuda_read_bandwidth()
                else:
                    speed = _core.measure_read_bandwidth(self._num_threads, key)
            except MemoryError:  # models may leave no room for what is read; the row is measured
                if key not in self._best:
                    raise
                speed = self._best[key]
            self._keep(key, speed)

    def _keep(self, key: int, speed: float) -> None:
        self._best[key] = max(speed, self._best.get(key, 0.0))
        self._fresh.add(key)


def with_floor(
    row: Measurement,
    target: BenchModel,
    draft: BenchModel | None,
    speed: Speed,
    *,
    num_gpus: int = 1,
) -> Measurement:
    """Adds the least time that an iteration can take, and the least time for the prompts.

    Args:
        row: The measurement.
        target: Its target.
        draft: Its drafter, or None.
        speed: How fast the device is; of one of several GPUs.
        num_gpus: GPUs that share the target as ranks.

    Returns:
        The measurement with `floor_ms`, `floor_share`, `additive_floor_ms`, `additive_floor_share`
        and `prompt_floor_ms`.
    """
    target = rank_part(target, num_gpus, is_whole=False)
    if draft is not None:
        draft = rank_part(draft, num_gpus, is_whole=not draft.loaded.model.has_parts)
    passes, prompt_passes = _passes(target, draft, row), _prompt_passes(target, draft, row)
    # Nothing of a pass goes on while it waits for the other ranks.
    waits, prompt_waits = (_exchanges(target, draft, ops) for ops in (passes, prompt_passes))
    whole, additive = (seconds + waits for seconds in _floors(target, passes, speed))
    prompts = _floors(target, prompt_passes, speed)[0] + prompt_waits
    return replace(
        row,
        floor_ms=whole * 1e3,
        floor_share=_share(whole, row),
        additive_floor_ms=additive * 1e3,
        additive_floor_share=_share(additive, row),
        prompt_floor_ms=prompts * 1e3,
    )


def _share(seconds: float, row: Measurement) -> float | None:
    return seconds * 1e3 / row.iteration_ms if row.iteration_ms > 0 else None


def _exchanges(
    target: BenchModel, draft: BenchModel | None, passes: Sequence[Sequence[Operation]]
) -> float:
    """The least seconds of the exchanges of passes, of which the first is the target's."""
    of_draft = 0.0 if draft is None else exchange_seconds(draft)
    of_logits = sum(any(op.name == "lm_head" for op in ops) for ops in passes[1:])
    return exchange_seconds(target) + of_logits * of_draft


def _floors(
    target: BenchModel, passes: Sequence[Sequence[Operation]], speed: Speed
) -> tuple[float, float]:
    """The least seconds for passes, and those for their operations one after the other."""
    device, dtype = target.model.device, target.model.weight_dtype
    if device == "cpu":
        rate = speed.arithmetic(is_bfloat16=dtype == "bfloat16")
    else:
        rate = CUDA_BF16_FLOPS if dtype == "bfloat16" else math.inf
    # Each operation of a pass is read as fast as the whole pass, whose bytes share the caches.
    seconds = [
        [
            (op.num_bytes / bandwidth, op.flops / rate)
            for bandwidth in [speed.of(int(sum(op.num_bytes for op in ops)))]
            for op in ops
        ]
        for ops in passes
    ]
    additive = sum(max(one) for ops in seconds for one in ops)
    if device == "cuda":  # the reads of one pass may overlap with the arithmetic of another
        seconds = [list(itertools.chain(*seconds))]
    whole = sum(max(map(sum, zip(*ops, strict=True))) for ops in seconds)
    return whole, additive


@dataclass(frozen=True)
class Operation:
    """The bytes and operations of a product or of a layer's attention, for all sequences.

    Attributes:
        name: For example "layers.0.attn.qkv" or "layers.0.attention".
        num_bytes: Bytes of weights or of KV.
        flops: Multiply-adds times two.
    """

    name: str
    num_bytes: float
    flops: float

    @property
    def is_attention(self) -> bool:
        """Returns whether it reads KV instead of weights."""
        return self.name.endswith(".attention")


def iteration_passes(
    target: BenchModel,
    draft: BenchModel | None,
    k: int,
    workload: Workload,
    experts: tuple[float | None, float | None] = (None, None),
    *,
    is_least: bool = False,
) -> list[list[Operation]]:
    """The operations of each pass of an iteration.

    Args:
        target: The target.
        draft: The drafter, or None.
        k: The number of drafts.
        workload: The requests.
        experts: Experts of a mixture layer that have rows, of the target and of the drafter. They
            are means over the passes of a model, since the engine counts those of an iteration
            together.
        is_least: Only what is certain if an iteration may draft fewer than k tokens: one row of the
            target, and one pass of the drafter.
    """
    # The cache, the drafter's too, holds elements of the target's weight dtype.
    item, context = target.item_bytes, workload.mean_context

    def one(model: BenchModel, hit: float | None, rows: int, logit_rows: int) -> list[Operation]:
        concurrency = workload.concurrency
        return pass_operations(model, hit, rows, logit_rows, concurrency, [context], item)

    of_target, of_draft = experts
    num_verified = 1 if is_least else k + 1
    passes = [one(target, of_target, num_verified, num_verified)]
    if draft is None or k == 0:
        return passes
    if _is_block(draft):
        num_drafts = 1 if is_least else k
        return passes + _block_passes(
            draft, of_draft, num_verified, num_drafts, workload.concurrency, context, item
        )
    num_first = 1 if is_least else _num_first_rows(draft, k)
    passes.append(one(draft, of_draft, num_first, 1))
    return passes + [one(draft, of_draft, 1, 1)] * (0 if is_least else k - 1)


def _passes(
    target: BenchModel, draft: BenchModel | None, row: Measurement
) -> list[list[Operation]]:
    """The passes of an iteration of a row that are certain."""
    experts = row.target_experts, row.draft_experts
    draft = None if row.is_adaptive else draft
    return iteration_passes(
        target, draft, row.num_draft_tokens, row.workload, experts, is_least=row.may_stop_early
    )


@dataclass(frozen=True)
class Work:
    """The bytes and operations of an iteration, for all sequences.

    Attributes:
        weight_bytes: Bytes of matrices: the target's once, the drafter's once a pass.
        kv_bytes: Bytes of KV, likewise.
        flops: Multiply-adds times two.
    """

    weight_bytes: int
    kv_bytes: int
    flops: int


def work_of(passes: Sequence[Sequence[Operation]]) -> Work:
    """Adds up the operations of passes."""
    ops = list(itertools.chain(*passes))
    kv_bytes = sum(op.num_bytes for op in ops if op.is_attention)
    num_bytes = sum(op.num_bytes for op in ops)
    return Work(int(num_bytes - kv_bytes), int(kv_bytes), int(sum(op.flops for op in ops)))


def _prompt_passes(
    target: BenchModel, draft: BenchModel | None, row: Measurement
) -> list[list[Operation]]:
    """The passes over the prompts: one over the target, and the drafter's first one.

    A prompt that is computed in chunks reads the weights again for each chunk; the floor does not.
    Of a mixture all experts count as read, since prompts of more than a few tokens hit all.
    """
    workload = row.workload
    num = workload.input_len
    # A row sees those before it. Contexts in the middle of equal parts stand for all.
    parts = min(num, _NUM_PROMPT_PARTS)
    contexts = [(i + 0.5) * num / parts for i in range(parts)]
    item = target.item_bytes

    def one(model: BenchModel, rows: int) -> list[Operation]:
        costs = model.costs
        return pass_operations(
            model, costs.num_experts or None, rows, 1, workload.concurrency, contexts, item
        )

    passes = [one(target, num)]
    if draft is None or row.num_draft_tokens == 0:
        return passes
    if _is_block(draft):
        k = 1 if row.may_stop_early else row.num_draft_tokens
        experts, c = row.draft_experts, workload.concurrency
        passes += _block_passes(draft, experts, num, k, c, num, item)
    else:
        reads_target = draft.config.get("drafter", {}).get("kind") == "gemma4_mtp"
        passes.append(one(draft, 1 if reads_target else num))
    return passes


def pass_operations(
    model: BenchModel,
    experts: float | None,
    rows: int,
    logit_rows: int,
    concurrency: int,
    contexts: Sequence[float],
    item_bytes: int,
) -> list[Operation]:
    """Lists the products and the attentions of one pass, for all sequences.

    Args:
        model: The model.
        experts: Experts of a mixture layer that have rows, on average; None without a mixture.
        rows: Rows of each sequence.
        logit_rows: Rows of each sequence whose logits are needed.
        concurrency: Number of sequences.
        contexts: Tokens that rows see; each stands for as many rows. KV is read once, by the row
            with the longest.
        item_bytes: Bytes per element of the cache.
    """
    c = concurrency
    products = [
        Operation(
            matrix.name,
            matrix.num_bytes * ((experts or 0.0) if matrix.num_experts else 1),
            c * (logit_rows if matrix.is_for_logits else rows) * 2 * matrix.parameters,
        )
        for matrix in model.costs.matrices
    ]
    return products + _attentions(model, c, rows, contexts, item_bytes)


def _attentions(
    model: BenchModel, concurrency: int, rows: int, contexts: Sequence[float], item_bytes: int
) -> list[Operation]:
    """The attention of each layer; see `pass_operations`."""
    found = []
    for i, layer in enumerate(model.config["layers"]):
        attention = layer["attention"]
        flops = statistics.fmean(layer_attention_flops(attention, one) for one in contexts)
        num_bytes = layer_kv_bytes(attention, contexts[-1], item_bytes)
        name = f"layers.{i}.attention"
        found.append(Operation(name, concurrency * num_bytes, concurrency * rows * flops))
    return found


def _is_block(draft: BenchModel) -> bool:
    """Returns whether one pass of the drafter makes all drafts."""
    return "block" in draft.config.get("drafter", {})


def _block_passes(
    draft: BenchModel,
    experts: float | None,
    num_known: int,
    k: int,
    concurrency: int,
    context: float,
    item: int,
) -> list[list[Operation]]:
    """The passes of a block drafter for all sequences: the products that write its context, the
    pass over the block, and the products of the Markov head for each draft.

    Args:
        draft: The drafter.
        experts: As for `pass_operations`, of the pass over the block.
        num_known: Tokens of each sequence whose hidden states are new.
        k: The number of drafts, at least 1.
        concurrency: Number of sequences.
        context: Tokens before the block.
        item: Bytes per element of the cache.
    """
    head = draft.config["drafter"]["block"]
    num_rows = k if head["samples_from_anchor"] else k + 1
    written, block, markov = [], [], []
    for matrix in draft.costs.matrices:
        flops = concurrency * 2 * matrix.parameters
        if matrix.name == "fc":
            written.append(Operation(matrix.name, matrix.num_bytes, num_known * flops))
        elif matrix.name.startswith("markov"):
            markov.append(Operation(matrix.name, matrix.num_bytes, flops))
        else:
            rows = k if matrix.is_for_logits else num_rows
            num_bytes = matrix.num_bytes * ((experts or 0.0) if matrix.num_experts else 1)
            block.append(Operation(matrix.name, num_bytes, rows * flops))
        if matrix.name.endswith((".attn.qkv", ".attn.qkv_a")):
            attention = draft.config["layers"][int(matrix.name.split(".")[1])]["attention"]
            part = _part_of_keys(attention)
            name = matrix.name.replace("qkv", "kv")
            written.append(Operation(name, part * matrix.num_bytes, part * num_known * flops))
    block += _attentions(draft, concurrency, num_rows, [context], item)
    return [written, block, *[markov] * (k if markov else 0)]


def _part_of_keys(attention: Mapping[str, Any]) -> float:
    """The part of the rows of a first projection that computes keys and values."""
    if attention["kind"] == "compressed":
        keys, queries = attention["head_dim"], attention["q_lora_rank"]
    else:
        queries = attention["num_qo_heads"]
        keys = (1 if attention.get("k_eq_v") else 2) * attention["num_kv_heads"]
    return float(keys / (queries + keys))


def _num_first_rows(draft: BenchModel, k: int) -> int:
    """Rows of a decoding sequence in the drafter's first pass.

    In the engine, `traits_for` (cpp/src/speculate/speculator.cc) gives each drafter its traits,
    and `first_rows_per_decode` (cpp/src/wire/batch_shape.h) the number of rows for its
    `first_rows`.
    """
    head = draft.config.get("drafter")
    if head is None:
        return 2  # kNewest: the last accepted token and the new one
    if head["kind"] == "gemma4_mtp":
        return 1  # kLast
    return k + 1  # kWindow, of EAGLE and EAGLE-3: the rows of the verify pass
