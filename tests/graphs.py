"""Small entry points in the emitted text's form, lowered from JAX: tests of linking and compiling.

One SSD block: gather an embedding, project, chunked scan with carried state, project, argmax.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

HEADS, HEAD_DIM, STATE, WIDTH, VOCAB = 4, 16, 16, 64, 96
DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
INNER = HEADS * HEAD_DIM


def parameters(weights: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Asymmetric random parameters of type `weights`; the decay rates stay f32."""
    shapes = {
        "embed.weight": (VOCAB, WIDTH),
        "in_proj.weight": (WIDTH, INNER + 2 * STATE + HEADS),
        "out_proj.weight": (INNER, WIDTH),
    }
    random = np.random.default_rng(seed)
    made = {
        name: (random.standard_normal(shape) * shape[0] ** -0.5 + 0.01).astype(DTYPES[weights])
        for name, shape in shapes.items()
    }
    return {**made, "A_log": np.log(np.arange(1, HEADS + 1)).astype(np.float32)}


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x.astype(w.dtype), w, dims, preferred_element_type=jnp.float32)


def forward(params: dict, tokens: jax.Array, h: jax.Array) -> tuple[jax.Array, ...]:
    """tokens i32[T], h f32[HEADS,HEAD_DIM,STATE] -> logits f32[1,VOCAB], argmax i32[1], h."""
    x = params["embed.weight"][tokens].astype(jnp.float32)
    mixed = _dot(
        x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5), params["in_proj.weight"]
    )
    x, b, c, dt = jnp.split(mixed, [INNER, INNER + STATE, INNER + 2 * STATE], axis=1)
    dt = jax.nn.softplus(dt)
    decay = jnp.cumsum((-jnp.exp(params["A_log"]) * dt).T, axis=1)
    x = (jax.nn.silu(x).reshape(-1, HEADS, HEAD_DIM) * dt[..., None]).transpose(1, 0, 2)
    lower = jnp.tril(jnp.ones((len(tokens), len(tokens)), jnp.float32))
    mix = (c @ b.T)[None] * jnp.exp((decay[:, :, None] - decay[:, None, :]) * lower) * lower
    y = jnp.einsum("hts,hsp->htp", mix, x)
    y = y + jnp.exp(decay)[..., None] * jnp.einsum("tn,hpn->htp", c, h)
    kept = x * jnp.exp(decay[:, -1:] - decay)[..., None]
    h = jnp.exp(decay[:, -1])[:, None, None] * h + jnp.einsum("htp,tn->hpn", kept, b)
    last = y.transpose(1, 0, 2).reshape(-1, INNER)[-1:]
    logits = _dot(_dot(last, params["out_proj.weight"]), params["embed.weight"].T)
    return logits, jnp.argmax(logits, -1).astype(jnp.int32), h


def entry(name: str, length: int, weights: str, function: Callable = forward) -> str:
    """`function` on `length` tokens as the text of entry point `name`, parameters as globals."""

    def call(tokens: jax.Array, h: jax.Array, params: dict) -> tuple[jax.Array, ...]:
        return function(params, tokens, h)

    params = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in parameters(weights).items()}
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    h = jax.ShapeDtypeStruct((HEADS, HEAD_DIM, STATE), jnp.float32)
    lowered = jax.jit(call, donate_argnums=(1,), keep_unused=True).lower(tokens, h, params)
    return _as_entry(name, lowered.as_text(), sorted(params), first=2)


def _as_entry(name: str, text: str, params: list[str], first: int) -> str:
    text = re.sub(r"^module @\S+ attributes \{.*\} \{$", f"module @{name} {{", text, flags=re.M)
    for private in re.findall(r"func\.func private @([\w.]+)\(", text):
        text = re.sub(rf"@{re.escape(private)}\(", f"@{name}.{private}(", text)
    text = text.replace("@main(", f"@{name}(")
    globals_, loads = [], []
    for index, param in enumerate(params, first):
        match = re.search(rf", %arg{index}: (tensor<[^>]*>)", text)
        assert match is not None
        text = text[: match.start()] + text[match.end() :]
        kind = match.group(1)
        globals_.append(
            f'  util.global private @"{param}" = #flow.parameter.named<"model"::"{param}"> : {kind}'
        )
        loads.append(f'    %arg{index} = util.global.load @"{param}" : {kind}')
    head, public, *rest = text.split("\n")
    return "\n".join([head, *globals_, public, *loads, *rest])
