"""The thread that steps an engine, for servers: submit from anywhere, drain, close."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from runtime.engine import Engine
from runtime.errors import UserError, report
from runtime.request import Request, Sink
from runtime.scheduler import Ticket
from runtime.snapshot import Snapshot


class Draining(UserError):
    """No new requests are taken any more."""


class Worker:
    """Steps `engine` on a thread of its own while there is work.

    `after_step` is called on that thread after every step: the place to wake a loop once for all
    the tokens of the step. Sinks are called there too.
    """

    def __init__(self, engine: Engine, after_step: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._after_step = after_step or (lambda: None)
        self._wake = threading.Condition()
        self._work = False  # something was submitted or cancelled since the last look
        self._busy = False
        self._draining = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def failed(self) -> str | None:
        """One line, once the device has failed; nothing runs any more then."""
        return self._engine.failed

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """See Engine.submit. Also raises Draining."""
        with self._wake:
            if self._draining:
                raise Draining("server: shutting down, no new requests; try another server")
            ticket = self._engine.submit(request, sink)
            self._notify()
        return ticket

    def cancel(self, ticket: Ticket, message: str = "cancelled") -> None:
        """See Engine.cancel."""
        with self._wake:
            self._engine.cancel(ticket, message)
            self._notify()

    def snapshot(self) -> Snapshot:
        """See Engine.snapshot."""
        return self._engine.snapshot()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait until all others have ended; False if `timeout_s` passed
        first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._wake:
            self._draining = True
            while (self._busy or self._work) and self._thread.is_alive():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._wake.wait(left if left is None else min(left, 0.5))
            return not (self._busy or self._work)

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        with self._wake:
            self._draining = self._closed = True
            self._notify()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join()

    def _notify(self) -> None:
        self._work = True
        self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._busy or self._work or self._closed):
                    self._wake.wait()
                if self._closed:
                    break
                self._busy, self._work = True, False
            self._step()
        self._end()

    def _end(self) -> None:
        self._engine.cancel_all("server: shut down")
        self._step()
        with self._wake:
            self._busy = self._work = False
            self._wake.notify_all()

    def _step(self) -> None:
        more = False
        try:
            more = self._engine.step()
        except Exception as error:  # the engine has ended every request and keeps the reason
            report(error)
        try:
            self._after_step()
        except Exception as error:
            report(error)
        with self._wake:
            self._busy = more
            if not more:
                self._wake.notify_all()
