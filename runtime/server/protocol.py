"""The HTTP/1.1 connection: uvicorn's, with bounds on what a client may send and how slowly.

uvicorn waits for ever for a request line, takes headers of any size, waits for ever for a reader,
answers a malformed request in plain text, and stops reading, so that it sees no disconnect, when a
second request comes before the first is answered. Here each of these has its limit, every answer
is a JSON error object, and a request that comes too early is dropped: the connection closes after
the answer before it (RFC 9112, section 9.3.2, lets a client send it again).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from runtime.server.fields import ApiError
from runtime.server.objects import encode

HEAD_BYTES = 65_536  # request line and headers together
FRAMING_BYTES = 1 << 20  # chunk sizes, extensions and trailers of one body
LINGER_S = 2.0  # how long the rest of a body is read, and dropped, after its answer


class Protocol(HttpToolsProtocol):
    """One connection. `timeout_s`: longest time to send a head, and to take nothing of an answer.

    A client over it is cut off, and its request then sees a disconnect.
    """

    timeout_s: ClassVar[float] = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._in_head = True
        self._completed = False  # a message ended in the piece that is being read
        self._started = False  # something of the next request has come
        self._framing = 0  # bytes of this request that are not its body
        self._body_bytes = 0
        self._refused = False
        self._early = False  # another request came before the answer: nothing more is taken
        self._last = False  # the client asked to close after this request
        self._lost = False

    # --- called by the transport ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm("head", self.timeout_s, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True  # from here on no timer may hold what is left of the connection
        for name in list(self._timers):
            self._disarm(name)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self._early:
            return
        before, self._started, self._completed = self._body_bytes, True, False
        super().data_received(data)
        self._framing += len(data) - (self._body_bytes - before)
        if self._completed or self._early:
            self._framing = 0
        elif self._framing > (HEAD_BYTES if self._in_head else FRAMING_BYTES):
            self._refuse(431, f"headers: found more than {HEAD_BYTES} bytes, expected fewer")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm("stall", self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm("stall")

    # --- called by the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._early, self.cycle.keep_alive = True, False
            return
        super().on_message_begin()
        if "head" not in self._timers:
            self._arm("head", self.timeout_s, self._head_late)

    def on_url(self, url: bytes) -> None:
        if not self._early:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._early:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._early:
            return
        self._in_head, self._framing = False, 0
        self._disarm("head")
        super().on_headers_complete()
        # An answer that comes before all of the body must not close at once: what is still on its
        # way would meet a closed socket, and the reset could overtake the answer.
        self._last, self.cycle.keep_alive = not self.cycle.keep_alive, True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._early:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._early:
            return
        self._in_head, self._started, self._completed = True, False, True
        self._disarm("linger")
        if self._last and self.cycle.response_complete:
            self._close()
        elif self._last:
            self.cycle.keep_alive = False
        super().on_message_complete()

    # --- called by uvicorn ---------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        if not self._early:
            self._refuse(400, "request: found malformed HTTP, expected an HTTP/1.1 request")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head:  # answered before its body had come
            self._arm("linger", LINGER_S, self._close)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    # --- ours ----------------------------------------------------------------------------------

    def _arm(self, name: str, seconds: float, action: Callable[[], object]) -> None:
        self._disarm(name)
        if not self._lost:
            self._timers[name] = self.loop.call_later(seconds, action)

    def _disarm(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _head_late(self) -> None:
        self._disarm("head")
        if self._started:
            self._refuse(408, f"request: found no complete head within {self.timeout_s:g} s")
        else:
            self._close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer is under way, and close."""
        self._refused = True
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = encode(ApiError(status, message).body())
            length = b"content-length: %d\r\n" % len(body)
            head = [STATUS_LINE[status], b"content-type: application/json\r\n", length]
            self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", body]))
        self._close()

    def _close(self) -> None:
        """Close; what the client does not take within the timeout is dropped."""
        self.transport.close()
        self._arm("close", self.timeout_s, self.transport.abort)


def bound(timeout_s: float) -> type[Protocol]:
    """The protocol with this timeout, as uvicorn's `http=` takes it."""
    return type("Protocol", (Protocol,), {"timeout_s": timeout_s})
