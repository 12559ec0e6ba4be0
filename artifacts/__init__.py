"""Content store, action cache and the stages that make a bundle. No JAX."""
