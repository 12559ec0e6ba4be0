"""mlx-lm's PLaMo 2, a second opinion on the float64 oracle, which decides for the family.

Three things the library does otherwise are set aside, one each:

- It clamps dt to [0.001, 100]. The handed checkpoint stays inside; elsewhere the limits are lifted.
- It attends to everything. Recorded references are compared up to the token whose window still
  reaches the first position; beyond it, the oracle runs with the windows opened.
- It knows one RoPE base, 10000. Rows with others are compared at that one, windows opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import mlx_reference
import numpy as np
import pytest
import references
from driver import relative

pytestmark = pytest.mark.oracle

LOWEST = 0.001
NAMES = [name for name in references.compared("plamo2") if not name.endswith("/handed")]
BASES = ("rope_theta", "rope_local_theta")
AT_10000 = [name for name in NAMES if not cases.find(name).config.keys() & set(BASES)]
# The library takes layer mamba_step // 2 for one with attention. In these rows there is no such
# layer; with these steps there is, and the same layers attend.
STEPS = {"plamo2/step_8_last_layer": 4}


@pytest.fixture
def dt(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[float]]:
    """Call it with whether to lift the limits of dt -> the smallest of each call before them."""
    from mlx_lm.models import ssm

    limited, found = ssm.compute_dt, []

    def set_limits(lifted: bool) -> list[float]:
        def spied(dt: Any, bias: Any, limits: tuple[float, float]) -> Any:
            free = limited(dt, bias, (0.0, float("inf")))
            found.append(float(free.min()))
            return free if lifted else limited(dt, bias, limits)

        monkeypatch.setattr(ssm, "compute_dt", spied)
        return found

    return set_limits


def write(name: str, directory: Path, **changed: Any) -> tuple[Path, dict[str, Any]]:
    """The checkpoint called `name`, with `changed` keys; and its config."""
    checkpoint = references.write_checkpoint(name, directory)
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    if changed:
        config |= changed
        path.write_text(json.dumps(config))
    return checkpoint, config


def test_handed_checkpoint(dt: Callable[[bool], list[float]], tmp_path: Path) -> None:
    """The library as it is: no window binds and no limit does."""
    smallest = dt(False)
    checkpoint, config = write("plamo2/handed", tmp_path)
    model, (_, rows) = mlx_reference.load(checkpoint), references.recorded("plamo2/handed")
    for row in rows:
        assert len(row.prompt) + references.NEW_TOKENS <= config["attention_window_size"]
        mlx_reference.check(model, row)
    assert smallest and min(smallest) >= LOWEST


@pytest.mark.parametrize("name", AT_10000)
def test_recorded_references_inside_the_window(
    name: str, dt: Callable[[bool], list[float]], tmp_path: Path
) -> None:
    dt(True)
    checkpoint, config = write(name, tmp_path)
    step = STEPS.get(name, config["mamba_step"])
    model, compared = mlx_reference.load(checkpoint, mamba_step=step), 0
    for row in references.recorded(name)[1]:
        # The last query is at position len(prompt) + steps - 2, and reads that many keys before it.
        steps = config["attention_window_size"] + 2 - len(row.prompt)
        if steps > 0:
            mlx_reference.check(model, row, steps)
            compared += steps
    assert compared > 10


@pytest.mark.parametrize("name", NAMES)
def test_oracle_with_open_windows(
    name: str, dt: Callable[[bool], list[float]], tmp_path: Path
) -> None:
    dt(True)
    step = STEPS.get(name, cases.full_config(cases.find(name))["mamba_step"])
    opened = {"attention_window_size": 4096, "mamba_step": step, **dict.fromkeys(BASES, 1e4)}
    opened["sliding_window"] = opened["attention_window_size"]
    checkpoint, _ = write(name, tmp_path, **opened)
    prompts = [row.prompt for row in references.recorded(name)[1] if len(row.prompt) in (2, 25)]
    model = mlx_reference.load(checkpoint)
    for row in references.derive(name, checkpoint, prompts):
        mlx_reference.check(model, row)


def test_where_its_limits_bind_only_they_differ(
    dt: Callable[[bool], list[float]], tmp_path: Path
) -> None:
    """Why they are lifted above: this prompt has a dt of about half the lower one."""
    name, errors = "plamo2/odd_sizes", []
    model = mlx_reference.load(write(name, tmp_path)[0])
    (row,) = (row for row in references.recorded(name)[1] if len(row.prompt) == 8)
    for lifted in (False, True):
        smallest = dt(lifted)
        got = mlx_reference.logits(model, row.prompt, row.tokens[:1])
        errors.append(relative(got[0], np.array(row.first_logits)))
        assert min(smallest) < LOWEST
    assert errors[0] > 1e-4, "the library has changed: drop this exception"
    assert errors[1] < mlx_reference.CLOSE
