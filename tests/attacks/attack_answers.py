"""Asks a hostile server for bundles and checkpoints; says how each request ended.

usage: python tests/attacks/attack_answers.py KIND URL MODE…

For each mode, which the server finds in the path, a line of JSON: `error`, what a user sees, and
`mib`, the memory that this process had at most so far beyond what it had before the first.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from attack_guard import ROOT, _peak, limited

sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from artifacts.fetch import fetch  # noqa: E402
from runtime import cli, web  # noqa: E402
from runtime.errors import UserError, shown  # noqa: E402


def _hub(url: str, mode: str) -> int:
    try:
        Path("cache").mkdir(exist_ok=True)
        fetch(f"hf:{mode}/tiny", None, Path("cache"), Path("lock.json"), endpoint=url)
    except UserError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return 1
    return 0


KINDS: dict[str, Callable[[str, str], int]] = {
    "web": lambda url, mode: cli.main(["pull", f"{url}/{mode}", "there"]),
    "registry": lambda url, mode: cli.main(["pull", f"oci://{url[7:]}/{mode}:one", "there"]),
    "s3": lambda url, mode: cli.main(["pull", f"s3://{mode}/tiny", "there"]),
    "hub": _hub,
}


def main() -> None:
    """As the command line says."""
    kind, url, modes = sys.argv[1], sys.argv[2], sys.argv[3:]
    web.SLOW_S, web.TRIES = 0.5, 1
    os.environ |= {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        os.environ["SCANWRIGHT_CACHE"] = place
        KINDS[kind](url, "absent")  # what is imported when it is first used
        limited()
        before = _peak()
        for mode in modes:
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                code = KINDS[kind](url, mode)
            error = said.getvalue().splitlines()[-1:] if code else []
            left = [path.name for path in Path().iterdir() if path.name == "there"]
            told = {"mode": mode, "error": error, "mib": (_peak() - before) / 1024, "left": left}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
