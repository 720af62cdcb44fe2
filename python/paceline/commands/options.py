# SPDX-License-Identifier: Apache-2.0
"""What the options that commands share mean for `LLM`; flags.toml has the options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from paceline.checks import check_path, check_revision, parse_json, shorten
from paceline.commands.flags import DEFAULT_DEMO
from paceline.option_schema import given_options

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams


def sampling_params(
    args: argparse.Namespace, default: SamplingParams | None = None
) -> SamplingParams:
    """Reads the options that are `SamplingParams`.

    Args:
        args: The arguments.
        default: What holds for options that are not given; None = `SamplingParams()`.
    """
    from paceline.sampling import SamplingParams

    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(SamplingParams)
        if getattr(args, field.name, None) is not None
    }
    if args.logit_bias is not None:
        given["logit_bias"] = _parse_logit_bias(args.logit_bias)
    return SamplingParams(**given) if default is None else dataclasses.replace(default, **given)


def _parse_logit_bias(text: str) -> list[tuple[int, Any]]:
    """Reads a JSON object; duplicate keys are kept, so that they are refused."""
    pairs = parse_json("--logit-bias", text, object_pairs_hook=tuple)
    try:
        if not text.lstrip().startswith("{"):
            raise ValueError
        return [(int(key), value) for key, value in pairs]
    except ValueError:
        raise ValueError(
            f"--logit-bias is {shorten(text)}; allowed: a JSON object from token ids to numbers, "
            "for example '{\"262\": -100}'"
        ) from None


def choose_model(args: argparse.Namespace) -> tuple[str, dict[str, Any] | str | None]:
    """Returns the target and the speculative configuration.

    Raises:
        ValueError: Options that exclude each other are given.
    """
    if args.model is not None:
        for option, value in (
            ("--demo", args.demo),
            ("--num-speculative-tokens", args.num_speculative_tokens),
        ):
            if value is not None:
                raise ValueError(
                    f"{option} is for the package's own checkpoints, not for --model; name the "
                    "drafter and 'num_speculative_tokens' in --speculative-config"
                )
        return args.model, args.speculative_config
    for option, value in (("--revision", args.revision), ("--cache-dir", args.cache_dir)):
        if value is not None:
            raise ValueError(
                f"{option} needs --model with a model of the hub; the demos ship with the package"
            )
    if args.speculative_config is not None:
        raise ValueError("--speculative-config needs --model; --demo has its own drafter")
    from paceline.demo import find_demo

    demo = find_demo(DEFAULT_DEMO if args.demo is None else args.demo)
    k = args.num_speculative_tokens
    return str(demo.target), None if k == 0 else demo.speculative_config(k)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the options of the engine and --chat-template as arguments of `LLM`."""
    # The demo's checkpoints are too small to gain from a GPU.
    is_demo = args.model is None
    return {
        "device": "cpu" if is_demo and args.device == "auto" else args.device,
        "chat_template": args.chat_template,
        **given_options(args, "all"),
    }


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the options of models and engine as arguments of `LLM`.

    Raises:
        ValueError: One of them is malformed, or options exclude each other.
    """
    model, speculative_config = choose_model(args)
    return {
        "model": model,
        "speculative_config": speculative_config,
        "show_progress": not args.quiet,
        **engine_arguments(args),
        **download_arguments(args),
    }


def download_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the options of models of the hub as keyword arguments of `LLM` and `find_folder`.

    Raises:
        ValueError: One of them is malformed.
    """
    check_revision("--revision", args.revision)
    if args.cache_dir is not None:
        check_path("--cache-dir", args.cache_dir, "the folder of the hub's cache")
    return {"revision": args.revision, "cache_dir": args.cache_dir}
