# SPDX-License-Identifier: Apache-2.0
"""Random requests with receipts, and random edits of receipts with what a replay must find."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny_models
from equality_jobs import random_sampling
from paceline import LLM, SamplingParams
from paceline.receipts.receipt import Receipt, chain_of, edited_part
from paceline.receipts.replay import Verdict, verify
from tiny_models import TinySpec

TEMPERATURES = (0.0, 0.5, 1.0, 1.6)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{2,5}( [0-9]{1,3}){1,4}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)
VOCAB = 288
#: With a tokenizer by bytes and an end-of-sequence id, which grammars need.
TARGET = TinySpec("gemma3", seed=3, vocab_size=VOCAB, eos_token_id=0, tokenizer_size=VOCAB)
#: Parameters that a receipt shows only with text.
HIDDEN = {"stop", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs"}


#: A request with a receipt, where any will do.
PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=12, seed=7, receipt="with_text")


def target_dir() -> Path:
    """The folder of the target."""
    return tiny_models.make(TARGET)


def receipt_of(llm: LLM, params: SamplingParams = PARAMS, prompt: Any = PROMPT) -> Receipt:
    """The receipt of the first output of a request."""
    receipt = llm.generate(prompt, params)[0].outputs[0].receipt
    assert receipt is not None
    return receipt


def verdict_of(llm: LLM, receipt: Any, **options: Any) -> Verdict:
    """What a replay of one receipt says."""
    (verdict,) = verify(llm, [("r", receipt)], **options)
    return verdict


@dataclass(frozen=True)
class Asked:
    """A request, and a sample of it with its receipt."""

    prompt: list[int]
    params: SamplingParams
    receipt: Receipt

    @property
    def tokens(self) -> list[int]:
        """The output."""
        tokens: list[int] = self.receipt["tokens"]
        return tokens

    @property
    def inputs(self) -> dict[str, Any]:
        """What is given beside the receipt if it is one without text."""
        return {"prompt": self.prompt}

    def alone(self, **changes: Any) -> SamplingParams:
        """The parameters of a request for this sample alone."""
        limit: int = self.receipt["max_model_len"] - len(self.prompt)
        own = {
            "n": 1,
            "seed": int(self.receipt["seed"]),
            "max_tokens": min(self.params.max_tokens or limit, limit),
            "receipt": False,
        }
        return replace(self.params, **own | changes)


def random_requests(rng: random.Random, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, of which many begin alike, and parameters of all kinds."""
    prompts: list[list[int]] = []
    params = []
    for _ in range(count):
        prompt = [2 + rng.randrange(256) for _ in range(rng.randint(1, 30))]
        if prompts and rng.random() < 0.6:
            other = rng.choice(prompts)
            prompt = [*other[: rng.randint(1, len(other))], *prompt][:60]
        prompts.append(prompt)
        params.append(_random_params(rng))
    return prompts, params


def _random_params(rng: random.Random) -> SamplingParams:
    values = random_sampling(rng)
    values |= {
        "temperature": rng.choice(TEMPERATURES),
        "max_tokens": rng.choice((1, 6, 12, 20, None)) if rng.random() < 0.9 else 30,
        "n": rng.choice((1, 1, 1, 2, 3)),
        "seed": None if rng.random() < 0.3 else rng.randrange(2**64),
        "receipt": True,
    }
    for name, value in (
        ("stop", [chr(rng.randrange(97, 123)), "zq"]),
        ("stop_token_ids", [rng.randrange(VOCAB)]),
        ("bad_words", [[rng.randrange(VOCAB)], [rng.randrange(VOCAB), rng.randrange(VOCAB)]]),
        ("allowed_token_ids", sorted(rng.sample(range(VOCAB), 80))),
        ("min_tokens", 5),
        ("logprobs", 1),
    ):
        if rng.random() < 0.12:
            values[name] = value
    if values["max_tokens"] is not None:
        values["min_tokens"] = min(values.get("min_tokens", 0), values["max_tokens"])
    if rng.random() < 0.12:
        for name in ("allowed_token_ids", "bad_words", "stop", "stop_token_ids", "min_tokens"):
            values.pop(name, None)
        values["structured_outputs"] = rng.choice(GRAMMARS)
    elif rng.random() < 0.2:
        values["ignore_eos"] = True
    if set(values) & HIDDEN or rng.random() < 0.5:
        values["receipt"] = "with_text"
    return SamplingParams(**values)


def run(llm: LLM, rng: random.Random, count: int) -> list[Asked]:
    """Runs at least `count` samples of random requests, in one batch."""
    prompts, params = random_requests(rng, count)
    outputs = llm.generate(prompts, params)
    asked = []
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        for one in output.outputs:
            assert one.receipt is not None and one.receipt["tokens"] == one.token_ids
            assert ("inputs" in one.receipt) == (param.receipt == "with_text")
            asked.append(Asked(prompt, param, one.receipt))
    return asked


# ---- edits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """An edited receipt.

    Attributes:
        kind: What was edited.
        receipt: The receipt.
        edited: The part that its chain shows, or None if the chain was made anew.
        params: What the replay samples with.
        prompt: What it continues.
    """

    kind: str
    receipt: Receipt
    edited: str | None
    params: SamplingParams
    prompt: list[int]


def random_edit(rng: random.Random, asked: Asked) -> Edit:
    """Edits one token, the length, the end, the seed or a parameter; the chain is old or new."""
    receipt = copy.deepcopy(asked.receipt)
    tokens = receipt["tokens"]
    changes: dict[str, Any] = {}
    kind = rng.choice(("token", "token", "cut", "added", "seed", "temperature", "penalty"))
    if kind == "token":
        position = rng.randrange(len(tokens))
        tokens[position] = (tokens[position] + 1 + rng.randrange(VOCAB - 1)) % VOCAB
    elif kind == "cut" and len(tokens) > 1:
        del tokens[rng.randrange(1, len(tokens)) :]
    elif kind in ("cut", "added"):
        kind = "added"
        tokens.append(rng.randrange(VOCAB))
    elif kind == "seed":
        changes["seed"] = rng.randrange(2**64)
        receipt["seed"] = str(changes["seed"])
    elif kind == "temperature":
        changes["temperature"] = receipt["sampling"]["temperature"] + rng.choice((0.01, 0.3, 2.0))
        receipt["sampling"]["temperature"] = changes["temperature"]
    else:
        changes["frequency_penalty"] = rng.choice((0.125, 1.75))
        receipt["sampling"]["frequency_penalty"] = changes["frequency_penalty"]
    if rng.random() < 0.5:
        receipt["chain"] = chain_of(receipt)
        edited = None
    else:
        edited = "tokens" if kind in ("token", "cut", "added") else "header"
    assert edited_part(receipt) == edited
    return Edit(kind, receipt, edited, asked.alone(**changes), asked.prompt)


def first_difference(edit: Edit, tokens: Sequence[int], finish_reason: str | None) -> int | None:
    """The first token of an edited receipt that an output does not have; None if there is none."""
    ours = edit.receipt["tokens"]
    for position, (one, other) in enumerate(zip(ours, tokens, strict=False)):
        if one != other:
            return position
    if len(ours) != len(tokens):
        return min(len(ours), len(tokens))
    return None if finish_reason == edit.receipt["finish_reason"] else len(ours)


#: What hostile receipts have in place of values.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**64, 10**30, 1.5, 1e308, float("nan"), float("inf")),
    *("", "a", "0" * 64, f"files:{'0' * 64}", "9" * 5000, "\ud800"),
    *([], {}, [0], [[0]], [[0, 1]], [None], {"a": 1}, {"regex": "("}, {"json": "{"}),
)


def hostile(rng: random.Random, receipt: Receipt) -> Any:
    """A receipt with one to three values that are missing, added or nonsense; with a chain of its
    own, where that can be made."""
    made = copy.deepcopy(receipt)
    for _ in range(rng.choice((1, 1, 2, 3))):
        inner, key = rng.choice(list(_places(made)) or [(made, "tokens")])
        chance = rng.random()
        if chance < 0.15:
            inner.pop(key, None) if isinstance(inner, dict) else inner.pop(key)
        elif chance < 0.25 and isinstance(inner, dict):
            inner[rng.choice(("grammar", "stop", "min_tokens", "zz"))] = rng.choice(HOSTILE)
        else:
            inner[key] = copy.deepcopy(rng.choice(HOSTILE))
    if rng.random() < 0.4:
        with contextlib.suppress(Exception):
            made["chain"] = chain_of(made)
    return made


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every key of an object and the first three of lists, at all levels."""
    keys: Iterable[Any] = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(min(len(value), 3))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def flip_weight(folder: Path, rng: random.Random) -> None:
    """Flips the sign or one bit of the mantissa of one float32 weight in the file of a checkpoint.

    A bit of the exponent may make infinity of a weight, whose model generates nothing. Low bits of
    the mantissa seldom change a token, so the highest one and the sign are chosen more often.
    """
    path = folder / "model.safetensors"
    contents = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(contents[:8], "little")
    bit = rng.choice((rng.randrange(23), 22, 31))
    place = begin + 4 * rng.randrange((len(contents) - begin) // 4) + bit // 8
    contents[place] ^= 1 << bit % 8
    path.write_bytes(contents)
