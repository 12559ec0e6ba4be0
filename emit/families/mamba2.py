"""Mamba2 (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060), Hugging Face `mamba2`.

    z, xBC, dt = in_proj(rms(x))
    x += out_proj(norm(ssd(act(conv(xBC)), softplus(dt + dt_bias)) * silu(z)))

Refused: an activation that is not in `nn.ACTIVATIONS`, and any unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from emit import config as config_reader
from emit.errors import EmitError
from emit.ops import conv, nn, ssd
from emit.state import StateSpec
from emit.weights import Param, WeightMap, depthwise_kernel, layer, matrix, per_layer, vector

SCAN_CHUNK = 64

# Keys that do not change the graph: initialisation (time_step_*, rescale_prenorm_residual), the
# reference's own scan chunk (the result does not depend on it), residual_in_fp32 (the residual
# stream here is always float32) and norm_before_gate (Codestral sets it, the reference gates first
# whatever it says, and so were the weights trained).
IGNORED = frozenset(
    """time_step_rank time_step_min time_step_max time_step_floor time_step_scale
    time_step_init_scheme rescale_prenorm_residual chunk_size residual_in_fp32
    norm_before_gate""".split()
)


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    num_heads: int = 128
    head_dim: int = 64
    n_groups: int = 8
    conv_kernel: int = 4
    expand: float = 2.0
    intermediate_size: int = 0  # 0 where a config lacks it; num_heads × head_dim once read
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    hidden_act: str = "silu"
    use_bias: bool = False
    use_conv_bias: bool = True
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, raw: Mapping[str, object]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        layers = raw.get("num_hidden_layers", cls.num_hidden_layers)
        kinds = ["linear_attention"] * (layers if isinstance(layers, int) and layers < 1000 else 0)
        only = {"rms_norm": True, "layer_types": kinds}
        cfg = config_reader.read(cls, raw, ignored=IGNORED, only=only)
        inner, acts = cfg.num_heads * cfg.head_dim, sorted(nn.ACTIVATIONS)
        wrong = []
        if cfg.expand * cfg.hidden_size != inner:
            wrong.append(
                f"expand × hidden_size = {cfg.expand * cfg.hidden_size:g} must equal "
                f"num_heads × head_dim = {inner}"
            )
        if cfg.intermediate_size not in (0, inner):
            wrong.append(f"intermediate_size = {cfg.intermediate_size}, expected {inner}")
        if cfg.num_heads % cfg.n_groups:
            wrong.append(f"num_heads = {cfg.num_heads}, expected a multiple of n_groups")
        if cfg.hidden_act not in acts:
            wrong.append(f"hidden_act = {cfg.hidden_act!r}, expected one of {acts}")
        if cfg.conv_kernel < 2:
            wrong.append(f"conv_kernel = {cfg.conv_kernel}, expected 2 or more")
        if not 0 < cfg.layer_norm_epsilon < float("inf"):
            wrong.append(f"layer_norm_epsilon = {cfg.layer_norm_epsilon:g} must be above 0")
        if not 0 <= cfg.time_step_limit[0] <= cfg.time_step_limit[1]:
            wrong.append(f"time_step_limit = {list(cfg.time_step_limit)} must be ascending, ≥ 0")
        if wrong:
            raise EmitError("config.json of mamba2: " + "; ".join(wrong))
        return replace(cfg, intermediate_size=inner)

    @property
    def conv_dim(self) -> int:
        """Channels that pass through the convolution: x, B and C."""
        return self.intermediate_size + 2 * self.n_groups * self.state_size


def weights(cfg: Config) -> WeightMap:
    """Canonical names are the checkpoint's without `backbone.`."""
    prefix = "backbone."
    table = (cfg.vocab_size, cfg.hidden_size)
    # The first published checkpoints say `embedding`.
    names = (prefix + "embeddings.weight", prefix + "embedding.weight")
    head = () if cfg.tie_word_embeddings else (matrix("lm_head.weight", table, "lm_head.weight"),)
    return WeightMap(
        params=(
            matrix("embeddings.weight", table, *names),
            *per_layer(cfg.num_hidden_layers, lambda i: _layer_weights(cfg, i, prefix)),
            vector("norm_f.weight", cfg.hidden_size, prefix, offset=1.0),
            *head,
        ),
        copies={"lm_head.weight": "embeddings.weight"} if cfg.tie_word_embeddings else {},
    )


def _layer_weights(cfg: Config, i: int, prefix: str) -> list[Param]:
    base = f"layers.{i}."
    mixer = base + "mixer."
    width = cfg.intermediate_size + cfg.conv_dim + cfg.num_heads
    kernel = (cfg.conv_dim, 1, cfg.conv_kernel)

    def projection(name: str, outputs: int, inputs: int) -> Param:
        return matrix(mixer + name, (outputs, inputs), prefix + mixer + name)

    rows = [
        vector(base + "norm.weight", cfg.hidden_size, prefix, offset=1.0),
        projection("in_proj.weight", width, cfg.hidden_size),
        Param(
            mixer + "conv1d.weight",
            (cfg.conv_kernel, cfg.conv_dim),
            (prefix + mixer + "conv1d.weight",),
            kernel,
            depthwise_kernel,
            scale=cfg.conv_kernel**-0.5,
        ),
        vector(mixer + "dt_bias", cfg.num_heads, prefix, offset=-3.0, scale=1.0),
        vector(mixer + "A_log", cfg.num_heads, prefix, offset=1.0, scale=0.7),
        vector(mixer + "D", cfg.num_heads, prefix, offset=1.0),
        vector(mixer + "norm.weight", cfg.intermediate_size, prefix, offset=1.0),
        projection("out_proj.weight", cfg.hidden_size, cfg.intermediate_size),
    ]
    if cfg.use_conv_bias:
        rows.append(vector(mixer + "conv1d.bias", cfg.conv_dim, prefix))
    if cfg.use_bias:
        rows.append(vector(mixer + "in_proj.bias", width, prefix))
        rows.append(vector(mixer + "out_proj.bias", cfg.hidden_size, prefix))
    return rows


def state(cfg: Config) -> list[StateSpec]:
    """Per layer: the convolution tail [1, K-1, C] and the SSD state [1, H, P, N]."""
    tail = (1, cfg.conv_kernel - 1, cfg.conv_dim)
    hidden = (1, cfg.num_heads, cfg.head_dim, cfg.state_size)
    return [
        StateSpec(f"layers.{i}.{name}", shape, "f32", 0, "fixed")
        for i in range(cfg.num_hidden_layers)
        for name, shape in (("conv", tail), ("ssm", hidden))
    ]


def _mixer(
    cfg: Config, p: Mapping[str, Array], x: Array, lengths: Array, tail: Array, hidden: Array
) -> tuple[Array, Array, Array]:
    """x f32[B, T, hidden_size] -> (same, new tail, new SSD state)."""
    B, T, _ = x.shape
    inner, N = cfg.intermediate_size, cfg.n_groups * cfg.state_size
    z, xbc, dt = jnp.split(
        nn.linear(x, p["in_proj.weight"], p.get("in_proj.bias")),
        [inner, inner + cfg.conv_dim],
        axis=-1,
    )
    run_conv = conv.step if T == 1 else conv.scan
    xbc, tail = run_conv(xbc, lengths, p["conv1d.weight"], p.get("conv1d.bias"), tail)
    xs, Bm, Cm = jnp.split(nn.ACTIVATIONS[cfg.hidden_act](xbc), [inner, inner + N], axis=-1)
    dt = jnp.clip(jax.nn.softplus(dt + p["dt_bias"]), *cfg.time_step_limit)
    valid = jnp.arange(T)[None, :] < lengths[:, None]
    inputs = (
        xs.reshape(B, T, cfg.num_heads, cfg.head_dim),
        jnp.where(valid[..., None], dt, 0.0),
        -jnp.exp(p["A_log"]),
        Bm.reshape(B, T, cfg.n_groups, cfg.state_size),
        Cm.reshape(B, T, cfg.n_groups, cfg.state_size),
        p["D"],
        hidden,
    )
    y, hidden = ssd.step(*inputs) if T == 1 else ssd.scan(*inputs, SCAN_CHUNK)
    y = y.reshape(B, T, inner)
    y = nn.gated_group_rms_norm(y, z, p["norm.weight"], cfg.n_groups, cfg.layer_norm_epsilon)
    return nn.linear(y, p["out_proj.weight"], p.get("out_proj.bias")), tail, hidden


def forward(
    cfg: Config,
    params: Mapping[str, Array],
    tokens: Array,
    lengths: Array,
    positions: Array,
    state: Mapping[str, Array],
) -> tuple[Array, dict[str, Array]]:
    """Logits f32[B, V] of each row's last valid token, and the new state.

    tokens i32[B, T], the first lengths[b] (i32[B]) of a row valid; positions i32[B] is the position
    of each row's first token, which a model without positions does not read.
    """
    del positions
    new: dict[str, Array] = {}
    x = nn.embed(tokens, params["embeddings.weight"])
    for i in range(cfg.num_hidden_layers):
        p = layer(params, f"layers.{i}.")
        tail, hidden = f"layers.{i}.conv", f"layers.{i}.ssm"
        y, new[tail], new[hidden] = _mixer(
            cfg,
            layer(p, "mixer."),
            nn.rms_norm(x, p["norm.weight"], cfg.layer_norm_epsilon),
            lengths,
            state[tail],
            state[hidden],
        )
        x = x + y
    x = nn.rms_norm(nn.last_valid(x, lengths), params["norm_f.weight"], cfg.layer_norm_epsilon)
    head = params["embeddings.weight" if cfg.tie_word_embeddings else "lm_head.weight"]
    return nn.linear(x, head)[:, 0], new
