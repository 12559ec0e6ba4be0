"""Who may ask what: API keys, the address that may be served, sizes and times of a request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import UserError
from runtime.server.fields import ApiError
from runtime.server.objects import encode

OPEN_PATHS = frozenset({"/", "/health", "/ready"})  # need no key: they tell nothing and do nothing
PROBES = frozenset({"/health", "/ready"})


class Keys:
    """The accepted API keys, as digests of one length."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __contains__(self, key: str) -> bool:
        """Whether `key` is accepted; the time does not depend on which key, or how much, agrees."""
        found = _digest(key.encode("utf-8", "surrogateescape"))
        same = [hmac.compare_digest(found, digest) for digest in self._digests]
        return any(same)


def load_keys(path: Path) -> Keys:
    """Keys from a file with one a line; empty lines are passed over.

    Raises UserError: the file cannot be read, has no key, or has one that no header can carry.
    """
    try:
        lines = path.read_bytes().decode("ascii").splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}, expected a file with one API key a line"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not ASCII, expected one API key a line"
        ) from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key:
            continue
        if not key.isprintable() or " " in key:
            raise UserError(
                f"{path}: line {number} has a space or control character inside, expected one API"
                " key a line"
            )
        keys.append(key)
    if not keys:
        raise UserError(f"{path}: found no key, expected one API key a line")
    return Keys(keys)


def bind(host: str, port: int, *, protected: bool) -> list[socket.socket]:
    """Sockets bound to every address of `host`, not listening yet; port 0 picks a free one.

    Raises UserError: no such host, an address beyond loopback though not `protected` by a key, or
    an address in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"host: {host!r}: {reason}, expected a name or address of this machine"
        ) from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    for _family, address in addresses:
        if not protected and not is_loopback(str(address[0])):
            raise UserError(
                f"host: {host} ({address[0]}) can be reached from other machines, expected a"
                " loopback address such as 127.0.0.1; give --api-key-file FILE, or --insecure to"
                " serve anyone"
            )
    sockets: list[socket.socket] = []
    try:
        for family, address in addresses:
            sockets.append(_bind(family, address, port))
            port = sockets[-1].getsockname()[1]
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise UserError(
            f"port: {port} of {host}: {error.strerror or error}, expected a free port; choose"
            " another with --port, or 0 for any"
        ) from error
    return sockets


def url(sockets: Sequence[socket.socket]) -> str:
    """Where the first of `sockets` is served."""
    host, port = sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    name = host.strip("[]").partition("%")[0].lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: the key, where there are keys; else that no web page of another origin asks.

    Without keys a browser on this machine could be led here by any page: by a form or script of
    that page (its `Origin` differs), or by a name that is made to mean 127.0.0.1 (`Host` differs).
    `names`: host names that are right besides loopback ones; None checks no name.
    """

    def __init__(self, app: ASGIApp, keys: Keys | None, names: Sequence[str] | None) -> None:
        self._app = app
        self._keys = keys
        self._names = None if names is None else [name.lower() for name in names]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope["path"], Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await send_error(send, error)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if path in PROBES:
            return None
        if self._keys is not None:
            return None if path in OPEN_PATHS else self._check_key(headers)
        host = headers.get("host", "")
        if self._names is not None and host and not self._known(host):
            return ApiError(
                403,
                f"host: found {host[:100]!r}, expected the address this server was started with",
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit_netloc(origin) != host.lower():
            return ApiError(
                403, f"origin: found {origin[:100]!r}, expected none or this server's own"
            )
        return None

    def _known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return is_loopback(name) or name.strip("[]").lower() in (self._names or ())

    def _check_key(self, headers: Headers) -> ApiError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip() in (self._keys or ()):
            return None
        found = "a wrong key" if key.strip() else "no key"
        return ApiError(
            401,
            f"authorization: found {found}, expected the header Authorization: Bearer KEY",
            code="invalid_api_key",
            type="authentication_error",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def read_body(headers: Headers, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError 413 beyond `limit` bytes (as soon as that is known), 408 when
    it takes longer than `timeout_s` seconds, 415 when it is compressed, ClientGone."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(
            415, f"content-encoding: found {coding[:40]!r}, expected an uncompressed body"
        )
    length = headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise ApiError(
            408, f"body: found {size} bytes after {timeout_s:g} s, expected all of it by then"
        ) from None


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with the error object."""
    body = encode(error.body())
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.lower(): value for name, value in error.headers.items()},
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def urlsplit_netloc(origin: str) -> str:
    """`host:port` of an Origin header, empty if it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"body: found more than {limit} bytes, expected at most {limit}")


def _bind(family: int, address: tuple[object, ...], port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only where the socket itself says that it is TCP.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((address[0], port, *address[2:]))
    except OSError:
        opened.close()
        raise
    return opened


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
