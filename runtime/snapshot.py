"""What an engine is doing, as plain data for metrics and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from runtime.request import REASONS, Reason

if TYPE_CHECKING:
    from runtime.scheduler import Ticket


@dataclass(frozen=True)
class SlotView:
    """One slot: `position` is the number of tokens its state has read, `tokens_per_s` the rate
    since the first generated token; `ticket` the number of its request."""

    index: int
    phase: Literal["idle", "prefill", "decode"]
    ticket: int | None = None
    position: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """All slots, the queue, and counts since the engine began; `parked` are the requests that gave
    way to others, `finished` counts by reason, `state_bytes` is the state of all slots."""

    slots: tuple[SlotView, ...]
    waiting: int
    queue_bound: int
    parked: int
    steps: int
    prefill_tokens: int
    generated_tokens: int
    submitted: int
    rejected: int
    preempted: int
    finished: dict[Reason, int]
    state_bytes: int


def slot_view(index: int, ticket: Ticket | None, now: float) -> SlotView:
    """The view of one slot."""
    if ticket is None or ticket.phase not in ("prefill", "decode"):
        return SlotView(index, "idle")
    since, generated = ticket.first_token, ticket.generated
    rate = (generated - 1) / (now - since) if since is not None and now > since else 0.0
    return SlotView(
        index, ticket.phase, ticket.id, ticket.fed, ticket.prompt_end, generated, max(0.0, rate)
    )


def take(
    holders: Sequence[Ticket | None],
    line: Sequence[Ticket],
    counts: Mapping[str, int],
    *,
    waiting: int,
    queue_bound: int,
    state_bytes: int,
    now: float,
) -> Snapshot:
    """A snapshot of `holders` by slot, the waiting `line` and the engine's counts."""
    words = (
        "steps", "prefill_tokens", "generated_tokens", "submitted", "rejected", "preempted",
    )  # fmt: skip
    return Snapshot(
        slots=tuple(slot_view(i, ticket, now) for i, ticket in enumerate(holders)),
        waiting=waiting,
        queue_bound=queue_bound,
        parked=sum(ticket.started is not None for ticket in line),
        finished={reason: counts.get(reason, 0) for reason in REASONS},
        state_bytes=state_bytes,
        **{word: counts.get(word, 0) for word in words},
    )
