"""Command lines as they may be written down: what a shell takes, without secrets."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

HIDDEN = "***"
_NAMES = re.compile(r"token|secret|passw|credential|signature|api_?key|access_?key", re.IGNORECASE)
_SHORTEST = 6  # characters of a variable's value that is looked for
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_WORD = re.compile(
    r"(?i)([\w.-]*(?:token|secret|passw(?:or)?d|credential|signature|api_?key|access_?key)[\w.-]*=)"
    r"[^&\s]+"
)
_HUB = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def command_line(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """`argv` as one line for a shell, secrets as ***.

    Secrets are: the values of variables whose names say so (HF_TOKEN, AWS_SECRET_ACCESS_KEY …),
    user and password of URLs, values of `token=` and the like, tokens of the hub.
    """
    environment = os.environ if environment is None else environment
    values = [v for k, v in environment.items() if _NAMES.search(k) and len(v) >= _SHORTEST]
    return shlex.join(_hidden(word, sorted(values, key=len, reverse=True)) for word in argv)


def _hidden(word: str, values: Sequence[str]) -> str:
    for value in values:
        word = word.replace(value, HIDDEN)
    word = _LOGIN.sub(HIDDEN, word)
    word = _WORD.sub(rf"\1{HIDDEN}", word)
    return _HUB.sub(HIDDEN, word)
