# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_text, shorten
from paceline.server.bodies import Fields
from paceline.server.errors import refusal
from paceline.server.fields import take_conversation
from paceline.server.tools import check_tools

if TYPE_CHECKING:
    from paceline.server.service import Service

_ALLOWED: Final = (
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "return_token_strs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
)
_REFUSED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "chat_template": ("the server's --chat-template or the checkpoint's own is used", ()),
}


def tokenize(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Converts a prompt, or a conversation, to token ids. Called in a worker thread."""
    fields = Fields(given)
    service.check_model(fields.take_text("model"))
    tokenizer = service.allm.llm.get_tokenizer()
    prompt = fields.take("prompt")
    returns_strings = fields.take_bool("return_token_strs")
    adds_special = fields.take_bool("add_special_tokens", prompt is not None)
    if prompt is None:
        messages, arguments = take_conversation(fields)
        arguments["tools"] = check_tools(fields.take("tools"))
        fields.finish(_ALLOWED, _REFUSED)
        (prompt,) = service.chat_templates.render(messages, **arguments)
    fields.finish(_ALLOWED, _REFUSED)
    ids = tokenizer.encode(check_text("prompt", prompt), add_special_tokens=adds_special)
    return {
        "count": len(ids),
        "max_model_len": service.allm.llm.max_model_len,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids) if returns_strings else None,
    }


def detokenize(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Converts token ids to text. Called in a worker thread."""
    fields = Fields(given)
    service.check_model(fields.take_text("model"))
    ids = fields.take("tokens")
    fields.finish(("model", "tokens"), {})
    if not isinstance(ids, list):
        raise refusal(f"tokens is {shorten(ids)}; allowed: a list of token ids", "tokens")
    try:
        return {"prompt": service.allm.llm.get_tokenizer().decode(ids)}
    except ValueError as error:
        raise refusal(str(error).replace("token_ids", "tokens"), "tokens") from None
