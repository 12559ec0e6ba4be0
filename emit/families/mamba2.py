"""Mamba2 (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060), Hugging Face `mamba2`.

    z, xBC, dt = in_proj(rms(x))
    x += out_proj(norm(ssd(act(conv(xBC)), softplus(dt + dt_bias)) * silu(z)))

Refused: an activation that is not in `nn.ACTIVATIONS`, and any unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emit import config as config_reader
from emit.blocks.backbone import Backbone, forward, mixers, state, weights
from emit.blocks.mamba2 import Mamba2
from emit.errors import EmitError
from emit.ops import nn

__all__ = ["Config", "forward", "state", "weights"]

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
        kinds = config_reader.alike(raw.get("num_hidden_layers", cls.num_hidden_layers))
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
    def mixer(self) -> Mamba2:
        """The mixer of every layer."""
        return Mamba2(
            self.hidden_size,
            self.num_heads,
            self.head_dim,
            self.n_groups,
            self.state_size,
            self.conv_kernel,
            self.hidden_act,
            self.layer_norm_epsilon,
            self.time_step_limit,
            self.use_bias,
            self.use_conv_bias,
        )

    @property
    def backbone(self) -> Backbone:
        """The whole model."""
        return mixers(
            self.vocab_size,
            self.hidden_size,
            self.layer_norm_epsilon,
            self.tie_word_embeddings,
            (self.mixer,) * self.num_hidden_layers,
            # The first published checkpoints say `embedding`.
            also=("backbone.embedding.weight",),
        )
