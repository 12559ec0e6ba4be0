"""The one exception whose message is meant for the user."""

from __future__ import annotations

import os
import sys
import traceback


class UserError(Exception):
    """A failure the user can act on.

    The message is one line: it names the file and field, what was found, what was expected and
    what to do.
    """


def report(error: BaseException) -> int:
    """Print `error` as one line on stderr (a traceback if SCANWRIGHT_DEBUG=1); return 1."""
    if os.environ.get("SCANWRIGHT_DEBUG") == "1":
        traceback.print_exception(error)
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return 1
