"""Bit streams, group scales, and the patterns that name modules."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import pytest

from emit.dequant import bits, names, parts
from emit.errors import EmitError


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 100])
def test_a_stream_gives_its_codes(width: int, count: int) -> None:
    rng = np.random.default_rng(width * 1000 + count)
    codes = rng.integers(0, 2**width, (3, count))
    words = np.zeros((3, bits.length(count, width)), np.uint32)
    for row in range(3):
        number = sum(int(code) << width * i for i, code in enumerate(codes[row]))
        for index in range(words.shape[1]):
            words[row, index] = number >> 32 * index & 0xFFFFFFFF
    np.testing.assert_array_equal(bits.stream(words.view(np.int32), width, count), codes)
    np.testing.assert_array_equal(bits.columns(words.T.view(np.int32), width, count), codes)


def test_exponents_are_powers_of_two() -> None:
    found = parts.exponents(np.arange(256, dtype=np.uint8))
    for code in range(255):
        assert found[code] == 2.0 ** (code - 127)
    assert np.isnan(found[255])


@pytest.mark.parametrize("sides", [(1, 5), (3, 4), (100, 100), (2, 2**31)])
def test_tiles_at_the_edges(sides: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((2, 7, 11)).astype(np.float32)
    scales = rng.standard_normal((2, -(-7 // sides[0]), -(-11 // sides[1]))).astype(np.float32)
    found = parts.tiles(codes, scales, sides)
    for e, i, j in np.ndindex(codes.shape):
        assert found[e, i, j] == codes[e, i, j] * scales[e, i // sides[0], j // sides[1]]


def drawn(rng: random.Random, depth: int = 0) -> str:
    """A pattern, not always a good one."""
    text = ""
    for _ in range(rng.randint(0, 4)):
        kind = rng.random()
        if kind < 0.5:
            text += rng.choice("abc.")
        elif kind < 0.6:
            text += rng.choice(["[ab]", "[^a]", r"\.", r"\d", "[]a]", r"\w", "^", "$"])
        elif depth < 3:
            inner = "|".join(drawn(rng, depth + 1) for _ in range(rng.randint(1, 3)))
            text += rng.choice(["(", "(?:", "(?=", "(?!"]) + inner + ")"
        if text and text[-1] not in "^$(" and rng.random() < 0.4:
            text += rng.choice(["*", "+", "?", "*?", "{2}", "{1,3}", "{,2}", "{2,}"])
    return text


def test_patterns_match_as_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "FEW", -1)  # never by `re`
    rng, seen = random.Random(1), 0
    while seen < 1000:
        text = drawn(rng)
        try:
            wanted = re.compile(text)
        except re.error:
            continue
        try:
            meant, seen = names.pattern(text), seen + 1
        except EmitError as error:
            assert "possessive" in str(error)
            continue
        for _ in range(6):
            name = "".join(rng.choice("abc.1") for _ in range(rng.randint(0, 7)))
            assert meant(name) == (wanted.match(name) is not None), (text, name)


@pytest.mark.parametrize(
    ("text", "name", "means"),
    [
        (r".*\.mlp\.gate$", "model.layers.0.mlp.gate", True),
        (r".*\.mlp\.gate$", "model.layers.0.mlp.gate_proj", False),
        (r"^(?!.*lm_head).*", "model.lm_head", False),
        (r".*layers\.(0|1[0-9])\..*(q|k)_proj", "model.layers.17.a.k_proj", True),
        ("lm_head", "lm_heads", True),
    ],
)
def test_usual_patterns(text: str, name: str, means: bool) -> None:
    assert names.pattern(text)(name) == means


def test_no_pattern_takes_long() -> None:
    for text in ("(a*)*b", "(a+)+$", "((((a{1,3}){500}){500}){500})b", "(.*.*.*)*x", "(a|a)*b"):
        start = time.monotonic()
        names.pattern(text)("a" * 200)
        assert time.monotonic() - start < 5


def test_a_pattern_of_many_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "STEPS", 1000)
    meant = names.pattern("(.*.*.*)*x")
    with pytest.raises(EmitError, match="a pattern takes more than 1000 steps"):
        meant("a" * 100)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("(", "malformed"),
        ("a" * 600, "more than 500"),
        ("(?<=a)b", "(?<=  is not supported".replace("  ", " ")),
        ("(?i)a", "is not supported"),
        (r"(a)\1", "is not supported"),
        ("a++", "possessive"),
        ("(" * 25 + "a" + ")" * 25, "within each other"),
    ],
)
def test_other_patterns_are_refused(text: str, line: str) -> None:
    with pytest.raises(EmitError, match=re.escape(line)):
        names.pattern(text)


def test_wildcards() -> None:
    meant = names.wildcard("model.*.mixer*")
    assert meant is not None and names.wildcard("lm_head") is None
    assert meant("model.0.mixer") and meant("model.layers.1.mixer.in_proj")
    assert not meant("model.mixer") and not meant("xmodel.0.mixer")
    middle = names.wildcard("*a*b")
    assert middle is not None and middle("xxayb") and not middle("xxby") and not middle("b")
