"""The one exception whose message is meant for the user."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType


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


def quiet_interrupt() -> None:
    """Let Ctrl-C end this process with one line instead of a traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("error: interrupted; the same command goes on from there", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
