# SPDX-License-Identifier: Apache-2.0
"""The configuration of speculative decoding, checked once and frozen.

Every error names the key, the value and the values allowed. No value is silently rewritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from paceline.checks import check_choice, did_you_mean, parse_json, quoted, shorten
from paceline.limits import MAX_SPECULATIVE_TOKENS
from paceline.speculative_checks import check_all
from paceline.speculative_fields import BLOCK_METHODS, LATER_METHODS, METHODS, SpeculativeFields
from paceline.vllm_arguments import advice_for

#: The model by which vLLM names prompt lookup, beside the method "ngram".
VLLM_NGRAM: Final = "[ngram]"

# Keys of SpeculativeConfig that users write under "x".
_NESTED_KEYS: Final = (
    "draft_driver",
    "draft_stop_threshold",
    "draft_position",
    "draft_feedback",
    "draft_proposals",
    "adaptive",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(SpeculativeFields):
    """How tokens are drafted and accepted. Keys are vLLM's; Paceline's own are nested under "x".

    `method` and `model` may both be None where the model brings a drafter of its own: a folder of
    `paceline convert`, one of the `speculators` package, or a target with a subfolder "dflash",
    "dflash2" or "dspark". A configuration that sets nothing, such as `{"method": None}`, means
    plain decoding.

    Attributes:
        method: "draft_model", "eagle", "eagle3", "mtp", "gemma4_mtp", "dflash", "dflash2",
            "dspark", "ngram" or "custom". None: `LLM` reads it from the checkpoint in `model`.
        model: The drafter: a folder or a model of the hub, as for `LLM`; a path-like object becomes
            a string. None with "ngram" and "custom", which need no model, with "mtp", whose layer
            is in the target's own files, and with "dflash", "dflash2" and "dspark", whose drafter
            is then the target's subfolder of that name or, with "dspark", in the target's own
            files.
        drafter: "custom" only: a function of the token ids of prompt and output, a list, that
            returns at most k ids that may follow. The engine calls it on a thread of its own, one
            call at a time, and each request waits for it, so it is for research; see
            docs/structured-output.md. What it raises ends that request with an error.
        revision: Of a drafter on the hub: a branch, a tag or a commit. None = the default branch.
        num_speculative_tokens: Tokens drafted in each iteration (k), 1 to 16. None, with a drafter
            that the model brings, or with "dflash", "dflash2" and "dspark": as the drafter's folder
            says.
        rejection_sample_method: "coupled" accepts a draft if it equals the token that the target
            samples; the output is bit for bit that of plain decoding. "standard" (rejection
            sampling) and "block" (block verification) follow the target's distribution, but the
            tokens of a seed depend on the drafts; at temperature 0 the output is that of plain
            decoding. They accept more drafts at temperatures above 0. "synthetic" does the work of
            "coupled", then overrides the verdict so that the mean acceptance length is
            `synthetic_acceptance_length`; it is for benches, and its output is meaningless.
        synthetic_acceptance_length: "synthetic" only: tokens per iteration, bonus token included,
            1 to k + 1.
        draft_sample_method: "probabilistic": the drafter samples at the request's temperature. It
            is the only choice for "coupled" and "synthetic", where drafter and target share noise.
            "greedy": the drafter takes its most likely token. It is the only choice for "ngram"
            and "custom" with "standard" and "block", since their tokens have no distribution.
            None = "probabilistic" where there is a choice.
        prompt_lookup_min: "ngram" only: length of the shortest n-gram that is looked up. None =
            `prompt_lookup_max`, or 5 if that is None too.
        prompt_lookup_max: "ngram" only: length of the longest n-gram, which is tried first. None =
            `prompt_lookup_min`.
        draft_driver: Under "x". What repeats the draft step: "unrolled", "replay", "while" or
            "eager". All give identical bits.
        draft_stop_threshold: Under "x", 0 to below 1. Drafting for a sequence ends once the
            drafter's probability of a draft falls below this. That draft is still verified. A block
            drafter with a confidence head ends the drafts before the first one whose estimated
            probability of acceptance is below this, which may leave none. With "coupled" acceptance
            the output does not change. 0 = off; other values need a method other than "ngram" and
            "custom" and, except with block drafters, the draft_driver "while".
        draft_position: Under "x", "gemma4_mtp" only. The position of the queries of all drafts:
            "last", the last position with KV of the target (None means this), or "next", that of
            the newest token. Engines differ here. The keys are the same, so only acceptance can
            change.
        draft_feedback: Under "x", "mtp" only. The hidden state that a draft step passes to the next
            one: "normed", after the layer's last norm (None means this, except that a folder of
            `paceline convert` may say otherwise), or "raw", before it. Engines differ here. The
            first draft is the same, so only the acceptance of later ones can change.
        draft_proposals: Under "x", 1 to 256, only for "standard" and "block" with "probabilistic"
            drafts (None = 64 there). Drafts are sampled from this many of the drafter's most likely
            tokens. The output distribution is exact for any number. The engine keeps 8 bytes for
            each, times k and `max_num_seqs`.
        adaptive: Under "x". True: each iteration chooses how many tokens are drafted, from 0 to
            `num_speculative_tokens`, by measured times and acceptance. False: always
            `num_speculative_tokens`. None = True with "coupled", whose output does not depend on
            the choice, except with the method "custom"; False otherwise. With True, "standard" and
            "block" have seeded output that depends on times, and the method "custom" is refused.
    """

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def is_off(self) -> bool:
        """Returns whether it sets nothing, which means plain decoding."""
        return self == SpeculativeConfig()

    @property
    def k(self) -> int:
        """`num_speculative_tokens` of a complete configuration.

        Raises:
            ValueError: It is incomplete.
        """
        if self.is_incomplete:
            raise self._needs_drafter()
        if self.num_speculative_tokens is None:
            raise _lacks_k()
        return self.num_speculative_tokens

    def completed(
        self, name: str, drafter: str | None = None, num_speculative_tokens: int | None = None
    ) -> SpeculativeConfig | None:
        """Returns the configuration for a model that may bring a drafter of its own.

        Args:
            name: The model, for messages.
            drafter: The folder of its drafter; None: it brings none.
            num_speculative_tokens: The default k of that drafter.

        Returns:
            The complete configuration; None: plain decoding.

        Raises:
            ValueError: A drafter is needed, and there is none.
        """
        if self.is_off:
            return None
        if not self.is_incomplete:
            return self
        if drafter is None:
            raise self._needs_drafter(f", and {name} brings no drafter")
        k = self.num_speculative_tokens or num_speculative_tokens
        return dataclasses.replace(self, model=drafter, num_speculative_tokens=k)

    def _needs_drafter(self, reason: str = "") -> ValueError:
        return ValueError(
            f"speculative_config has neither 'method' nor 'model'{reason}; methods of this "
            f"version: {quoted(METHODS)}"
        )

    def resolved(self, method: str) -> SpeculativeConfig:
        """Returns this configuration with the method of the drafter's checkpoint.

        Raises:
            ValueError: The configuration names another method.
        """
        if self.method == method:
            return self
        if self.method is not None:
            raise ValueError(
                f"speculative_config['method'] is {self.method!r}, but the drafter is for "
                f"{method!r}; allowed: {method!r}, or no 'method'"
            )
        return dataclasses.replace(self, method=method)

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """Reads a configuration in any of the forms that users write.

        Args:
            value: A mapping with vLLM's keys, a JSON object with them, or a SpeculativeConfig. The
                model "[ngram]" means the method "ngram", as in vLLM.

        Returns:
            The checked configuration.

        Raises:
            ValueError: Invalid JSON, an unknown key or a value that is not allowed.
            NotImplementedError: A key or value that other engines take and this version does not.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            value = parse_json("speculative_config", value)
        if not isinstance(value, Mapping):
            raise ValueError(
                f"speculative_config is {shorten(value)} ({type(value).__name__}); "
                "allowed: a mapping or a JSON object"
            )
        fields = [field.name for field in dataclasses.fields(cls) if field.name not in _NESTED_KEYS]
        _check_keys("speculative_config", value, (*fields, "x"))
        if value.get("model") == VLLM_NGRAM and value.get("method") in (None, "ngram"):
            value = {**value, "method": "ngram", "model": None}
        if "num_speculative_tokens" not in value:
            # The method is checked first: if it does not exist, the missing k does not matter.
            if value.get("method") is not None:
                check_choice(
                    "speculative_config['method']", value["method"], METHODS, LATER_METHODS
                )
            has_drafter = value.get("method") is not None or value.get("model") is not None
            if not value or (has_drafter and value.get("method") not in BLOCK_METHODS):
                # Not left to the drafter's folder, which may be gigabytes on the hub.
                raise _lacks_k(may_name_method=value.get("method") is None)
        arguments = {key: value[key] for key in fields if key in value}
        nested = value.get("x", {})
        if not isinstance(nested, Mapping):
            raise ValueError(f"speculative_config['x'] is {shorten(nested)}; allowed: a mapping")
        _check_keys("speculative_config['x']", nested, _NESTED_KEYS)
        return cls(**arguments, **nested)


def ignored_keys(value: object) -> dict[str, object]:
    """Returns what a parsed configuration has of vLLM's keys that change nothing, by name."""
    if isinstance(value, str):
        value = parse_json("speculative_config", value)
    if not isinstance(value, Mapping):
        return {}
    return {
        f"speculative_config[{key!r}]": value[key]
        for key in value
        if advice_for("speculative_config", key) is not None
    }


def _lacks_k(*, may_name_method: bool = False) -> ValueError:
    methods = " or ".join(map(repr, BLOCK_METHODS))
    otherwise = f", or 'method': {methods}, whose drafters state it" if may_name_method else ""
    return ValueError(
        "speculative_config lacks 'num_speculative_tokens'; "
        f"allowed: an integer from 1 to {MAX_SPECULATIVE_TOKENS}{otherwise}"
    )


def _check_keys(where: str, mapping: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Refuses unknown keys, except for values of vLLM's that change nothing."""
    refused = {}
    for key, value in mapping.items():
        advice = None if key in allowed else advice_for(where, key)
        if advice is not None and not advice.accepts(value):
            refused[key] = advice.plain
        elif advice is None and key not in allowed:
            raise _unknown_key(where, key, allowed)
    if len(refused) == 1:
        [(key, text)] = refused.items()
        raise NotImplementedError(
            f"{where}: key {key!r} is not supported yet; this version has: {quoted(allowed)}; "
            f"{text}"
        )
    if refused:
        listed = "\n".join(
            f"  {key!r}: {shorten(mapping[key])}: {text}" for key, text in refused.items()
        )
        raise NotImplementedError(
            f"{where}: these keys are not supported yet:\n{listed}\n"
            f"this version has: {quoted(allowed)}"
        )


def _unknown_key(where: str, key: Any, allowed: tuple[str, ...]) -> ValueError:
    if key == "tensor_parallel_size":
        hint = "; the drafter's key is 'draft_tensor_parallel_size', which may be 1"
    elif where == "speculative_config" and key in _NESTED_KEYS:
        hint = f"; it belongs under 'x': {{'x': {{{key!r}: ...}}}}"
    else:
        hint = did_you_mean(str(key), allowed)
    return ValueError(f"{where}: unknown key {shorten(key)}{hint}; allowed: {quoted(allowed)}")
