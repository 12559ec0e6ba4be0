"""Changes whole files at random into such as a hostile or broken writer could have made.

Everything follows from the `random.Random` that is given.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

LARGEST = 1 << 20  # characters that one change may add
Mutator = Callable[[random.Random, bytes], bytes]
NUMBERS = (0, 1, 2, 3, 7, 8, 13, 31, 32, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1,
           2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
TEXTS = ("", "a", "../../x", "/etc/passwd", "\ud800", "\0", "\x1b[2J", "\n", "é", "x" * 300, "1",
         "F32", "-1", "NaN", "__class__", "<0x00>", "model", "\u202e", "9" * 5000)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0.5, -0.0, 1e308, float("inf"), float("nan"), [], {}, [[]], [None],
    {"": None}, [0] * 40, *NUMBERS, *TEXTS, 10**400,
)  # fmt: skip


def in_bytes(rng: random.Random, data: bytes, window: int = 1 << 30) -> bytes:
    """One to four changes within the first `window` bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, out, min(len(out), window))
    return bytes(out)


def _change(rng: random.Random, out: bytearray, most: int) -> None:
    at, size = rng.randrange(most + 1), rng.choice((1, 1, 2, 4, 8, 16, 64, 256))
    kind = rng.randrange(8)
    if kind == 0 and at < most:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at : at + size] = rng.randbytes(size)
    elif kind == 2:
        del out[at : at + size]
    elif kind == 3:
        out[at:at] = out[(start := rng.randrange(most + 1)) : start + size]
    elif kind == 4:
        del out[at:]
    elif kind == 5:
        form = rng.choice(("<B", "<H", "<I", "<Q"))
        width = struct.calcsize(form)
        out[at : at + width] = struct.pack(form, rng.choice(NUMBERS) % (1 << 8 * width))
    elif kind == 6:
        out[at : at + size] = bytes([rng.choice(b"\0\xff[{\"'\\(:, \n9-")]) * size
    else:
        word = rng.choice(TEXTS).encode(errors="surrogatepass")
        out[at : at + rng.choice((0, len(word)))] = word


def in_json(rng: random.Random, data: bytes) -> bytes:
    """A JSON text with one to three of its values replaced, removed, doubled, moved or nested."""
    root = [json.loads(data)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        parent, key = _place(rng, root)
        _replace(rng, root, parent, key)
    if rng.random() < 0.02:  # what json.dumps does not write
        return json.dumps(root[0]).encode().replace(b"null", b"[" * 5000 + b"]" * 5000, 1)
    return json.dumps(root[0]).encode(errors="surrogatepass")


def _place(rng: random.Random, root: list[Any]) -> tuple[Any, Any]:
    """A container anywhere in `root`, and a key of it: walked down at random."""
    parent: Any = root
    key: Any = 0
    while True:
        value = parent[key]
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(
            value, list) else []  # fmt: skip
        if not keys or rng.random() < 0.15:
            return parent, key
        parent, key = value, rng.choice(keys)


def _replace(rng: random.Random, root: list[Any], parent: Any, key: Any) -> None:
    kind = rng.randrange(9)
    value = parent[key]
    if kind < 4:
        parent[key] = _copy(rng.choice(VALUES))  # its own: later changes may be within it
    elif kind == 4 and parent is not root:
        del parent[key]
    elif kind == 5 and isinstance(parent, dict):
        parent[rng.choice(TEXTS)] = parent.pop(key)
    elif kind == 6:
        for _ in range(rng.choice((1, 2, 60, 250))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        parent[key] = value
    elif kind == 7 and isinstance(parent, list) and parent is not root:
        parent[key:key] = _copies(value, rng.choice((1, 3, 1000)))
    elif isinstance(value, int):
        parent[key] = value + rng.choice((-1, 1, 7, -value * 2, 2**32))
    else:
        other, place = _place(rng, root)
        parent[key] = _copy(other[place])


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _copies(value: Any, count: int) -> list[Any]:
    """`count` copies of a JSON value, fewer if they would be more than LARGEST characters."""
    text = json.dumps(value)
    return json.loads(f"[{','.join([text] * max(1, min(count, LARGEST // len(text))))}]")


def in_lines(rng: random.Random, data: bytes) -> bytes:
    """A text with lines moved, lost, doubled, joined or changed."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0 and len(lines) > 1:
            del lines[i]
        elif kind == 1:
            lines.insert(j, lines[i])
        elif kind == 2:
            lines[i] = lines[i] + lines[j]
        elif kind == 3:
            lines[i] = b" " * rng.randrange(9) + lines[j]
        else:
            lines[i] = in_bytes(rng, lines[i])
    return b"\n".join(lines)


def in_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Mostly the header, as JSON or as bytes."""
    if rng.random() < 0.2:
        return in_bytes(rng, data, 4096)
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    header = in_json(rng, header) if rng.random() < 0.8 else in_bytes(rng, header)
    return struct.pack("<Q", len(header)) + header + body


def in_zip(rng: random.Random, data: bytes) -> bytes:
    """A zip archive with a member changed and written again, or the archive's own bytes."""
    if rng.random() < 0.3:
        return in_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    place = rng.randrange(len(members)) if rng.random() < 0.3 else 0
    name, content = members[place]
    members[place] = (name, in_bytes(rng, content))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def in_head(window: int) -> Mutator:
    """Changes within the first `window` bytes."""
    return lambda rng, data: in_bytes(rng, data, window)


def in_json_text(rng: random.Random, data: bytes) -> bytes:
    """By structure mostly, now and then by bytes."""
    return in_json(rng, data) if rng.random() < 0.8 else in_bytes(rng, data)


def in_json_lines(rng: random.Random, data: bytes) -> bytes:
    """Lines of JSON: one by structure, or the lines as such."""
    if rng.random() < 0.5:
        return in_lines(rng, data)
    lines = data.split(b"\n")
    place = rng.randrange(len(lines) - 1)
    lines[place] = in_json(rng, lines[place])
    return b"\n".join(lines)
