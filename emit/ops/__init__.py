"""Recurrences and layers: `step` is the reference, `scan` equals `step` folded."""
