"""Textual linking: one StableHLO module per entry point in, one module for the compiler out.

Each input is `module @<entry> { globals, executables, functions }`. The globals (parameters) are
the same text wherever they occur and become one copy each; every function keeps its text, its name
made unique by the entry's: the public function is `@<entry>`, private ones are `@<entry>.<name>`,
and an executable is `@<entry>.kernels`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.errors import UserError

MODULE = "model"

_GLOBAL = re.compile(r'  util\.global private (@"[^"]+"|@[\w.$-]+) = .*')
_EXECUTABLE = re.compile(r"  stream\.executable private @([\w$-]+)\.kernels attributes .* \{")
_FUNCTION = re.compile(r"  func\.func (public|private) @([\w.$-]+)\(.*")


def link(modules: Sequence[tuple[str, str]]) -> str:
    """One module `@model` out of (entry name, module text) pairs, in their order.

    Raises UserError naming the entry and line where a module breaks the rules above.
    """
    globals_: dict[str, str] = {}
    functions: dict[str, str] = {}  # function name -> entry that has it
    body: list[str] = []
    for entry, text in modules:
        for number, line in _inner_lines(entry, text):
            if match := _GLOBAL.fullmatch(line):
                name = match.group(1)
                if globals_.setdefault(name, line) != line:
                    raise _fault(entry, number, f"global {name} differs between entry points")
                continue
            if match := _FUNCTION.fullmatch(line):
                _claim(functions, entry, number, *match.groups())
            elif match := _EXECUTABLE.fullmatch(line):
                _claim(functions, entry, number, "private", f"{match.group(1)}.kernels")
            elif line[2:3] not in ("", " ", "}"):
                raise _fault(
                    entry, number, f"neither a global nor a function: {line.strip()[:60]!r}"
                )
            body.append(line)
        if entry not in functions:
            raise _fault(entry, 1, f"no public function @{entry}")
    return "\n".join([f"module @{MODULE} {{", *globals_.values(), *body, "}", ""])


def _claim(functions: dict[str, str], entry: str, number: int, scope: str, name: str) -> None:
    if (name != entry) if scope == "public" else not name.startswith(f"{entry}."):
        expected = f"@{entry}" if scope == "public" else f"@{entry}.<name>"
        raise _fault(entry, number, f"{scope} function @{name}: expected {expected}")
    if name in functions:
        raise _fault(entry, number, f"function @{name} is defined twice")
    functions[name] = entry


def _inner_lines(entry: str, text: str) -> list[tuple[int, str]]:
    lines = text.rstrip("\n").split("\n")
    if lines[0] != f"module @{entry} {{" or lines[-1] != "}":
        raise _fault(entry, 1, f"expected one module `module @{entry} {{ … }}`")
    inner = [(number, line) for number, line in enumerate(lines[1:-1], 2) if line]
    for number, line in inner:
        if not line.startswith("  "):
            raise _fault(entry, number, "a second top-level operation after the module")
    return inner


def _fault(entry: str, line: int, message: str) -> UserError:
    return UserError(f"{entry}.mlir:{line}: {message}: emit the entry point again")
