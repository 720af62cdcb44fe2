# SPDX-License-Identifier: Apache-2.0
"""Verifies receipts: replays them on an LLM and compares the tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from paceline.checks import shorten
from paceline.limits import MAX_INT
from paceline.outputs import RequestError
from paceline.receipts.digests import MEMORY, digest, weights_digest
from paceline.receipts.receipt import (
    INPUTS,
    MODEL,
    Receipt,
    ReceiptError,
    check_inputs,
    check_receipt,
    edited_part,
    missing_inputs,
)
from paceline.running_llm import internals
from paceline.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput

#: Of MODEL, in messages.
_NAMES: Final = {
    "weights": "digest of the weights",
    "config": "digest of the configuration",
    "tokenizer": "digest of the tokenizer",
    "template": "chat template",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the replay of a receipt shows.

    Attributes:
        name: The receipt's name.
        verdict: "equal": the replay has the same tokens and ends in the same way. "different": it
            does not. "edited": it does, but the receipt's header, tokens or inputs do not agree
            with its own chain. "refused": the receipt could not be replayed.
        num_tokens: Output tokens that the receipt has.
        position: The first output token that differs, from 0; as many as `num_tokens` if the
            outputs differ only in how they end.
        receipt_token: The receipt's token there; None if its output has ended.
        replay_token: The replay's token there; None if its output has ended.
        margin: By how much the target's raw logit of `replay_token` is above that of
            `receipt_token`. None where one of them is None, or is no token of the model.
        edited: The part that does not agree with the chain: "header", "tokens" or "inputs".
        notes: What differs from the conditions of the receipt and is allowed to, in sentences.
        error: Why it was refused.
    """

    name: str
    verdict: Literal["equal", "different", "edited", "refused"]
    num_tokens: int = 0
    position: int | None = None
    receipt_token: int | None = None
    replay_token: int | None = None
    margin: float | None = None
    edited: str | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain JSON types."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}

    def __str__(self) -> str:
        """Says it in one line."""
        if self.verdict == "refused":
            return f"{self.name}: refused: {self.error}"
        parts = [f"{self.name}: {self.verdict}"]
        if self.verdict == "equal":
            parts.append(f"{self.num_tokens} tokens")
        elif self.position is not None:
            parts.append(self._difference())
        else:
            parts.append(f"the replay has its {self.num_tokens} tokens")
        if self.edited is not None:
            verb = "was" if self.edited == "header" else "were"
            parts.append(f"its {self.edited} {verb} edited, as its chain shows")
        return "; ".join([", ".join(parts[:2]), *parts[2:], *self.notes])

    def _difference(self) -> str:
        ours = "ends there" if self.receipt_token is None else f"has {self.receipt_token}"
        theirs = "ends there" if self.replay_token is None else f"has {self.replay_token}"
        if self.receipt_token is None and self.replay_token is None:
            ours, theirs = "ends there for another reason", "is the same up to there"
        margin = "" if self.margin is None else f" (logit margin {self.margin:.6g})"
        return f"first at token {self.position}: the receipt {ours}, the replay {theirs}{margin}"


@dataclasses.dataclass(frozen=True)
class _Job:
    """A receipt that can be replayed."""

    index: int
    name: str
    receipt: Receipt
    prompt: list[int]
    params: SamplingParams
    edited: str | None
    notes: tuple[str, ...]


class Inputs:
    """Prompts and other inputs that are given beside receipts, by digest."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        """Stores inputs.

        Args:
            given: Objects such as the "inputs" of a receipt.

        Raises:
            ReceiptError: One of them is malformed.
        """
        self._values: dict[str, Any] = {}
        self._names: set[str] = set()
        for one in given:
            self.add(one)

    def add(self, inputs: Any) -> None:
        """Adds values by name; raises ReceiptError if they are malformed."""
        for name, value in check_inputs(inputs).items():
            self._names.add(name)
            self._values[digest(value)] = value

    def of(self, receipt: Receipt) -> dict[str, Any]:
        """Returns the inputs of a receipt by name: its own, or those given beside it.

        Raises:
            ReceiptError: Some are in neither.
        """
        own = receipt.get("inputs", {})
        known = {**self._values, **{digest(value): value for value in own.values()}}
        # Inputs that were edited are replayed as they are; the chain tells of them.
        digests = receipt["digests"]
        found: dict[str, Any] = {
            name: known[value] for name, value in digests.items() if value in known
        } | own
        missing = [name for name in missing_inputs(receipt, known) if name not in own]
        absent = [name for name in missing if name not in self._names]
        if absent:
            raise ReceiptError(
                f"the receipt has only digests of its inputs, and {', '.join(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not given beside it; give them with "
                "--inputs FILE or --prompt TEXT, or ask for a receipt with text"
            )
        if missing:
            raise ReceiptError(
                f"the receipt is of another {' and another '.join(missing)} than the one that is "
                "given beside it: the digests differ; give the very tokens with --inputs FILE, or "
                "the very text with --prompt TEXT, or ask for a receipt with text"
            )
        return found


def replay_length(receipt: Receipt) -> int:
    """Returns how many tokens a replay generates at most: one more than the receipt has, if its
    output had not reached its limit, to see whether the replay ends there, too."""
    num_tokens = len(receipt["tokens"])
    if receipt["finish_reason"] == "abort":
        return max(1, num_tokens)
    limit: int = receipt["max_model_len"] - receipt["num_prompt_tokens"]
    most: int | None = receipt["sampling"]["max_tokens"]
    return max(1, min(limit, MAX_INT if most is None else most, num_tokens + 1))


def verify(
    llm: LLM,
    receipts: Sequence[tuple[str, Any]],
    *,
    inputs: Inputs | None = None,
    any_model: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> list[Verdict]:
    """Replays receipts, all in the same batch.

    Args:
        llm: The model, best without a drafter, which would be loaded for nothing.
        receipts: Their names and values, which are not trusted; an error in place of a value is
            passed on as the reason for refusing it.
        inputs: What receipts without text were made of.
        any_model: Replay receipts of other models, tokenizers and dtypes, too, with a note.
        progress: Called after each receipt.

    Returns:
        A verdict for each, in their order.

    Raises:
        RuntimeError: The LLM is closed, or the engine failed.
    """
    verdicts: list[Verdict | None] = [None] * len(receipts)
    jobs = []
    known = inputs or Inputs()
    check = _ModelCheck(llm, any_model=any_model)
    for index, (name, value) in enumerate(receipts):
        try:
            if isinstance(value, ReceiptError):
                raise value
            job = _job(llm, index, name, check_receipt(value), known, check)
        except (ValueError, TypeError, NotImplementedError) as error:
            verdicts[index] = Verdict(name, "refused", error=" ".join(str(error).splitlines()))
            progress()
        else:
            jobs.append(job)
    for job, output in _replayed(llm, jobs, progress):
        verdicts[job.index] = _compared(llm, job, output)
    return [verdict for verdict in verdicts if verdict is not None]


class _ModelCheck:
    """Compares the model of receipts with that of an LLM."""

    def __init__(self, llm: LLM, *, any_model: bool) -> None:
        self._llm = llm
        self._any_model = any_model
        self._facts = internals(llm).requests.receipts.facts()

    @functools.cached_property
    def _memory_digest(self) -> str:
        return weights_digest(self._llm.target, of_memory=True)

    def notes(self, receipt: Receipt) -> list[str]:
        """Says what differs and is allowed to; raises ReceiptError for what is not."""
        theirs, ours = receipt["model"], dict(self._facts["model"])
        if theirs["weights"].startswith(MEMORY) != ours["weights"].startswith(MEMORY):
            if not theirs["weights"].startswith(MEMORY):
                raise ReceiptError(
                    f"the receipt is of weights in files, and those of {self._llm.target.path} are "
                    "not from files; allowed: the folder of the model"
                )
            ours["weights"] = self._memory_digest
        differing = [key for key in MODEL if theirs[key] != ours[key]]
        notes = [
            f"the {_NAMES.get(key, key)} of {self._llm.target.path} is another one"
            for key in differing
        ]
        refused = [key for key in differing if key != "template"]
        if refused and not self._any_model:
            key = refused[0]
            cure = "give the model that made it"
            if refused == ["dtype"]:
                cure = f"give --dtype {theirs['dtype']}"
            raise ReceiptError(
                f"the receipt is of another model: its {_NAMES.get(key, key)} is "
                f"{shorten(theirs[key], 80)}, that of {self._llm.target.path} is "
                f"{shorten(ours[key], 80)}; {cure}, or --any-model to see where the tokens differ"
            )
        for key, what in (("device", "device class"), ("runtime", "version of Paceline")):
            if receipt[key] != self._facts[key]:
                notes.append(
                    f"made with another {what} ({receipt[key]}; here {self._facts[key]}), on which "
                    "tokens with nearly equal logits may differ"
                )
        return notes


def _job(
    llm: LLM, index: int, name: str, receipt: Receipt, known: Inputs, check: _ModelCheck
) -> _Job:
    """Prepares a receipt; raises ValueError or NotImplementedError if it cannot be replayed."""
    notes = check.notes(receipt)
    inputs = known.of(receipt)
    prompt = inputs["prompt"]
    length = replay_length(receipt)
    if len(prompt) + length > llm.max_model_len:
        raise ReceiptError(
            f"the prompt and the output have {len(prompt) + length} tokens, and max_model_len is "
            f"{llm.max_model_len}; give --max-model-len at least {len(prompt) + length}"
        )
    params = _params(receipt, inputs, length)
    if receipt["finish_reason"] == "abort":
        notes.append("its client ended it, so only the tokens until then can be compared")
    (request, *_) = internals(llm).requests.prepare([{"prompt_token_ids": prompt}], params)
    stops = receipt["sampling"]["stop_token_ids"]
    if request.sampling["stop_token_ids"] != sorted(stops):
        raise ReceiptError(
            f"the stop tokens of the receipt are {shorten(stops)}, and those of "
            f"{llm.target.path} with its grammar are "
            f"{shorten(request.sampling['stop_token_ids'])}; give --model the folder with the "
            "generation_config.json that made it"
        )
    return _Job(index, name, receipt, prompt, params, edited_part(receipt), tuple(notes))


def _params(receipt: Receipt, inputs: Mapping[str, Any], length: int) -> SamplingParams:
    """The parameters of the replay."""
    sampling = dict(receipt["sampling"])
    del sampling["max_tokens"]
    given = {name: inputs[name] for name in INPUTS if name in inputs}
    del given["prompt"]
    grammar = given.pop("grammar", None)
    min_tokens = sampling.pop("min_tokens", 0)
    return SamplingParams(
        **sampling,
        **given,
        max_tokens=length,
        min_tokens=min(min_tokens, length),
        seed=int(receipt["seed"]),
        structured_outputs=grammar,
        # The receipt has all stop tokens; a grammar needs those of the checkpoint.
        ignore_eos=grammar is None,
        detokenize="stop" in given,
    )


def _replayed(
    llm: LLM, jobs: Sequence[_Job], progress: Callable[[], object]
) -> Iterable[tuple[_Job, RequestOutput]]:
    """Runs all jobs together and yields their outputs."""
    outputs: list[tuple[_Job, RequestOutput]] = []
    if not jobs:
        return outputs
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
    with llm.stream(prompts, [job.params for job in jobs]) as stream:
        for chunk in stream:
            if chunk.output is not None:
                outputs.append((jobs[chunk.index], chunk.output))
                progress()
    return outputs


def _compared(llm: LLM, job: _Job, output: RequestOutput) -> Verdict:
    receipt = job.receipt
    ours: list[int] = receipt["tokens"]
    if output.error is not None:
        return Verdict(job.name, "refused", len(ours), edited=job.edited, error=output.error)
    replay = output.outputs[0]
    theirs = replay.token_ids
    is_aborted = receipt["finish_reason"] == "abort"
    if is_aborted:
        theirs = theirs[: len(ours)]
    pairs = zip(ours, theirs, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None and len(ours) != len(theirs):
        position = min(len(ours), len(theirs))
    if position is None and not is_aborted and replay.finish_reason != receipt["finish_reason"]:
        position = len(ours)
    if position is None:
        verdict: Literal["equal", "edited"] = "equal" if job.edited is None else "edited"
        return Verdict(job.name, verdict, len(ours), edited=job.edited, notes=job.notes)
    of_receipt = ours[position] if position < len(ours) else None
    of_replay = theirs[position] if position < len(theirs) else None
    margin = None
    if of_receipt is not None and of_replay is not None:
        margin = _margin(llm, [*job.prompt, *ours[:position]], of_replay, of_receipt)
    return Verdict(
        job.name, "different", len(ours), position, of_receipt, of_replay, margin, job.edited,
        job.notes,
    )  # fmt: skip


def _margin(llm: LLM, before: list[int], upper: int, lower: int) -> float | None:
    """The difference of two tokens' raw logits behind some tokens, which is that of their
    logprobs; None if one is no token of the model, or there is no room for it."""
    if max(upper, lower) >= llm.target.vocab_size or len(before) + 2 > llm.max_model_len:
        return None
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": [*before, token]} for token in (upper, lower)]
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    except RequestError:  # the logits are not finite
        return None
    found = []
    for output, token in zip(outputs, (upper, lower), strict=True):
        last = output.prompt_logprobs[-1] if output.prompt_logprobs else None
        if last is None:
            return None
        found.append(last[token].logprob)
    return found[0] - found[1]
