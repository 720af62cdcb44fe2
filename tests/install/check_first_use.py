# SPDX-License-Identifier: Apache-2.0
"""Does what a new user does, with the installation that runs this script and nothing beside it.

    python -P check_first_use.py

A checkpoint and a drafter of one's own come from folders and from a stand-in for the Hugging Face
Hub; then a chat, a stream, a chart. It runs in an empty folder with an empty hub cache.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from pathlib import Path

from paceline.demo import demo_paths

sys.path.append(str(Path(__file__).parents[1] / "support"))
from hub_server import HubServer  # needs the standard library only

PROMPT = "def read_lines(path):"
TEMPLATE = (
    "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
STREAM = """\
import sys
from paceline import LLM, SamplingParams
drafter = {"model": sys.argv[2], "num_speculative_tokens": 3}
with LLM(sys.argv[1], speculative_config=drafter) as llm:
    for chunk in llm.stream("class Stack:", SamplingParams(temperature=0.8, seed=1)):
        print(chunk.text, end="", flush=True)
"""


def run(*command: str | Path, env: dict[str, str]) -> str:
    """Runs a command and returns its standard output; exits with all output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        sys.exit(f"{shown} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_server(paceline: Path, pair: list[str], expected: str, env: dict[str, str]) -> None:
    """Serves a pair, measures the server, and compares its text with that of `generate`."""
    command = [paceline, "serve", *pair, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            served = next(line for line in lines if line.startswith("paceline: serving"))
            url = served.partition(" at ")[2].partition(",")[0]
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 64}
            request = urllib.request.Request(
                f"{url}/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                text = json.load(response)["choices"][0]["text"]
            assert expected.strip().endswith(text.strip()), (expected, text)
            base = (
                "--base-url",
                url.removesuffix("/v1"),
                "--num-prompts",
                "2",
                "--output-len",
                "4",
            )
            run(paceline, "bench", "serve", *base, env=env)
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()


def main() -> None:
    paceline = Path(sysconfig.get_path("scripts")) / "paceline"
    demo_target, demo_draft = demo_paths("draft_model")
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        target, draft = Path("my-model"), Path("my-drafter")
        shutil.copytree(demo_target, target)
        shutil.copytree(demo_draft, draft)
        (target / "chat_template.jinja").write_text(TEMPLATE)

        with HubServer({"me/model": target, "me/drafter": draft}) as hub:
            env = {**os.environ, **hub.environment}
            run(paceline, "doctor", env=env)

            def pair(model: str, drafter: str) -> list[str]:
                speculative = json.dumps({"model": drafter, "num_speculative_tokens": 3})
                return ["--model", model, "--speculative-config", speculative]

            def generate(model: str, drafter: str, *options: str) -> str:
                return run(
                    paceline, "generate", "--quiet", *pair(model, drafter), *options, env=env
                )

            from_folder = generate(str(target), str(draft), PROMPT)
            assert from_folder.strip()
            assert generate("me/model", "me/drafter", PROMPT) == from_folder
            chat = generate("me/model", "me/drafter", "--chat", "Read the lines of a file.")
            assert chat.strip() and chat != from_folder
            assert run(
                sys.executable, "-P", "-c", STREAM, "me/model", "me/drafter", env=env
            ).strip()
            assert hub.fetched

            run(
                paceline, "bench", "latency", *pair(str(target), str(draft)),
                "--concurrency", "1,2", "--input-len", "16", "--output-len", "16", "--rounds", "1",
                "--plot", "chart.png", env=env,
            )  # fmt: skip
            assert Path("chart.png").read_bytes().startswith(b"\x89PNG")
            check_server(paceline, pair(str(target), str(draft)), from_folder, env)
        os.chdir("/")
    print("doctor, folders, hub, chat, stream, chart and server: all work in a new installation")


if __name__ == "__main__":
    main()
