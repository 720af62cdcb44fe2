# SPDX-License-Identifier: Apache-2.0
"""Installs the C++ library, builds a consumer with it, and compares its tokens with Python's.

Usage: check_install.py CMAKE BUILD_DIR, with an interpreter that has paceline installed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths
from paceline.loader.convert import convert

PROMPT = "def read_lines(path):\n"
MAX_TOKENS = 48
NUM_SPECULATIVE_TOKENS = 4


def run(*command: str) -> str:
    """Runs a command and returns its standard output; on failure prints all output and exits."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    cmake, build_dir = sys.argv[1:3]
    source = Path(__file__).parent / "consumer"
    target, draft = demo_paths("draft_model")
    with tempfile.TemporaryDirectory() as scratch:
        prefix, consumer, folder = (Path(scratch) / name for name in ("prefix", "build", "model"))
        run(cmake, "--install", build_dir, "--prefix", str(prefix))
        run(
            cmake, "-S", str(source), "-B", str(consumer), "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_PREFIX_PATH={prefix}",
        )  # fmt: skip
        run(cmake, "--build", str(consumer))
        convert(target, folder, draft_dir=draft, num_speculative_tokens=NUM_SPECULATIVE_TOKENS)

        speculative = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        }
        with LLM(str(target), speculative_config=speculative, max_model_len=512) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
            output = llm.generate([PROMPT], params)[0]
        ids = [str(token) for token in output.prompt_token_ids]
        printed = run(str(consumer / "consumer"), str(folder), str(MAX_TOKENS), *ids)
        from_cpp = [int(token) for token in printed.split()]
        from_python = list(output.outputs[0].token_ids)
        if from_cpp != from_python or not from_cpp:
            sys.exit(f"tokens differ:\nC++    {from_cpp}\nPython {from_python}")
        print(f"C++ and Python generated the same {len(from_cpp)} tokens")


if __name__ == "__main__":
    main()
