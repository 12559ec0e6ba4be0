"""Which request goes next: waiting, reading its prompt, decoding, or giving way. No tensors here.

Waiting requests go by priority, then in order of arrival. A request that waits while one of a
lower priority holds a slot takes the slot of the lowest, latest one; that one waits again, in its
old place, and goes on where it was.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.errors import UserError
from runtime.request import Request, Sink
from runtime.slots import Slots

Phase = Literal["waiting", "prefill", "decode", "done"]


class QueueFull(UserError):
    """The queue of waiting requests has no room."""


@dataclass(eq=False)
class Ticket:
    """One request on its way through the engine.

    `tokens` are all ids of the sequence, of which the first `fed` are in its state and the first
    `prompt_end` were not generated here. `samples`: the sampler picks, not the device's argmax;
    `needs_row`: the logits of its row cross to the host. `work` is the prefill in progress,
    `parked` the state of a sequence that gave way; both are the engine's.
    """

    id: int
    request: Request
    sink: Sink
    submitted: float
    deadline: float | None = None
    phase: Phase = "waiting"
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    prompt_end: int = 0
    limit: int = 0
    sampler: Any = None
    samples: bool = False
    needs_row: bool = False
    work: Any = None
    parked: Any = None
    started: float | None = None
    first_token: float | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_end

    @property
    def key(self) -> tuple[int, int]:
        """Sorts tickets by who goes first."""
        return (-self.request.priority, self.id)


class Scheduler:
    """The waiting line of one set of slots."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._waiting: list[Ticket] = []
        self._oldest_first = False

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets without a slot, in the order they will get one."""
        return list(self._waiting)

    def add(self, ticket: Ticket) -> None:
        """Put a ticket into the line."""
        ticket.phase = "waiting"
        bisect.insort(self._waiting, ticket, key=lambda t: t.key)

    def remove(self, ticket: Ticket) -> None:
        """Take a waiting ticket out of the line."""
        del self._waiting[bisect.bisect_left(self._waiting, ticket.key, key=lambda t: t.key)]

    def admit(self) -> Ticket | None:
        """Give an idle slot to the first in line; None if there is no slot or no one."""
        slot = self._slots.free()
        if slot is None or not self._waiting:
            return None
        ticket = self._waiting.pop(0)
        ticket.slot = slot
        self._slots.reserve(slot, ticket)
        return ticket

    def victim(self) -> Ticket | None:
        """Who must give way to the first waiting ticket, when no slot is idle."""
        if not self._waiting or self._slots.idle:
            return None
        last = max(self._slots.held(), key=lambda t: t.key)
        return last if last.request.priority < self._waiting[0].request.priority else None

    def chunk(self) -> Ticket | None:
        """Whose prompt gets the next chunk: by turns the first in line and the one with the least
        left to read, so that short prompts pass long ones and none starves."""
        reading = [t for t in self._slots.held() if t.phase == "prefill"]
        if not reading:
            return None
        self._oldest_first = not self._oldest_first
        if self._oldest_first:
            return min(reading, key=lambda t: t.key)
        return min(reading, key=lambda t: (len(t.tokens) - t.fed, t.key))
