"""HTTP by the standard library: redirects that take no credentials along, downloads that go on.

Proxies are those of the environment (`https_proxy`, `no_proxy`). Plain http is for this machine
itself unless it is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import UserError

Count = Callable[[int], object]
TRIES = 4  # in a row without a new byte
TIMEOUT_S = 30.0  # without a byte
SLOW_S, SLOW = 60.0, 256  # seconds, and bytes a second that are too few after them
CHUNK = 1 << 18
MAX_TEXT = 64 << 20  # bytes of an answer that is read into memory
BROKEN = (OSError, http.client.HTTPException)  # urllib's and ssl's errors are OSErrors


class Refused(Exception):
    """An answer of 400 or more: `status`, `headers`, the first bytes of `body`."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


def is_loopback(host: str) -> bool:
    """Whether a host name (no port, no brackets) is this machine by its own word."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def check_url(url: str, plain: bool) -> None:
    """Raise UserError for a URL that is no http(s) URL, or would go unencrypted without `plain`."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{url}: not a URL ({error}), expected https://HOST/PATH") from error
    if parts.scheme not in ("http", "https") or not host or set(url) & set(" \r\n\t"):
        raise UserError(f"{url}: found no host, expected https://HOST/PATH")
    if parts.username is not None:
        raise UserError(f"{parts.scheme}://…@{host}: found a user in the URL, expected none")
    if parts.scheme == "http" and not plain and not is_loopback(host):
        raise UserError(
            f"{url}: plain http to another machine, expected https; ask for it with --plain-http"
            " (plain_http=1 for doit) if that network is trusted"
        )


def origin(url: str) -> tuple[str, str | None, int | None]:
    """What credentials belong to: scheme, host and port."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows GET and HEAD; credentials go along within the origin, and https stays https."""

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        check_url(newurl, self._plain and origin(req.full_url)[0] == "http")
        if origin(req.full_url)[0] == "https" and origin(newurl)[0] != "https":
            raise UserError(f"{req.full_url}: sends on to {newurl}, expected https there, too")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        held = req.unredirected_hdrs.get("Authorization")
        if new is not None:
            new.method = req.get_method()
            if held and origin(newurl) == origin(req.full_url):
                new.add_unredirected_header("Authorization", held)
        return new


class Client:
    """Makes requests; `plain` allows http:// to other machines."""

    def __init__(self, plain: bool = False, timeout: float = TIMEOUT_S) -> None:
        self.plain, self._timeout = plain, timeout
        self._opener = urllib.request.build_opener(_Redirects(plain))

    @contextlib.contextmanager
    def open(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        authorization: str | None = None,
        method: str = "GET",
        data: Any = None,
    ) -> Iterator[Any]:
        """The answer, to be read in the block. `data` is bytes or a file with Content-Length given.

        Raises Refused for 400 and above, OSError or HTTPException if the network fails, UserError
        for a URL that must not be asked.
        """
        check_url(url, self.plain)
        request = urllib.request.Request(url, data=data, method=method)
        for name, value in {"User-Agent": "scanwright", **(headers or {})}.items():
            request.add_header(name, value)
        if authorization is not None:
            request.add_unredirected_header("Authorization", authorization)
        try:
            answer = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    body = error.read(4096)
                except BROKEN:
                    body = b""
            raise Refused(error.code, error.headers, body) from None
        with answer:
            yield answer


def broken(where: str, error: BaseException, going_on: bool = False) -> NoReturn:
    """Raise a failure of the network as one line."""
    reason = getattr(error, "reason", error)
    text = " ".join(str(reason).split())[:200] or type(error).__name__
    what = "broke off" if going_on else "cannot be reached"
    again = "go on from the bytes that are here" if going_on else "try again"
    raise UserError(f"{where}: {what} ({text}); run the same command to {again}") from error


def refusal(where: str, error: Refused, hint: str = "") -> UserError:
    """An answer of 400 or more as one line."""
    text = " ".join(error.body.decode("utf-8", "replace").split())[:120]
    shown = f" ({text})" if text and not text.startswith("<") else ""
    what = {401: "needs credentials", 403: "refuses this user", 404: "is not there"}.get(
        error.status, "was refused"
    )
    return UserError(f"{where}: {what}: status {error.status}{shown}{hint}")


def read_all(answer: Any, where: str, limit: int = MAX_TEXT) -> bytes:
    """The body of an answer of at most `limit` bytes. Raises UserError for a larger one, or one
    that takes more than SLOW_S and comes by less than SLOW bytes a second."""
    data, began = bytearray(), time.monotonic()
    while piece := answer.read1(min(CHUNK, limit + 1 - len(data))):
        data += piece
        if len(data) > limit:
            raise UserError(f"{where}: more than {limit} bytes, expected a small file")
        if (took := time.monotonic() - began) > SLOW_S and len(data) < SLOW * took:
            raise UserError(f"{where}: {len(data)} bytes in {took:.0f} s, expected at least"
                            f" {SLOW} a second; try again later")  # fmt: skip
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return bytes(data)


Headers = Mapping[str, str]
Answer = Any  # a http.client.HTTPResponse
Opener = Callable[[Headers], contextlib.AbstractContextManager[Answer]]


def download(opener: Opener, where: str, partial: Path, size: int | None, count: Count) -> None:
    """Append to `partial` until it has `size` bytes (None: as many as the answer says).

    opener: makes the request with the headers it is given. A server that knows no ranges is read
    from the start. What arrived before a failure stays in `partial`. `count` hears how
    many bytes are there. Raises UserError.
    """
    failures, best = 0, 0
    while True:
        have = partial.stat().st_size if partial.exists() else 0
        if size is not None and have == size:
            return
        if size is not None and have > size:
            os.truncate(partial, 0)
            raise UserError(f"{where}: more than the expected {size} bytes, expected that many")
        best = max(best, have)
        try:
            size = _receive(opener, where, partial, have, size, count)
            continue
        except Refused as error:
            if error.status == 416 and have:  # the file there is shorter than what is here
                os.truncate(partial, 0)
            elif error.status < 500 and error.status != 429:
                raise refusal(where, error) from error
            failure: Exception = error
        except BROKEN as error:
            if _of_disk(error):
                raise
            failure = error
        now = partial.stat().st_size if partial.exists() else 0
        failures = 0 if now > best else failures + 1
        if failures >= TRIES:
            if isinstance(failure, Refused):
                raise refusal(where, failure, "; try again later") from failure
            broken(where, failure, going_on=best > 0)
        if failures:
            time.sleep(0.1 * 2**failures)


def _of_disk(error: BaseException) -> bool:
    """True for an error about a file here, not about the network."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    return isinstance(error, OSError) and (error.filename is not None or error.errno in full)


def _receive(
    opener: Opener, where: str, partial: Path, have: int, size: int | None, count: Count
) -> int:
    """One request from byte `have` on; the size of the whole file. Raises as `Client.open`."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with opener(headers) as answer:
        if have and answer.status != 206:
            have = 0
        length = answer.headers.get("Content-Length")
        given = int(length) if length is not None and length.isdecimal() else None
        if have:
            found = answer.headers.get("Content-Range") or ""
            if not found.startswith(f"bytes {have}-"):
                raise UserError(f"{where}: found the range {found!a}, expected bytes {have}-")
        total = size if size is not None else None if given is None else have + given
        if total is None:
            raise UserError(f"{where}: found no Content-Length, expected the size of the file")
        with partial.open("r+b" if partial.exists() else "wb") as file:
            file.truncate(have)
            file.seek(have)
            while piece := answer.read(min(CHUNK, total - have + 1)):
                file.write(piece)
                have += len(piece)
                count(have)
                if have > total:
                    break
        if have < total:
            raise http.client.IncompleteRead(b"", total - have)
    return total
