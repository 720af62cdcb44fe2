# SPDX-License-Identifier: Apache-2.0
"""Errors in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from paceline._core import DeviceError, InternalError, ModelFileError
from paceline.checks import shorten, wrong_value
from paceline.grammar_queue import GrammarQueueFull
from paceline.grammar_trial import TOO_COSTLY
from paceline.outputs import RequestError

_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Those of Anthropic's API.
_MESSAGE_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MAX_MESSAGE: Final = 2000
# The fields that have parameters of other names.
_FIELDS: Final = {
    "num_speculative_tokens": "speculative",
    "speculative_method": "speculative",
}


#: The code of an error for a prompt that is too long.
TOO_LONG: Final = "context_length_exceeded"


class ApiError(Exception):
    """The error that a client gets instead of a result.

    Attributes:
        status: The HTTP status.
        message: What was given, what is allowed, what to do.
        param: The field of the request; None if no single one is at fault.
        code: A name for programs; None if the status says all.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the response."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        message = self.message
        if len(message) > _MAX_MESSAGE:
            message = message[:_MAX_MESSAGE] + "..."
        return {
            "error": {
                "message": message,
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }

    def message_body(self, request_id: str) -> dict[str, Any]:
        """Returns the JSON of the response in the form of Anthropic's API."""
        fallback = "api_error" if self.status >= 500 else "invalid_request_error"
        return {
            "type": "error",
            "error": {
                "type": _MESSAGE_TYPES.get(self.status, fallback),
                "message": self.body()["error"]["message"],
            },
            "request_id": request_id,
        }


def refusal(message: str, param: str | None = None) -> ApiError:
    """Makes the error for a request that is malformed, or asks for what there is not."""
    return ApiError(400, message, param=param)


def wrong_field(name: str, value: Any, allowed: str, param: str | None = None) -> ApiError:
    """The refusal of a value that is not allowed.

    Args:
        name: The field, or a place in it such as "tools[0]".
        value: The value.
        allowed: What is allowed.
        param: The field, where `name` does not begin with it.
    """
    return refusal(str(wrong_value(name, value, allowed)), param or re.split(r"\W", name)[0])


def as_api_error(error: BaseException) -> ApiError:
    """Converts an error of the package.

    Args:
        error: What a call has raised.

    Returns:
        400 for a value that is not allowed, a grammar that costs too much, or parameters that
        leave no token; 429 if too many grammars wait; 500 if the request failed; 503 if the engine
        did.
    """
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RequestError) and TOO_COSTLY in message:
        return refusal(message, "structured_outputs")
    if isinstance(error, RequestError) and any(output.is_refused for output in error.outputs):
        return refusal(message, _param_of(message))
    if isinstance(error, RequestError | InternalError | ModelFileError | MemoryError):
        return ApiError(500, message)
    if isinstance(error, ValueError | NotImplementedError):
        is_too_long = "(max_model_len is " in message
        return ApiError(
            400,
            message,
            param=_param_of(message),
            code=TOO_LONG if is_too_long else None,
        )
    if isinstance(error, GrammarQueueFull):
        return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, DeviceError | RuntimeError):
        return ApiError(503, message)
    return ApiError(500, f"internal error: {type(error).__name__}: {shorten(message, 200)}")


def _param_of(message: str) -> str | None:
    """The field that a message of the package begins with; such messages are "NAME is ..."."""
    message = message.removeprefix("the prompt of ")  # that is, of messages
    found = re.match(r"([a-z]\w*)(\[['\w]+\])* (is|has|and|are) ", message)
    return None if found is None else _FIELDS.get(found[1], found[1])
