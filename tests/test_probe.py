"""What the proof's inputs cover."""

from __future__ import annotations

import pytest

from runtime import probe
from runtime.manifest import FunctionSpec, TensorSpec

I32 = "i32"


def prefill(chunk: int) -> FunctionSpec:
    shapes = {"tokens": (1, chunk), "length": (1,), "position": (1,)}
    return FunctionSpec(tuple(TensorSpec(n, I32, s) for n, s in shapes.items()), ())


def given(chunk: int, context: int | None) -> list[tuple[int, int]]:
    """(length, position) of every call of a prefill."""
    name = f"prefill_{chunk}"
    made = [
        probe.inputs(call, prefill(chunk), 100, context, seed=1) for call, _ in probe.calls([name])
    ]
    assert all(arrays["tokens"].shape == (1, chunk) for arrays in made)
    return [(int(arrays["length"][0]), int(arrays["position"][0])) for arrays in made]


@pytest.mark.parametrize("chunk", [8, 16, 32, 64, 128, 256, 512])
def test_the_last_valid_token_of_a_prefill_takes_every_place_of_four(chunk: int) -> None:
    found = given(chunk, None)
    assert {(length - 1) % 4 for length, _ in found} == {0, 1, 2, 3}
    assert {position == 0 for _, position in found} == {True, False}


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 12])
def test_a_prefill_of_any_size_stays_inside_its_chunk_and_context(chunk: int) -> None:
    for length, position in given(chunk, 12):
        assert 1 <= length <= chunk
        assert position >= 0 and position + length <= 12


def test_other_entries_are_called_once() -> None:
    assert list(probe.calls(["decode", "seed"])) == [("decode", "decode"), ("seed", "seed")]


def test_each_call_has_tokens_of_its_own() -> None:
    one, two = (
        probe.inputs(c, prefill(8), 100, None, 1)["tokens"] for c in ("prefill_8", "prefill_8@1")
    )
    assert (one != two).any()
