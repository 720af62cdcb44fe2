# SPDX-License-Identifier: Apache-2.0
"""The format of receipts: what they say, the hash chain over it, and reading one from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from paceline import _core
from paceline.checks import did_you_mean, parse_json, quoted, shorten
from paceline.limits import MAX_INT, MAX_SEED
from paceline.receipts.digests import FILES, MEMORY, canonical, digest

#: The key that marks a receipt, and the version of the format that is its value.
VERSION_KEY: Final = "paceline_receipt"
VERSION: Final = 1
#: Bytes of one receipt; one of a million tokens with its inputs has 20 million.
MAX_RECEIPT_BYTES: Final = 64 << 20
#: The field of a response of the server that has a receipt.
RESPONSE_KEY: Final = "x_receipt"

#: What a receipt has digests of, and only `receipt="with_text"` shows.
INPUTS: Final = ("prompt", "grammar", "stop", "bad_words", "logit_bias", "allowed_token_ids")
#: The sampling parameters that a receipt may have.
SAMPLING: Final = (
    "temperature",
    "max_tokens",
    "stop_token_ids",
    "min_tokens",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
FINISH_REASONS: Final = ("stop", "length", "abort")
#: The keys of "model".
MODEL: Final = ("weights", "config", "dtype", "tokenizer", "template")

# All keys but these are the header, with which the chain begins.
_BEHIND_HEADER: Final = ("tokens", "finish_reason", "chain", "inputs")
_HEADER: Final = (
    VERSION_KEY,
    "runtime",
    "model",
    "device",
    "max_model_len",
    "num_prompt_tokens",
    "digests",
    "sampling",
    "seed",
)
_CURE: Final = "ask the server for it again, or take it from where it was stored first"
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_WEIGHTS: Final = re.compile(rf"({FILES}|{MEMORY})[0-9a-f]{{64}}")

Receipt = dict[str, Any]


class ReceiptError(ValueError):
    """A receipt cannot be read or checked; the message says what to do."""


def header_of(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a receipt that the chain begins with."""
    return {key: value for key, value in receipt.items() if key not in _BEHIND_HEADER}


def chain_of(receipt: Mapping[str, Any]) -> dict[str, str]:
    """Computes the hash chain of a receipt: one link for the header, one for each token, and one
    for how the output ended.

    Args:
        receipt: The receipt; a chain in it does not matter.

    Returns:
        The "first" and the "last" link, in hexadecimal. The first is the SHA-256 of the header's
        canonical form; each further one is that of the link before and the token, as a
        little-endian integer of 8 bytes; the last one is that of the link before and the finish
        reason.
    """
    header = canonical(header_of(receipt))
    first, last = _core.receipt_chain(header, receipt["tokens"], receipt["finish_reason"])
    return {"first": first, "last": last}


def edited_part(receipt: Mapping[str, Any]) -> str | None:
    """Says what does not agree with a receipt's own chain and digests.

    Returns:
        "header", "tokens" (or how the output ended), or "inputs"; None: all is as it was made, or
        was edited by someone who made another chain.
    """
    chain = chain_of(receipt)
    if chain["first"] != receipt["chain"]["first"]:
        return "header"
    if chain["last"] != receipt["chain"]["last"]:
        return "tokens"
    for name, value in receipt.get("inputs", {}).items():
        if receipt["digests"].get(name) != digest(value):
            return "inputs"
    return None


# ---- reading -----------------------------------------------------------------------------------


def read_receipts(name: str, text: str) -> Iterator[tuple[str, Any]]:
    """Finds the receipts in a file, which are not checked.

    Args:
        name: The name of the file, for messages.
        text: Its contents: a receipt, a response of the server, a list of those, or one of them in
            each line.

    Yields:
        The name of each receipt and its value, or a `ReceiptError` in place of the value.
    """
    stripped = text.strip()
    lines = text.split("\n")
    first = stripped.partition("\n")[0].rstrip()
    is_listed = first.startswith("{") and first.endswith("}") and first != stripped
    if stripped and (is_listed or name.endswith(".jsonl")):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield from _read_one(f"{name}:{number}", line)
    else:
        yield from _read_one(name, stripped)


def _read_one(name: str, text: str) -> Iterator[tuple[str, Any]]:
    if len(text) > MAX_RECEIPT_BYTES:
        reason = f"{name} has {len(text)} bytes; allowed: at most {MAX_RECEIPT_BYTES} for a receipt"
        yield name, ReceiptError(f"{reason}; write each receipt of a batch in a line of its own")
        return
    try:
        value = parse_json(name, text)
    except ValueError as error:
        yield name, ReceiptError(f"{error}; it may be cut off: {_CURE}")
        return
    if isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from _of_response(f"{name}[{index}]", one)
    else:
        yield from _of_response(name, value)


def _of_response(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The receipts in a response of the server; another value is taken for a receipt."""
    found = []
    if isinstance(value, dict) and VERSION_KEY not in value:
        if RESPONSE_KEY in value:
            found.append((name, value[RESPONSE_KEY]))
        choices = value.get("choices")
        for index, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict) and RESPONSE_KEY in choice:
                found.append((f"{name} choice {index}", choice[RESPONSE_KEY]))
    yield from found or [(name, value)]


def check_receipt(value: Any) -> Receipt:
    """Checks that a value from outside is a receipt of this version, with values that can be
    replayed.

    Raises:
        ReceiptError: It is not; the message says what is wrong and what to do.
    """
    if not isinstance(value, dict) or VERSION_KEY not in value:
        raise ReceiptError(
            f"there is no receipt: {shorten(value)} has no key {VERSION_KEY!r}; allowed: a "
            f"receipt, or a response with {RESPONSE_KEY!r}, for which the request has the field "
            f"{RESPONSE_KEY}: true"
        )
    version = value[VERSION_KEY]
    if type(version) is not int or version != VERSION:
        raise ReceiptError(
            f"{VERSION_KEY} is {shorten(version)}; this version of Paceline reads {VERSION}; "
            f"verify it with the version that made it, {shorten(value.get('runtime'))}"
        )
    allowed = (*_HEADER, *_BEHIND_HEADER)
    for key in value:
        if key not in allowed:
            raise ReceiptError(
                f"a receipt has no key {shorten(key)}{did_you_mean(key, allowed)}; it was edited: "
                f"{_CURE}"
            )
    for key in allowed:
        if key not in value and key != "inputs":
            raise ReceiptError(f"{key} is missing; the receipt was cut off or edited: {_CURE}")
    try:
        canonical(value)
    except (ValueError, RecursionError):
        raise ReceiptError(
            f"a number is infinite or none, or it is nested too deeply; it was edited: {_CURE}"
        ) from None
    _check_header(value)
    _check(_is_ids(value["tokens"]), value, "tokens", "a list of token ids")
    _check(value["finish_reason"] in FINISH_REASONS, value, "finish_reason", quoted(FINISH_REASONS))
    chain = value["chain"]
    is_chain = isinstance(chain, dict) and set(chain) == {"first", "last"}
    _check(is_chain and all(map(_is_hex, chain.values())), value, "chain", "two digests")
    if "inputs" in value:
        check_inputs(value["inputs"])
    return value


def _check_header(value: dict[str, Any]) -> None:
    for key in ("runtime", "device"):
        _check(isinstance(value[key], str) and len(value[key]) < 256, value, key, "a short string")
    for key in ("max_model_len", "num_prompt_tokens"):
        _check(_is_id(value[key]) and value[key] > 0, value, key, "a positive integer")
    model = value["model"]
    is_model = isinstance(model, dict) and set(model) == set(MODEL)
    _check(is_model, value, "model", f"an object with {quoted(MODEL)}")
    is_weights = isinstance(model["weights"], str) and _WEIGHTS.fullmatch(model["weights"])
    _check(bool(is_weights), model, "weights", f"a digest after {FILES!r} or {MEMORY!r}")
    _check(_is_hex(model["config"]), model, "config", "a digest")
    _check(model["dtype"] in ("float32", "bfloat16"), model, "dtype", "'float32', 'bfloat16'")
    for key in ("tokenizer", "template"):
        _check(model[key] is None or _is_hex(model[key]), model, key, "a digest, or null")
    digests = value["digests"]
    is_digests = isinstance(digests, dict) and "prompt" in digests and set(digests) <= set(INPUTS)
    allowed = f"an object with 'prompt' and maybe others of {quoted(INPUTS)}"
    _check(is_digests and all(map(_is_hex, digests.values())), value, "digests", allowed)
    sampling = value["sampling"]
    needed = {"temperature", "max_tokens", "stop_token_ids"}
    _check(
        isinstance(sampling, dict) and needed <= set(sampling) <= set(SAMPLING),
        value,
        "sampling",
        f"an object with {quoted(sorted(needed))} and maybe others of {quoted(SAMPLING)}",
    )
    most = sampling["max_tokens"]
    _check(most is None or (_is_id(most) and most > 0), sampling, "max_tokens", "1 or more")
    _check(_is_id(sampling.get("min_tokens", 0)), sampling, "min_tokens", "0 or more")
    _check(_is_ids(sampling["stop_token_ids"]), sampling, "stop_token_ids", "token ids")
    seed = value["seed"]
    is_seed = isinstance(seed, str) and re.fullmatch(r"[0-9]{1,20}", seed, re.ASCII) is not None
    _check(is_seed and int(seed) <= MAX_SEED, value, "seed", f"a decimal number up to {MAX_SEED}")


def check_inputs(inputs: Any) -> dict[str, Any]:
    """Checks the "inputs" of a receipt, or those that are given beside it.

    Raises:
        ReceiptError: They are not an object with some of `INPUTS`, or the prompt is not token ids.
    """
    if not isinstance(inputs, dict) or not set(inputs) <= set(INPUTS):
        raise ReceiptError(
            f"inputs is {shorten(inputs)}; allowed: an object with some of {quoted(INPUTS)}"
        )
    if "prompt" in inputs and not (_is_ids(inputs["prompt"]) and inputs["prompt"]):
        raise ReceiptError(
            f"the prompt of inputs is {shorten(inputs['prompt'])}; allowed: a list of token ids"
        )
    return inputs


def _check(is_allowed: bool, value: dict[str, Any], key: str, allowed: str) -> None:
    if not is_allowed:
        raise ReceiptError(
            f"{key} is {shorten(value[key])}; allowed: {allowed}; the receipt was edited: {_CURE}"
        )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_ids(value: Any) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= MAX_INT)


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def shown(receipt: Mapping[str, Any]) -> str:
    """Returns the canonical form of a receipt as text, in one line."""
    return canonical(receipt).decode()


def missing_inputs(receipt: Mapping[str, Any], known: Mapping[str, Any]) -> Sequence[str]:
    """Returns the names of the inputs of a receipt that are not among those known by digest."""
    return [name for name, value in receipt["digests"].items() if value not in known]
