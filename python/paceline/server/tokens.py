# SPDX-License-Identifier: Apache-2.0
"""/tokenize, /detokenize and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_text
from paceline.prompts import check_prompt_chars
from paceline.server.bodies import Fields
from paceline.server.errors import TOO_LONG, ApiError, refusal, wrong_field
from paceline.server.field_schemas import DETOKENIZE_FIELDS, REFUSED_IN_TOKENIZE, TOKENIZE_FIELDS
from paceline.server.fields import take_conversation
from paceline.server.message_fields import read_counted
from paceline.server.tools import check_tools
from paceline.token_bound import min_num_tokens

if TYPE_CHECKING:
    from paceline.server.service import Service

# What makes a prompt of messages; a prompt that is given needs none of it.
_OF_MESSAGES: Final = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
)
# Of a tokenizer whose longest token is not known.
_MAX_CHARS_PER_TOKEN: Final = 64

#: Makes the JSON of a response; for a worker thread.
Conversion = Callable[[], dict[str, Any]]


def read_tokenize(service: Service, given: dict[str, Any]) -> Conversion:
    """Reads the body of a request to /tokenize.

    Returns:
        What converts the prompt, or the conversation, to token ids. It raises ValueError for a text
        that is too long for the model by its characters alone, and what a chat template raises.

    Raises:
        ApiError: A field is unknown, not supported or malformed.
        ValueError: Likewise.
    """
    fields = Fields(given)
    service.check_model(fields.take_text("model"))
    tokenizer = service.allm.llm.get_tokenizer()
    prompt = fields.take("prompt")
    returns_strings = fields.take_bool("return_token_strs")
    adds_special = fields.take_bool("add_special_tokens", prompt is not None)
    name = "prompt"
    if prompt is None:
        name = "the prompt of messages"
        messages, arguments = take_conversation(fields)
        arguments["tools"] = check_tools(fields.take("tools"))
    else:
        check_text("prompt", prompt)
        for other in _OF_MESSAGES:
            if fields.peek(other) is not None:
                raise refusal(
                    f"{other} is given, and prompt is; allowed: prompt, or messages and what goes "
                    "with them",
                    other,
                )
    fields.finish(TOKENIZE_FIELDS, REFUSED_IN_TOKENIZE)

    def convert() -> dict[str, Any]:
        text = prompt
        if text is None:
            (text,) = service.chat_templates.render(messages, **arguments)
        _check_chars(service, name, text)
        ids = tokenizer.encode(text, add_special_tokens=adds_special)
        return {
            "count": len(ids),
            "max_model_len": service.allm.llm.max_model_len,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids) if returns_strings else None,
        }

    return convert


def read_count(service: Service, given: dict[str, Any]) -> Conversion:
    """Reads the body of a request to /v1/messages/count_tokens; see `read_tokenize`."""
    messages, arguments = read_counted(given, service.served)
    tokenizer = service.allm.llm.get_tokenizer()

    def convert() -> dict[str, Any]:
        (text,) = service.chat_templates.render(messages, **arguments)
        _check_chars(service, "the prompt of messages", text)
        return {"input_tokens": len(tokenizer.encode(text, add_special_tokens=False))}

    return convert


def _check_chars(service: Service, name: str, text: str) -> None:
    """Refuses what would take seconds to tokenize, and could not be a prompt."""
    llm = service.allm.llm
    check_prompt_chars(name, text, llm.target, llm.max_model_len, spare=0)
    most = _MAX_CHARS_PER_TOKEN * llm.max_model_len
    assert llm.target.tokenizer is not None
    if len(text) > most and min_num_tokens(llm.target.tokenizer, text) == 0:
        raise ApiError(
            400,
            f"{name} has {len(text)} characters; allowed: at most {most}, "
            f"{_MAX_CHARS_PER_TOKEN} for each token (max_model_len is {llm.max_model_len})",
            param=name.removeprefix("the prompt of "),
            code=TOO_LONG,
        )


def read_detokenize(service: Service, given: dict[str, Any]) -> Conversion:
    """Reads the body of a request to /detokenize.

    Returns:
        What converts the token ids to text. It raises ApiError for a value that is no token id.

    Raises:
        ApiError: A field is unknown or malformed, or there are too many ids.
        ValueError: Likewise.
    """
    fields = Fields(given)
    service.check_model(fields.take_text("model"))
    tokenizer = service.allm.llm.get_tokenizer()
    ids = fields.take("tokens")
    fields.finish(DETOKENIZE_FIELDS, {})
    if not isinstance(ids, list):
        raise wrong_field("tokens", ids, "a list of token ids")
    most = service.allm.llm.max_model_len
    if len(ids) > most:
        raise ApiError(
            400,
            f"tokens has {len(ids)} entries; allowed: at most {most} (max_model_len is {most})",
            param="tokens",
            code=TOO_LONG,
        )

    def convert() -> dict[str, Any]:
        try:
            return {"prompt": tokenizer.decode(ids)}
        except ValueError as error:
            raise refusal(str(error).replace("token_ids", "tokens"), "tokens") from None

    return convert
