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
        check_choice("speculative_config['method']", config.method, METHODS, LATER_METHODS)
    _check_model(config)
    _check_drafter(config)
    _check_prompt_lookup(config)
    _check_number_of_drafts(config)
    check_choice(
        "speculative_config['rejection_sample_method']",
        config.rejection_sample_method,
        REJECTION_SAMPLE_METHODS,
    )
    _check_synthetic_length(config)
    _check_draft_sampling(config)
    _check_draft_proposals(config)
    check_choice("speculative_config['x']['draft_driver']", config.draft_driver, DRAFT_DRIVERS)
    _check_draft_stop(config)
    _check_adaptive(config)
    _check_draft_position(config)
    _check_draft_feedback(config)


def _set(config: SpeculativeFields, key: str, value: Any) -> None:
    object.__setattr__(config, key, value)


def _check_number_of_drafts(config: SpeculativeFields) -> None:
    k = config.num_speculative_tokens
    if k is None and (config.is_incomplete or config.method in BLOCK_METHODS):
        return
    k = check_int("speculative_config['num_speculative_tokens']", k, 1, MAX_SPECULATIVE_TOKENS)
    _set(config, "num_speculative_tokens", k)


def _check_model(config: SpeculativeFields) -> None:
    key = "speculative_config['model']"
    if not config.has_model:
        source = (
            "looks drafts up in the sequence" if config.method == "ngram" else "calls a function"
        )
        for name in ("model", "revision"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"speculative_config[{name!r}] is {shorten(getattr(config, name))}, but "
                    f"method {config.method!r} {source} and has no model; allowed: no {name!r}"
                )
        return
    if config.is_incomplete:
        if config.revision is not None:
            raise ValueError(
                f"speculative_config['revision'] is {shorten(config.revision)}, but 'model' is "
                "missing; allowed: only with a 'model' on the hub"
            )
        return
    if config.method in ("mtp", *BLOCK_METHODS) and config.model is None:
        if config.revision is not None:
            raise ValueError(
                f"speculative_config['revision'] is {shorten(config.revision)}, but without a "
                f"'model' method {config.method!r} drafts with files of the target; allowed: no "
                "'revision'"
            )
        return
    what = "the folder of the drafter, or its name on the hub"
    if config.method is not None:
        what += f", which method {config.method!r} needs"
    model = check_path(key, config.model, what)
    if isinstance(config.model, os.PathLike):
        # A string such as "name" could be a model of the hub; a path is not.
        model = os.path.join(os.curdir, model)
    _set(config, "model", model)
    check_revision("speculative_config['revision']", config.revision)


def _check_drafter(config: SpeculativeFields) -> None:
    key = "speculative_config['drafter']"
    if config.method == "custom":
        if not callable(config.drafter):
            raise ValueError(
                f"{key} is {shorten(config.drafter)}; allowed: a function of token ids that "
                "returns token ids, which method 'custom' needs and only Python can give"
            )
    elif config.drafter is not None:
        raise ValueError(
            f"{key} is {shorten(config.drafter)}, but method is {config.method!r}; allowed: only "
            "with 'custom'"
        )


def _check_prompt_lookup(config: SpeculativeFields) -> None:
    given = {"prompt_lookup_min": config.prompt_lookup_min}
    given["prompt_lookup_max"] = config.prompt_lookup_max
    for name, value in given.items():
        if value is None:
            continue
        key = f"speculative_config['{name}']"
        if config.method != "ngram":
            raise ValueError(
                f"{key} is {shorten(value)}, but method is {config.method!r}; "
                "allowed: only with 'ngram'"
            )
        check_int(key, value, 1, MAX_PROMPT_LOOKUP)
    if config.method != "ngram":
        return
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is None:
        low = DEFAULT_PROMPT_LOOKUP if high is None else high
    if high is None:
        high = low
    if low > high:
        raise ValueError(
            f"speculative_config['prompt_lookup_min'] is {low}; allowed: an integer from 1 to "
            f"prompt_lookup_max = {high}"
        )
    _set(config, "prompt_lookup_min", operator.index(low))
    _set(config, "prompt_lookup_max", operator.index(high))


def _check_synthetic_length(config: SpeculativeFields) -> None:
    key = "speculative_config['synthetic_acceptance_length']"
    value = config.synthetic_acceptance_length
    if config.rejection_sample_method != "synthetic":
        if value is not None:
            raise ValueError(
                f"{key} is {shorten(value)}, but rejection_sample_method is "
                f"{config.rejection_sample_method!r}; allowed: only with 'synthetic'"
            )
        return
    # Without k, `completed` checks again.
    k = config.num_speculative_tokens or MAX_SPECULATIVE_TOKENS
    allowed = f"a number from 1 to num_speculative_tokens + 1 = {k + 1}"
    length = check_finite(key, value, allowed)
    if not 1 <= length <= k + 1:
        raise ValueError(f"{key} is {shorten(value)}; allowed: {allowed}")
    _set(config, "synthetic_acceptance_length", length)


def _check_draft_sampling(config: SpeculativeFields) -> None:
    key = "speculative_config['draft_sample_method']"
    has_probabilities = config.rejection_sample_method in _RATIO_METHODS
    is_looked_up = has_probabilities and not config.has_model
    if config.draft_sample_method is None:
        default = "greedy" if is_looked_up else "probabilistic"
        _set(config, "draft_sample_method", default)
    elif config.draft_sample_method == "greedy" and not has_probabilities:
        raise ValueError(
            f"{key} is 'greedy'; "
            f"with rejection_sample_method {config.rejection_sample_method!r} the drafter "
            "samples with the target's noise, at the request's temperature; allowed: "
            "'probabilistic' (at temperature 0 both are greedy)"
        )
    elif config.draft_sample_method == "probabilistic" and is_looked_up:
        raise ValueError(
            f"{key} is 'probabilistic', but method is {config.method!r}, whose drafts "
            f"have no distribution; allowed with rejection_sample_method "
            f"{config.rejection_sample_method!r}: 'greedy'"
        )
    allowed = DRAFT_SAMPLE_METHODS if has_probabilities else DRAFT_SAMPLE_METHODS[:1]
    check_choice(key, config.draft_sample_method, allowed)


def _check_draft_proposals(config: SpeculativeFields) -> None:
    key = "speculative_config['x']['draft_proposals']"
    has_probabilities = (
        config.rejection_sample_method in _RATIO_METHODS
        and config.draft_sample_method == "probabilistic"
    )
    count = config.draft_proposals
    if not has_probabilities:
        if count is not None:
            raise ValueError(
                f"{key} is {shorten(count)}, but rejection_sample_method is "
                f"{config.rejection_sample_method!r} and draft_sample_method "
                f"{config.draft_sample_method!r}; allowed: only with {quoted(_RATIO_METHODS)} "
                "and 'probabilistic'"
            )
        return
    if count is None:
        count = DEFAULT_DRAFT_PROPOSALS
    _set(config, "draft_proposals", check_int(key, count, 1, MAX_DRAFT_PROPOSALS))


def _check_draft_stop(config: SpeculativeFields) -> None:
    key = "speculative_config['x']['draft_stop_threshold']"
    allowed = "a number from 0 (off) to below 1"
    threshold = check_finite(key, config.draft_stop_threshold, allowed)
    if not 0 <= threshold < 1:
        raise ValueError(f"{key} is {threshold}; allowed: {allowed}")
    if threshold > 0 and not config.has_model:
        raise ValueError(
            f"{key} is {threshold}, but method is {config.method!r}, whose drafts have no "
            "probability; "
            "allowed: 0 (off), or a method with a model"
        )
    # A block drafter has no steps. Without a method the checkpoint decides, see `resolved`.
    has_steps = config.method not in (None, *BLOCK_METHODS)
    if threshold > 0 and has_steps and config.draft_driver != "while":
        raise ValueError(
            f"{key} is {threshold}, but draft_driver is {config.draft_driver!r}; allowed: with "
            f"method {config.method!r} only 'while', the only driver that can end draft steps early"
        )
    _set(config, "draft_stop_threshold", threshold)


def _check_adaptive(config: SpeculativeFields) -> None:
    key = "speculative_config['x']['adaptive']"
    if config.adaptive is None:
        return
    check_bool(key, config.adaptive)
    if config.adaptive and config.method == "custom":
        raise ValueError(
            f"{key} is True, but method is 'custom', whose time the engine does not know; "
            "allowed: False, or leave it out"
        )


def _check_draft_position(config: SpeculativeFields) -> None:
    key = "speculative_config['x']['draft_position']"
    if config.draft_position is None:
        if config.method == "gemma4_mtp":
            _set(config, "draft_position", DRAFT_POSITIONS[0])
        return
    check_choice(key, config.draft_position, DRAFT_POSITIONS)
    # Without a method the checkpoint decides, see `resolved`.
    if config.method not in (None, "gemma4_mtp"):
        raise ValueError(
            f"{key} is {config.draft_position!r}, but method is {config.method!r}, whose drafts "
            "have one position each; allowed: only with 'gemma4_mtp', otherwise leave it out"
        )


def _check_draft_feedback(config: SpeculativeFields) -> None:
    key = "speculative_config['x']['draft_feedback']"
    if config.draft_feedback is None:
        return
    check_choice(key, config.draft_feedback, DRAFT_FEEDBACKS)
    # Without a method the checkpoint decides, see `resolved`.
    if config.method not in (None, "mtp"):
        raise ValueError(
            f"{key} is {config.draft_feedback!r}, but method is {config.method!r}; allowed: only "
            "with 'mtp', otherwise leave it out"
        )
