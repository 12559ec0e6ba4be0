"""Calls of kernels in lowered text, made dispatches of executables that hold the kernels' objects.

A call is a `stablehlo.custom_call @scanwright.<name>`; it becomes a `flow.dispatch` to one export
of the entry's `stream.executable`, which calls the C function with bare pointers for each tile.
Such a module compiles for CPUs only, with `--iree-hal-executable-object-search-path` naming a
directory that holds OBJECT for the target's CPU level.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from emit.kernels import PREFIX

OBJECT = "kernels.o"
FORMATS = ("embedded-elf-x86_64", "embedded-elf-arm_64")

_CALL = re.compile(
    rf"^(?P<left> *%\S+ = )stablehlo\.custom_call @{re.escape(PREFIX)}(?P<name>\w+)"
    r"\((?P<operands>[^)]*)\) \{.*?sizes = (?P<sizes>dense<[^>]*> : tensor<\d+xi64>), "
    r"tiles = (?P<tiles>\d+) : i64\}.*\} : (?P<types>\(.*\) -> .*)$"
)
_TENSOR = re.compile(r"tensor<([^>]*)>")


@dataclass(frozen=True)
class _Export:
    """One kernel at one shape."""

    name: str
    operands: tuple[str, ...]  # element types and shapes, as in a tensor's brackets
    results: tuple[str, ...]
    sizes: tuple[int, ...]
    tiles: int

    def lines(self, symbol: str) -> list[str]:
        """How many tiles there are."""
        return [
            f"    stream.executable.export public @{symbol} "
            "workgroups() -> (index, index, index) {",
            f"      %tiles = arith.constant {self.tiles} : index",
            "      %one = arith.constant 1 : index",
            "      stream.return %tiles, %one, %one : index, index, index",
            "    }",
        ]

    @property
    def kernel(self) -> str:
        """The C function."""
        return f"scanwright_{self.name}"

    @property
    def types(self) -> list[str]:
        """Those of the C function's arguments: whatever its shape, an array is a bare pointer."""
        elements = [shape.rpartition("x")[2] for shape in (*self.operands, *self.results)]
        return [*(f"memref<{word}>" for word in elements), *["index"] * (len(self.sizes) + 1)]

    @property
    def declaration(self) -> str:
        """That of the C function."""
        return (
            f"      func.func private @{self.kernel}({', '.join(self.types)}) "
            "attributes {hal.import.static, llvm.bareptr = true}"
        )

    def function(self, symbol: str) -> list[str]:
        """The function that takes the bindings and calls the kernel."""
        arrays = range(len(self.operands) + len(self.results))
        bindings = ", ".join(f"%b{i}: !stream.binding" for i in arrays)
        names = [*(f"%m{i}" for i in arrays), *(f"%s{i}" for i in range(len(self.sizes)))]
        return [
            f"      func.func @{symbol}({bindings}) {{",
            "        %zero = arith.constant 0 : index",
            "        %tile = stream.dispatch.workgroup.id[0] : index",
            *(
                f"        %m{i} = stream.binding.subspan %b{i}[%zero] : "
                f"!stream.binding -> {self.types[i]}"
                for i in arrays
            ),
            *(f"        %s{i} = arith.constant {n} : index" for i, n in enumerate(self.sizes)),
            f"        func.call @{self.kernel}({', '.join([*names, '%tile'])}) : "
            f"({', '.join(self.types)}) -> ()",
            "        return",
            "      }",
        ]


def _numbers(dense: str) -> tuple[int, ...]:
    """Those of `dense<…> : tensor<Nxi64>`, which is one number where all are the same."""
    words, _, kind = dense.partition(">")
    found = tuple(int(word) for word in re.findall(r"-?\d+", words))
    count = int(re.findall(r"tensor<(\d+)xi64>", kind)[0])
    return found * (count // len(found))


def splice(text: str, entry: str) -> str:
    """`text`, a module of one entry, with its calls of kernels as dispatches."""
    exports: dict[_Export, str] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines):
        match = _CALL.match(line)
        if match is None:
            continue
        operands, _, results = match["types"].partition(" -> ")
        export = _Export(
            match["name"],
            tuple(_TENSOR.findall(operands)),
            tuple(_TENSOR.findall(results)),
            _numbers(match["sizes"]),
            int(match["tiles"]),
        )
        symbol = exports.setdefault(export, f"{entry}_kernel_{len(exports)}")
        lines[number] = (
            f"{match['left']}flow.dispatch @{entry}.kernels::@{symbol}({match['operands']}) : "
            f"{match['types']}"
        )
    if not exports:
        return text
    return "\n".join([lines[0], *_executable(entry, exports), *lines[1:]])


def _executable(entry: str, exports: dict[_Export, str]) -> list[str]:
    paths = [
        f'#hal.executable.target<"llvm-cpu", "{name}"> = '
        f'[#hal.executable.object<{{path = "{OBJECT}"}}>]'
        for name in FORMATS
    ]
    objects = f"#hal.executable.objects<{{{', '.join(paths)}}}>"
    return [
        f"  stream.executable private @{entry}.kernels attributes "
        f"{{hal.executable.objects = {objects}}} {{",
        *(line for export, symbol in exports.items() for line in export.lines(symbol)),
        "    builtin.module {",
        *dict.fromkeys(export.declaration for export in exports),
        *(line for export, symbol in exports.items() for line in export.function(symbol)),
        "    }",
        "  }",
    ]
