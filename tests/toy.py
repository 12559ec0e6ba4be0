"""A tiny stateful model with the real calling convention, as text, module and bundle.

Vocabulary 16; h[t] = 0.9 h[t-1] + embed[token] + bank[token] + 0.01 position; a tail of the last
two embeddings; logits = h @ out + tail. Enough to tell a swapped state, slot or position. A hybrid
has a KV region too: what h finds in it by attention is added to the input of the logits.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime import manifest as mf
from runtime.params_random import random_values, write_archive
from runtime.vmfb import bytecode_version

V, D, SLOTS, CHUNKS = 16, 8, 3, (4, 8)
STATE = (
    mf.StateSpec("h", "f32", (1, D), 0, "fixed"),
    mf.StateSpec("tail", "f32", (2, 1, D), 1, "fixed"),
)
CONTEXT = 48  # of the hybrid
HYBRID_STATE = (*STATE, mf.StateSpec("kv", "f32", (1, CONTEXT, D), 0, "per_position"))
FLAGS = {
    "local": (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=x86-64-v2",
    ),
    "vulkan": ("--iree-hal-target-device=vulkan",),
}
_MLIR = {"f32": "f32", "bf16": "bf16", "i32": "i32"}
_JNP = {"f32": jnp.float32, "bf16": jnp.bfloat16, "i32": jnp.int32}


def param_specs(device: str, bank_rows: int) -> tuple[mf.ParamSpec, ...]:
    """embed (bf16 where the device has it), out, and a bank of `bank_rows` rows."""
    kind = "f32" if device == "vulkan" else "bf16"
    return (
        mf.ParamSpec("embed", kind, (V, D), 0.0, 1.0),
        mf.ParamSpec("out", "f32", (D, V), 0.0, 0.5),
        mf.ParamSpec("bank", "f32", (bank_rows, D), 0.25, 0.1),
    )


def _step(params: Any, token: Any, position: Any, h: Any, tail: Any, *kv: Any) -> Any:
    """One token of one row: h [D], tail [2,D], maybe kv [C,D] -> (logits [V], state)."""
    embed, out, bank = params
    x = embed[token].astype(jnp.float32)
    h = 0.9 * h + x + bank[token] + 0.01 * position.astype(jnp.float32)
    found, place = h, jnp.arange(CONTEXT)
    if kv:
        kv = (jnp.where((place == position)[:, None], x + 0.1 * h, kv[0]),)
        scores = jnp.where(place <= position, kv[0] @ h / D, -jnp.inf)
        found = h + jax.nn.softmax(scores) @ jnp.where((place <= position)[:, None], kv[0], 0)
    logits = found @ out + jnp.tile(tail[0], V // D)
    return logits, h, jnp.stack([tail[1], x]), *kv


def _argmax(logits: Any) -> Any:
    """The argmax of each row, -1 for rows that are not numbers."""
    found = jnp.argmax(logits, -1).astype(jnp.int32)
    return jnp.where(jnp.isfinite(jnp.max(logits, -1)), found, -1)


def prefill(params: Any, tokens: Any, length: Any, position: Any, *state: Any) -> Any:
    """tokens [1,P], length [1], position [1], state of one slot."""
    axes = [spec.slot_axis for spec in HYBRID_STATE[: len(state)]]

    def body(carry: Any, i: Any) -> Any:
        new = _step(params, tokens[0, i], position[0] + i, *carry[1:])
        keep = i < length[0]
        return tuple(jnp.where(keep, a, b) for a, b in zip(new, carry, strict=True)), None

    rows = [jnp.squeeze(x, axis) for x, axis in zip(state, axes, strict=True)]
    start = (jnp.zeros(V, jnp.float32), *rows)
    (logits, *rows), _ = jax.lax.scan(body, start, jnp.arange(tokens.shape[1]))
    argmax = _argmax(logits)
    rows = [jnp.expand_dims(x, axis) for x, axis in zip(rows, axes, strict=True)]
    return logits[None], argmax[None], *rows


def decode(params: Any, tokens: Any, positions: Any, active: Any, *state: Any) -> Any:
    """tokens, positions, active [B], state of B slots."""
    axes = tuple(spec.slot_axis for spec in HYBRID_STATE[: len(state)])
    step = jax.vmap(functools.partial(_step, params), in_axes=(0, 0, *axes), out_axes=(0, *axes))
    logits, *new = step(tokens, positions, *state)

    def keep(old: Any, got: Any, axis: int) -> Any:
        on = jnp.expand_dims(active > 0, [i for i in range(old.ndim) if i != axis])
        return jnp.where(on, got, old)

    state = tuple(map(keep, state, new, axes))
    return logits, _argmax(logits), *state


def seed(params: Any, slot: Any, *state: Any) -> Any:
    """Replace a slot's rows: state of B slots, then of one."""
    half = len(state) // 2
    axes = [spec.slot_axis for spec in HYBRID_STATE[:half]]
    update = jax.lax.dynamic_update_slice_in_dim
    return tuple(
        update(old, new, slot, axis)
        for old, new, axis in zip(state[:half], state[half:], axes, strict=True)
    )


def extract(params: Any, slot: Any, *state: Any) -> Any:
    """Copy a slot's rows out."""
    axes = [spec.slot_axis for spec in HYBRID_STATE[: len(state)]]
    cut = jax.lax.dynamic_slice_in_dim
    return tuple(cut(x, slot, 1, axis) for x, axis in zip(state, axes, strict=True))


def graph(name: str) -> Any:
    """The JAX function behind an entry point, called as (params, *inputs)."""
    table = {"decode": decode, "seed": seed, "extract": extract}
    return table.get(name, prefill)


def _type(dtype: str, shape: tuple[int, ...]) -> str:
    return "tensor<" + "x".join([*map(str, shape), _MLIR[dtype]]) + ">"


def outputs_stored(spec: mf.FunctionSpec) -> set[str]:
    """Names of the arguments that are storage."""
    return {tensor.name for tensor in spec.inputs if tensor.name.startswith("out.")}


def emit(name: str, spec: mf.FunctionSpec, params: tuple[mf.ParamSpec, ...]) -> tuple[str, str]:
    """(global lines, functions) of one entry: a public wrapper that loads the parameters."""
    inputs = [tensor for tensor in spec.inputs if not tensor.name.startswith("out.")]
    avals = [jax.ShapeDtypeStruct(p.shape, _JNP[p.dtype]) for p in (*params, *inputs)]
    flat = lambda *a: graph(name)(a[: len(params)], *a[len(params) :])  # noqa: E731
    text = jax.jit(flat, keep_unused=True).lower(*avals).as_text()
    body = text[text.index("func.func") : text.rindex("}")]
    body = body.replace("func.func private @", f"func.func private @{name}.")
    body = body.replace("call @", f"call @{name}.")
    body = body.replace("func.func public @main", f"func.func private @{name}.main")
    outputs = {f"out.{o.name}": i for i, o in enumerate(spec.outputs)}
    args, loads, results = [], [], []
    for i, arg in enumerate(spec.inputs):
        output = outputs.get(arg.name)
        note = "" if output is None else f" {{iree.abi.output = {output} : index}}"
        if arg.name == "kv" and "out.kv" not in outputs_stored(spec):
            note = " {iree.abi.consume}"
        args.append(f"%a{i}: {_type(arg.dtype, arg.shape)}{note}")
    for i, p in enumerate(params):
        loads.append(f'    %p{i} = util.global.load @"{p.name}" : {_type(p.dtype, p.shape)}')
    results = [_type(o.dtype, o.shape) for o in spec.outputs]
    kinds = [_type(t.dtype, t.shape) for t in (*params, *inputs)]
    values = [f"%p{i}" for i in range(len(params))] + [f"%a{i}" for i in range(len(inputs))]
    count = f":{len(results)}" if len(results) > 1 else ""
    names = [f"%r#{i}" for i in range(len(results))] if count else ["%r"]
    wrapper = "\n".join(
        [
            f"  func.func public @{name}({', '.join(args)}) -> ({', '.join(results)}) {{",
            *loads,
            f"    %r{count} = call @{name}.main({', '.join(values)})"
            f" : ({', '.join(kinds)}) -> ({', '.join(results)})",
            f"    return {', '.join(names)} : {', '.join(results)}",
            "  }",
        ]
    )
    lines = [
        f'  util.global private @"{p.name}" = #flow.parameter.named<"model"::"{p.name}">'
        f" : {_type(p.dtype, p.shape)}"
        for p in params
    ]
    return "\n".join(lines), wrapper + "\n  " + body


def _ref(path: Path) -> mf.FileRef:
    data = path.read_bytes()
    return mf.FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data))


def make_manifest(
    device: str,
    params: tuple[mf.ParamSpec, ...],
    files: mf.Files,
    bytecode: str,
    slots: int = SLOTS,
    hybrid: bool = False,
) -> mf.Manifest:
    """The toy's manifest."""
    state, context = (HYBRID_STATE, CONTEXT) if hybrid else (STATE, None)
    return mf.Manifest(
        schema=mf.SCHEMA,
        model=mf.ModelInfo("toy", "toy", "dir:toy", None, None, "0" * 64, V, (0,), None),
        target=mf.TargetInfo(
            "cpu" if device == "local" else device,
            device,  # type: ignore[arg-type]
            "local-task" if device == "local" else device,
            "x86-64-v2" if device == "local" else None,
            ("+sse4_2", "+popcnt") if device == "local" else (),
            "3.13.0",
            bytecode,
            FLAGS[device],
            None,
            None,
        ),
        shape=mf.ShapeInfo(f"b{slots}-p4+8", slots, CHUNKS, context),
        files=files,
        functions=mf.expected_functions(V, slots, CHUNKS, state),
        state=state,
        params=params,
        numerics=mf.Numerics("bf16", "f32", "f32", None),
        prefix_sharing=False,
        proof=mf.Proof("not-run", "toy", "fast", mf.Tolerance(1e-5, 1e-5)),
        build=None,
        alternatives=(),
    )


def compile_text(text: str, device: str, out: Path) -> None:
    """Run iree-compile on linked text."""
    source = out.with_suffix(".mlir")
    source.write_text(text)
    tool = Path(sys.executable).with_name("iree-compile")
    command = [str(tool), str(source), "-o", str(out), "--iree-input-type=stablehlo"]
    subprocess.run([*command, *FLAGS[device]], check=True, timeout=300)


def jax_params(params: tuple[mf.ParamSpec, ...], number: int) -> list[Any]:
    """The random parameters of `number` as JAX arrays."""
    out = []
    for spec, data in zip(params, random_values(params, number), strict=True):
        kind = jnp.bfloat16 if spec.dtype == "bf16" else data.dtype
        out.append(jnp.asarray(np.asarray(data).view(kind)).reshape(spec.shape))
    return out


def greedy(
    params: list[Any], prompt: list[int], count: int, hybrid: bool = False
) -> tuple[list[int], list[Any]]:
    """Generate token by token with the JAX step: (tokens, logits of each)."""
    state = [jnp.zeros(D), jnp.zeros((2, D)), *[jnp.zeros((CONTEXT, D))] * hybrid]
    logits = None
    for i, token in enumerate(prompt):
        logits, *state = _step(params, token, jnp.asarray(i), *state)
    tokens, every = [], []
    for i in range(count):
        assert logits is not None
        every.append(np.asarray(logits))
        tokens.append(int(np.argmax(every[-1])))
        logits, *state = _step(params, tokens[-1], jnp.asarray(len(prompt) + i), *state)
    return tokens, every


def _reference(params: list[Any], hybrid: bool) -> dict[str, Any]:
    prompts = []
    for prompt in ([3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]):
        tokens, every = greedy(params, prompt, 8, hybrid)
        top = [[[int(i), float(row[i])] for i in np.argsort(-row)[:4]] for row in every]
        gap = min(t[0][1] - t[1][1] for t in top)
        prompts.append({"tokens": prompt, "generated": tokens, "top_logits": top, "min_gap": gap})
    oracle = {"name": "jax", "version": jax.__version__}
    return {"schema": 1, "oracle": oracle, "prompts": prompts, "entries": None}


@functools.lru_cache(maxsize=8)
def bundle(
    device: str = "local",
    bank_rows: int = V,
    weight_free: bool = False,
    slots: int = SLOTS,
    hybrid: bool = False,
) -> Path:
    """A bundle directory of the toy (built once a process; copy it before changing it)."""
    out = Path(tempfile.mkdtemp(prefix="toy-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    specs = param_specs(device, bank_rows)
    functions = mf.expected_functions(V, slots, CHUNKS, HYBRID_STATE if hybrid else STATE)
    parts = [emit(name, spec, specs) for name, spec in functions.items()]
    text = "module @model {\n" + parts[0][0] + "\n" + "\n".join(p[1] for p in parts) + "\n}\n"
    compile_text(text, device, out / "model.vmfb")
    (out / "model.mlir").unlink()
    write_archive(specs, 7, out / "params.irpa")
    (out / "reference.json").write_text(json.dumps(_reference(jax_params(specs, 7), hybrid)))
    params = None if weight_free else _ref(out / "params.irpa")
    reference = None if weight_free else _ref(out / "reference.json")
    if weight_free:
        (out / "params.irpa").unlink()
        (out / "reference.json").unlink()
    files = mf.Files(_ref(out / "model.vmfb"), params, reference, (), None, ())
    toy = make_manifest(device, specs, files, bytecode_version(out / "model.vmfb"), slots, hybrid)
    (out / mf.FILE_NAME).write_text(mf.dumps(toy))
    return out


def copy(source: Path, to: Path) -> Path:
    """A copy of a bundle that a test may damage."""
    shutil.copytree(source, to)
    return to
