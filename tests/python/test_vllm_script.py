# SPDX-License-Identifier: Apache-2.0
"""A script for vLLM runs when its import line, and nothing else, is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths

SCRIPT = Path(__file__).parents[1] / "support" / "vllm_script.py"


def test_only_the_import_line_changes(tmp_path: Path) -> None:
    source = SCRIPT.read_text()
    assert source.count("from vllm import ") == source.count("import vllm") + 1
    changed = tmp_path / "script.py"
    changed.write_text(source.replace("from vllm import ", "from paceline import "))
    target, draft = demo_paths("draft_model")
    result = subprocess.run(
        [sys.executable, str(changed), str(target), str(draft)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    kinds = [line.split()[0] for line in lines]
    assert (kinds.count("greedy"), kinds.count("sampled"), kinds.count("choice")) == (3, 3, 3)
    assert "chat True [True, True]" in lines
    # The output is that of plain decoding.
    with LLM(target, max_num_seqs=2) as plain:
        greedy = SamplingParams(temperature=0, max_tokens=16)
        (output,) = plain.generate("class Stack:", greedy)
        text = output.outputs[0].text
        sampling = SamplingParams(
            temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, seed=1, max_tokens=8
        )
        sampled = plain.generate("class Stack:", sampling)[0].outputs[0].token_ids
    assert f"greedy 'class Stack:' {text!r} length" in lines
    assert [line for line in lines if line.startswith("sampled") and line.endswith(f"{sampled}")]
    (stopped,) = (line for line in lines if line.startswith("stopped"))
    assert stopped == r"stopped '\n' stop '\n'"
    answers = {line.partition("True ")[2] for line in lines if line.startswith("prompt ")}
    assert len(answers - {""}) == 1 and kinds.count("prompt") == 5
