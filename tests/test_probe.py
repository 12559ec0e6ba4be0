"""What the proof's inputs cover."""

from __future__ import annotations

import weakref

import numpy as np
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


def test_other_entries_are_called_twice() -> None:
    """With another slot; a driver may keep what the first call said."""
    assert list(probe.calls(["seed"])) == [("seed", "seed"), ("seed@1", "seed")]
    shapes = {"slot": (), "a": (3, 4)}
    spec = FunctionSpec(
        tuple(TensorSpec(n, "f32" if s else "i32", s) for n, s in shapes.items()), ()
    )
    one, two = (probe.inputs(call, spec, 100, None, 1) for call, _ in probe.calls(["seed"]))
    assert (int(one["slot"]), int(two["slot"])) == (2, 0)
    assert (one["a"] != two["a"]).all()


def test_each_call_has_tokens_of_its_own() -> None:
    one, two = (
        probe.inputs(c, prefill(8), 100, None, 1)["tokens"] for c in ("prefill_8", "prefill_8@1")
    )
    assert (one != two).any()


class Device:
    """Says of each call whether the buffers of the one before are still held."""

    def __init__(self) -> None:
        self.before: list[weakref.ref[np.ndarray]] = []
        self.alive: list[bool] = []

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def call(self, name: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
        self.alive.append(all(ref() is not None for ref in self.before))
        results = [np.zeros(3, np.float32)]
        self.before = [weakref.ref(array) for array in (*arguments, *results)]
        return results


def test_a_call_has_other_buffers_than_the_one_before() -> None:
    """Else a driver that keeps the first call's buffers would not be seen."""
    spec = FunctionSpec((TensorSpec("a", "f32", (3,)),), (TensorSpec("b", "f32", (3,)),))
    device = Device()
    run = probe.Runs(device)
    for _ in range(3):
        run("seed", spec, {"a": np.zeros(3, np.float32)})
    assert device.alive == [True, True, True]
