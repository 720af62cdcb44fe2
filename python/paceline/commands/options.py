# SPDX-License-Identifier: Apache-2.0
"""The options that `generate` and `chat` share, and what they mean for `LLM`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_path, check_revision, parse_json, shorten
from paceline.commands.colors import COLOR_CHOICES
from paceline.console import integer, number
from paceline.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)
from paceline.option_schema import add_options, given_options, key_names

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams

_DEFAULT_DEMO: Final = "draft_model"


def add_hub_options(group: argparse._ActionsContainer) -> None:
    """Adds the options of models of the Hugging Face Hub."""
    group.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model of the hub (default: its default branch)",
    )
    group.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder for what is downloaded from the hub (default: the hub's own, see `paceline "
        "doctor`)",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name target and drafter."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        metavar="DIR_OR_ID",
        help="the target: a folder with a checkpoint, a folder that `paceline convert` wrote, or a "
        "model of the Hugging Face Hub such as org/name (default: none, a demo runs)",
    )
    add_hub_options(group)
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='the drafter, for example \'{"method": "draft_model", "model": DIR_OR_ID, '
        '"num_speculative_tokens": 4}\'; needs --model (default: the drafter that the '
        f"model's folder brings, or plain decoding); keys: {key_names()}",
    )
    group.add_argument(
        "--demo",
        metavar="NAME",
        help="the package's own checkpoints, used without --model: draft_model, eagle3, "
        f"gemma4_mtp or ngram (default: {_DEFAULT_DEMO})",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=integer,
        metavar="K",
        help=f"drafts per iteration of a demo, 0 to {MAX_SPECULATIVE_TOKENS}; 0 = plain decoding "
        "(default: the demo's own; with --model, --speculative-config sets it)",
    )


def add_chat_options(parser: argparse.ArgumentParser, *, is_always_chat: bool) -> None:
    """Adds the options of conversations."""
    group = parser.add_argument_group("chat")
    needs = "" if is_always_chat else "; needs --chat"
    if not is_always_chat:
        group.add_argument(
            "--chat",
            action="store_true",
            help="a prompt is what a user says: the checkpoint's chat template turns it into the "
            "model's input (default: off, the model continues the prompt as it is)",
        )
    group.add_argument(
        "--system",
        metavar="TEXT",
        help=f"begin the conversation with this system message (default: none){needs}",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help=f"Jinja template to use (default: none, the checkpoint's own){needs}",
    )


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int, is_chat: bool = False
) -> None:
    """Adds the options that are `SamplingParams`; docs/sampling.md defines them."""
    own = "the checkpoint's, else "  # of generation_config.json
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=integer,
        default=max_tokens,
        metavar="N",
        help=f"tokens to generate at most, N >= 1 (default: {max_tokens})",
    )
    group.add_argument(
        "--temperature",
        type=number,
        default=None if is_chat else 0.0,
        metavar="T",
        help=f"divides the logits, 0 to {MAX_TEMPERATURE:,.0f}; 0 = greedy "
        f"(default: {own + '1' if is_chat else '0'})",
    )
    group.add_argument(
        "--seed",
        type=integer,
        default=0,
        metavar="N",
        help="random seed, 0 to 2**64 - 1; the same seed gives the same output (default: 0)",
    )
    if not is_chat:
        group.add_argument(
            "--n",
            type=integer,
            default=1,
            metavar="N",
            help=f"completions of each prompt, 1 to {MAX_SAMPLES}; more than one are printed at "
            "the end (default: 1)",
        )
    _add_token_choice(group)
    if not is_chat:
        for flag, text in (
            ("--logprobs", "print the logprob of each token and of the N most likely tokens"),
            ("--prompt-logprobs", "the same for the tokens of the prompt"),
        ):
            group.add_argument(
                flag,
                type=integer,
                metavar="N",
                help=f"{text}, 0 to {MAX_LOGPROBS} (default: none)",
            )
    _add_stopping(parser.add_argument_group("stopping"))


def _add_token_choice(group: Any) -> None:
    """Options that change the distribution."""
    for flag, kind, metavar, text in (
        ("--top-k", integer, "N", "sample from the N most likely tokens, N >= 1 (default: 0, all)"),
        (
            "--top-p",
            number,
            "P",
            "sample from the fewest tokens with total probability P, above 0 to 1 (default: 1, "
            "all)",
        ),
        (
            "--min-p",
            number,
            "P",
            "sample from tokens at least P times as likely as the best, 0 to 1 (default: 0, all)",
        ),
        (
            "--repetition-penalty",
            number,
            "X",
            "divide positive logits of tokens in prompt or output and multiply negative ones, "
            "X > 0 (default: 1, off)",
        ),
        (
            "--presence-penalty",
            number,
            "X",
            "subtract X from the logits of tokens in the output, -2 to 2 (default: 0)",
        ),
        (
            "--frequency-penalty",
            number,
            "X",
            "subtract X times the number of occurrences in the output, -2 to 2 (default: 0)",
        ),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--logit-bias",
        metavar="JSON",
        help="add to logits: token ids to numbers from -100 to 100, as '{\"262\": -100}', "
        f"at most {MAX_LOGIT_BIAS} (default: none)",
    )
    group.add_argument(
        "--bad-words",
        action="append",
        metavar="TEXT",
        help=f"text the output must not contain; repeatable, at most {MAX_BAD_WORDS} words of "
        f"{MAX_BAD_WORD_TOKENS} tokens in all (default: none)",
    )
    group.add_argument(
        "--allowed-token-ids",
        type=_token_ids,
        metavar="IDS",
        help="sample from these tokens only: 1,2,3 (default: all)",
    )


def _add_stopping(group: Any) -> None:
    """Options that end a request."""
    group.add_argument(
        "--min-tokens",
        type=integer,
        metavar="N",
        help="output tokens before a stop is allowed, 0 to --max-tokens (default: 0)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; repeatable, at most 16 texts of at most 256 characters "
        "(a newline is $'\\n' in bash; default: none)",
    )
    group.add_argument(
        "--include-stop-str-in-output",
        action="store_true",
        help="end after the text of --stop (default: off, before it)",
    )
    group.add_argument(
        "--stop-token-ids",
        type=_token_ids,
        metavar="IDS",
        help=f"end at any of these tokens: 1,2,3; at most {MAX_STOP_TOKEN_IDS} with the "
        "checkpoint's own (default: none)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after an end-of-sequence token (default: off)",
    )
    group.add_argument(
        "--no-skip-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        help="show special tokens in the text (default: off)",
    )


def add_device_option(group: argparse._ActionsContainer, *, has_demo: bool = True) -> None:
    """Adds `--device`, for commands with or without a demo."""
    but = ", but cpu with a demo" if has_demo else ""
    group.add_argument(
        "--device",
        default="auto",
        help=f"auto, cpu or cuda; auto is cuda if a GPU is usable{but} (default: auto)",
    )


def add_color_option(group: argparse._ActionsContainer, what: str) -> None:
    """Adds `--color`, for what it colours."""
    group.add_argument(
        "--color",
        choices=COLOR_CHOICES,
        default="never",
        help=f"colour {what} by where its tokens come from: auto "
        "(on a terminal, unless NO_COLOR is set), always or never (default: never)",
    )


def add_quiet_option(group: argparse._ActionsContainer, effect: str) -> None:
    """Adds `-q`, with its effect."""
    group.add_argument("-q", "--quiet", action="store_true", help=f"{effect} (default: off)")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are arguments of `LLM`."""
    group = parser.add_argument_group("engine")
    add_device_option(group)
    add_options(group, "all")


def _token_ids(text: str) -> list[int]:
    """Reads token ids separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)} is not a list of token ids; allowed: integers separated by commas"
        ) from None


def sampling_params(
    args: argparse.Namespace, default: SamplingParams | None = None
) -> SamplingParams:
    """Reads the options of `add_sampling_options`.

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

    demo = find_demo(_DEFAULT_DEMO if args.demo is None else args.demo)
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


def download_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the options of models of the hub as keyword arguments of `LLM` and `find_folder`.

    Raises:
        ValueError: One of them is malformed.
    """
    check_revision("--revision", args.revision)
    if args.cache_dir is not None:
        check_path("--cache-dir", args.cache_dir, "the folder of the hub's cache")
    return {"revision": args.revision, "cache_dir": args.cache_dir}
