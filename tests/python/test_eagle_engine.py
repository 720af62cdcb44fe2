# SPDX-License-Identifier: Apache-2.0
"""The output with an EAGLE draft head is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafter_checks import ENGINE, outputs, plain_outputs
from eagle_pair import SPECS, TARGET
from errors import raises
from paceline import LLM
from paceline.loader import load_checkpoint, load_drafter
from tiny_models import make


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("layout", SPECS)
def test_output_is_that_of_plain_decoding(
    layout: str, is_named: bool, draft_head: Callable[..., Path]
) -> None:
    method = SPECS[layout].method
    config: dict[str, Any] = {"model": str(draft_head(layout)), "num_speculative_tokens": 3}
    if is_named:
        config["method"] = method
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        assert llm.speculative_config is not None
        assert llm.speculative_config.method == method
        assert llm.capabilities()["configured"]["method"] == method
        assert outputs(llm) == plain_outputs(TARGET)
        assert llm._executor.check_integrity() == ""


def test_loaded_drafter_of_another_target(draft_head: Callable[..., Path]) -> None:
    target = load_checkpoint(make(TARGET), progress=False)
    other = load_checkpoint(make(replace(TARGET, dtype="bfloat16")), progress=False)
    draft = load_drafter(draft_head("eagle3"), target, progress=False)
    assert draft.method == "eagle3"
    config = {"model": "head", "num_speculative_tokens": 2}
    with raises(ValueError, "weight dtype", "'float32'", "'bfloat16'"):
        LLM.from_loaded(other, draft, speculative_config=config)
    with raises(ValueError, "is 'eagle'", "'eagle3'"):
        LLM.from_loaded(target, draft, speculative_config=config | {"method": "eagle"})
