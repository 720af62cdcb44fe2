# SPDX-License-Identifier: Apache-2.0
"""Follows docs/embedding.md outside the tree, and compares every example with Python.

Usage: check_install.py CMAKE BUILD_DIR, with an interpreter that has paceline installed.

The programs are those of the page: its code blocks replace the files of examples/ that they name.
The commands of the page install the library, convert a demo and run the C++ and C programs and the
C++ server. Then the programs are built in the other ways: with the static and the shared library,
with CMake and with pkg-config. Each program must print the tokens of `LLM`, and so must the ctypes
example. `cpp_server_checks.py` checks the server.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.demo import demo_paths

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))
from cpp_server_checks import check_server  # noqa: E402

from markdown_pages import blocks  # noqa: E402

EXAMPLES = ROOT / "examples"
PAGE = Path("docs/embedding.md")
PROMPT = "def read_lines(path):\n"
MAX_TOKENS = 48
NUM_SPECULATIVE_TOKENS = 4
# Temperature and seed of each request. The page has the last one.
REQUESTS = ((0.0, 0), (0.8, 7))
STRICT_C = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
# These build the library; BUILD_DIR is what they make.
BUILD_COMMANDS = (
    "cmake --preset cpu-release -DPACELINE_TESTS=OFF",
    "cmake --build --preset cpu-release",
)


def run(*command: str | Path, **options: object) -> str:
    """Runs a command and returns its standard output; on failure prints all output and exits."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(words)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_with_cmake(cmake: str, source: Path, prefix: Path, shared: bool) -> Path:
    """Builds an example with find_package. Returns the program."""
    build = source / f"build-{'shared' if shared else 'static'}"
    run(
        cmake, "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DBUILD_SHARED_LIBS={'ON' if shared else 'OFF'}",
    )  # fmt: skip
    run(cmake, "--build", build)
    return build / "generate"


def build_with_static_pkg_config(source: Path, prefix: Path) -> Path:
    """Builds the C example with pkg-config and an installation without the shared library."""
    program = source / "with-static-pkg-config"
    environment = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = run("pkg-config", "--static", "--cflags", "--libs", "paceline", env=environment)
    run("cc", source / "main.c", "-o", program, *shlex.split(flags))
    return program


def check_subdirectory(cmake: str, folder: Path) -> None:
    """Configures a project that contains the sources: it has the targets of the package."""
    folder.mkdir()
    (folder / "main.cc").touch()
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(parent LANGUAGES CXX)\n"
        f"add_subdirectory({ROOT} paceline)\nadd_executable(program main.cc)\n"
        "target_link_libraries(program PRIVATE paceline::paceline paceline::paceline_shared\n"
        "  paceline::paceline_static)\n"
        'if(TARGET c_api_test)\n  message(FATAL_ERROR "the tests are part of it")\nendif()\n'
    )
    run(cmake, "-S", folder, "-B", folder / "build", "-DBUILD_SHARED_LIBS=ON")


def check_missing_packages(cmake: str, source: Path, prefix: Path) -> None:
    """Configures the server without a package that it needs: the error names what to install."""
    done = subprocess.run(
        [
            cmake, "-S", source, "-B", source / "build-missing", f"-DCMAKE_PREFIX_PATH={prefix}",
            "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    message = " ".join(done.stderr.split())
    if done.returncode == 0 or "apt install libcpp-httplib-dev nlohmann-json3-dev" not in message:
        sys.exit(f"without nlohmann-json, cmake exited with {done.returncode}: {message}")


def check_linkage(program: Path, shared: bool) -> None:
    """Checks that a program needs libpaceline.so exactly if it was linked with it."""
    if ("libpaceline.so" in run("readelf", "--dynamic", program)) != shared:
        sys.exit(f"{program} {'does not need' if shared else 'needs'} libpaceline.so")


def python_tokens(target: Path, draft: Path) -> tuple[list[int], list[list[int]]]:
    """Generates with Python. Returns the prompt and the tokens of each request."""
    speculative = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS)
        for temperature, seed in REQUESTS
    ]
    with LLM(str(target), speculative_config=speculative, max_model_len=512) as llm:
        outputs = llm.generate([PROMPT] * len(params), params)
    return list(outputs[0].prompt_token_ids), [list(o.outputs[0].token_ids) for o in outputs]


def check_output(name: str, printed: str, expected: list[int]) -> None:
    """Compares what an example has printed with the tokens of Python."""
    lines = printed.splitlines()
    tokens = [int(word) for word in lines[-2].split()] if len(lines) > 1 else []
    if tokens != expected or len(tokens) < 8:
        sys.exit(f"{name}: tokens differ:\n{tokens}\n{expected} in Python")
    counts = re.fullmatch(r"(\d+) of (\d+) drafts were accepted", lines[-1])
    # How many are drafted depends on times.
    if counts is None or int(counts[1]) > int(counts[2]) or int(counts[2]) == 0:
        sys.exit(f"{name}: the last line is {lines[-1]!r}")


def write_programs(scratch: Path) -> None:
    """Writes the programs of the page into a folder, where it has the files that they name."""
    programs = {str(block.why): block.code for block in blocks(PAGE) if block.how == "program"}
    assert {Path(name).suffix for name in programs} == {".cc", ".c", ".txt"}, list(programs)
    for name, code in programs.items():
        (scratch / name).unlink()
        (scratch / name).write_text(code)


def follow_page(cmake: str, scratch: Path, values: dict[str, str]) -> list[str]:
    """Runs the commands of the page in a folder. Returns the output of each block."""
    outputs = []
    for block in blocks(PAGE):
        if block.how != "install":
            continue
        lines = [line for line in block.code.splitlines() if line not in BUILD_COMMANDS]
        if any("--preset" in line for line in lines):
            sys.exit(f"{block}: allowed with --preset: {BUILD_COMMANDS}")
        script = "\n".join(["set -euo pipefail", *lines])
        for word, value in values.items():
            script = re.sub(rf"(?<![\w/]){word}(?!\w)", lambda _, value=value: value, script)
        path = f"{Path(cmake).parent}{os.pathsep}{os.environ['PATH']}"
        outputs.append(run("bash", "-c", script, cwd=scratch, env=os.environ | {"PATH": path}))
    return outputs


def main() -> None:
    cmake, build_dir = shutil.which(sys.argv[1]), Path(sys.argv[2]).resolve()
    assert cmake is not None, sys.argv[1]
    # A CUDA build is compared on the CPU too: the package that is installed may have no CUDA.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    target, draft = demo_paths("draft_model")
    prompt, expected = python_tokens(target, draft)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        prefix, folder, sources = scratch / "prefix", scratch / "folder", scratch / "examples"
        shutil.copytree(EXAMPLES, sources)
        write_programs(scratch)
        (scratch / "build").mkdir()
        (scratch / "build" / "cpu-release").symlink_to(build_dir)
        token_ids = " ".join(map(str, prompt))
        outputs = follow_page(
            cmake,
            scratch,
            {
                "/opt/paceline": str(prefix),
                "paceline convert": f"{sys.executable} -m paceline convert",
                "MODEL": str(target),
                "DRAFTER": str(draft),
                "FOLDER": str(folder),
                "TOKEN_IDS": token_ids,
            },
        )
        assert len(outputs) == 6, outputs
        # After installation and conversion: C++, the server's build and its answer, and C.
        *_, cpp, _, answer, c = outputs
        for printed in (cpp, c):
            check_output(str(PAGE), printed, expected[-1])
        assert '"finish_reason":"length"' in answer, answer
        print(f"{PAGE.name}: {len(outputs)} blocks of commands, the tokens of Python")

        check_missing_packages(cmake, sources / "cpp-server", prefix)
        server = scratch / "build" / "cpp-server" / "paceline-cpp-server"
        check_server(server, folder, prompt, dict(zip(REQUESTS, expected, strict=True)))
        print("C++ server: the tokens of Python")
        check_subdirectory(cmake, scratch / "subdirectory")
        include = f"-I{prefix / 'include'}"
        run("cc", *STRICT_C, include, sources / "c" / "main.c")
        programs = {
            ("C++, static", False): scratch / "build" / "cpp" / "generate",
            ("C++, shared", True): build_with_cmake(cmake, sources / "cpp", prefix, True),
            ("C, static", False): build_with_cmake(cmake, sources / "c", prefix, False),
            ("C, shared", True): build_with_cmake(cmake, sources / "c", prefix, True),
            ("C, shared, pkg-config", True): scratch / "generate-c",
        }
        # An installation can be moved, and be without the shared library.
        moved = scratch / "moved"
        ignored = shutil.ignore_patterns("libpaceline.so*")
        shutil.copytree(prefix, moved, ignore=ignored)
        programs["C, static, pkg-config", False] = build_with_static_pkg_config(
            sources / "c", moved
        )
        commands = {}
        for (name, shared), program in programs.items():
            check_linkage(program, shared)
            commands[name] = [str(program)]
        library = prefix / "lib" / "libpaceline.so"
        # -I and -S leave out site-packages, so the example cannot import paceline.
        example = str(sources / "ctypes" / "generate.py")
        commands["ctypes"] = [sys.executable, "-I", "-S", example, str(library)]
        environment = os.environ | {"LD_LIBRARY_PATH": str(prefix / "lib")}
        for name, command in commands.items():
            for (temperature, seed), tokens in zip(REQUESTS, expected, strict=True):
                arguments = map(str, (folder, MAX_TOKENS, temperature, seed, *prompt))
                printed = run(*command, *arguments, env=environment)
                check_output(f"{name}, temperature {temperature}", printed, tokens)
            print(f"{name}: the tokens of Python")


if __name__ == "__main__":
    main()
