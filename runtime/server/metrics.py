"""What /metrics says, in the Prometheus text format.

What the engine counts is read from its snapshot at each scrape, so nothing is counted twice; the
rest is counted on the event loop, never on the engine's thread.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from runtime.request import REASONS
from runtime.server.model import Model
from runtime.snapshot import Snapshot

PHASES = ("idle", "prefill", "decode")
_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_BETWEEN = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2,
            0.5, 1)  # fmt: skip
_WHOLE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms of one server, in a registry of their own."""

    def __init__(self, model: Model, snapshot: Callable[[], Snapshot]) -> None:
        prometheus_client.disable_created_metrics()
        registry = self.registry = CollectorRegistry()
        ProcessCollector(namespace="scanwright", registry=registry)
        registry.register(_Engine(model, snapshot))
        self.answers = Counter(
            "scanwright_http_requests_total",
            "HTTP requests answered, by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.rejected = Counter(
            "scanwright_rejected_requests_total",
            "Requests refused with 503, by reason: queue_full, draining, failed",
            ["reason"],
            registry=registry,
        )
        self.disconnects = Counter(
            "scanwright_disconnected_requests_total",
            "Requests whose client went away before the end",
            registry=registry,
        )
        self.first_token = Histogram(
            "scanwright_time_to_first_token_seconds",
            "From submission to the first token of a sequence, waiting included",
            buckets=_FIRST,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "scanwright_inter_token_seconds",
            "Between two tokens of a sequence",
            buckets=_BETWEEN,
            registry=registry,
        )
        self.latency = Histogram(
            "scanwright_request_seconds",
            "From the start of a request to the end of its answer, by endpoint",
            ["endpoint"],
            buckets=_WHOLE,
            registry=registry,
        )
        for reason in ("queue_full", "draining", "failed"):
            self.rejected.labels(reason)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) for an Accept header."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class _Engine(Collector):
    def __init__(self, model: Model, snapshot: Callable[[], Snapshot]) -> None:
        self._model = model
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        manifest = self._model.manifest
        info = GaugeMetricFamily(
            "scanwright_model_info",
            "The bundle that is served; always 1",
            labels=["model", "family", "target", "shape"],
        )
        words = (self._model.name, manifest.model.family, manifest.target.name, manifest.shape.name)
        info.add_metric(words, 1)
        yield info
        slots = GaugeMetricFamily("scanwright_slots", "Slots, by phase", labels=["phase"])
        phases = Tally(slot.phase for slot in now.slots)
        for phase in PHASES:
            slots.add_metric([phase], phases[phase])
        yield slots
        gauges = (
            ("queue_requests", "Sequences that wait for a slot", now.waiting),
            ("queue_limit_requests", "Sequences that may wait for a slot", now.queue_bound),
            ("parked_requests", "Sequences that gave up their slot and wait", now.parked),
            ("state_bytes", "State of all slots", now.state_bytes),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(f"scanwright_{name}", about, value=value)
        counters = (
            ("steps", "Engine steps", now.steps),
            ("prompt_tokens", "Prompt tokens read", now.prefill_tokens),
            ("generated_tokens", "Tokens generated", now.generated_tokens),
            ("submitted_sequences", "Sequences submitted", now.submitted),
            ("preempted_sequences", "Times that a sequence gave up its slot", now.preempted),
            ("rejected_sequences", "Sequences refused because the queue was full", now.rejected),
        )
        for name, about, value in counters:
            yield CounterMetricFamily(f"scanwright_{name}_total", about, value=value)
        finished = CounterMetricFamily(
            "scanwright_finished_sequences_total", "Sequences ended, by reason", labels=["reason"]
        )
        for reason in REASONS:
            finished.add_metric([reason], now.finished[reason])
        yield finished
