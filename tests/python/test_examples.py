# SPDX-License-Identifier: Apache-2.0
"""Every Python example runs on the demo checkpoints, and prints what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from time_limits import HANG_LIMIT_S

EXAMPLES = Path(__file__).parents[2] / "examples"

# A part of what each example prints.
PRINTED = {
    "async_requests.py": "--- cancelled; no request runs",
    "batch.py": "--- log-probability",
    "capture.py": "served with an acceptance length of",
    "chat.py": "assistant> ",
    "drafters.py": "the outputs are the same: True",
    "eagle3.py": "the tokens of plain decoding",
    "ngram_edit.py": "tokens per iteration",
    "receipts.py": "edited: different, first at token 5: ",
    "stream.py": "--- first token after",
    "torch_weights.py": "largest difference from torch: ",
}


def test_every_example_is_listed() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PRINTED)


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # not the checkout: an example must need nothing beside it
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout
    assert list(tmp_path.iterdir()) == []
