# SPDX-License-Identifier: Apache-2.0
"""The values allowed for the keys of a `SpeculativeConfig`, each by itself and beside others."""

from __future__ import annotations

import operator
import os
from typing import Any, Final

from paceline.checks import (
    check_bool,
    check_choice,
    check_finite,
    check_int,
    check_path,
    check_revision,
    quoted,
    shorten,
)
from paceline.limits import (
    DEFAULT_DRAFT_PROPOSALS,
    MAX_DRAFT_PROPOSALS,
    MAX_PROMPT_LOOKUP,
    MAX_SPECULATIVE_TOKENS,
)
from paceline.speculative_fields import (
    BLOCK_METHODS,
    DRAFT_DRIVERS,
    DRAFT_FEEDBACKS,
    DRAFT_POSITIONS,
    DRAFT_SAMPLE_METHODS,
    LATER_METHODS,
    METHODS,
    NESTED_KEYS,
    REJECTION_SAMPLE_METHODS,
    SpeculativeFields,
)

# Those of REJECTION_SAMPLE_METHODS that compare the probabilities of drafter and target.
_RATIO_METHODS: Final = ("standard", "block")

# The length of the n-grams that are looked up, by default.
DEFAULT_PROMPT_LOOKUP: Final = 5


def check_all(config: SpeculativeFields) -> None:
    """Checks a configuration, and sets those of its keys whose default depends on other keys.

    Raises:
        ValueError: A value is not allowed; the message names the key and the values allowed.
        NotImplementedError: A method that this version does not have.
    """
    if config.method is not None:
        check_choice(_key("method"), config.method, METHODS, LATER_METHODS)
    _check_model(config)
    _check_drafter(config)
    _check_prompt_lookup(config)
    _check_number_of_drafts(config)
    _check_choice(config, "rejection_sample_method", REJECTION_SAMPLE_METHODS)
    _check_synthetic_length(config)
    _check_draft_sampling(config)
    _check_draft_proposals(config)
    _check_choice(config, "draft_driver", DRAFT_DRIVERS)
    _check_draft_stop(config)
    _check_adaptive(config)
    _check_draft_position(config)
    _check_draft_feedback(config)


def _key(name: str) -> str:
    """The name of a key for messages."""
    where = "['x']" if name in NESTED_KEYS else ""
    return f"speculative_config{where}[{name!r}]"


def _error(name: str, value: object, allowed: str, but: str = "") -> ValueError:
    """The error for a value that is not allowed, perhaps because of another key."""
    but = f", but {but}" if but else ""
    return ValueError(f"{_key(name)} is {shorten(value)}{but}; allowed: {allowed}")


def _check_choice(config: SpeculativeFields, name: str, allowed: tuple[str, ...]) -> None:
    check_choice(_key(name), getattr(config, name), allowed)


def _set(config: SpeculativeFields, key: str, value: Any) -> None:
    object.__setattr__(config, key, value)


def _check_number_of_drafts(config: SpeculativeFields) -> None:
    name = "num_speculative_tokens"
    k = config.num_speculative_tokens
    if k is None and (config.is_incomplete or config.method in BLOCK_METHODS):
        return
    _set(config, name, check_int(_key(name), k, 1, MAX_SPECULATIVE_TOKENS))


def _check_model(config: SpeculativeFields) -> None:
    method = config.method
    if not config.has_model:
        source = "looks drafts up in the sequence" if method == "ngram" else "calls a function"
        but = f"method {method!r} {source} and has no model"
        for name in ("model", "revision"):
            if getattr(config, name) is not None:
                raise _error(name, getattr(config, name), f"no {name!r}", but)
        return
    is_own = method in ("mtp", *BLOCK_METHODS) and config.model is None
    if config.is_incomplete or is_own:
        if config.revision is None:
            return
        if config.is_incomplete:
            allowed, but = "only with a 'model' on the hub", "'model' is missing"
        else:
            allowed = "no 'revision'"
            but = f"without a 'model' method {method!r} drafts with files of the target"
        raise _error("revision", config.revision, allowed, but)
    what = "the folder of the drafter, or its name on the hub"
    if method is not None:
        what += f", which method {method!r} needs"
    model = check_path(_key("model"), config.model, what)
    if isinstance(config.model, os.PathLike):
        # A string such as "name" could be a model of the hub; a path is not.
        model = os.path.join(os.curdir, model)
    _set(config, "model", model)
    check_revision(_key("revision"), config.revision)


def _only_with(config: SpeculativeFields, name: str, method: str, note: str = "") -> ValueError:
    """The error for a key that another method has."""
    allowed = f"only with {method!r}{note}"
    return _error(name, getattr(config, name), allowed, f"method is {config.method!r}")


def _check_drafter(config: SpeculativeFields) -> None:
    name = "drafter"
    if config.method == "custom":
        if not callable(config.drafter):
            allowed = (
                "a function of token ids that returns token ids, which method 'custom' needs and "
                "only Python can give"
            )
            raise _error(name, config.drafter, allowed)
    elif config.drafter is not None:
        raise _only_with(config, name, "custom")


def _check_prompt_lookup(config: SpeculativeFields) -> None:
    names = ("prompt_lookup_min", "prompt_lookup_max")
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if config.method != "ngram":
            raise _only_with(config, name, "ngram")
        check_int(_key(name), value, 1, MAX_PROMPT_LOOKUP)
    if config.method != "ngram":
        return
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is None:
        low = DEFAULT_PROMPT_LOOKUP if high is None else high
    if high is None:
        high = low
    if low > high:
        raise _error(names[0], low, f"an integer from 1 to prompt_lookup_max = {high}")
    for name, value in zip(names, (low, high), strict=True):
        _set(config, name, operator.index(value))


def _check_synthetic_length(config: SpeculativeFields) -> None:
    name = "synthetic_acceptance_length"
    value = config.synthetic_acceptance_length
    if config.rejection_sample_method != "synthetic":
        if value is not None:
            but = f"rejection_sample_method is {config.rejection_sample_method!r}"
            raise _error(name, value, "only with 'synthetic'", but)
        return
    # Without k, `completed` checks again.
    k = config.num_speculative_tokens or MAX_SPECULATIVE_TOKENS
    allowed = f"a number from 1 to num_speculative_tokens + 1 = {k + 1}"
    length = check_finite(_key(name), value, allowed)
    if not 1 <= length <= k + 1:
        raise _error(name, value, allowed)
    _set(config, name, length)


def _check_draft_sampling(config: SpeculativeFields) -> None:
    name = "draft_sample_method"
    has_probabilities = config.rejection_sample_method in _RATIO_METHODS
    is_looked_up = has_probabilities and not config.has_model
    if config.draft_sample_method is None:
        _set(config, name, "greedy" if is_looked_up else "probabilistic")
    elif config.draft_sample_method == "greedy" and not has_probabilities:
        raise ValueError(
            f"{_key(name)} is 'greedy'; "
            f"with rejection_sample_method {config.rejection_sample_method!r} the drafter "
            "samples with the target's noise, at the request's temperature; allowed: "
            "'probabilistic' (at temperature 0 both are greedy)"
        )
    elif config.draft_sample_method == "probabilistic" and is_looked_up:
        raise ValueError(
            f"{_key(name)} is 'probabilistic', but method is {config.method!r}, whose drafts "
            f"have no distribution; allowed with rejection_sample_method "
            f"{config.rejection_sample_method!r}: 'greedy'"
        )
    _check_choice(config, name, DRAFT_SAMPLE_METHODS[: None if has_probabilities else 1])


def _check_draft_proposals(config: SpeculativeFields) -> None:
    name = "draft_proposals"
    count = config.draft_proposals
    method, sampling = config.rejection_sample_method, config.draft_sample_method
    if method not in _RATIO_METHODS or sampling != "probabilistic":
        if count is not None:
            but = f"rejection_sample_method is {method!r} and draft_sample_method {sampling!r}"
            allowed = f"only with {quoted(_RATIO_METHODS)} and 'probabilistic'"
            raise _error(name, count, allowed, but)
        return
    count = DEFAULT_DRAFT_PROPOSALS if count is None else count
    _set(config, name, check_int(_key(name), count, 1, MAX_DRAFT_PROPOSALS))


def _check_draft_stop(config: SpeculativeFields) -> None:
    name = "draft_stop_threshold"
    allowed = "a number from 0 (off) to below 1"
    threshold = check_finite(_key(name), config.draft_stop_threshold, allowed)
    if not 0 <= threshold < 1:
        raise _error(name, threshold, allowed)
    if threshold > 0 and not config.has_model:
        but = f"method is {config.method!r}, whose drafts have no probability"
        raise _error(name, threshold, "0 (off), or a method with a model", but)
    # A block drafter has no steps. Without a method the checkpoint decides, see `resolved`.
    has_steps = config.method not in (None, *BLOCK_METHODS)
    if threshold > 0 and has_steps and config.draft_driver != "while":
        allowed = (
            f"with method {config.method!r} only 'while', the only driver that can end draft "
            "steps early"
        )
        raise _error(name, threshold, allowed, f"draft_driver is {config.draft_driver!r}")
    _set(config, name, threshold)


def _check_adaptive(config: SpeculativeFields) -> None:
    name = "adaptive"
    if config.adaptive is None:
        return
    check_bool(_key(name), config.adaptive)
    if config.adaptive and config.method == "custom":
        but = "method is 'custom', whose time the engine does not know"
        raise _error(name, True, "False, or leave it out", but)


def _check_draft_position(config: SpeculativeFields) -> None:
    name = "draft_position"
    if config.draft_position is None:
        if config.method == "gemma4_mtp":
            _set(config, name, DRAFT_POSITIONS[0])
        return
    _check_choice(config, name, DRAFT_POSITIONS)
    # Without a method the checkpoint decides, see `resolved`.
    if config.method not in (None, "gemma4_mtp"):
        but = f"method is {config.method!r}, whose drafts have one position each"
        allowed = "only with 'gemma4_mtp', otherwise leave it out"
        raise _error(name, config.draft_position, allowed, but)


def _check_draft_feedback(config: SpeculativeFields) -> None:
    name = "draft_feedback"
    if config.draft_feedback is None:
        return
    _check_choice(config, name, DRAFT_FEEDBACKS)
    # Without a method the checkpoint decides, see `resolved`.
    if config.method not in (None, "mtp"):
        raise _only_with(config, name, "mtp", ", otherwise leave it out")
