"""How the choices of a call go out: as one object, or as server-sent events while they come."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from runtime.request import Ending
from runtime.server import objects
from runtime.server.calls import Call
from runtime.server.choice import Piece
from runtime.server.metrics import Metrics
from runtime.server.streams import Event, Stream

KEEP_ALIVE_S = 10.0  # a comment is sent to a waiting client this often, so that no proxy gives up
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Taker:
    """Takes a stream's events and measures when its tokens came."""

    def __init__(self, stream: Stream, choices: int, metrics: Metrics) -> None:
        self._stream = stream
        self._last: list[float | None] = [None] * choices
        self._metrics = metrics

    def __call__(self) -> list[Event]:
        found = self._stream.take()
        for event in found:
            if event.ending is not None:
                continue
            last = self._last[event.index]
            if last is None:
                self._metrics.first_token.observe(event.at - self._stream.submitted)
            else:
                self._metrics.between_tokens.observe(event.at - last)
            self._last[event.index] = event.at
        return found


async def whole(call: Call, stream: Stream, take: Taker, send: Send) -> None:
    """Answer with one object. Raises ApiError if a choice did not come to its end."""
    count = len(call.requests)
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    reasons: list[str | None] = [None] * count
    endings: list[Ending] = []
    while not stream.done:
        await stream.wait()
        if stream.gone:
            return
        for event in take():
            pieces[event.index].append(event.piece)
            if event.ending is not None:
                if error := objects.ending_error(event.ending):
                    raise error
                endings.append(event.ending)
                reasons[event.index] = event.finish_reason
    answers = [objects.Answer.join(*pair) for pair in zip(pieces, reasons, strict=True)]
    body = objects.encode(objects.whole(call, answers, objects.usage(call, endings)))
    await send({"type": "http.response.start", "status": 200, "headers": _json(body)})
    await send({"type": "http.response.body", "body": body})


async def events(call: Call, stream: Stream, take: Taker, send: Send) -> None:
    """Answer with server-sent events.

    Raises ApiError if a choice fails before anything is out; later the error is an event, the last.
    """
    begun: set[int] = set()
    endings: list[Ending] = []
    opened = False
    while not stream.done:
        failure = None
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await stream.wait()
        except TimeoutError:
            out = [b": waiting\n\n"]
        else:
            if stream.gone:
                return
            out = []
            for event in take():
                if event.ending is not None:
                    endings.append(event.ending)
                    failure = failure or objects.ending_error(event.ending)
                out += [_event(item) for item in _items(call, event, begun)]
        if failure is not None and not opened:
            raise failure
        if failure is not None:
            out.append(_event(failure.body()))
        elif stream.done:
            if call.include_usage:
                out.append(_event(objects.usage_chunk(call, objects.usage(call, endings))))
            out.append(b"data: [DONE]\n\n")
        if out and not opened:
            opened = True
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        last = failure is not None or stream.done
        if out:
            await send({"type": "http.response.body", "body": b"".join(out), "more_body": not last})
        if last:
            return


def _items(call: Call, event: Event, begun: set[int]) -> list[dict[str, object]]:
    """The chunks that one event becomes."""
    items: list[dict[str, object]] = []
    if event.index not in begun:
        begun.add(event.index)
        items += objects.opening(call, event.index)
    if event.piece:
        items.append(objects.chunk(call, event.index, event.piece))
    if event.finish_reason is not None:
        items.append(objects.closing(call, event.index, event.finish_reason))
    return items


def _event(item: dict[str, object]) -> bytes:
    return b"data: " + objects.encode(item) + b"\n\n"


def _json(body: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
