# SPDX-License-Identifier: Apache-2.0
"""The configuration of speculative decoding, checked once and frozen.

Every error names the key, the value and the values allowed. No value is silently rewritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from paceline.checks import did_you_mean, parse_json, quoted, shorten, wrong_type, wrong_value
from paceline.option_schema import KEYS, argument_docs
from paceline.speculative_checks import check_all, lacks_k
from paceline.speculative_fields import METHODS, SpeculativeFields, check_found_method
from paceline.vllm_arguments import advice_for

#: The models by which vLLM names prompt lookup, beside the method "ngram".
VLLM_NGRAM: Final = ("ngram", "[ngram]")

# Keys of SpeculativeConfig that users write under "x".
_NESTED_KEYS: Final = tuple(name for name, option in KEYS.items() if option.nested)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(SpeculativeFields):
    """How tokens are drafted and accepted. Keys are vLLM's; Paceline's own are nested under "x".

    `method` and `model` may both be None where the model brings a drafter of its own: a folder of
    `paceline convert`, one of the `speculators` package, or a target with a subfolder "dflash",
    "dflash2" or "dspark". A configuration that sets nothing, such as `{"method": None}`, means
    plain decoding.

    Attributes:
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
            raise lacks_k()
        return self.num_speculative_tokens

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that draft: `method`, and "ngram" if prompt lookup stands in front of it.

        The method must be known.
        """
        if self.method is None:
            return ()
        is_in_front = self.has_model and self.prompt_lookup_max is not None
        return (self.method, "ngram") if is_in_front else (self.method,)

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
        check_found_method(self.method, method)
        if self.method == method:
            return self
        return dataclasses.replace(self, method=method)

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """Reads a configuration in any of the forms that users write.

        Args:
            value: A mapping with vLLM's keys, a JSON object with them, or a SpeculativeConfig. The
                model "ngram" or "[ngram]" means the method "ngram", as in vLLM.

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
            raise wrong_type("speculative_config", value, "a mapping or a JSON object")
        fields = [name for name in KEYS if name not in _NESTED_KEYS]
        _check_keys("speculative_config", value, (*fields, "x"))
        if value.get("model") in VLLM_NGRAM:
            if value.get("method") not in (None, "ngram"):
                raise ValueError(
                    f"speculative_config['model'] is {value['model']!r}, vLLM's name of prompt "
                    f"lookup, and 'method' is {shorten(value['method'])}; allowed: 'ngram', or no "
                    "'method'"
                )
            value = {**value, "method": "ngram", "model": None}
        if not value:
            raise lacks_k(may_name_method=True)
        arguments = {key: value[key] for key in fields if key in value}
        nested = value.get("x", {})
        if not isinstance(nested, Mapping):
            raise wrong_value("speculative_config['x']", nested, "a mapping")
        _check_keys("speculative_config['x']", nested, _NESTED_KEYS)
        return cls(**arguments, **nested)


SpeculativeConfig.__doc__ = (
    f"{SpeculativeConfig.__doc__}    {argument_docs('        ', KEYS).lstrip()}\n    "
)


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
        hint = "; the drafter's key is 'draft_tensor_parallel_size'"
    elif where == "speculative_config" and key in _NESTED_KEYS:
        hint = f"; it belongs under 'x': {{'x': {{{key!r}: ...}}}}"
    else:
        hint = did_you_mean(str(key), allowed)
    return ValueError(f"{where}: unknown key {shorten(key)}{hint}; allowed: {quoted(allowed)}")
