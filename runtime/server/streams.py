"""From the engine's thread to the event loop: what the choices of one request have produced.

The engine's thread only appends; it never waits for a client. The loop is woken once for a step
of the engine, whatever the number of tokens in it. What a client does not take stays here, at most
`max_tokens` pieces for a choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass

from runtime.request import Choice, Ending
from runtime.scheduler import Ticket
from runtime.server.calls import Call
from runtime.server.choice import ChoiceText, Piece
from runtime.worker import Worker


@dataclass(frozen=True)
class Event:
    """What one token of choice `index` brought, or its end. `at`: perf_counter, s.

    With `ending` comes the client's `finish_reason`, None if the choice did not come to its end.
    """

    index: int
    piece: Piece
    at: float
    ending: Ending | None = None
    finish_reason: str | None = None


class Bridge:
    """Wakes the streams that got something; `after_step` is given to the Worker."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._marked: deque[Stream] = deque()
        self._scheduled = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop that the streams live on; before the first stream."""
        self._loop = loop

    def mark(self, stream: Stream) -> None:
        """Have `stream` woken after this step. Engine's thread."""
        if not stream.marked:
            stream.marked = True
            self._marked.append(stream)

    def after_step(self) -> None:
        """Wake the loop if anything is marked. Engine's thread."""
        if self._marked and not self._scheduled and self._loop is not None:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        # In this order a mark that comes in between is seen here or schedules again.
        self._scheduled = False
        while self._marked:
            stream = self._marked.popleft()
            stream.marked = False
            stream.wake.set()


class Stream:
    """The choices of one call on the engine. All methods are for the event loop.

    `gone`: the client has closed the connection.
    """

    def __init__(self, call: Call, worker: Worker, bridge: Bridge) -> None:
        """Submits every choice. Raises what `Worker.submit` raises; then none is left behind."""
        self.gone = False
        self.marked = False
        self.wake = asyncio.Event()
        self.submitted = time.perf_counter()
        self._worker = worker
        self._events: deque[Event] = deque()
        self._tickets: dict[int, Ticket] = {}  # of the choices that have not ended
        try:
            for index, request in enumerate(call.requests):
                sink = _Sink(self, call, index, bridge)
                self._tickets[index] = worker.submit(request, sink)
        except BaseException:
            self.cancel()
            raise

    @property
    def done(self) -> bool:
        """Whether every choice has ended and its events were taken."""
        return not self._tickets

    async def wait(self) -> None:
        """Return once there may be something to take, or the client is gone."""
        await self.wake.wait()
        self.wake.clear()

    def take(self) -> list[Event]:
        """Everything there is, in the order it came."""
        events = []
        while self._events:
            events.append(self._events.popleft())
            if events[-1].ending is not None:
                del self._tickets[events[-1].index]
        return events

    def hang_up(self) -> None:
        """The client is gone: cancel every choice."""
        self.gone = True
        self.cancel("the client closed the connection")
        self.wake.set()

    def cancel(self, message: str = "cancelled") -> None:
        """Cancel every choice that has not ended."""
        for ticket in self._tickets.values():
            self._worker.cancel(ticket, message)

    def put(self, event: Event) -> None:
        """Engine's thread."""
        self._events.append(event)


class _Sink:
    """One choice, on the engine's thread."""

    def __init__(self, stream: Stream, call: Call, index: int, bridge: Bridge) -> None:
        self._stream = stream
        self._index = index
        self._bridge = bridge
        self._text = ChoiceText(call, index)
        self._live = call.stream

    def token(self, choice: Choice) -> bool:
        piece = self._text.push(choice)
        if not choice.prompt:
            self._stream.put(Event(self._index, piece, time.perf_counter()))
            if self._live and piece:
                self._bridge.mark(self._stream)
        return self._text.stopped

    def finish(self, ending: Ending) -> None:
        piece = self._text.finish(ending)
        reason = self._text.finish_reason
        self._stream.put(Event(self._index, piece, time.perf_counter(), ending, reason))
        self._bridge.mark(self._stream)
        self._bridge.after_step()  # an end may come outside of a step
