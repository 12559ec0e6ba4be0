"""The one exception of this package whose message is meant for the user."""

from __future__ import annotations

import reprlib
from typing import Any


class EmitError(ValueError):
    """A checkpoint, config or shape that cannot be used; the message is one line that says why."""


def shallow(value: Any) -> str:
    """`value` in ASCII, its long parts cut short, however large and deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    short.maxlist = short.maxtuple = short.maxdict = 20
    return short.repr(value).encode("ascii", "backslashreplace").decode()
