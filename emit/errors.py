"""The one exception of this package whose message is meant for the user."""

from __future__ import annotations


class EmitError(ValueError):
    """A checkpoint, config or shape that cannot be used; the message is one line that says why."""
