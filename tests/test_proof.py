"""The proof refuses what does not compute what JAX computes: the compiler's faults and ours."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import building
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from building import Place, assert_right, contents

from artifacts import bundle, proof
from artifacts.actions import Result
from artifacts.buildlog import BuildLog
from artifacts.compile import run_compiler
from artifacts.cpu import host_has, resolve_cpu
from artifacts.job import Job
from artifacts.stages import Stages
from artifacts.store import Store
from emit.blocks import mamba2
from emit.checkpoint import read_config_file
from emit.entry import Model, entries, param_structs
from emit.ops import conv, nn, ssd
from emit.shape import Shape
from emit.stablehlo import lower
from recipes.resolve import resolve_model, resolve_shape, resolve_target
from runtime.errors import UserError
from runtime.module import Module
from runtime.probe import Check, whole_error

pytestmark = pytest.mark.iree
LAYERS = 3  # of the tiny checkpoint
BASE, PER_LAYER = proof.TOLERANCE
LIMIT = round(BASE + LAYERS * PER_LAYER, 9)
HANDED = Path(__file__).parent / "data" / "miscompile"
FUSION = "--iree-dispatch-creation-enable-aggressive-fusion"
# Makes named products of the graph's own and narrows their inputs: wrong from the third digit on.
NAMED, NARROWED = "linalg-specialize-generic-ops", "iree-global-opt-demote-contraction-inputs"
PIPELINE = "--iree-preprocessing-pass-pipeline=builtin.module(util.func({}))"
HARMLESS = PIPELINE.format(NAMED)
NARROW = PIPELINE.format(f"{NAMED},{NARROWED}{{operation=matmul type=bf16}}")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Place:
    """A copy of the session's one cold build."""
    cold, _ = building.cold(tmp_path_factory.getbasetemp())
    return cold.copy(tmp_path / "place")


# The compiler's own faults -----------------------------------------------------------------------


def masked_exp(b: np.ndarray, c: np.ndarray, a: np.ndarray) -> list[np.ndarray]:
    """The decay matrix alone: exp of the pairwise differences of a's running sum, float64."""
    total = np.cumsum(a.astype(np.float64), axis=0).T
    lower = np.tril(np.ones((len(a), len(a)), bool))
    return [np.where(lower, np.exp(np.where(lower, total[:, :, None] - total[:, None], 0)), 0)]


def ssd_residual(*arrays: np.ndarray) -> list[np.ndarray]:
    """x + y/10 of the SSD recurrence token by token, and its last state, float64."""
    x, b, c, dt, a, h = (array.astype(np.float64) for array in arrays)
    y = []
    for t in range(len(x)):
        update = (dt[t][:, None] * x[t])[..., None] * b[t]
        h = np.exp(dt[t] * a)[:, None, None] * h + update
        y.append(h @ c[t])
    return [x + np.stack(y) / 10, h]


def handed_inputs(name: str) -> list[np.ndarray]:
    """Seeded inputs of a handed graph, as its note says."""
    random = np.random.default_rng(11)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    if name == "masked_exp":
        maps = [normal(64, 128, scale=0.1), normal(64, 128, scale=0.1)]
        return [*maps, -np.abs(normal(64, 24, scale=0.1))]
    maps = [normal(256, 128, scale=0.1), normal(256, 128, scale=0.1)]
    dt, a = np.abs(normal(256, 24, scale=0.1)), -np.abs(normal(24))
    return [normal(256, 24, 64), *maps, dt, a, normal(24, 64, 128)]


def handed_rows(name: str, flags: Sequence[str], work: Path) -> list[Check]:
    """Compile a handed graph for x86-64-v3, run it, compare as the build's proof does."""
    cpu = resolve_cpu("x86-64-v3", "x86_64-unknown-linux-gnu", work / "cpu.json")
    if not host_has(cpu):
        pytest.skip("the faults are those of x86-64-v3 code")
    text = (HANDED / f"{name}.mlir").read_text()
    fixed = [f for f in resolve_target("cpu").flags if "-hal-" in f]
    run_compiler(text, [*fixed, *flags, *cpu.flags, "-o", "model.vmfb"], work)
    module = Module.load(work / "model.vmfb", None, "local-task", ["run"])
    given = handed_inputs(name)
    found = module.call("run", [module.to_device(array) for array in given])
    wanted = {"masked_exp": masked_exp, "aggressive_fusion": ssd_residual}[name](*given)
    return [
        Check("run", f"result{i}", whole_error(np.asarray(module.to_host(got)), want), LIMIT)
        for i, (got, want) in enumerate(zip(found, wanted, strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "flags", "least"),
    [
        ("aggressive_fusion", ("--iree-opt-level=O2",), 1e-3),
        pytest.param(
            "aggressive_fusion", ("--iree-opt-level=O0", FUSION), 1e-3, marks=pytest.mark.slow
        ),
        ("masked_exp", ("--iree-opt-level=O0", f"{FUSION}=false"), 1e-2),
        ("masked_exp", ("--iree-opt-level=O2", f"{FUSION}=false"), 1e-2),
    ],
)
def test_graphs_known_to_be_miscompiled_are_refused(
    tmp_path: Path, name: str, flags: tuple[str, ...], least: float
) -> None:
    rows = handed_rows(name, flags, tmp_path)
    problem = proof.worst([asdict(row) for row in rows])
    assert problem is not None and problem.startswith("run: result0: relative error"), rows
    assert rows[0].error > least
    assert all(row.ok for row in rows[1:])  # the state is right all the same


def test_the_same_graph_compiled_right_is_accepted(tmp_path: Path) -> None:
    rows = handed_rows("aggressive_fusion", ("--iree-opt-level=O2", f"{FUSION}=false"), tmp_path)
    assert proof.worst([asdict(row) for row in rows]) is None
    assert max(row.error for row in rows) < LIMIT / 20


# Our own: a graph that differs a little from the one JAX ran -------------------------------------


def honest_stages(place: Place, kernels: bool = False, name: str = "tiny") -> Stages:
    """The stages of the build of one of the place's models; its target has no safe flags."""
    model = resolve_model(str(place.work / name))
    recipe = replace(resolve_target("cpu"), safe_flags=())
    shape = resolve_shape(building.SHAPE, model)
    job = Job(model, recipe, shape, lambda own: "f32", params=True, proof=True, kernels=kernels)
    return Stages(Store(place.cache), job, BuildLog())


def plant(stages: Stages, directory: Path) -> set[str]:
    """Put the graphs that this process lowers now in the place of the honest; those that differ."""
    model = Model.of(read_config_file(building.CHECKPOINT / "config.json"))
    outputs, changed = dict(stages.emit.outputs), set()
    directory.mkdir()
    for entry in entries(model, Shape.parse(building.SHAPE)):
        path = directory / f"{entry.name}.mlir"
        params = param_structs(model, model.storage("f32"))
        text = lower(entry, params, by_kernels=stages.job.kernels)
        path.write_text(text, encoding="utf-8")
        blob = stages.store.put_file(path)
        if blob != outputs[path.name]:
            changed.add(entry.name)
        outputs[path.name] = blob
    honest = stages.emit
    stages.expect  # noqa: B018 - what JAX computes from the honest graphs
    stages.__dict__["emit"] = Result(honest.key, True, outputs, honest.meta)
    return changed


def no_skip_for_head_5(honest: Callable[..., Any], *args: Any) -> Any:
    x, dt, A, Bm, Cm, D, *rest = args
    return honest(x, dt, A, Bm, Cm, D.at[5].set(0.0), *rest)


def no_skip_for_head_5_of(entries: set[str], honest: Callable[..., Any], *args: Any) -> Any:
    x, dt, Bm, Cm, heads, *rest = args
    if ("decode" if getattr(x, "whole", x).shape[1] == 1 else "prefill_8") in entries:
        heads = replace(heads, D=heads.D.at[5].set(0.0))
    return honest(x, dt, Bm, Cm, heads, *rest)


def groups_swapped(honest: Callable[..., Any], *args: Any) -> Any:
    x, dt, A, Bm, Cm, *rest = args
    return honest(x, dt, A, Bm, Cm[:, :, ::-1], *rest)


def taps_reversed(honest: Callable[..., Any], *args: Any) -> Any:
    x, lengths, weight, *rest = args
    return honest(x, lengths, weight[::-1], *rest)


def tail_one_early(honest: Callable[..., Any], *args: Any) -> Any:
    x, lengths, *rest = args
    y, _ = honest(x, lengths, *rest)
    return y, honest(x, jnp.maximum(lengths - 1, 0), *rest)[1]


def length_ignored(honest: Callable[..., Any], *args: Any) -> Any:
    x, dt, *rest = args
    return honest(x, jnp.where(dt == 0, 1e-3, dt), *rest)


def state_in_bf16(honest: Callable[..., Any], *args: Any) -> Any:
    return honest(*args[:-1], args[-1].astype(jnp.bfloat16).astype(jnp.float32))


def eps_tenth(honest: Callable[..., Any], *args: Any) -> Any:
    return honest(*args[:-1], args[-1] / 10)


def eps_tenfold(honest: Callable[..., Any], *args: Any) -> Any:
    return honest(*args[:-1], args[-1] * 10)


def weight_in_bf16(honest: Callable[..., Any], x: Any, weight: Any, *rest: Any) -> Any:
    return honest(x, weight.astype(jnp.bfloat16), *rest)


def wrong_where_the_last_is_the_first_of_four(
    honest: Callable[..., Any], x: Any, lengths: Any
) -> Any:
    if x.shape[1] == 1:
        return honest(x, lengths)
    off = jnp.where(lengths % 4 == 1, 1e-3, 0.0).astype(x.dtype)
    return honest(x, lengths) + off[:, None, None]


def gelu(honest: Callable[..., Any], x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


# name, (module, function) it stands before, entries whose graph changes, a word of the message
PLANTS = [
    (no_skip_for_head_5, [(ssd, "scan")], {"prefill_8"}),
    (no_skip_for_head_5, [(ssd, "step")], {"decode"}),
    (groups_swapped, [(ssd, "scan")], {"prefill_8"}),
    (state_in_bf16, [(ssd, "step")], {"decode"}),
    (taps_reversed, [(conv, "step")], {"decode"}),
    (tail_one_early, [(conv, "scan")], {"prefill_8"}),
    (length_ignored, [(ssd, "scan")], {"prefill_8"}),
    (wrong_where_the_last_is_the_first_of_four, [(nn, "last_valid")], {"prefill_8"}),
    (eps_tenth, [(nn, "group_rms_norm")], {"prefill_8", "decode"}),
    (eps_tenth, [(nn, "rms_norm")], {"prefill_8", "decode"}),
    (eps_tenfold, [(nn, "rms_norm")], {"prefill_8", "decode"}),
    (weight_in_bf16, [(nn, "linear")], {"prefill_8", "decode"}),
]
QUICK = {(no_skip_for_head_5, "scan"), (eps_tenth, "group_rms_norm")}


def planted() -> Iterator[Any]:
    for change, places, touched in PLANTS:
        marks = [] if (change, places[0][1]) in QUICK else [pytest.mark.slow]
        name = f"{change.__name__}-{places[0][1]}"
        yield pytest.param(change, places, touched, id=name, marks=marks)


def prove(stages: Stages) -> None:
    proof.compile_and_prove(stages, partial(bundle._write, stages))


def assert_refused(place: Place, stages: Stages, touched: set[str]) -> str:
    """The proof fails, names an entry that is wrong, and leaves no module. Returns the message."""
    key = {name: blob.sha256 for name, blob in stages.graphs.items()}
    with pytest.raises(UserError, match="every flag list compiles to wrong numbers") as caught:
        prove(stages)
    message = str(caught.value)
    assert any(re.search(f"fast: {entry}(@\\d+)?: ", message) for entry in touched), message
    assert "relative error" in message and f"allowed {LIMIT:g}" in message
    records = [place.store.peek(k) for k in place.store.recent_keys()]
    kept = [r for r in records if r and r.stage == "compile" and r.fields["graphs"] == key]
    assert kept == []
    return message


@pytest.mark.parametrize(("change", "places", "touched"), list(planted()))
def test_a_subtly_changed_graph_is_refused(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    change: Callable[..., Any],
    places: list[tuple[Any, str]],
    touched: set[str],
) -> None:
    for module, name in places:
        monkeypatch.setattr(module, name, partial(change, getattr(module, name)))
    stages = honest_stages(place)
    assert plant(stages, tmp_path / "planted") == touched
    message = assert_refused(place, stages, touched)
    print(message)
    assert "proof failed with fast flags: " in capfd.readouterr().err


@pytest.mark.slow
def test_another_activation_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(nn.ACTIVATIONS, "silu", partial(gelu, nn.ACTIVATIONS["silu"]))
    stages = honest_stages(place)
    assert plant(stages, tmp_path / "planted") == {"prefill_8", "decode"}
    assert_refused(place, stages, {"prefill_8", "decode"})


class Narrow:
    """jax.numpy whose `exp`, the decay of every recurrence, rounds to bfloat16."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def exp(x: Any) -> Any:
        return jnp.exp(x).astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.slow
def test_a_decay_in_bf16_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ssd, "jnp", Narrow())
    stages = honest_stages(place)
    assert plant(stages, tmp_path / "planted") == {"prefill_8", "decode"}
    assert_refused(place, stages, {"prefill_8", "decode"})


def test_a_state_in_the_wrong_slot_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    honest = jax.lax.dynamic_update_slice_in_dim
    monkeypatch.setattr(
        jax.lax, "dynamic_update_slice_in_dim", lambda a, b, i, axis: honest(a, b, 0 * i, axis)
    )
    stages = honest_stages(place)
    assert plant(stages, tmp_path / "planted") == {"seed"}
    assert_refused(place, stages, {"seed"})


def test_the_same_path_without_a_plant_is_accepted(place: Place, tmp_path: Path) -> None:
    """So that what the tests above see refused is the plant and nothing else."""
    stages = honest_stages(place)
    assert plant(stages, tmp_path / "planted") == set()
    prove(stages)
    assert mamba2.SCAN_CHUNK >= 8  # one scan chunk: `scan` is the whole of prefill_8


@pytest.mark.parametrize("wrong", [{"decode"}, {"prefill_8", "decode"}])
def test_an_entry_whose_kernels_are_wrong_goes_without_them(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    wrong: set[str],
) -> None:
    """And only that entry; the manifest lists the others."""
    monkeypatch.setattr(ssd, "mix", partial(no_skip_for_head_5_of, wrong, ssd.mix))
    stages = honest_stages(place, kernels=True)
    assert plant(stages, tmp_path / "planted") == wrong
    done = proof.compile_and_prove(stages, partial(bundle._write, stages))
    assert (done.status, done.label) == ("passed", "fast")
    assert "proof failed with fast flags and kernels: " in capfd.readouterr().err
    kept = {"prefill_8", "decode"} - wrong
    assert (set(done.kernels["functions"]) if done.kernels else set()) == kept
    again = proof.compile_and_prove(stages, partial(bundle._write, stages))
    assert again.module == done.module and "proof failed" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_model_that_amplifies_is_allowed_what_it_amplifies(
    place: Place,
) -> None:
    """Attention scores of some hundreds: a right module is off by more than the least bound."""
    directory = place.work / "loud"
    shutil.copytree(HANDED.parent / "falcon_h1" / "checkpoint", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"key_multiplier": 300.0}))
    stages = honest_stages(place, name="loud")
    done = proof.compile_and_prove(stages, partial(bundle._write, stages))
    assert done.status == "passed"
    assert stages.expect is not None
    reference = stages.store.path(stages.expect.outputs["reference.json"])
    moved = json.loads(reference.read_text())["entries"]["sensitivity"]
    assert all(0 < 6 * each["state"] < 1e-3 for each in moved.values())
    assert max(6 * each["state"] for each in moved.values()) > LIMIT
    for name, blob in dict(stages.expect.outputs).items():
        if name.endswith(".npz"):
            with np.load(stages.store.path(blob)) as whole:
                kept = {key: whole[key] for key in whole if key != "sensitivity"}
            np.savez(place.work / name, allow_pickle=False, **kept)
            stages.expect.outputs[name] = stages.store.put_file(place.work / name)
    with pytest.raises(UserError, match=f"relative error .*allowed {LIMIT:g}"):
        proof.compile_and_prove(stages, partial(bundle._write, stages))


# Flags -------------------------------------------------------------------------------------------


def target(place: Place, name: str, *flag_lists: tuple[str, ...]) -> str:
    """The words target=… of a recipe with these flags, then safe flags, beside the usual ones."""
    source = (building.ROOT / "recipes" / "targets" / "cpu.yaml").read_text()
    lines = source.partition("flags:")[0]
    usual = ("--iree-opt-level=O2", f"{FUSION}=false", "--iree-opt-const-expr-hoisting=false")
    fast, *safe = [json.dumps([*usual, *flags]) for flags in flag_lists]
    path = place.work / f"{name}.yaml"
    rest = "weights: [f32, f16, bf16, int8, int4]\nruns_here: host\n"
    path.write_text(f"{lines}flags: {fast}\nsafe_flags: [{', '.join(safe)}]\n{rest}")
    return f"target={path}"


def test_wrong_fast_flags_give_way_to_safe_ones(place: Place) -> None:
    word = target(place, "narrow", (NARROW,), (HARMLESS,))
    done = place.doit("build", word)
    bundle_dir = place.build / "tiny" / "narrow" / building.SHAPE
    assert done.code == 0, done.err
    told = [line for line in done.err.splitlines() if line.startswith("proof failed with fast")]
    assert len(told) == 1 and "relative error" in told[0] and f"allowed {LIMIT:g}" in told[0]
    assert any(re.search(f" {entry}(@\\d+)?: ", told[0]) for entry in building.ENTRIES)
    manifest = assert_right(bundle_dir)
    assert manifest.proof.flags == "safe-1"
    assert HARMLESS in manifest.target.flags and NARROW not in manifest.target.flags
    wrong = [r for r in map(place.store.peek, place.store.recent_keys()) if r is not None]
    compiled = [r for r in wrong if r.stage == "compile"]
    assert not any(NARROW in r.fields["flags"] for r in compiled)  # it is deleted

    shutil.rmtree(place.build)
    again = place.built(word)
    assert again.started == []  # the verdict is remembered: nothing is compiled or proven
    assert "proof failed" not in again.err
    assert_right(bundle_dir)


def test_a_target_whose_flags_are_all_wrong_gives_nothing(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = contents(place.build)
    word = target(place, "hopeless", (NARROW,))
    done = place.doit("build", word)
    assert done.code != 0 and len(done.errors) == 1, done.err
    assert "tiny for hopeless: every flag list compiles to wrong numbers" in done.errors[0]
    assert "fast: " in done.errors[0] and "relative error" in done.errors[0]
    assert contents(place.build) == before
    again = place.doit("build", word)
    assert again.code == done.code and again.errors == done.errors
    assert again.started == []
    assert contents(place.build) == before


def test_nan_is_an_error_beyond_all_limits() -> None:
    right = np.ones((2, 3), np.float32)
    wrong = right.copy()
    wrong[1, 2] = np.nan
    row = Check("decode", "logits", min(whole_error(wrong, right), 1.7e308), LIMIT)
    assert proof.worst([asdict(row)]) == "decode: logits: not finite, allowed 1.2e-05"
    assert whole_error(right[:1], right) == float("inf")
    assert proof.worst([asdict(replace(row, error=LIMIT))]) is None
