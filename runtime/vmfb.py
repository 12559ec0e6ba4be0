"""What can be read from a compiled module file without loading it."""

from __future__ import annotations

import struct
from pathlib import Path

from runtime.errors import UserError

# bytecode_version is field 13 of the root table of the module's FlatBuffer.
_VERSION_FIELD = 13


def _version_offset(data: bytes) -> int:
    """Where in the file the 32-bit bytecode version lies. Raises ValueError or struct.error."""
    at = 0
    if data[:4] == b"PK\x03\x04":  # a zip archive whose first, stored member is the FlatBuffer
        name, extra = struct.unpack_from("<HH", data, 26)
        at = 30 + name + extra
    base = at + 4 if data[at + 8 : at + 12] == b"IREE" else at  # with or without a size prefix
    if data[base + 4 : base + 8] != b"IREE":
        raise ValueError("no IREE identifier")
    table = base + struct.unpack_from("<I", data, base)[0]
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = vtable + 4 + 2 * _VERSION_FIELD
    if entry + 2 > vtable + struct.unpack_from("<H", data, vtable)[0]:
        raise ValueError("no bytecode version")
    offset = struct.unpack_from("<H", data, entry)[0]
    if not offset:
        raise ValueError("no bytecode version")
    return table + offset


def bytecode_version(path: Path) -> str:
    """The bytecode version a module was compiled for, "major.minor".

    Raises UserError: the file is not an IREE module.
    """
    try:
        data = path.read_bytes()
        value = struct.unpack_from("<I", data, _version_offset(data))[0]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); rebuild the bundle") from error
    except (ValueError, struct.error) as error:
        raise UserError(f"{path}: not an IREE module ({error}); rebuild the bundle") from error
    return f"{value >> 16}.{value & 0xFFFF}"


def with_version(data: bytes, major: int, minor: int) -> bytes:
    """The module's bytes with another bytecode version written into them."""
    at = _version_offset(data)
    return data[:at] + struct.pack("<I", major << 16 | minor) + data[at + 4 :]
