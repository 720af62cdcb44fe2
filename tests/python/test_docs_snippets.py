# SPDX-License-Identifier: Apache-2.0
"""Every code block of the pages is run, or checked in the way that its marker says.

A marker is a comment on the line before the fence: `<!-- test: HOW WHY -->`.

| HOW | languages | what is checked |
|---|---|---|
| none | python, bash | the block runs; Python blocks of a page share names |
| `types` | python | the types alone, as test_stub.py checks them for all, because WHY |
| `parse` | bash | every command line, by its real parser, because WHY |
| `ci` | bash | that FILE, the first word of WHY, runs every command of the block |
| `install` | bash | a ctest, tests/install/check_install.py, runs all such blocks of its page |
| `file` | c, cpp, cmake, python | that WHY, a file that another test runs, contains the block |
| `program` | c, cpp, cmake | that WHY is a file with this code; check_install.py builds the block |
| `message` | text | test_docs_messages.py raises it |

JSON is parsed. `text` is for drawings and output. A block of another language is an error.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import paceline
from hub_server import HubServer
from markdown_pages import ROOT, Block, blocks, pages, prose
from paceline.cli import build_parser
from paceline.speculative_config import SpeculativeConfig
from snippet_models import make_models
from time_limits import HANG_LIMIT_S

RUNNER = ROOT / "tests/support/snippet_runner.py"
SHELLS = ("bash",)
# For each language, the markers that its blocks may have; "" is none.
ALLOWED = {
    "python": ("", "types", "file"),
    "bash": ("", "parse", "ci", "install"),
    "c": ("file", "program"),
    "cpp": ("file", "program"),
    "cmake": ("file", "program"),
    "json": ("",),
    "text": ("", "message"),
}


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]


def of(how: str, *languages: str) -> list[Block]:
    """The blocks with a marker, or without one, in some languages."""
    return [b for b in all_blocks() if (b.how or "") == how and b.language in languages]


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block, without comments.

    Raises:
        ValueError: A quotation is not closed, or the block has a construct of the shell.
    """
    found: list[list[str]] = []
    text = ""
    for line in block.code.splitlines():
        text += line
        if text.endswith("\\"):
            text = text[:-1]
            continue
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on in the next line
            text += "\n"
            continue
        while "&&" in words:
            found.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        if words:
            found.append(words)
        text = ""
    if text:
        raise ValueError(f"{block}: a quotation is not closed")
    return found


def test_every_block_is_checked() -> None:
    wrong = []
    counts: collections.Counter[str] = collections.Counter()
    for block in all_blocks():
        how = block.how or ""
        counts[f"{block.language or 'no language'}, {how or 'no marker'}"] += 1
        if how not in ALLOWED.get(block.language, ()):
            wrong.append(f"{block}: language {block.language!r} with marker {how!r}")
        elif how and not block.why:
            wrong.append(f"{block}: the marker {how!r} does not say why")
    for kind, count in sorted(counts.items()):
        print(f"{count:4d} blocks: {kind}")
    assert not wrong, "\n".join(wrong)
    assert counts["python, no marker"] >= 7 and counts["bash, no marker"] >= 6
    # A marker that no block follows is a mistake, and so is a block in tildes.
    for page in pages():
        text = (ROOT / page).read_text()
        markers = re.findall(r"^ *<!-- test: ", text, re.MULTILINE)
        assert len(markers) == sum(b.how is not None for b in blocks(page)), page
        assert not re.search(r"^ *~~~", text, re.MULTILINE), page


# ---- blocks that run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """Runs all blocks without a marker in one process; the result of each by page and line."""
    folder = tmp_path_factory.mktemp("snippets")
    jobs = [
        {"page": str(b.page), "line": b.line, "language": b.language, "code": b.code}
        for b in of("", "python", *SHELLS)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    models = folder / "models"
    models.mkdir()
    # Blocks have fixed ports. Where two workers run tests of this module, one follows the other.
    shared = folder.parents[1] if "PYTEST_XDIST_WORKER" in os.environ else folder
    with open(shared / "snippets.lock", "w") as lock, HubServer(make_models(models)) as hub:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, RUNNER, folder / "jobs.json", folder / "results.json", folder],
            capture_output=True,
            text=True,
            env=os.environ
            | hub.environment
            | {"PYTHONPATH": str(Path(paceline.__file__).parents[1]), "MPLBACKEND": "agg"},
            timeout=HANG_LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "results.json").read_text())
    assert len(found) == len(jobs)
    for result in sorted(found, key=lambda result: -result["seconds"])[:8]:
        print(f"{result['seconds']:6.2f} s  {result['page']}:{result['line']}")
    return {(result["page"], result["line"]): result for result in found}


@pytest.mark.parametrize("block", of("", "python", *SHELLS), ids=str)
def test_block_runs(block: Block, results: dict[tuple[str, int], dict[str, Any]]) -> None:
    result = results[str(block.page), block.line]
    assert result["error"] is None, result["error"]
    if block.language == "python" and "print(" in block.code and "def " not in block.code:
        assert result["output"].strip(), "the block prints nothing"


# ---- blocks that do not run ----------------------------------------------------------------------


class Parsed(Exception):
    """A program has read its command line."""


def parse(words: list[str]) -> None:
    """Reads one command line by its real parser.

    Raises:
        AssertionError: The program does not exist, or refuses the command line.
    """
    words = list(words)
    while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words.pop(0)
    program, *arguments = words
    if program == "paceline":
        values = vars(read_arguments(arguments))
        if values.get("speculative_config") and values.get("model"):
            SpeculativeConfig.parse(values["speculative_config"])
    elif program in ("python", "python3") and arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).exists() for path in arguments[2:] if not path.startswith("-"))
    elif program in ("python", "python3"):
        script, *arguments = arguments
        parse_script(ROOT / script, arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert next(word for word in arguments if "=" not in word) in targets, words
    elif program == "pip":
        assert arguments[:1] == ["install"], words
        for name in arguments[1:]:
            found = re.fullmatch(r"paceline\[([\w,-]+)\]", name)
            assert found and set(found[1].split(",")) <= extras(), words
    elif program in ("cmake", "ctest") and "--preset" in arguments:
        presets = json.loads((ROOT / "CMakePresets.json").read_text())
        kind = {"ctest": "testPresets"}.get(program, "configurePresets")
        if "--build" in arguments:
            kind = "buildPresets"
        name = arguments[arguments.index("--preset") + 1]
        assert name in [preset["name"] for preset in presets[kind]], words
    elif program == "cmake" and arguments[:1] == ["--install"]:
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        folders = [p["binaryDir"].replace("${sourceDir}/", "") for p in presets if "binaryDir" in p]
        names = [preset["name"] for preset in presets]
        known = {folder.replace("${presetName}", name) for folder in folders for name in names}
        assert arguments[1] in known, words
    else:
        raise AssertionError(f"no parser for: {shlex.join(words)}")


def extras() -> set[str]:
    """The extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads a command line of `paceline`."""
    try:
        return build_parser().parse_args(arguments)
    except SystemExit as end:
        if end.code == 0:  # --help
            return argparse.Namespace()
        raise AssertionError(f"paceline refuses: {shlex.join(arguments)}") from None


def parse_script(script: Path, arguments: list[str]) -> None:
    """Starts a program of the repository up to the moment when it has read its command line."""
    read = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *_: Any) -> Any:
        read(parser, arguments)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Parsed:
            return
        except SystemExit:
            raise AssertionError(f"{script.name} refuses: {shlex.join(arguments)}") from None
    raise AssertionError(f"{script} reads no command line")


@pytest.mark.parametrize("block", of("parse", *SHELLS), ids=str)
def test_command_lines_parse(block: Block) -> None:
    assert commands(block)
    for words in commands(block):
        parse(words)


def flags_of(words: list[str]) -> set[str]:
    """The flags of the command of `paceline` that a command line names."""
    parser: argparse.ArgumentParser = build_parser()
    for word in words:
        subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not subparsers or word not in subparsers[0].choices:
            break
        parser = subparsers[0].choices[word]
    return {flag for action in parser._actions for flag in action.option_strings}


def test_flags_in_running_text_exist() -> None:
    count = 0
    for page in pages():
        for span in re.findall(r"`(paceline [^`]*)`", prose(page)):
            _, *words = span.split()
            for flag in re.findall(r"(?<![\w-])--[\w-]+", span):
                assert flag in flags_of(words), f"{page}: `{' '.join(span.split())}`"
                count += 1
    assert count >= 10


def test_extras_in_running_text_exist() -> None:
    found = {
        (str(page), extra)
        for page in pages()
        for names in re.findall(r"paceline\[([^\]]*)\]", (ROOT / page).read_text())
        for extra in names.split(",")
    }
    assert {extra for _, extra in found} <= extras(), found
    for page in ("README.md", "docs/quickstart.md", "docs/server.md"):
        assert (page, "server") in found


def runs_in(words: list[str], line: str) -> bool:
    """Whether a line of a file has the words of a command in their order."""
    rest = iter(re.split(r"[\s\"';]+", line))
    words = " ".join(words).split()

    def is_same(word: str, other: str) -> bool:
        return (
            word == other
            or other.endswith(f"/{word}")
            or (word == "." and other.partition("[")[0] == "/src")
        )

    return all(any(is_same(word, other) for other in rest) for word in words)


@pytest.mark.parametrize("block", of("ci", *SHELLS), ids=str)
def test_ci_runs_the_commands(block: Block) -> None:
    assert block.why is not None
    text = (ROOT / block.why.split()[0]).read_text().replace("\\\n", " ")
    for words in commands(block):
        assert any(runs_in(words, line) for line in text.splitlines()), (str(block), words)


def is_part(code: str, text: str) -> bool:
    """Whether a file has the lines of a block, however they are indented."""
    shown, whole = ([line.strip() for line in part.splitlines()] for part in (code, text))
    return "\n".join(shown).strip() in "\n".join(whole)


def test_files_contain_the_blocks() -> None:
    for block in of("file", "c", "cpp", "cmake", "python"):
        assert block.why is not None
        text = (ROOT / block.why.split()[0]).read_text()
        assert is_part(block.code, text), f"{block}: not in {block.why}"
    assert is_part("a\n  b\n", "0\n  a\n    b\nc") and not is_part("a\nc\n", "a\nb\nc")


def without_comment(text: str) -> str:
    """A file's text without the comment at its top."""
    lines = text.splitlines(keepends=True)
    return "".join(itertools.dropwhile(re.compile(r"//|# ").match, lines))


def test_programs_are_whole_files() -> None:
    for block in of("program", "c", "cpp", "cmake"):
        assert block.why is not None
        text = (ROOT / block.why).read_text()
        assert block.code == without_comment(text), f"{block}: differs from {block.why}"


def test_the_install_test_runs_its_page() -> None:
    for found in (of("install", *SHELLS), of("program", "c", "cpp", "cmake")):
        assert {block.page for block in found} == {Path("docs/embedding.md")}
    script = (ROOT / "tests/install/check_install.py").read_text()
    assert 'Path("docs/embedding.md")' in script


@pytest.mark.parametrize("block", of("", "json"), ids=str)
def test_json_parses(block: Block) -> None:
    json.loads(block.code)


# ---- the checks themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "paceline generate --no-such-flag x",
        "paceline bench latency --concurency 1",
        "make no-such-target",
        "cmake --preset no-such-preset",
        "no-such-program x",
        "pip install 'paceline[no-such-extra]'",
        "python python/training/evaluate_demo.py --no-such-flag",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        parse(shlex.split(line))


def test_commands_join_lines_and_quotations() -> None:
    code = "A=1 one \\\n  two '{\n 3}' # four\n\nfive\n"
    block = Block(Path("x.md"), 1, "bash", code, None, None)
    assert commands(block) == [["A=1", "one", "two", "{\n 3}"], ["five"]]
    assert runs_in(["pip", "install", "."], '$(VENV)/bin/pip install --quiet "."')
    assert not runs_in(["install", "pip"], "pip install")
