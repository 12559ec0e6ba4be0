"""Random requests, alone and in company: what `scanwright selftest` and the tests run.

In company, arrivals are staggered, slots recycled, long prompts read beside short ones, requests
cancelled, preempted, saved to a file and restored, and idle slots are full of NaN.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime import saved as conversations
from runtime.engine import Engine
from runtime.hal import DTYPES, Buffer
from runtime.manifest import Manifest
from runtime.request import Choice, Ending, Request
from runtime.sampling import SamplingParams
from runtime.scheduler import Ticket
from runtime.session import Session

_SAMPLE = 256  # values of a row that are kept


@dataclass(frozen=True)
class Print:
    """A row of logits f32[V] in short: digest of its bytes, evenly spaced values, scale."""

    digest: bytes
    sample: NDArray[np.float32]
    scale: float

    @classmethod
    def of(cls, row: NDArray[np.float32]) -> Print:
        """Of one row."""
        digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        sample = row[:: max(1, row.size // _SAMPLE)].copy()
        return cls(digest, sample, float(np.max(np.abs(row))))

    def distance(self, other: Print) -> float:
        """Largest difference of the sampled values, relative to the row's scale."""
        gap = float(np.max(np.abs(self.sample - other.sample)))
        return gap / max(self.scale, 1e-30)


@dataclass(eq=False)
class Run:
    """The sink of one request: its tokens and, for each, the slot and what its row looked like.

    The first row is the prefill's, which knows no slot: -1.
    """

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    prints: list[Print] = field(default_factory=list)
    ending: Ending | None = None
    ticket: Ticket | None = None

    def token(self, choice: Choice) -> bool:
        """See Sink.token."""
        assert choice.logits is not None and self.ticket is not None
        prefill = self.ticket.phase == "prefill"
        self.slots.append(-1 if prefill or self.ticket.slot is None else self.ticket.slot)
        self.tokens.append(choice.token)
        self.prints.append(Print.of(choice.logits))
        return False

    def finish(self, ending: Ending) -> None:
        """See Sink.finish."""
        self.ending = ending


@dataclass(frozen=True)
class Plan:
    """One request in company: the step it comes at, which of the requests it is (None: one that
    is cancelled), how many steps later it is cancelled, after how many tokens it is saved and
    restored (None: not)."""

    request: Request
    arrival: int
    index: int | None
    cancel_after: int | None = None
    split: int | None = None


def requests(manifest: Manifest, count: int, seed: int) -> list[Request]:
    """Random requests that this model can run: one-token prompts, prompts around and over every
    chunk size, greedy and sampled, 1 to 48 tokens."""
    rng = np.random.default_rng([seed, 1])
    largest = manifest.shape.chunks[-1]
    context = manifest.shape.context or (1 << 30)
    lengths = sorted({1, 2, *(p + d for p in manifest.shape.chunks for d in (-1, 0, 1))} - {0})
    lengths += [2 * largest + 3]
    found = []
    for i in range(count):
        pick = int(rng.choice(lengths)) if i % 2 else int(rng.integers(1, largest + 2))
        length, wanted = min(pick, max(1, context // 2)), int(rng.integers(1, 49))
        sampling = SamplingParams()
        if i % 3:
            sampling = SamplingParams(
                temperature=float(rng.uniform(0.5, 1.5)),
                top_k=int(rng.choice([0, 20])),
                top_p=float(rng.choice([1.0, 0.9])),
                seed=int(rng.integers(0, 1 << 31)),
            )
        prompt = tuple(map(int, rng.integers(0, manifest.model.vocab_size, length)))
        found.append(Request(prompt, wanted, sampling, ignore_eos=bool(i % 4), logits=True))
    return found


def alone(session: Session, manifest: Manifest, request: Request) -> Run:
    """Run one request with nothing else on `session`, whose slots must be zero."""
    run = Run()
    engine = Engine(session, manifest)
    run.ticket = engine.submit(request, run)
    while engine.step():
        pass
    return run


def plans(every: Sequence[Request], seed: int) -> list[Plan]:
    """The same requests in company, in order of arrival: random arrivals and priorities, some
    saved and restored, and beside them a quarter as many that are cancelled on the way."""
    rng = np.random.default_rng([seed, 2])
    found = []
    for index, request in enumerate(every):
        split = None
        if request.max_tokens > 2 and rng.random() < 0.2:
            split = int(rng.integers(1, request.max_tokens))
        priority = int(rng.choice([0, 0, 0, 1, 2]))
        arrival = int(rng.integers(0, 2 * len(every)))
        found.append(Plan(replace(request, priority=priority), arrival, index, split=split))
    for pick in rng.integers(0, len(every), len(every) // 4):
        noise = replace(every[pick], priority=int(rng.choice([0, 1])))
        arrival = int(rng.integers(0, 2 * len(every)))
        found.append(Plan(noise, arrival, None, cancel_after=int(rng.integers(0, 12))))
    return sorted(found, key=lambda plan: plan.arrival)


class Company:
    """Runs plans together on one engine. `events` counts what happened on the way."""

    def __init__(self, session: Session, manifest: Manifest, files: Path, queue: int) -> None:
        """`files` is a directory for saved conversations; `queue` bounds those that wait."""
        self.engine = Engine(session, manifest, queue=queue)
        self.events: Counter[str] = Counter()
        self._session = session
        self._manifest = manifest
        self._files = files
        self._step = 0
        self._open: list[tuple[Plan, Run]] = []

    def run(self, every: Sequence[Plan], poison: bool = True) -> dict[int, Run]:
        """Run all plans to their end: the runs of those with an index, by it.

        With `poison`, idle slots are filled with NaN over and over.
        """
        left, runs = list(every), {}
        while left or self._open:
            if poison and self._step % 8 == 0:
                self._poison()
            while left and left[0].arrival <= self._step:
                plan = left.pop(0)
                run = self._submit(plan, plan.request)
                if plan.index is not None:
                    runs[plan.index] = run
            for plan, run in self._open:
                if plan.cancel_after is not None and run.ticket is not None:
                    if self._step >= plan.arrival + plan.cancel_after:
                        self.engine.cancel(run.ticket)
            self.engine.step()
            self._step += 1
            self._look()
        self.events["preempted"] = self.engine.snapshot().preempted
        return runs

    def _submit(self, plan: Plan, request: Request, run: Run | None = None) -> Run:
        run = run or Run()
        if plan.split is not None:
            request = replace(request, max_tokens=plan.split, keep=True)
        run.ending = None
        run.ticket = self.engine.submit(request, run)
        self._open.append((plan, run))
        return run

    def _poison(self) -> None:
        idle = [view.index for view in self.engine.snapshot().slots if view.phase == "idle"]
        for slot in idle:
            self._session.seed(slot, poisoned(self._session, self._manifest))
        self.events["poisoned"] += len(idle)

    def _look(self) -> None:
        """Count what is going on, restore what was saved, forget what has ended."""
        busy = [view.phase for view in self.engine.snapshot().slots]
        self.events["steps"] += 1
        self.events["steps with every slot decoding"] += all(p == "decode" for p in busy)
        self.events["steps with prefill beside decode"] += {"prefill", "decode"} <= set(busy)
        for plan, run in [pair for pair in self._open if pair[1].ending is not None]:
            self._open.remove((plan, run))
            assert run.ending is not None
            whole = len(run.tokens) == plan.request.limit(self._manifest)
            if run.ending.saved is not None and run.ending.reason == "length" and not whole:
                self._restore(plan, run, run.ending.saved)
            else:
                self.events[run.ending.reason] += 1

    def _restore(self, plan: Plan, run: Run, saved: conversations.Saved) -> None:
        """Send a conversation through a file and let it go on."""
        path = self._files / "conversation"
        conversations.save(saved, self._manifest, path)
        request = replace(
            plan.request,
            prompt=(),
            max_tokens=plan.request.max_tokens - len(run.tokens),
            saved=conversations.load(path, self._manifest),
        )
        self._submit(replace(plan, split=None), request, run)
        self.events["saved and restored"] += 1


def poisoned(session: Session, manifest: Manifest) -> list[Buffer]:
    """State of one slot with every float a NaN and every integer its type's largest."""
    found = []
    for spec in manifest.state:
        kind = DTYPES[spec.dtype]
        worst = np.iinfo(kind).max if kind.kind == "i" else np.nan
        found.append(session.device.to_device(np.full(spec.shape, worst, kind)))
    return found
