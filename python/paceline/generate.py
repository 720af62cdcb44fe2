# SPDX-License-Identifier: Apache-2.0
"""`paceline generate`: continues a prompt and streams the output as it is accepted."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import parse_json, shorten
from paceline.console import (
    EXIT_OK,
    EXIT_SELF_CHECK,
    check_output,
    emit,
    integer,
    number,
    tell,
)

if TYPE_CHECKING:
    from paceline.config import SpeculativeConfig
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput
    from paceline.sampling import SamplingParams

_DEFAULT_DEMO: Final = "draft_model"
_RULE: Final = "-" * 50


def add_parser(commands: Any) -> None:
    """Adds `generate` to the command line's subparsers."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt and streams the output as it is accepted. Without --model "
        "it uses checkpoints that ship with the package.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt to continue")
    model = parser.add_argument_group("model")
    model.add_argument("-m", "--model", metavar="DIR", help="the target's checkpoint")
    model.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='the drafter, for example \'{"method": "draft_model", "model": DIR, '
        '"num_speculative_tokens": 4}\'',
    )
    model.add_argument(
        "--demo",
        metavar="NAME",
        help="the package's own checkpoints, used without --model: draft_model, eagle3, "
        f"gemma4_mtp or ngram (default: {_DEFAULT_DEMO})",
    )
    model.add_argument(
        "--num-speculative-tokens",
        type=integer,
        metavar="K",
        help="drafts per iteration of a demo; 0 = plain decoding (with --model, set it in "
        "--speculative-config)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens",
        type=integer,
        default=64,
        metavar="N",
        help="tokens to generate at most (default: 64)",
    )
    sampling.add_argument(
        "--temperature",
        type=number,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 = greedy (default: 0)",
    )
    sampling.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="random seed (default: 0)"
    )
    sampling.add_argument(
        "--n",
        type=integer,
        default=1,
        metavar="N",
        help="completions to sample; more than one are printed at the end (default: 1)",
    )
    _add_token_choice(sampling)
    for flag, text in (
        ("--logprobs", "report the log-probability of each token and of the N most likely tokens"),
        ("--prompt-logprobs", "the same for the tokens of the prompt"),
    ):
        sampling.add_argument(flag, type=integer, metavar="N", help=text)
    _add_stopping(parser.add_argument_group("stopping"))
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--device",
        default="auto",
        help="auto, cpu or cuda (default: auto, which is cuda if available; with a demo, cpu)",
    )
    engine.add_argument(
        "--dtype",
        default="auto",
        help="dtype of the weights: auto, float32 or bfloat16 (default: auto)",
    )
    engine.add_argument(
        "--max-model-len",
        type=integer,
        metavar="N",
        help="tokens of prompt and output together at most",
    )
    engine.add_argument(
        "--kv-cache-bytes", type=integer, metavar="N", help="size of the KV pool in bytes"
    )
    engine.add_argument(
        "--block-size",
        type=integer,
        default=16,
        metavar="N",
        help="tokens per KV block (default: 16)",
    )
    engine.add_argument(
        "--num-threads", type=integer, metavar="N", help="CPU threads (default: one per core)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="run plain decoding too, report both speeds, and fail if the outputs differ; needs a "
        "rejection_sample_method that keeps the output",
    )
    output.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    output.add_argument(
        "--no-stream", action="store_true", help="print the output when it is complete"
    )
    output.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print the output only, without prompt and report",
    )
    parser.set_defaults(run=_run_generate)


def _add_token_choice(group: Any) -> None:
    """Options that change the distribution; docs/sampling.md defines them."""
    for flag, kind, metavar, text in (
        ("--top-k", integer, "N", "sample from the N most likely tokens (default: 0, all)"),
        (
            "--top-p",
            number,
            "P",
            "sample from the fewest tokens with total probability P (default: 1, all)",
        ),
        (
            "--min-p",
            number,
            "P",
            "sample from tokens at least P times as likely as the best (default: 0)",
        ),
        (
            "--repetition-penalty",
            number,
            "X",
            "divide positive logits of tokens in prompt or output, multiply negative (default: 1)",
        ),
        (
            "--presence-penalty",
            number,
            "X",
            "subtract from the logits of tokens in the output, -2 to 2 (default: 0)",
        ),
        ("--frequency-penalty", number, "X", "the same, times the number of occurrences"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--logit-bias",
        metavar="JSON",
        help="add to logits: token ids to numbers from -100 to 100, as '{\"262\": -100}'",
    )
    group.add_argument(
        "--bad-words",
        action="append",
        metavar="TEXT",
        help="text the output must not contain (repeatable)",
    )
    group.add_argument(
        "--allowed-token-ids",
        type=_token_ids,
        metavar="IDS",
        help="sample from these tokens only: 1,2,3",
    )


def _add_stopping(group: Any) -> None:
    """Options that end a request."""
    group.add_argument(
        "--min-tokens",
        type=integer,
        metavar="N",
        help="output tokens before a stop is allowed (default: 0)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text (repeatable; a newline is $'\\n' in bash)",
    )
    group.add_argument(
        "--include-stop-str-in-output",
        action="store_true",
        help="include the text of --stop in the output",
    )
    group.add_argument(
        "--stop-token-ids", type=_token_ids, metavar="IDS", help="end at any of these tokens: 1,2,3"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the end-of-sequence token"
    )


def _token_ids(text: str) -> list[int]:
    """Reads token ids separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)} is not a list of token ids; allowed: integers separated by commas"
        ) from None


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from paceline.sampling import SamplingParams

    given = {
        name: getattr(args, name)
        for name in SamplingParams.__dataclass_fields__
        if getattr(args, name) is not None
    }
    if args.logit_bias is not None:
        given["logit_bias"] = _parse_logit_bias(args.logit_bias)
    return SamplingParams(**given)


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


def _run_generate(args: argparse.Namespace) -> int:
    from paceline.config import SpeculativeConfig
    from paceline.llm import LLM
    from paceline.logprobs import logprob_lines, needed_max_logprobs
    from paceline.memory import memory_plan
    from paceline.prompts import check_prompt_text

    show_text = not args.json
    show_progress = show_text and not args.quiet
    check_output()
    check_prompt_text("prompt", args.prompt)
    if show_progress:
        check_output(args.prompt)
    params = _sampling_params(args)
    model, speculative_config = _choose_model(args)
    speculative = None
    if speculative_config is not None:
        speculative = SpeculativeConfig.parse(speculative_config)
    if args.compare:
        _check_comparable(speculative, params)
    # The demo's checkpoints are too small to gain from a GPU.
    is_demo = args.model is None
    engine: dict[str, Any] = {
        "device": "cpu" if is_demo and args.device == "auto" else args.device,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "kv_cache_bytes": args.kv_cache_bytes,
        "block_size": args.block_size,
        "num_threads": args.num_threads,
        "max_num_seqs": params.n,
        "max_logprobs": needed_max_logprobs(params),
    }
    with LLM(model, speculative_config=speculative, show_progress=show_progress, **engine) as llm:
        if show_progress:
            tell(f"paceline: {memory_plan(llm.memory_report())}")
        output = _stream_text(llm, args, params, is_shown=show_text)
        target, draft = llm.target, llm.draft
        configured = llm.capabilities()["configured"]
    plain = None
    if args.compare:
        with LLM.from_loaded(target, **engine) as llm:
            plain = _stream_text(llm, args, params, is_shown=False)
    is_same = plain is None or plain.outputs == output.outputs
    if args.json:
        report = _json_report(output, plain)
        report["model"] = str(target.path)
        report["draft_model"] = None if draft is None else str(draft.path)
        report["configured"] = configured
        emit(json.dumps(report))
    elif not args.quiet:
        emit(_RULE)
        emit("\n".join([*logprob_lines(output), *report_lines(output, plain)]))
    if not is_same:
        tell("paceline: error: speculative and plain decoding produced different tokens")
        return EXIT_SELF_CHECK
    return EXIT_OK


def _check_comparable(speculative: SpeculativeConfig | None, params: SamplingParams) -> None:
    """Refuses --compare with methods whose output may differ from plain decoding by design."""
    if speculative is None:
        raise ValueError("--compare needs a drafter; see --speculative-config")
    method = speculative.rejection_sample_method
    allowed = "allowed: rejection_sample_method 'coupled'"
    if method == "synthetic":
        raise ValueError(
            "--compare expects the output of plain decoding, but rejection_sample_method is "
            f"'synthetic', whose verdicts are artificial; {allowed}, or no --compare"
        )
    if method != "coupled" and params.temperature > 0:
        raise ValueError(
            f"--compare expects the output of plain decoding, but rejection_sample_method is "
            f"{method!r} and temperature is {params.temperature:g}, which keeps the "
            f"distribution but not the tokens of a seed; {allowed}, temperature 0, or no --compare"
        )


def _choose_model(args: argparse.Namespace) -> tuple[str, dict[str, Any] | str | None]:
    """Returns the target's folder and the speculative configuration."""
    if args.model is not None:
        for option, value in (
            ("--demo", args.demo),
            ("--num-speculative-tokens", args.num_speculative_tokens),
        ):
            if value is not None:
                raise ValueError(
                    f"{option} is for the package's own checkpoints, not for --model; "
                    "name the drafter in --speculative-config"
                )
        return args.model, args.speculative_config
    if args.speculative_config is not None:
        raise ValueError("--speculative-config needs --model; --demo has its own drafter")
    from paceline.demo import find_demo

    demo = find_demo(_DEFAULT_DEMO if args.demo is None else args.demo)
    k = args.num_speculative_tokens
    return str(demo.target), None if k == 0 else demo.speculative_config(k)


def _stream_text(
    llm: LLM, args: argparse.Namespace, params: SamplingParams, *, is_shown: bool
) -> RequestOutput:
    """Generates and prints the output as it arrives; hidden runs take the same path."""
    from paceline.outputs import RequestError

    is_streamed = is_shown and not args.no_stream and params.n == 1
    output = None
    with llm.stream(args.prompt, params) as stream:
        if is_shown and not args.quiet:
            emit(args.prompt, end="", flush=True)
        for chunk in stream:
            if is_streamed:
                emit(chunk.text, end="", flush=True)
            output = chunk.output or output
    assert output is not None
    if is_shown:
        if is_streamed:
            emit("")
        elif params.n == 1:
            emit(output.outputs[0].text)
        else:
            for completion in output.outputs:
                emit(f"\n[{completion.index}] {completion.text}")
    if output.error is not None:
        raise RequestError(output.error, [output])
    return output


def report_lines(output: RequestOutput, plain: RequestOutput | None = None) -> list[str]:
    """Formats the metrics of a request.

    Args:
        output: The request.
        plain: The same request with plain decoding, if it ran.

    Returns:
        Lines of text.
    """
    metrics = output.metrics
    ends = ", ".join(
        completion.finish_reason
        + ("" if completion.stop_reason is None else f" ({completion.stop_reason!r})")
        for completion in output.outputs
    )
    first = metrics.time_to_first_token_ms
    lines = [
        f"{metrics.num_output_tokens} tokens in {metrics.total_time_ms / 1e3:.3f} s"
        + (f", the first after {first:.1f} ms" if first is not None else "")
        + f"; ended by {ends}",
        f"{_rate(metrics.tokens_per_second)} after the first token",
    ]
    speculative = metrics.speculative_decoding
    if speculative is not None:
        length = speculative["mean_acceptance_length"]
        k = speculative["num_spec_tokens"]
        if length is None:
            lines.append("no drafts were verified")
        else:
            lines.append(
                f"acceptance length {length:.2f} of at most {k + 1}; "
                f"{speculative['num_accepted_draft_tokens']} of {speculative['num_draft_tokens']} "
                f"drafts accepted ({100 * speculative['draft_acceptance_rate']:.0f} %)"
            )
            positions = "  ".join(
                "-" if share is None else f"{100 * share:.0f} %"
                for share in speculative["acceptance_per_position"]
            )
            lines.append(f"acceptance at draft position 1 to {k}: {positions}")
    if plain is not None:
        same = "the same output" if plain.outputs == output.outputs else "a DIFFERENT output"
        speed = ""
        if metrics.tokens_per_second and plain.metrics.tokens_per_second:
            ratio = metrics.tokens_per_second / plain.metrics.tokens_per_second
            speed = f"; speculation is {ratio:.2f} times as fast"
        lines.append(f"plain decoding: {_rate(plain.metrics.tokens_per_second)}, {same}{speed}")
    return lines


def _rate(tokens_per_second: float | None) -> str:
    return "- tokens/s" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def _json_report(output: RequestOutput, plain: RequestOutput | None) -> dict[str, Any]:
    from paceline.logprobs import logprobs_as_json, prompt_logprobs_as_json

    first, *others = (
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **logprobs_as_json(completion),
        }
        for completion in output.outputs
    )
    report: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **first,
        **prompt_logprobs_as_json(output),
        "metrics": output.metrics.to_dict(),
    }
    if others:
        report["others"] = others
    if plain is not None:
        rate, plain_rate = output.metrics.tokens_per_second, plain.metrics.tokens_per_second
        report["plain"] = {
            "is_same": plain.outputs == output.outputs,
            "metrics": plain.metrics.to_dict(),
            "speedup": rate / plain_rate if rate and plain_rate else None,
        }
    return report
