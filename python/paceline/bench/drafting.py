# SPDX-License-Identifier: Apache-2.0
"""The drafting that `paceline bench latency` measures, from its options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from paceline.bench.values import parse_list, parse_names
from paceline.checks import parse_json, shorten
from paceline.limits import MAX_SPECULATIVE_TOKENS
from paceline.speculative_config import SpeculativeConfig
from paceline.speculative_fields import DRAFT_DRIVERS

# Default speculation. Dummy weights would accept no draft, so their acceptance is synthetic.
_DEFAULT_SPECULATION: Final[dict[str, Any]] = {"num_speculative_tokens": 4}
_DUMMY_SPECULATION: Final[dict[str, Any]] = {
    **_DEFAULT_SPECULATION,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.2,
}
# Instead of 2.2 where k = 1 is among what is measured, which has at most 2 tokens an iteration.
_LENGTH_OF_ONE_DRAFT: Final = 1.8


def speculations(
    args: argparse.Namespace,
) -> tuple[SpeculativeConfig | None, list[SpeculativeConfig]]:
    """The given configuration, and one for each k and driver; without drafts None and none."""
    default_draft, default_options = None, _DUMMY_SPECULATION
    lengths = None
    if args.num_speculative_tokens is not None:
        lengths = parse_draft_lengths(args.num_speculative_tokens)
        if 1 in lengths:
            shorter = {"synthetic_acceptance_length": _LENGTH_OF_ONE_DRAFT}
            default_options = default_options | shorter
    if args.draft_config is not None:
        default_draft = args.draft_config
    elif args.demo:
        from paceline.demo import demo_paths

        default_draft, default_options = str(demo_paths("draft_model")[1]), _DEFAULT_SPECULATION
    elif args.model is None and args.config is None:
        default_draft = "gemma3-10m"
    if args.speculative_config is not None:
        config = _parse_speculative_config(args, default_draft, lengths)
    elif default_draft is not None:
        config = SpeculativeConfig.parse({"model": default_draft, **default_options})
    else:
        for option in ("drivers", "num_speculative_tokens", "adaptive"):
            if getattr(args, option) not in (None, False):
                raise ValueError(
                    f"{option} is {shorten(getattr(args, option))}, but there is no drafter; give "
                    "one with --speculative-config or --draft-config"
                )
        return None, []
    configs = [config]
    if lengths is not None:
        configs = _with_lengths(config, lengths)
    if args.drivers is not None:
        drivers = parse_names("drivers", args.drivers, DRAFT_DRIVERS)
        try:
            configs = [
                dataclasses.replace(config, draft_driver=driver)
                for config in configs
                for driver in drivers
            ]
        except ValueError as error:  # a stop threshold works with one driver only
            raise ValueError(f"drivers is {shorten(args.drivers)}: {error}") from None
    if args.adaptive:
        if args.host_only:
            raise ValueError("--adaptive does not go with --host-only, which has no times")
        # Beside those with a fixed number: the one with the most drafts, which chooses.
        longest = max(configs, key=lambda config: config.k)
        configs.append(dataclasses.replace(longest, adaptive=True))
    return config, [with_fixed_k(config) for config in configs]


def _with_lengths(config: SpeculativeConfig, lengths: list[int]) -> list[SpeculativeConfig]:
    """A configuration for each k.

    Raises:
        ValueError: Some k have fewer tokens than an imposed acceptance length. The message has all.
    """
    configs, refused = [], {}
    for k in lengths:
        try:
            configs.append(dataclasses.replace(config, num_speculative_tokens=k))
        except ValueError as error:
            refused[k] = error
    if refused:
        listed, (reason, *_) = ",".join(map(str, refused)), refused.values()
        rest = ",".join(str(k) for k in lengths if k not in refused)
        raise ValueError(
            f"--num-speculative-tokens has {listed}, which --speculative-config excludes: "
            f"{reason}; use --num-speculative-tokens {rest} (--acceptance-lengths reports tokens "
            "per second at other lengths)"
        )
    return configs


def _parse_speculative_config(
    args: argparse.Namespace, default_draft: str | None, lengths: list[int] | None
) -> SpeculativeConfig:
    """Reads --speculative-config, which may omit the drafter if there is a default, and k if
    --num-speculative-tokens names it.
    """
    values = parse_json("speculative_config", args.speculative_config)
    if not isinstance(values, dict):
        return SpeculativeConfig.parse(values)  # refuses
    if args.draft_config is not None:
        _check_names_no_drafter(values, args.draft_config)
    if default_draft is not None and values.get("method") not in ("ngram", "mtp"):
        values = {"model": default_draft} | values
    if lengths is not None:
        values = values | {"num_speculative_tokens": max(lengths)}
    return SpeculativeConfig.parse(values)


def _check_names_no_drafter(values: dict[str, Any], draft_config: str) -> None:
    """Refuses options that would make --draft-config meaningless."""
    given = f"--draft-config is {shorten(draft_config)}"
    for method, why in (
        ("ngram", "which looks drafts up in the sequence and needs no model"),
        ("mtp", "whose layer is the target's"),
    ):
        if values.get("method") == method:
            raise ValueError(
                f"{given}, but method is {method!r}, {why}; leave out --draft-config, or name "
                "another method"
            )
    if "model" in values:
        raise ValueError(
            f"{given}, but speculative_config['model'] is {shorten(values['model'])}; "
            "allowed: one of the two (--draft-config has dummy weights)"
        )


def with_fixed_k(config: SpeculativeConfig) -> SpeculativeConfig:
    """Drafts always k tokens, unless the configuration says that the engine chooses."""
    return dataclasses.replace(config, adaptive=bool(config.adaptive))


def may_stop_early(config: SpeculativeConfig) -> bool:
    """Returns whether an iteration may draft fewer tokens than k.

    It may end below a threshold, prompt lookup may find nothing, or the engine chooses.
    """
    can_find_nothing = config.method == "ngram"
    return config.draft_stop_threshold > 0 or can_find_nothing or bool(config.adaptive)


def parse_draft_lengths(text: str) -> list[int]:
    """Reads --num-speculative-tokens.

    Raises:
        ValueError: It is no list of such numbers.
    """
    allowed = f"integers from 1 to {MAX_SPECULATIVE_TOKENS}, for example 1,3,5,7"
    name, high = "num_speculative_tokens", MAX_SPECULATIVE_TOKENS
    return list(dict.fromkeys(parse_list(name, text, int, allowed, 1, high)))
