"""Linking entry points: one copy of the parameters, every function once, broken text refused."""

from __future__ import annotations

import re

import pytest

from artifacts.link import link
from runtime.errors import UserError

GLOBAL = '  util.global private @"w.x" = #flow.parameter.named<"model"::"w.x"> : tensor<4xf32>'


def module(name: str, *lines: str) -> str:
    function = [
        f"  func.func public @{name}(%arg0: tensor<4xf32>) -> tensor<4xf32> {{",
        '    %w = util.global.load @"w.x" : tensor<4xf32>',
        "    return %w : tensor<4xf32>",
        "  }",
    ]
    return "\n".join([f"module @{name} {{", GLOBAL, *function, *lines, "}", ""])


def private(name: str) -> tuple[str, ...]:
    return (f"  func.func private @{name}() {{", "    return", "  }")


def test_linked_text_holds_each_global_and_function_once() -> None:
    other = GLOBAL.replace("w.x", "v")
    inputs = [
        ("decode", module("decode", *private("decode.silu"), other)),
        ("seed", module("seed", *private("seed.silu"))),
    ]
    text = link(inputs)
    head, *_ = text.split("\n  func.func", 1)
    assert head == f"module @model {{\n{GLOBAL}\n{other}"
    names = re.findall(r"func\.func \w+ @([\w.]+)\(", text)
    assert names == ["decode", "decode.silu", "seed", "seed.silu"]
    assert text.endswith("  }\n}\n")
    # nothing is lost: the lines are those of the inputs, less wrappers and the repeated global
    kept = sorted([*"".join(t for _, t in inputs).splitlines(), "module @model {"])
    for gone in ("module @decode {", "module @seed {", "}", GLOBAL):
        kept.remove(gone)
    assert sorted(text.splitlines()) == kept


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"b\.mlir:1: expected one module"),
        (module("a"), r"b\.mlir:1: expected one module"),
        (module("b").replace("{", "attributes {x} {", 1), r"b\.mlir:1: expected one module"),
        (module("b") + module("c"), r"b\.mlir:7: a second top-level operation"),
        (module("b", *private("silu")), r"b\.mlir:7: private function @silu: expected @b\.<name>"),
        (module("b", *private("a.silu")), r"private function @a\.silu: expected @b\.<name>"),
        (module("b", *private("b.x"), *private("b.x")), r"b\.mlir:10: function @b\.x is defined"),
        (module("b").replace("@b(", "@c("), r"public function @c: expected @b"),
        (module("b").replace("public @b(", "private @b.c("), r"no public function @b"),
        (module("b").replace("4xf32>\n", "5xf32>\n", 1), r'global @"w\.x" differs between'),
        (module("b", "  #loc = loc(unknown)"), r"b\.mlir:7: neither a global nor a function"),
    ],
)
def test_text_that_breaks_the_rules_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        link([("a", module("a")), ("b", text)])
    link([("a", module("a")), ("b", module("b"))])  # the unchanged pair is accepted
