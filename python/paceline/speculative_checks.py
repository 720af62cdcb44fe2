# SPDX-License-Identifier: Apache-2.0
"""The checks of a `SpeculativeConfig`, each in one place.

A key's type and range stand in options.toml and are checked by `Option.check`. Conditions between
keys are those of cpp/src/executor/option_checks.cc, which also serve programs in C++ and C. Here
is what C++ cannot see: the files of drafters, keys that are missing, and defaults.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

from paceline import _core
from paceline.checks import check_path, check_revision, shorten
from paceline.custom_drafter import CustomDrafter
from paceline.limits import DEFAULT_DRAFT_PROPOSALS, MAX_SPECULATIVE_TOKENS
from paceline.option_schema import KEYS
from paceline.speculative_fields import BLOCK_METHODS, DRAFT_POSITIONS, SpeculativeFields

# The values of rejection_sample_method that compare the probabilities of drafter and target.
_RATIO_METHODS: Final = ("standard", "block")

# The length of the n-grams that are looked up, by default.
DEFAULT_PROMPT_LOOKUP: Final = 5


def check_all(config: SpeculativeFields) -> None:
    """Checks a configuration, and sets those of its keys whose default depends on other keys.

    Raises:
        ValueError: A value is not allowed; the message names the key and the values allowed.
        NotImplementedError: A method that this version does not have.
    """
    for name, option in KEYS.items():
        value = option.check(getattr(config, name))
        _set(config, name, value)
        if option.cpp is None:
            option.check_method(value, config.method)
    _check_model(config)
    _check_drafter_is_given(config)
    if config.num_speculative_tokens is None and not (
        config.is_incomplete or config.method in BLOCK_METHODS
    ):
        raise lacks_k(may_name_method=config.method is None)
    _set_defaults(config)
    _check_conditions(config)


def speculative_options(config: SpeculativeFields) -> dict[str, Any]:
    """Returns those of the `options` of `_core.Executor` that say how tokens are drafted.

    A key that is not given has the default of C++.
    """
    options = {
        name: value
        for name, option in KEYS.items()
        if option.cpp is not None and (value := getattr(config, name)) is not None
    }
    if config.drafter is not None:
        k = config.num_speculative_tokens or 0
        options["drafter"] = CustomDrafter(config.drafter, k)
    return options


def lacks_k(*, may_name_method: bool = False) -> ValueError:
    """The error about a number of drafts that is missing."""
    methods = " or ".join(map(repr, BLOCK_METHODS))
    otherwise = f", or 'method': {methods}, whose drafters state it" if may_name_method else ""
    return ValueError(
        "speculative_config lacks 'num_speculative_tokens', which is None; "
        f"allowed: an integer from 1 to {MAX_SPECULATIVE_TOKENS}{otherwise}"
    )


def _with_keys(message: str, config: SpeculativeFields) -> str:
    """Names the key and the value of Python first in a message of C++, which names an option."""
    name, _, rest = message.partition(" is ")
    if name not in KEYS:
        return message
    rest = rest[re.match(r"[^,;]*?(?=[,;]|$)", rest).end() :]  # type: ignore[union-attr]
    rest = re.sub(r"\b(true|false)\b", lambda word: word[0].title(), rest)
    return f"{KEYS[name].key} is {shorten(getattr(config, name))}{rest}"


def _set(config: SpeculativeFields, key: str, value: Any) -> None:
    object.__setattr__(config, key, value)


def _check_model(config: SpeculativeFields) -> None:
    """Checks the drafter's path and revision, of which C++ knows nothing."""
    if not config.has_model:
        return
    may_lack_model = config.is_incomplete or config.method in ("mtp", *BLOCK_METHODS)
    if config.model is None and may_lack_model:
        if config.revision is not None:
            drafts = (
                "'model' is missing"
                if config.method is None
                else f"without a 'model' method {config.method!r} drafts with files of the target"
            )
            raise ValueError(
                f"speculative_config['revision'] is {shorten(config.revision)}, but {drafts}; "
                "allowed: no 'revision', or a 'model' on the hub"
            )
        return
    what = "the folder of the drafter, or its name on the hub"
    if config.method is not None:
        what += f", which method {config.method!r} needs"
    model = check_path("speculative_config['model']", config.model, what)
    if isinstance(config.model, os.PathLike):
        # A string such as "name" could be a model of the hub; a path is not.
        model = os.path.join(os.curdir, model)
    _set(config, "model", model)
    check_revision("speculative_config['revision']", config.revision)


def _check_drafter_is_given(config: SpeculativeFields) -> None:
    if config.method == "custom" and config.drafter is None:
        option = KEYS["drafter"]
        raise ValueError(f"{option.key} is None; allowed: {option.allowed}")


def _check_conditions(config: SpeculativeFields) -> None:
    """Checks conditions between keys by the function of C++ that also checks them for an engine."""
    try:
        _core.check_options(speculative_options(config), config.method)
    except ValueError as error:
        raise ValueError(_with_keys(str(error), config)) from None


def _set_defaults(config: SpeculativeFields) -> None:
    """Sets keys that are not given and whose default depends on other keys."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    is_given = low is not None or high is not None
    accepts = config.method in (None, *KEYS["prompt_lookup_max"].methods)
    if config.method == "ngram" or (is_given and accepts):
        if low is None:
            low = DEFAULT_PROMPT_LOOKUP if high is None else high
        _set(config, "prompt_lookup_min", low)
        _set(config, "prompt_lookup_max", low if high is None else high)
    compares = config.rejection_sample_method in _RATIO_METHODS
    if config.draft_sample_method is None:
        is_looked_up = compares and not config.has_model
        _set(config, "draft_sample_method", "greedy" if is_looked_up else "probabilistic")
    is_sampled = compares and config.draft_sample_method == "probabilistic"
    if is_sampled and config.has_model and config.draft_proposals is None:
        _set(config, "draft_proposals", DEFAULT_DRAFT_PROPOSALS)
    if config.method == "gemma4_mtp" and config.draft_position is None:
        _set(config, "draft_position", DRAFT_POSITIONS[0])
