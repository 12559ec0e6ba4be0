"""The playground's page and the headers that keep it to itself."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

_FILE = Path(__file__).with_name("playground.html")


def page() -> tuple[bytes, dict[str, str]]:
    """(HTML, headers). The policy allows the page's own script and style by their digests, and
    requests to this server; nothing else."""
    text = _FILE.read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _sources(text, "script"),
        "style-src": _sources(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text.encode(), headers


def _sources(text: str, tag: str) -> str:
    """The digests of the page's elements called `tag`, as Content Security Policy level 3 does."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()) for body in found)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
