# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters that a checkpoint recommends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from paceline.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.loader import LoadedModel

# By key of generation_config.json. vLLM reads the same keys.
_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_params(target: LoadedModel) -> SamplingParams:
    """Returns the parameters that a checkpoint's `generation_config.json` states.

    Args:
        target: The model.

    Returns:
        Those parameters, with the defaults of `SamplingParams` for all others.

    Raises:
        paceline.ModelFileError: The file states a value that is not allowed.
    """
    from paceline._core import ModelFileError

    generation = target.generation_config
    given: dict[str, Any] = {}
    for key, name in _NAMES.items():
        if generation is None or not generation.has(key):
            continue
        given[name] = generation.values[key]
        try:
            SamplingParams(**{name: given[name]})
        except ValueError as error:
            raise ModelFileError(
                f'{generation.source}: key "{key}" is no default that can be used: {error}; give '
                "sampling_params, or correct the file"
            ) from None
    return SamplingParams(**given)
