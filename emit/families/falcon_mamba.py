"""Falcon Mamba (Zuo et al., arXiv:2410.05355), Hugging Face `falcon_mamba`.

    x, z = in_proj(rms(u))
    dt, B, C = rms of each part of x_proj(act(conv(x))), without weights
    u += out_proj(selective_scan(act(conv(x)), softplus(dt_proj(dt)), B, C) * silu(z))

Refused: an activation that is not in `nn.ACTIVATIONS`, and any unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emit import config as config_reader
from emit.blocks.backbone import Backbone, forward, mixers, state, weights
from emit.blocks.mamba1 import Mamba1
from emit.errors import EmitError
from emit.ops import nn

__all__ = ["Config", "forward", "state", "weights"]

# Keys that do not change the graph: initialisation (time_step_*, rescale_prenorm_residual), which
# scan the reference runs (use_mambapy and its older name, use_associative_scan) and
# residual_in_fp32 (the residual stream here is always float32).
IGNORED = frozenset(
    """time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme
    rescale_prenorm_residual use_mambapy use_falcon_mambapy use_associative_scan
    residual_in_fp32""".split()
)


@dataclass(frozen=True)
class Config:
    """What the graph depends on; names and defaults are those of the Hugging Face config."""

    vocab_size: int = 50280
    hidden_size: int = 768
    state_size: int = 16
    num_hidden_layers: int = 32
    layer_norm_epsilon: float = 1e-5
    expand: float = 2.0  # where intermediate_size is given, what that makes it
    intermediate_size: int = 0  # 0 where a config lacks it; expand × hidden_size once read
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_rank: int = 0  # 0 where a config lacks it or says "auto"; hidden_size / 16 once read
    tie_word_embeddings: bool = True
    mixer_rms_eps: float = 1e-6

    @classmethod
    def read(cls, raw: Mapping[str, object]) -> Config:
        """Read either dialect of config.json; EmitError lists every key that does not fit."""
        kinds = config_reader.alike(raw.get("num_hidden_layers", cls.num_hidden_layers))
        only = {"layer_types": kinds}
        given = dict(raw)
        if given.get("time_step_rank") == "auto":
            del given["time_step_rank"]
        cfg = config_reader.read(cls, given, ignored=IGNORED, only=only)
        acts, wrong = sorted(nn.ACTIVATIONS), []
        # A given size overrides `expand`: the published falcon-mamba-7b has 16 where 2 is meant.
        inner = cfg.intermediate_size or int(cfg.expand * cfg.hidden_size)
        if inner < 1:
            wrong.append(f"expand = {cfg.expand:g}, expected a size above 0")
        if cfg.hidden_act not in acts:
            wrong.append(f"hidden_act = {cfg.hidden_act!r}, expected one of {acts}")
        if cfg.conv_kernel < 2:
            wrong.append(f"conv_kernel = {cfg.conv_kernel}, expected 2 or more")
        for key in ("layer_norm_epsilon", "mixer_rms_eps"):
            if not 0 < getattr(cfg, key) < float("inf"):
                wrong.append(f"{key} = {getattr(cfg, key):g} must be above 0")
        if wrong:
            raise EmitError("config.json of falcon_mamba: " + "; ".join(wrong))
        rank = cfg.time_step_rank or -(-cfg.hidden_size // 16)
        expand = inner / cfg.hidden_size
        return replace(cfg, expand=expand, intermediate_size=inner, time_step_rank=rank)

    @property
    def mixer(self) -> Mamba1:
        """The mixer of every layer."""
        return Mamba1(
            self.hidden_size,
            self.intermediate_size,
            self.state_size,
            self.time_step_rank,
            self.conv_kernel,
            self.hidden_act,
            self.mixer_rms_eps,
            self.use_bias,
            self.use_conv_bias,
            norms="plain",
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
        )
