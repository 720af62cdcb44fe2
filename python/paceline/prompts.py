# SPDX-License-Identifier: Apache-2.0
"""Checks and encodes the prompts and parameters of a call."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

from paceline.checks import bytes_advice, check_text, quoted, shorten, wrong_type
from paceline.limits import MAX_CACHE_SALT_BYTES
from paceline.loader import LoadedModel
from paceline.sampling import SamplingParams
from paceline.token_bound import min_num_tokens


class TextPrompt(TypedDict):
    """A prompt as text. Prompts of different salts share no KV."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. Its text, if given, is only stored in the output. Prompts of different
    salts share no KV."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


# A mapping has the keys of `TextPrompt` or `TokensPrompt`.
Prompt = str | Sequence[int] | Mapping[str, Any]
# One prompt or several. Not `Prompt | Sequence[Prompt]`: type checkers accept a list of different
# prompts only where there is one kind of sequence to choose from.
Prompts = str | Mapping[str, Any] | Sequence[int | Prompt]
_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt")
# vLLM has these too.
_LATER_KEYS: Final = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
    "token_type_ids",
)
_MESSAGE_KEYS: Final = ("role", "content", "messages")
_FOR_CHATS: Final = "chat(messages) takes messages"
_ALLOWED: Final = (
    "a string, a sequence of token ids, {'prompt': string} or {'prompt_token_ids': token ids}"
)

# Strings of fewer characters for each token of max_model_len are tokenized at once.
_MIN_BOUNDED_CHARS: Final = 8

# These have items too, but are no prompts.
_NO_PROMPTS: Final = (bytes, bytearray, memoryview)


def given_prompts(prompts: Prompts | None, prompt_token_ids: Any) -> list[Prompt]:
    """Lists the prompts of a call that may name token ids with a keyword of their own, as in vLLM.

    Raises:
        ValueError: Both are given, or none, or one of them is something else.
    """
    if prompt_token_ids is None:
        return list_prompts(prompts)  # type: ignore[arg-type]
    if prompts is not None:
        raise ValueError(
            "prompts and prompt_token_ids are both given; allowed: one of them, or prompts such as "
            "{'prompt': string, 'prompt_token_ids': token ids}"
        )
    listed = list_prompts(prompt_token_ids)
    if any(isinstance(one, str | Mapping) for one in listed):
        raise ValueError(
            f"prompt_token_ids is {shorten(prompt_token_ids)}; allowed: token ids, or a sequence "
            "of those; strings and mappings are prompts"
        )
    return listed


def list_prompts(prompts: Prompts) -> list[Prompt]:
    """Makes a list of no prompt, one or several; ValueError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_number = getattr(prompts, "ndim", 1) == 0  # a scalar array or tensor
    if isinstance(prompts, _NO_PROMPTS) or not hasattr(prompts, "__getitem__") or is_number:
        raise wrong_type(
            "prompts", prompts, f"{_ALLOWED}, or a sequence of those{bytes_advice(prompts)}"
        )
    if len(prompts) == 0:
        if isinstance(prompts, list | tuple):
            return []
        raise ValueError("prompts is empty; allowed: at least one prompt of at least one token")
    first = prompts[0]
    # Elements of arrays and tensors have the methods of a sequence even if they are scalars.
    if hasattr(first, "__len__") and getattr(first, "ndim", 1) > 0:
        listed: list[Prompt] = []
        for index, prompt in enumerate(prompts):
            check_prompt_type(f"prompts[{index}]", prompt)
            listed.append(prompt)  # type: ignore[arg-type]
        return listed
    return [prompts]  # type: ignore[list-item]


def list_params(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """Makes a list with one entry per prompt; ValueError if the numbers differ."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise wrong_type("sampling_params", params, "SamplingParams or a sequence of them")
    for index, param in enumerate(params):
        if not isinstance(param, SamplingParams):
            raise wrong_type(f"sampling_params[{index}]", param, "SamplingParams")
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {num_prompts} prompts; "
            "allowed: one for all prompts or one per prompt"
        )
    return list(params)


def encode(
    prompt: Prompt,
    name: str,
    target: LoadedModel,
    *,
    max_model_len: int,
    spare: int,
    add_special_tokens: bool = True,
) -> tuple[str | None, list[int]]:
    """Checks one prompt.

    Args:
        prompt: A string, token ids, or a mapping with one or both.
        name: Its name in error messages.
        target: The model that reads it.
        max_model_len: Maximum tokens of a sequence.
        spare: Tokens of the sequence that are reserved for output.
        add_special_tokens: Surround a string with the tokenizer's special tokens.

    Returns:
        The prompt as a string, None if only token ids were given; and its token ids.

    Raises:
        ValueError: It is empty, too long, not valid Unicode, a string for a model without
            tokenizer, or has a token that the model does not. A string whose length alone rules it
            out is not tokenized.
    """
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, name, target, max_model_len=max_model_len, spare=spare)
    if not isinstance(prompt, str):
        check_prompt_type(name, prompt)
        _check_num_tokens(name, len(prompt), target, max_model_len, spare)
        token_ids = _check_token_ids(prompt, name, target.vocab_size)
        if not token_ids:
            raise ValueError(f"{name} is empty; allowed: at least one token")
        return None, token_ids
    check_prompt_text(name, prompt)
    if target.tokenizer is None:
        raise ValueError(
            f"{name} is a string, but {target.path} has no tokenizer.json; allowed: token ids"
        )
    check_prompt_chars(name, prompt, target, max_model_len, spare)
    token_ids = target.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    _check_num_tokens(name, len(token_ids), target, max_model_len, spare)
    for position, token_id in enumerate(token_ids):
        if token_id >= target.vocab_size:
            raise ValueError(
                f"{name} has token id {token_id} at position {position}, from the tokenizer of "
                f"{target.path}, but the model's vocab_size is {target.vocab_size}; allowed: "
                "strings whose tokens are in the vocabulary"
            )
    if not token_ids:
        raise ValueError(
            f"{name} is {shorten(prompt)}, for which the tokenizer of {target.path} returns no "
            "token; allowed: at least one token"
        )
    return prompt, token_ids


def encode_chats(
    texts: Sequence[str],
    target: LoadedModel,
    max_model_len: int,
    cache_salt: str | None = None,
) -> list[Prompt]:
    """Encodes rendered conversations. A chat template writes the special tokens itself.

    Args:
        texts: The conversations.
        target: As for `encode`.
        max_model_len: As for `encode`.
        cache_salt: Of all of them; None = they have none.

    Raises:
        ValueError: As for `encode`.
    """
    if cache_salt is not None:
        check_cache_salt("cache_salt", cache_salt)
    prompts: list[Prompt] = []
    for index, text in enumerate(texts):
        name = f"the prompt of messages[{index}]" if len(texts) > 1 else "the prompt of messages"
        if not text:
            raise ValueError(f"{name} is empty, because the chat template writes nothing for it")
        _, token_ids = encode(
            text,
            name,
            target,
            max_model_len=max_model_len,
            spare=1,
            add_special_tokens=False,
        )
        prompts.append(with_salt({"prompt": text, "prompt_token_ids": token_ids}, cache_salt))
    return prompts


def with_salt(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """Returns a prompt, which has no salt, with one; None = without."""
    if cache_salt is None:
        return prompt
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    return {**prompt, "cache_salt": cache_salt}


def cache_salt_of(prompt: Prompt) -> str:
    """Returns the salt of a prompt that `encode` has checked; "" = it has none."""
    return str(prompt.get("cache_salt", "")) if isinstance(prompt, Mapping) else ""


def check_cache_salt(name: str, value: object) -> str:
    """Checks a salt, which no caller may believe to have while it has none.

    Raises:
        ValueError: It is no string, empty, too long, not valid Unicode, or has a NUL character.
    """
    allowed = f"a string of 1 to {MAX_CACHE_SALT_BYTES} bytes in UTF-8 without NUL characters"
    salt = check_text(name, value, allowed)
    if not salt:
        raise ValueError(f"{name} is empty; allowed: {allowed}, or leave it out")
    if len(salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise ValueError(
            f"{name} has {len(salt.encode())} bytes; allowed: {allowed}; send a hash of it"
        )
    if "\0" in salt:
        raise ValueError(
            f"{name} has a NUL character at position {salt.index(chr(0))}; allowed: {allowed}"
        )
    return salt


def _encode_mapping(
    prompt: Mapping[str, Any], name: str, target: LoadedModel, *, max_model_len: int, spare: int
) -> tuple[str | None, list[int]]:
    for key in prompt:
        if key in _LATER_KEYS:
            raise NotImplementedError(
                f"{name} has the key {key!r}, which is not supported yet; this version has: "
                f"{quoted(_KEYS)}"
            )
        if key not in _KEYS:
            hint = f"; {_FOR_CHATS}" if key in _MESSAGE_KEYS else ""
            raise ValueError(f"{name} has the key {shorten(key)}; allowed: {quoted(_KEYS)}{hint}")
    if "prompt" not in prompt and "prompt_token_ids" not in prompt:
        what = "has no text and no token ids" if prompt else "is empty"
        raise ValueError(f"{name} {what}; allowed: {_ALLOWED}")
    if "cache_salt" in prompt:
        check_cache_salt(f"{name}['cache_salt']", prompt["cache_salt"])
    text = None
    if "prompt" in prompt:
        text_name = f"{name}['prompt']"
        text = check_text(text_name, prompt["prompt"], "a string; token ids are 'prompt_token_ids'")
        if "prompt_token_ids" not in prompt:
            return encode(text, text_name, target, max_model_len=max_model_len, spare=spare)
    ids = prompt["prompt_token_ids"]
    ids_name = f"{name}['prompt_token_ids']"
    if isinstance(ids, str | Mapping):
        raise wrong_type(ids_name, ids, "a sequence of token ids; a string is 'prompt'")
    _, token_ids = encode(ids, ids_name, target, max_model_len=max_model_len, spare=spare)
    return text, token_ids


def check_prompt_chars(
    name: str, prompt: str, target: LoadedModel, max_model_len: int, spare: int
) -> None:
    """Checks the length of a string without tokenizing it, for a model with a tokenizer.

    Raises:
        ValueError: Its characters alone make it too long; for the arguments see `encode`.
    """
    if len(prompt) >= _MIN_BOUNDED_CHARS * max_model_len:
        assert target.tokenizer is not None
        least = min_num_tokens(target.tokenizer, prompt)
        qualifier = f"{len(prompt)} characters, at least "
        _check_num_tokens(name, least, target, max_model_len, spare, qualifier)


def check_prompt_type(name: str, prompt: object) -> None:
    """Checks that a value may be one prompt; its elements are checked later.

    Raises:
        ValueError: It has a type that no prompt has.
    """
    is_sequence = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")
    if isinstance(prompt, _NO_PROMPTS) or not is_sequence or getattr(prompt, "ndim", 1) == 0:
        raise wrong_type(name, prompt, f"{_ALLOWED}{bytes_advice(prompt)}")


def _check_num_tokens(
    name: str,
    num_tokens: int,
    target: LoadedModel,
    max_model_len: int,
    spare: int,
    qualifier: str = "",
) -> None:
    max_len = max_model_len - spare
    if num_tokens > max_len:
        may_raise = num_tokens + spare <= target.max_position
        advice = "; shorten it, or raise max_model_len" if may_raise else ""
        raise ValueError(
            f"{name} has {qualifier}{num_tokens} tokens; allowed: at most {max_len} "
            f"(max_model_len is {max_model_len}, the model was made for {target.max_position})"
            f"{advice}"
        )


def check_prompt_text(name: str, text: str) -> None:
    """Checks what can be checked of a prompt before a model is loaded.

    Raises:
        ValueError: It is empty or not valid Unicode.
    """
    check_text(name, text)
    if not text:
        raise ValueError(f"{name} is empty; allowed: at least one character or token")


def _check_token_ids(prompt: Sequence[int], name: str, vocab_size: int) -> list[int]:
    token_ids = []
    for position, token in enumerate(prompt):
        try:
            if isinstance(token, bool):
                raise TypeError
            token_id = operator.index(token)
        except TypeError:
            raise wrong_type(f"{name}[{position}]", token, "a token id") from None
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name}[{position}] is token id {shorten(token_id)}; "
                f"allowed: 0 to vocab_size - 1 = {vocab_size - 1}"
            )
        token_ids.append(token_id)
    return token_ids
