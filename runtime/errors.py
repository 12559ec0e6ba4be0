"""The one exception whose message is meant for the user."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

MAX_SHOWN = 4000  # characters of a message


class UserError(Exception):
    """A failure the user can act on.

    The message is one line: it names the file and field, what was found, what was expected and
    what to do.
    """


def report(error: BaseException) -> int:
    """Print `error` as one line on stderr (a traceback if SCANWRIGHT_DEBUG=1); return 1."""
    if os.environ.get("SCANWRIGHT_DEBUG") == "1":
        traceback.print_exception(error)
    print("error: " + shown(error), file=sys.stderr)
    return 1


def shown(error: BaseException) -> str:
    """The message of `error` on one line, as a terminal may show it.

    What a hostile file put into it moves no cursor (unprintable characters are escaped) and fills
    no screen (the middle of more than MAX_SHOWN characters is left out).
    """
    text = " ".join(str(error).split())
    if len(text) > MAX_SHOWN:
        text = f"{text[: MAX_SHOWN // 2]} […] {text[-MAX_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quiet_interrupt() -> None:
    """Let Ctrl-C end this process with one line instead of a traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("error: interrupted; the same command goes on from there", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
