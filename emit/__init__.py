"""Checkpoint to canonical parameters, config and shape to StableHLO. JAX lives only here."""
