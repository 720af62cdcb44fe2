# SPDX-License-Identifier: Apache-2.0
"""The fields of completions and chats, and what they mean for the engine.

`SamplingParams` checks the sampling parameters, so each limit has one place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from paceline.checks import check_int, quoted, shorten
from paceline.limits import MAX_INT, MAX_LOGPROBS, MAX_SPECULATIVE_TOKENS
from paceline.prompts import check_cache_salt
from paceline.receipts.receipt import RESPONSE_KEY
from paceline.sampling import WITH_TEXT, SamplingParams
from paceline.server.bodies import Fields, object_of
from paceline.server.errors import refusal, wrong_field
from paceline.server.field_schemas import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_MESSAGES,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    ROLES,
    SAMPLING,
)
from paceline.server.formats import FORMATS, Format, Parser
from paceline.server.json_values import Quota
from paceline.server.no_effect import take_no_effect
from paceline.server.structured import calls_grammar, in_format, take_structured
from paceline.server.thinking import Thinking, with_effort
from paceline.server.tools import check_tool_calls, check_tools, chosen_tools
from paceline.speculative_fields import METHODS
from paceline.structured_outputs import StructuredOutputsParams


@dataclasses.dataclass(frozen=True)
class Wishes:
    """The fields that completions and chats have in common.

    Attributes:
        params: The sampling parameters.
        is_streamed: Whether the output is sent while it grows.
        includes_usage: Whether a stream ends with the usage.
        has_continuous_usage: Whether each chunk has the usage so far.
        returns_token_ids: Whether token ids are sent with the text.
        shows_ids: Whether logprobs name tokens "token_id:ID".
        cache_salt: The prompt shares KV only with prompts of the same salt; None = it has none.
        echoes: Whether the prompt is put before the text.
        is_chat: Whether the prompt is a conversation.
    """

    params: SamplingParams
    is_streamed: bool
    includes_usage: bool
    has_continuous_usage: bool
    returns_token_ids: bool
    shows_ids: bool
    cache_salt: str | None = None
    echoes: bool = False
    is_chat: bool = False


@dataclasses.dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions.

    Attributes:
        prompts: Strings or lists of token ids, at least one.
        wishes: All else.
    """

    prompts: list[Any]
    wishes: Wishes


@dataclasses.dataclass(frozen=True)
class ChatCall:
    """A request whose prompt is a conversation.

    Attributes:
        messages: The conversation.
        template_arguments: Keyword arguments of `ChatTemplates.render`.
        make_parser: Makes what divides the text of an output into content, reasoning and calls.
        wishes: All else.
        shown: Fields that the response repeats.
    """

    messages: list[Any]
    template_arguments: dict[str, Any]
    make_parser: Callable[[], Parser]
    wishes: Wishes
    shown: dict[str, Any] = dataclasses.field(default_factory=dict)


class ServedModel(NamedTuple):
    """The model as requests for chats find it.

    Attributes:
        params: What holds for parameters that are not given.
        check_name: Raises an error for the name of another model; None = no name is given.
        text_format: How the model writes reasoning and calls; None = unknown.
        thinking: How the model's thinking is chosen.
    """

    params: SamplingParams
    check_name: Callable[[str | None], None]
    text_format: Format | None
    thinking: Thinking


def read_completion(
    given: dict[str, Any], default: SamplingParams, check_model: Callable[[str | None], None]
) -> CompletionCall:
    """Reads the body of a request to /v1/completions.

    Args:
        given: The body.
        default: What holds for parameters that are not given.
        check_model: Raises an error for a model that is not served.

    Raises:
        ApiError: A field is unknown, not supported or malformed.
        ValueError: Likewise.
    """
    fields = Fields(given)
    check_model(fields.take_text("model"))
    prompts = _prompts(fields.take("prompt"))
    num_logprobs = fields.take_int("logprobs", 0, MAX_LOGPROBS)
    echoes = fields.take_bool("echo")
    num_of_prompt = fields.take("prompt_logprobs")
    if echoes and num_of_prompt is None:
        num_of_prompt = num_logprobs
    wishes = _wishes(
        fields,
        default,
        num_logprobs,
        echoes=echoes,
        structured_outputs=take_structured(fields),
        prompt_logprobs=num_of_prompt,
    )
    if echoes and wishes.is_streamed:
        raise refusal("echo is true and stream is too; allowed: one of them", "echo")
    fields.finish(COMPLETION_FIELDS, REFUSED_IN_COMPLETIONS)
    return CompletionCall(prompts, wishes)


def read_chat(
    given: dict[str, Any],
    model: ServedModel,
) -> ChatCall:
    """Reads the body of a request to /v1/chat/completions.

    Args:
        given: The body.
        model: The model.

    Raises:
        Exception: As for `read_completion`.
    """
    fields = Fields(given)
    model.check_name(fields.take_text("model"))
    messages, arguments = take_conversation(fields)
    arguments["chat_template_kwargs"] = with_effort(
        arguments["chat_template_kwargs"], fields.take("reasoning_effort"), model.thinking
    )
    take_no_effect(fields, ("verbosity",))
    tools, calls = take_tools(fields, model.text_format)
    arguments["tools"] = tools
    make_parser, default = message_form(
        fields, model.params, take_structured(fields), calls, model, arguments
    )
    wants_logprobs = fields.take_bool("logprobs")
    num_logprobs = fields.take_int("top_logprobs", 0, MAX_LOGPROBS)
    if num_logprobs and not wants_logprobs:
        raise refusal(
            f"top_logprobs is {num_logprobs}, but logprobs is not true; allowed: both, or none",
            "top_logprobs",
        )
    most = fields.take("max_completion_tokens")
    if most is not None:
        given_most = fields.take("max_tokens")
        if given_most is not None and given_most != most:
            raise refusal(
                f"max_completion_tokens is {shorten(most)} and max_tokens is "
                f"{shorten(given_most)}; allowed: one of them",
                "max_completion_tokens",
            )
        most = check_int("max_completion_tokens", most, 1, 2**31 - 1)
    wishes = _wishes(
        fields,
        default,
        (num_logprobs or 0) if wants_logprobs else None,
        is_chat=True,
        max_tokens=most,
        prompt_logprobs=fields.take("prompt_logprobs"),
    )
    fields.finish(CHAT_FIELDS, REFUSED_IN_CHATS)
    return ChatCall(messages, arguments, make_parser, wishes)


def take_conversation(fields: Fields) -> tuple[list[Any], dict[str, Any]]:
    """Takes the messages of a conversation and the keyword arguments for its template."""
    messages = check_conversation(fields.take("messages"), "messages")
    continues = fields.take_bool("continue_final_message")
    return messages, {
        "add_generation_prompt": fields.take_bool("add_generation_prompt", not continues),
        "continue_final_message": continues,
        "chat_template_kwargs": fields.take_object("chat_template_kwargs"),
    }


def check_conversation(messages: Any, param: str) -> list[Any]:
    """Checks messages, and makes objects of the arguments of their calls.

    Args:
        messages: The messages.
        param: The field that they come from.

    Raises:
        ApiError: One is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise refusal(
            f"messages is {shorten(messages)}; allowed: a list of at least one message "
            '{"role": ..., "content": ...}',
            param,
        )
    if len(messages) > MAX_MESSAGES:
        raise refusal(
            f"messages has {len(messages)} entries; allowed: at most {MAX_MESSAGES}", param
        )
    quota = Quota()
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise wrong_field(f"messages[{index}]", message, "an object", param)
        role = message.get("role")
        if role is not None and role not in ROLES:
            raise wrong_field(f"messages[{index}]['role']", role, ", ".join(ROLES), param)
        messages[index] = check_tool_calls(f"messages[{index}]", message, param, quota)
    return messages


def take_tools(
    fields: Fields, text_format: Format | None
) -> tuple[list[Any] | None, StructuredOutputsParams | None]:
    """Takes the tools of a conversation.

    Returns:
        The tools, None if the model is to call none; and the grammar of the calls, None if the
        model may as well call none.

    Raises:
        ApiError: They are malformed, or calls could not be read.
    """
    tools = check_tools(fields.take("tools"))
    choice = fields.take("tool_choice")
    is_parallel = fields.take_bool("parallel_tool_calls", True)
    required = chosen_tools(tools, choice)
    if tools is None or choice == "none":
        return None, None
    if text_format is None:
        raise refusal(
            "tools is given, but this model's chat template tells no format of calls that this "
            "version reads (Qwen3-Coder's <function=NAME> is not read); leave it out, or start the "
            f"server with --tool-call-parser, one of {', '.join(FORMATS)}",
            "tools",
        )
    if required is not None:
        is_one = choice != "required" or not is_parallel
        return tools, calls_grammar(required, text_format, is_one=is_one)
    if not is_parallel:
        raise refusal(
            "parallel_tool_calls is false; allowed: true, because the model decides how many "
            "tools it calls, or a tool_choice that requires a call",
            "parallel_tool_calls",
        )
    return tools, None


def message_form(
    fields: Fields,
    default: SamplingParams,
    structured: StructuredOutputsParams | None,
    calls: StructuredOutputsParams | None,
    model: ServedModel,
    arguments: Mapping[str, Any],
) -> tuple[Callable[[], Parser], SamplingParams]:
    """Decides what a message must look like and how its text is divided.

    Args:
        fields: The fields of the request.
        default: The parameters.
        structured: What the fields say of the output.
        calls: The grammar of required calls.
        model: The model.
        arguments: The `template_arguments` of `ChatCall`.

    Returns:
        The `make_parser` of `ChatCall`, and the parameters, with which the marks of the format are
        in the text.

    Raises:
        ApiError: The form of the output contradicts the tools.
    """
    text_format = model.text_format
    has_tools = arguments["tools"] is not None
    if structured is not None and has_tools:
        raise refusal(
            "the form of the output is given, and tools are, whose calls have another; allowed: "
            "one of them, or tool_choice 'none'",
            "tools",
        )
    if structured is not None:
        calls = in_format(structured, text_format)
    default = dataclasses.replace(default, structured_outputs=calls)
    # A client that asks for special tokens gets the output undivided.
    wants_marks = fields.peek("skip_special_tokens") is False
    is_continued = arguments.get("continue_final_message", False)
    if text_format is None or is_continued:
        return Parser, default
    if not (has_tools or (text_format.is_always_read and not wants_marks)):
        return Parser, default
    if text_format.is_always_read:
        fields.take("skip_special_tokens")
        default = dataclasses.replace(default, skip_special_tokens=False)
    # A form that is required begins with the output.
    is_thinking = (
        structured is None
        and arguments.get("add_generation_prompt", True)
        and model.thinking.begins_with(arguments.get("chat_template_kwargs"))
    )
    tools = arguments["tools"] or ()
    return functools.partial(text_format.make, tools, is_thinking=is_thinking), default


def single_wishes(
    fields: Fields, default: SamplingParams, names: Collection[str], **given: Any
) -> Wishes:
    """Takes what the APIs of one output have in common.

    Args:
        fields: The fields of the request.
        default: What holds for parameters that are not given.
        names: The sampling parameters of the route.
        **given: Those that the caller has taken.
    """
    params = dataclasses.replace(
        default,
        **take_speculative(fields),
        receipt=take_receipt(fields),
        **fields.take_sampling(names),
        **given,
    )
    salt = take_salt(fields)
    return Wishes(params, fields.take_bool("stream"), True, False, False, False, cache_salt=salt)


def _wishes(
    fields: Fields,
    default: SamplingParams,
    num_logprobs: int | None,
    *,
    echoes: bool = False,
    is_chat: bool = False,
    **given: Any,
) -> Wishes:
    """Takes the sampling parameters and what is common to all routes.

    `given` has parameters that the caller has taken; None = those of `default` hold.
    """
    given |= take_speculative(fields)
    given["return_token_sources"] = fields.take_bool("return_token_sources")
    given["receipt"] = take_receipt(fields)
    parameters = fields.take_sampling(SAMPLING) | {
        name: value for name, value in given.items() if value is not None
    }
    params = dataclasses.replace(default, logprobs=num_logprobs, **parameters)
    is_streamed = fields.take_bool("stream")
    if is_streamed and params.prompt_logprobs is not None:
        raise refusal(
            "prompt_logprobs is given and stream is true; allowed: one of them", "prompt_logprobs"
        )
    if fields.peek("stream_options") is not None and not is_streamed:
        fields.take_object("stream_options")
        raise refusal(
            "stream_options is given, but stream is not true; allowed: both, or none",
            "stream_options",
        )
    padding = {"include_obfuscation": ("events are sent without padding; leave it out", (False,))}
    names = ("include_usage", "continuous_usage_stats")
    with object_of(fields, "stream_options", names, padding) as shown:
        has_continuous_usage = shown.take_bool("continuous_usage_stats")
        includes_usage = shown.take_bool("include_usage")
    take_no_effect(fields)
    best = fields.take("best_of")
    if best is not None and check_int("best_of", best, 1, MAX_INT) != params.n:
        raise refusal(
            f"best_of is {best} and n is {params.n}; allowed: the same, since a request gets all "
            "of its outputs",
            "best_of",
        )
    return Wishes(
        params=params,
        cache_salt=take_salt(fields),
        echoes=echoes,
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        has_continuous_usage=has_continuous_usage,
        returns_token_ids=fields.take_bool("return_token_ids"),
        shows_ids=fields.take_bool("return_tokens_as_token_ids"),
        is_chat=is_chat,
    )


def take_speculative(fields: Fields) -> dict[str, Any]:
    """Takes how a request drafts: which method, and how many drafts it has at most.

    Returns:
        The parameters; None = as the engine does.
    """
    names = ("enabled", "num_speculative_tokens", "method")
    with object_of(fields, "speculative", names) as given:
        is_enabled = given.take_bool("enabled", True)
        most = given.take_int("num_speculative_tokens", 0, MAX_SPECULATIVE_TOKENS)
        method = given.take("method")
        if method is not None and method not in METHODS:
            raise wrong_field("method", method, f"one of {quoted(METHODS)}")
    return {
        "num_speculative_tokens": most if is_enabled else 0,
        "speculative_method": method,
    }


def take_receipt(fields: Fields) -> Any:
    """Takes whether outputs have receipts: true, false or "with_text"."""
    value = fields.take(RESPONSE_KEY)
    if value is None:
        return False
    if isinstance(value, bool) or value == WITH_TEXT:
        return value
    raise wrong_field(RESPONSE_KEY, value, f"true, false or {WITH_TEXT!r}")


def take_salt(fields: Fields) -> str | None:
    """Takes the salt of the prefix cache; None = there is none."""
    salt = fields.take("cache_salt")
    return None if salt is None else check_cache_salt("cache_salt", salt)


def _prompts(given: Any) -> list[Any]:
    """Makes a list of prompts; their elements are checked when they are encoded."""
    allowed = "a string, a list of token ids, or a list of those"
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise wrong_field("prompt", given, allowed)
    if isinstance(given[0], str | list):
        for index, one in enumerate(given):
            if not isinstance(one, str | list) or not one:
                raise wrong_field(f"prompt[{index}]", one, allowed)
        return given
    return [given]
