# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the server's page for docs/images, in Chromium, with the demo.

PYTHONPATH=python python docs/scripts/page_screenshots.py
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser, find_chromium  # noqa: E402
from paceline import LLM  # noqa: E402
from paceline.demo import find_demo  # noqa: E402
from running_server import RunningServer  # noqa: E402

PROMPTS = (
    "class Stack:",
    "import os\nimport sys\n",
    "def read_lines(path):\n    with open(path) as f:\n",
)


def main() -> None:
    """Writes page-light.png and page-dark.png."""
    executable = find_chromium()
    if executable is None:
        sys.exit("Chromium was not found; install it: apt-get install chromium")
    demo = find_demo("draft_model")
    is_over = threading.Event()
    with (
        LLM(
            demo.target,
            speculative_config=demo.speculative_config(),
            max_num_seqs=8,
            max_model_len=512,
            kv_cache_bytes=12 << 20,
            device="cpu",
        ) as llm,
        RunningServer(llm) as server,
        Browser(executable) as browser,
    ):
        server.service.names = ("paceline-demo",)
        browser.set_size(1240, 900)
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("!document.getElementById('main').hidden")
        others = [
            threading.Thread(target=_others, args=(server, number, is_over)) for number in range(3)
        ]
        for thread in others:
            thread.start()
        time.sleep(60)  # for the chart of the last minute
        for name, value in (("seed", 7), ("temperature", 0.4), ("max-tokens", 114)):
            browser.run(f"document.getElementById({name!r}).value = {value}")
        browser.run("document.getElementById('run').click()")
        browser.wait_for("document.getElementById('run-state').textContent.includes(' tokens in ')")
        browser.wait_for("!document.getElementById('load').textContent.startsWith('0')")
        browser.run("document.getElementById('output').scrollTop = 0")
        for scheme in ("light", "dark"):
            browser.set_scheme(scheme)
            browser.screenshot(ROOT / "docs" / "images" / f"page-{scheme}.png")
        is_over.set()
        for thread in others:
            thread.join()


def _others(server: RunningServer, number: int, is_over: threading.Event) -> None:
    """Requests of other clients."""
    for index in itertools.count():
        body = {
            "prompt": PROMPTS[index % len(PROMPTS)] * 6,
            "max_tokens": 380,
            "seed": index,
            "temperature": 0.3 * number,
        }
        server.result("/v1/completions", body)
        if is_over.wait(0.1 + 0.3 * (index % 4)):
            return


if __name__ == "__main__":
    main()
