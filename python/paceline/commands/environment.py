# SPDX-License-Identifier: Apache-2.0
"""The environment variables that begin with PACELINE_; the command line refuses all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.checks import did_you_mean
from paceline.commands.serve import parser_of_options
from paceline.device import CUBLASLT_VARIABLE
from paceline.server.settings import PREFIX, variables

# What the runtime reads beside the options.
_OF_RUNTIME: Final = (CUBLASLT_VARIABLE, "PACELINE_PORTABLE")
# What builds from source read.
_OF_BUILDS: Final = ("PACELINE_CUDA_ARCHITECTURES",)
# What the tests and the Makefile read.
_OF_TESTS: Final = (
    "PACELINE_DEVICE_ONLY",
    "PACELINE_GOOGLETEST_DIR",
    "PACELINE_REQUIRE_GPU",
    "PACELINE_SEED",
    "PACELINE_SHRINK",
    "PACELINE_TEST_LEVEL",
)


def known_variables() -> list[str]:
    """All names: those of options of `paceline serve`, of the runtime, of builds and of tests."""
    return [*variables(parser_of_options()), *_OF_RUNTIME, *_OF_BUILDS, *_OF_TESTS]


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuses unknown variables, which are mistyped ones that would have no effect.

    Raises:
        ValueError: There is one. The message says which known name is the most similar.
    """
    given = sorted(name for name in environment if name.startswith(PREFIX))
    if not given:
        return
    known = known_variables()
    for name in given:
        if name not in known:
            raise ValueError(
                f"the environment variable {name} is not known{did_you_mean(name, known)}; "
                f"allowed: {PREFIX} and the name of an option of `paceline serve` in capitals, or "
                f"{' or '.join(_OF_RUNTIME)}; unset {name} (Kubernetes sets such names for a "
                "Service called paceline: enableServiceLinks: false)"
            )
