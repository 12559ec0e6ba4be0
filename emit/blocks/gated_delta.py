"""The Gated DeltaNet mixer (arXiv:2412.06464, figure 1), as Qwen3-Next and Qwen3.5 have it.

q, k, v, z, b, a = projections(x);  q, k, v = silu(conv(q, k, v))
y = delta(l2(q) / sqrt(K), l2(k), v, -exp(A_log) softplus(a + dt_bias), sigmoid(b))
out = out_proj(rms(y) * silu(z))        (the norm is that of each head)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from emit.blocks.block import Rows, State
from emit.forms import Form
from emit.ops import conv, delta, nn
from emit.state import StateSpec
from emit.weights import Param, kernel, matrix, vector

# Tokens of a chunk. With 32 a model of many layers takes longer to compile by a fifth, and the scan
# itself is up to twice as fast on a CPU.
SCAN_CHUNK = 64


def grouped_by_kind(tensor: np.ndarray, groups: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Rows that are `sizes` of each kind for one group after the other, as all rows of a kind."""
    each = tensor.reshape(groups, sum(sizes), -1)
    parts = np.split(each, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1, tensor.shape[-1]) for part in parts])


@dataclass(frozen=True)
class GatedDelta:
    """Sizes and variants of the mixer: `key_heads`, each shared by value_heads / key_heads others.

    A checkpoint has in_proj_qkvz, whose rows are q, k, v and z of one key head after the other, and
    in_proj_ba likewise; here the rows are sorted by kind. With `split` it has in_proj_qkv (sorted
    already), in_proj_z, in_proj_b and in_proj_a.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    activation: str
    eps: float
    split: bool = False

    @property
    def _widths(self) -> tuple[int, int]:
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the convolution: q, k and v."""
        keys, values = self._widths
        return 2 * keys + values

    def params(self, name: str, source: str) -> list[Param]:
        """The projections, conv1d, dt_bias, A_log, norm and out_proj."""
        prefix, values = source.removesuffix(name), self._widths[1]
        out = (self.hidden_size, values)
        return [
            *self._projections(name, source),
            kernel(
                name + "conv1d.weight", self.conv_kernel, self.conv_dim, source + "conv1d.weight"
            ),
            vector(name + "dt_bias", self.value_heads, prefix, offset=-3.0, scale=1.0),
            vector(name + "A_log", self.value_heads, prefix, offset=1.0, scale=0.7),
            vector(name + "norm.weight", self.value_dim, prefix, offset=1.0),
            matrix(name + "out_proj.weight", out, source + "out_proj.weight"),
        ]

    def _projections(self, name: str, source: str) -> list[Param]:
        values, heads, hidden = self._widths[1], self.value_heads, self.hidden_size
        if self.split:
            sizes = {"qkv": self.conv_dim, "z": values, "b": heads, "a": heads}
            return [
                matrix(
                    f"{name}in_proj_{each}.weight",
                    (n, hidden),
                    f"{source}in_proj_{each}.weight",
                    use="kept" if each in "ba" else "product",
                )
                for each, n in sizes.items()
            ]
        shared = heads // self.key_heads
        wide = shared * self.value_dim
        kinds = {"qkvz": (self.key_dim, self.key_dim, wide, wide), "ba": (shared, shared)}
        rows = []
        for each, sizes in kinds.items():
            shape = (self.key_heads * sum(sizes), hidden)
            sort = partial(grouped_by_kind, groups=self.key_heads, sizes=sizes)
            word = f"in_proj_{each}.weight"
            forms = (Form((source + word,), shape, sort, rows=True),)
            use = "kept" if each == "ba" else "product"
            scale = hidden**-0.5
            rows.append(Param(name + word, shape, forms, matrix=True, scale=scale, use=use))
        return rows

    def state(self, context: int | None) -> list[StateSpec]:
        """The convolution tail [1, K-1, C] and the delta rule's state [1, H, K, V]."""
        del context
        tail = (1, self.conv_kernel - 1, self.conv_dim)
        hidden = (1, self.value_heads, self.key_dim, self.value_dim)
        return [
            StateSpec("conv", tail, "f32", 0, "fixed"),
            StateSpec("delta", hidden, "f32", 0, "fixed"),
        ]

    def __call__(
        self, p: Mapping[str, Array], x: Array, rows: Rows, state: State
    ) -> tuple[Array, dict[str, Array]]:
        """x f32[B, T, hidden_size] -> (same, new state)."""
        T = x.shape[1]
        qkv, z, b, a = self._project(p, x)
        run_conv = conv.step if T == 1 else conv.scan
        qkv, tail = run_conv(qkv, rows.lengths, p["conv1d.weight"], None, state["conv"])
        valid = rows.valid(T)[..., None]
        g = -jnp.exp(p["A_log"]) * jax.nn.softplus(a + p["dt_bias"])
        y, hidden = delta.mixer(
            nn.ACTIVATIONS[self.activation](qkv),
            z,
            jnp.where(valid, g, 0.0)[..., None],
            jnp.where(valid, jax.nn.sigmoid(b), 0.0),
            p["norm.weight"],
            state["delta"],
            eps=self.eps,
            gate="silu",
            chunk=SCAN_CHUNK,
        )
        y = nn.linear(y, p["out_proj.weight"])
        return y, {"conv": tail, "delta": hidden}

    def _project(self, p: Mapping[str, Array], x: Array) -> list[Array]:
        """q, k and v together, z, b and a."""
        if self.split:
            return [nn.linear(x, p[f"in_proj_{each}.weight"]) for each in ("qkv", "z", "b", "a")]
        qkv, z = jnp.split(nn.linear(x, p["in_proj_qkvz.weight"]), [self.conv_dim], axis=-1)
        b, a = jnp.split(nn.linear(x, p["in_proj_ba.weight"]), 2, axis=-1)
        return [qkv, z, b, a]
