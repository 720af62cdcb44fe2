# SPDX-License-Identifier: Apache-2.0
"""`make demo` says what it is doing, with an environment whose programs do nothing."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
# Without what a make that runs these tests hands down.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
PIP = """\
#!/bin/sh
echo '  [3/9] Building CXX object a.o'
sleep 1.5
echo 'the compiler says no' >&2
exit {code}
"""


DONE = "#!/bin/sh\nexit 0\n"
PACELINE = '#!/bin/sh\necho "ran $*"\n'


def prepare(folder: Path, code: int) -> list[str]:
    """Writes the programs of both environments. The build ends with `code`."""
    for name, text in (
        ("build-venv/bin/python", PIP.format(code=code)),
        ("venv/bin/python", DONE),
        ("venv/bin/paceline", PACELINE),
    ):
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    variables = ["BUILD_VENV=build-venv", "VENV=venv", "JOBS=3"]
    return ["make", "-C", str(folder), "-f", str(MAKEFILE), *variables, "demo"]


def test_each_stage_has_a_line(tmp_path: Path) -> None:
    command = prepare(tmp_path, 0)
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "ing directory" not in line]
    program = "venv/bin/paceline"
    assert lines[0] == (
        "make: building paceline with 3 jobs: a minute or several; the log is build/install.log"
    )
    assert lines[1].startswith("make: built in ")
    assert lines[2].startswith("make: installing the wheel and what it needs into venv")
    assert lines[3].startswith("make: generating with a demo that ships in the package")
    assert lines[4] == "ran generate def read_lines(path):"
    assert f"make: paceline is installed as {tmp_path}/{program}" in lines
    next_command = lines[-1].strip()
    assert next_command.startswith(f"{program} generate --demo")
    shown = subprocess.run(
        next_command, shell=True, cwd=tmp_path, env=ENV, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("ran generate")
    # The second time nothing is built, unless the build is asked for in another way.
    again = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
    assert "building" not in again.stdout and "ran generate" in again.stdout
    other = ENV | {"CMAKE_ARGS": "-DPACELINE_CUDA=ON"}
    changed = subprocess.run(command, env=other, capture_output=True, text=True, check=True)
    assert "building" in changed.stdout and "installing the wheel" in changed.stdout


def test_a_terminal_shows_how_far_the_build_is(tmp_path: Path) -> None:
    terminal, standard_error = pty.openpty()
    command = prepare(tmp_path, 0)
    subprocess.run(command, env=ENV, stdout=subprocess.DEVNULL, stderr=standard_error, check=True)
    os.close(standard_error)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert re.search(r"\rmake: [1-9]\d* s, compiling \[3/9\] ", shown), shown


def test_a_failed_build_names_its_log(tmp_path: Path) -> None:
    done = subprocess.run(prepare(tmp_path, 1), env=ENV, capture_output=True, text=True)
    assert done.returncode != 0
    log = tmp_path / "build" / "install.log"
    assert "the compiler says no\n" in done.stderr
    assert f"make: the build failed; the whole log is {log}\n" in done.stderr
    assert "the compiler says no" in log.read_text()
    assert not (tmp_path / "venv" / ".installed").exists() and "installed as" not in done.stdout


@pytest.mark.parametrize("option", ["--demo eagle3", "--color always"])
def test_the_next_command_has_options_that_exist(option: str) -> None:
    from paceline import cli

    assert option in MAKEFILE.read_text()
    cli.build_parser().parse_args(["generate", *option.split(), "x"])
