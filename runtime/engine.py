"""Continuous batching: many requests on the slots of one module, a step at a time.

A step reads at most one chunk of one waiting prompt and then decodes one token for every active
slot, so a long prompt holds the others up for one chunk at most. The engine knows token ids and
slots; what a model is, the manifest says. State stays on the device: what crosses per token is its
id, and the row of logits if sampling needs it. Nothing here looks for a common prefix: every
request has its own state from its first token on.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from runtime import snapshot
from runtime.errors import UserError, report
from runtime.manifest import Manifest
from runtime.request import Choice, Ending, Reason, Request, Sink
from runtime.sampling import Sampler
from runtime.saved import Saved
from runtime.scheduler import QueueFull, Scheduler, Ticket
from runtime.session import Prefill, Session, cut
from runtime.slots import Slots


class Engine:
    """Requests in, tokens out. `submit`, `cancel` and `snapshot` may be called from any thread,
    `step` from one."""

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        *,
        queue: int = 256,
        chunks: Sequence[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over `session`, whose slots must be zero.

        `queue` bounds the requests that wait while all slots are held. `chunks` restricts the
        prefill sizes to some of the compiled ones. Raises UserError for others.
        """
        compiled = manifest.shape.chunks
        self._chunks = sorted(chunks or compiled)
        if odd := [size for size in self._chunks if size not in compiled]:
            raise UserError(f"chunks: found {odd[0]}, expected compiled sizes: {list(compiled)}")
        self.manifest = manifest
        self.failed: str | None = None
        self._session = session
        self._slots = Slots(session.slots)
        self._scheduler = Scheduler(self._slots)
        self._queue = queue
        self._clock = clock
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards the inbox, the number that wait, and `failed`
        self._inbox: deque[Ticket] = deque()
        self._waiting = 0  # never begun: in the inbox or in line
        self._cancels: deque[tuple[Ticket, str]] = deque()
        self._timed: list[Ticket] = []
        self._counts: Counter[str] = Counter()
        self._ends = frozenset(manifest.model.eos_token_ids)

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request; `sink` gets its tokens and, in the end, `finish`.

        Raises UserError (this model cannot run it, or the device has failed) and QueueFull; the
        sink is then not called.
        """
        request.check(self.manifest)
        now = self._clock()
        with self._lock:
            if self.failed is not None:
                raise UserError(self.failed)
            if self._waiting >= self._queue + self._slots.idle:
                self._counts["rejected"] += 1
                raise QueueFull(
                    f"queue: {self._waiting} requests wait, expected at most {self._queue}; try"
                    " again later"
                )
            ticket = Ticket(next(self._ids), request, sink, now)
            if request.deadline_s is not None:
                ticket.deadline = now + request.deadline_s
            self._waiting += 1
            self._counts["submitted"] += 1
            self._inbox.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket, message: str = "cancelled") -> None:
        """End a request with reason `cancelled` at the next step, wherever it is; a finished one
        stays as it is."""
        self._cancels.append((ticket, message))

    def cancel_all(self, message: str) -> None:
        """Cancel everything that was submitted; call it on the thread that steps."""
        for ticket in self._everyone():
            self.cancel(ticket, message)

    def step(self) -> bool:
        """Do at most one prefill chunk and one decode step; False when nothing is left to do.

        Raises what the device raised; every request has then ended with reason `error`.
        """
        try:
            self._collect()
            self._admit()
            self._prefill()
            self._decode()
        except Exception as error:
            self._fail(error)
            raise
        self._counts["steps"] += 1
        return bool(self._inbox or self._cancels or self._scheduler.waiting or self._slots.held())

    def snapshot(self) -> snapshot.Snapshot:
        """What the slots and the queue are doing."""
        return snapshot.take(
            self._slots.holders,
            self._scheduler.waiting,
            self._counts,
            waiting=self._waiting,
            queue_bound=self._queue,
            state_bytes=self.manifest.state_bytes_per_slot * self._session.slots,
            now=self._clock(),
        )

    def _collect(self) -> None:
        """Take in what was submitted or cancelled, and what has run out of time."""
        cancels = len(self._cancels)  # of tickets that are no longer in the inbox below
        while self._inbox:
            ticket = self._inbox.popleft()
            self._scheduler.add(ticket)
            if ticket.deadline is not None:
                self._timed.append(ticket)
        for _ in range(cancels):
            ticket, message = self._cancels.popleft()
            self._retire(ticket, "cancelled", message)
        if not self._timed:
            return
        now = self._clock()
        for ticket in self._timed:
            if ticket.deadline is not None and ticket.deadline <= now:
                message = f"deadline: {ticket.request.deadline_s:g} s have passed"
                self._retire(ticket, "deadline", message)
        self._timed = [ticket for ticket in self._timed if ticket.phase != "done"]

    def _admit(self) -> None:
        """Give idle slots to the first in line; for a higher priority, the lowest gives way."""
        while True:
            if (victim := self._scheduler.victim()) is not None:
                self._park(victim)
            ticket = self._scheduler.admit()
            if ticket is None:
                return
            if ticket.started is None:
                self._begin(ticket)
            self._go_on(ticket)

    def _begin(self, ticket: Ticket) -> None:
        """Fill in what a sequence needs from its request and the conversation it continues."""
        request, saved = ticket.request, ticket.request.saved
        with self._lock:
            self._waiting -= 1
        ticket.started = self._clock()
        ticket.tokens = [*(saved.tokens if saved else ()), *request.prompt]
        ticket.prompt_end = len(ticket.tokens)
        ticket.limit = request.limit(self.manifest)
        ticket.sampler = _sampler(request)
        ticket.samples = request.sampling.needs_logits
        ticket.needs_row = ticket.samples or request.logits or request.score_prompt
        state = None
        if saved is not None:
            ticket.fed = saved.fed
            state = [self._session.device.to_device(a) for a in saved.arrays(self.manifest)]
        unread = ticket.tokens[ticket.fed :]
        generated = saved is not None and saved.fed >= saved.prompt_tokens
        if generated and not request.prompt and len(unread) == 1:
            ticket.parked = state  # goes on as if it had never stopped
        elif not request.score_prompt:
            pieces = cut(ticket.fed, len(unread), self._chunks)
            ticket.work = self._session.start(unread, ticket.fed, state, pieces)

    def _go_on(self, ticket: Ticket) -> None:
        """Resume a ticket that has just got a slot, whose state is zero."""
        if ticket.work is not None:
            ticket.phase = "prefill"
        elif ticket.parked is not None and ticket.limit < 1 and not ticket.request.score_prompt:
            self._retire(ticket, "length")
        elif ticket.parked is not None:
            state, ticket.parked = ticket.parked, None
            self._feed(ticket, state)
        else:
            self._score(ticket, None)

    def _prefill(self) -> None:
        """Read one chunk of one prompt."""
        ticket = self._scheduler.chunk()
        if ticket is None:
            return
        work: Prefill = ticket.work
        finished = work.step()
        self._counts["prefill_tokens"] += work.position - ticket.fed
        ticket.fed = work.position
        if not finished:
            return
        if ticket.limit < 1:
            self._retire(ticket, "length")
            return
        device = self._session.device
        row = device.rows(work.logits, [0])[0] if ticket.needs_row else None
        ids = None if ticket.samples else device.to_host(work.argmax)
        if self._choose(ticket, row, ids, 0):
            ticket.work = None
            self._feed(ticket, work.take())

    def _decode(self) -> None:
        """Decode one token for every active slot."""
        tickets, slots = self._slots.decoding(), self._slots
        if not tickets:
            return
        logits, argmax = self._session.decode(slots.tokens, slots.positions, slots.active)
        device = self._session.device
        wanted = [_slot(ticket) for ticket in tickets if ticket.needs_row]
        rows = dict(zip(wanted, device.rows(logits, wanted), strict=True)) if wanted else {}
        ids = None if all(ticket.samples for ticket in tickets) else device.to_host(argmax)
        for ticket in tickets:
            slot = _slot(ticket)
            ticket.fed += 1
            self._counts["prefill_tokens"] += ticket.fed <= ticket.prompt_end
            if ticket.fed < ticket.prompt_end:
                self._score(ticket, rows[slot])
            elif self._choose(ticket, rows.get(slot), ids, slot):
                self._feed(ticket)

    def _choose(self, ticket: Ticket, row: Any, ids: Any, at: int) -> bool:
        """Pick the next token, from `row` or as `ids[at]`, and pass it on; whether to go on."""
        request = ticket.request
        try:
            token = ticket.sampler.sample(row) if ticket.samples else _greedy(int(ids[at]))
            ticket.tokens.append(token)
            self._counts["generated_tokens"] += 1
            if ticket.first_token is None:
                ticket.first_token = self._clock()
            eos = token in self._ends and not request.ignore_eos
            shown = row.copy() if request.logits else None  # the row itself is the device's
            stop = ticket.sink.token(Choice(token, shown, eos))
        except Exception as error:  # of this request alone: logits that are NaN, a sink that fails
            return self._retire(ticket, "error", _line(error))
        if eos or stop:
            return self._retire(ticket, "stop")
        if ticket.generated >= ticket.limit:
            return self._retire(ticket, "length")
        return True

    def _score(self, ticket: Ticket, row: Any) -> None:
        """Report the prompt token that is to be read next, with the row that predicts it."""
        last = ticket.fed + 1 == ticket.prompt_end and ticket.limit < 1
        shown = None if row is None else row.copy()
        try:
            stop = ticket.sink.token(Choice(ticket.tokens[ticket.fed], shown, prompt=True))
        except Exception as error:
            self._retire(ticket, "error", _line(error))
            return
        if stop or last:
            self._retire(ticket, "stop" if stop else "length")
        else:
            self._feed(ticket)

    def _feed(self, ticket: Ticket, state: list[Any] | None = None) -> None:
        """Let the next step read a ticket's next token, after putting `state` into its slot."""
        slot = _slot(ticket)
        if state is not None:
            self._session.seed(slot, state)
        ticket.phase = "decode"
        self._slots.feed(slot, ticket.tokens[ticket.fed], ticket.fed)

    def _park(self, ticket: Ticket) -> None:
        """Take a ticket out of its slot and put it back into the line with its state."""
        if ticket.phase == "decode":
            ticket.parked = self._session.extract(_slot(ticket))
        self._vacate(ticket)
        self._counts["preempted"] += 1
        self._scheduler.add(ticket)

    def _vacate(self, ticket: Ticket) -> None:
        """Leave the slot zero and idle."""
        slot = _slot(ticket)
        if ticket.phase == "decode":
            self._session.reset(slot)
        self._slots.release(slot)
        ticket.slot = None

    def _retire(self, ticket: Ticket, reason: Reason, message: str = "") -> bool:
        """End a ticket wherever it is; always False."""
        if ticket.phase == "done":
            return False
        saved = self._saved(ticket) if ticket.request.keep else None
        if ticket.slot is not None:
            self._vacate(ticket)
        else:
            self._scheduler.remove(ticket)
        self._end(ticket, reason, message, saved)
        return False

    def _end(
        self, ticket: Ticket, reason: Reason, message: str, saved: Saved | None = None
    ) -> None:
        """Tell the sink, once, and forget what the ticket held."""
        if ticket.started is None:
            with self._lock:
                self._waiting -= 1
        ticket.phase, ticket.work, ticket.parked = "done", None, None
        self._counts[reason] += 1
        ending = Ending(
            reason=reason,
            message=message,
            prompt_tokens=min(ticket.fed, ticket.prompt_end) if ticket.started else 0,
            generated=ticket.generated,
            submitted=ticket.submitted,
            started=ticket.started,
            first_token=ticket.first_token,
            ended=self._clock(),
            saved=saved,
        )
        try:
            ticket.sink.finish(ending)
        except Exception as error:  # the sink's own fault; the others go on
            report(UserError(f"request {ticket.id}: its sink failed: {_line(error)}"))

    def _saved(self, ticket: Ticket) -> Saved | None:
        """A host copy of a ticket's state; None if it has not read a token."""
        if ticket.phase == "decode":
            buffers = self._session.extract(_slot(ticket))
        elif ticket.parked is not None:
            buffers = ticket.parked
        elif ticket.work is not None and ticket.fed:
            buffers = ticket.work.take()
        else:
            return None
        to_host, specs = self._session.device.to_host, self.manifest.state
        state = {s.name: to_host(buffer) for s, buffer in zip(specs, buffers, strict=True)}
        before, given = ticket.request.saved, ticket.prompt_end
        if before is not None and not ticket.request.prompt:
            given = before.prompt_tokens
        return Saved(
            bundle=self.manifest.digest,
            tokens=tuple(ticket.tokens),
            prompt_tokens=given,
            fed=ticket.fed,
            seed=ticket.sampler.seed,
            draws=ticket.sampler.draws,
            state=state,
        )

    def _fail(self, error: Exception) -> None:
        """End everything: what the device held is lost."""
        message = f"engine: stopped, {_line(error)}"
        with self._lock:
            self.failed = message
        every = self._everyone()
        self._inbox.clear()
        for ticket in every:
            self._end(ticket, "error", message)
        for slot, ticket in enumerate(self._slots.holders):
            if ticket is not None:
                self._slots.release(slot)
        for ticket in self._scheduler.waiting:
            self._scheduler.remove(ticket)

    def _everyone(self) -> list[Ticket]:
        return [*self._inbox, *self._scheduler.waiting, *self._slots.held()]


def _slot(ticket: Ticket) -> int:
    assert ticket.slot is not None
    return ticket.slot


def _greedy(token: int) -> int:
    if token < 0:
        raise UserError(
            "logits: found none that is finite and largest, expected numbers; the module is wrong"
            " on this device: run scanwright verify on the bundle"
        )
    return token


def _line(error: Exception) -> str:
    """What a client may read of an error; a defect's own words go to stderr."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    report(error)
    return f"unexpected {type(error).__name__}; its message is in the log (stderr)"


def _sampler(request: Request) -> Sampler:
    """The request's sampler. One that goes on without a new prompt, and with the same seed or
    none, goes on with the random stream where it stood."""
    params, saved = request.sampling, request.saved
    if saved is None:
        return Sampler(params, request.prompt)
    if request.prompt:
        return Sampler(params, (*saved.tokens, *request.prompt))
    same = params.seed in (None, saved.seed)
    return Sampler(
        dataclasses.replace(params, seed=saved.seed) if same else params,
        saved.tokens[: saved.prompt_tokens],
        saved.tokens[saved.prompt_tokens :],
        saved.draws if same else 0,
    )
