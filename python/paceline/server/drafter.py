# SPDX-License-Identifier: Apache-2.0
"""/v1/drafter, by which an operator changes the drafter while requests run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline._core import ModelFileError, ModelNotFoundError
from paceline.server.bodies import Fields, inside
from paceline.server.errors import ApiError
from paceline.server.field_schemas import DRAFTER_FIELDS
from paceline.speculative_config import SpeculativeConfig
from paceline.weights import BusyError

if TYPE_CHECKING:
    from paceline.server.service import Service


def read_drafter(given: dict[str, Any]) -> SpeculativeConfig | None:
    """Reads the body of a request to /v1/drafter.

    Returns:
        The configuration; None = plain decoding.

    Raises:
        ApiError: The field is missing, or another one is there.
        ValueError: The configuration is not allowed.
        NotImplementedError: It has what this version does not support.
    """
    if "speculative_config" not in given:
        raise ApiError(
            400,
            "speculative_config is missing; allowed: an object as --speculative-config takes it, "
            "or null for plain decoding",
            param="speculative_config",
        )
    fields = Fields(given)
    config = fields.take_object("speculative_config")
    fields.finish(DRAFTER_FIELDS, {})
    with inside("speculative_config"):
        return None if config is None else SpeculativeConfig.parse(config)


def check_may_change(service: Service) -> None:
    """Raises ApiError 403 unless the server lets its clients change the drafter."""
    if not service.allows_drafter_changes:
        raise ApiError(
            403,
            "this server does not let its clients change the drafter; start it with "
            "--allow-drafter-changes",
        )


async def set_drafter(service: Service, config: SpeculativeConfig | None) -> dict[str, Any]:
    """Changes the drafter; goes on if the client goes away.

    Returns:
        The JSON of the response: what drafts now.

    Raises:
        ApiError: 409: another change is under way; 400: the drafter cannot be found or loaded, or
            does not fit; 502: the hub cannot be reached.
        Exception: As for `LLM.set_drafter`.
    """
    try:
        await service.allm.set_drafter(config, show_progress=False)
    except BusyError as error:
        raise ApiError(409, str(error), code="busy") from None
    except (ModelNotFoundError, ModelFileError, ValueError) as error:
        raise ApiError(400, str(error), param="speculative_config") from None
    except ConnectionError as error:
        raise ApiError(502, str(error)) from None
    now = service.allm.llm.speculative_config
    return {
        "object": "drafter",
        "method": None if now is None else now.method,
        "model": None if now is None else now.model,
        "num_speculative_tokens": None if now is None else now.num_speculative_tokens,
    }
