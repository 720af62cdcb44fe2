# SPDX-License-Identifier: Apache-2.0
"""docs/embedding.md names every field of an event, in C++ and in C, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_pages import ROOT

HEADERS = ROOT / "cpp/include/paceline"
# Beside the tables, in a sentence below them.
ONLY_CPP = {"logprobs", "prompt_logprobs", "logits", "device_logits", "hidden_states"}
ONLY_C = {"size"}


def fields(header: Path, start: str) -> set[str]:
    """The fields of a structure, from the line that opens it to the one that closes it."""
    body = header.read_text().partition(start)[2].partition("\n}")[0]
    code = re.sub(r"//.*", "", body)
    declarations = [line.split("=")[0].strip() for line in code.split(";")]
    return {
        re.sub(r"\[.*\]", "", declaration).split()[-1].lstrip("*")
        for declaration in declarations
        if declaration
    }


def columns(page: str) -> tuple[set[str], set[str]]:
    """The fields of C++ and of C that the tables of the section have."""
    section = page.partition("\n## Events\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    cpp, c = (set(re.findall(r"`(\w+)`", " ".join(cells))) for cells in zip(*rows, strict=True))
    return cpp, c


def test_events_have_all_fields() -> None:
    page = (ROOT / "docs/embedding.md").read_text()
    cpp, c = columns(page)
    assert cpp | ONLY_CPP == fields(HEADERS / "request.h", "\nstruct RequestEvent {")
    assert c | ONLY_C == fields(HEADERS / "paceline.h", "\ntypedef struct paceline_event {")
    for name in ONLY_CPP | ONLY_C:
        assert f"`{name}`" in page


def test_the_request_has_one_name() -> None:
    cpp, c = columns((ROOT / "docs/embedding.md").read_text())
    for name in ("request_id", "sample", "token_ids", "finish_reason", "num_cached_tokens"):
        assert name in cpp & c
