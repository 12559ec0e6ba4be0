"""The rows of `decode`: who holds each, and the arguments of the next step. No device here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from runtime.scheduler import Ticket


class Slots:
    """B rows. A row is idle, reserved (its holder's prompt is being read) or active.

    `tokens`, `positions`, `active` i32[B] are what the next decode step takes: the token to feed,
    its absolute position, and 1 for active rows.
    """

    def __init__(self, count: int) -> None:
        self.holders: list[Ticket | None] = [None] * count
        self.tokens: NDArray[np.int32] = np.zeros(count, np.int32)
        self.positions: NDArray[np.int32] = np.zeros(count, np.int32)
        self.active: NDArray[np.int32] = np.zeros(count, np.int32)

    def free(self) -> int | None:
        """The lowest idle row; None if all are held."""
        return self.holders.index(None) if None in self.holders else None

    @property
    def idle(self) -> int:
        """Number of idle rows."""
        return self.holders.count(None)

    def held(self) -> list[Ticket]:
        """Holders, by row."""
        return [ticket for ticket in self.holders if ticket is not None]

    def decoding(self) -> list[Ticket]:
        """Holders of active rows, by row."""
        return [t for t, on in zip(self.holders, self.active, strict=True) if t is not None and on]

    def reserve(self, slot: int, ticket: Ticket) -> None:
        """Give an idle row to `ticket`."""
        if self.holders[slot] is not None:
            raise ValueError(f"slot {slot} is held")
        self.holders[slot] = ticket

    def feed(self, slot: int, token: int, position: int) -> None:
        """Let the next step read `token` at `position` in a held row."""
        self.tokens[slot], self.positions[slot], self.active[slot] = token, position, 1

    def release(self, slot: int) -> None:
        """Make a row idle."""
        self.holders[slot] = None
        self.tokens[slot] = self.positions[slot] = self.active[slot] = 0
