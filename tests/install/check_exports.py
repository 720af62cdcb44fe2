# SPDX-License-Identifier: Apache-2.0
"""Checks that the shared library exports the public interface and nothing else.

Usage: check_exports.py LIBRARY. A C++ symbol must be of a name that a public header marks with
PACELINE_API, and every such name and every C function of paceline.h must be exported.
"""

import re
import subprocess
import sys
from pathlib import Path

HEADERS = Path(__file__).parents[2] / "cpp" / "include" / "paceline"


def declared() -> tuple[set[str], set[str]]:
    """The names that the headers mark with PACELINE_API: of C functions, and of C++."""
    c_names: set[str] = set()
    cpp_names: set[str] = set()
    for path in set(HEADERS.glob("*.h")) - {HEADERS / "export.h"}:
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        marked = re.findall(r"class PACELINE_API (\w+)|\bPACELINE_API\s+[^;{]*?(\w+)\(", text)
        names = {cls or function for cls, function in marked}
        (c_names if path.name == "paceline.h" else cpp_names).update(names)
    return c_names, cpp_names


def exported(library: str) -> list[str]:
    """The demangled symbols that the library defines."""
    listing = subprocess.run(
        ["nm", "--dynamic", "--demangle", "--defined-only", library],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.split(" ", 2)[2] for line in listing.stdout.splitlines()]


def main() -> None:
    c_names, cpp_names = declared()
    found_c: set[str] = set()
    found_cpp: set[str] = set()
    unexpected = []
    for symbol in exported(sys.argv[1]):
        name = re.match(r"(?:(?:typeinfo|typeinfo name|vtable) for )?paceline::(\w+)", symbol)
        if symbol in c_names:
            found_c.add(symbol)
        elif name is not None and name[1] in cpp_names:
            found_cpp.add(name[1])
        else:
            unexpected.append(symbol)
    missing = sorted((c_names - found_c) | (cpp_names - found_cpp))
    if unexpected or missing or len(c_names) < 8 or len(cpp_names) < 8:
        sys.exit(f"exported, but not public: {unexpected}\npublic, but not exported: {missing}")
    print(f"{len(c_names)} C functions and {len(cpp_names)} C++ names are exported, nothing else")


if __name__ == "__main__":
    main()
