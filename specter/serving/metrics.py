"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specter.records import Generation

Outcome = Literal["answered", "cancelled", "refused", "failed", "busy"]
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"specter_{name}", text, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"specter_{name}_seconds", text, registry=registry, buckets=_SECONDS)

        self._requests = Counter("specter_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._cached = counter("cached_tokens", "Tokens of prompts whose KV was there")
        self._completion = counter("completion_tokens", "Tokens of answers")
        self._rounds = counter("rounds", "Rounds of draft, verification and acceptance")
        self._drafted = counter("drafted_tokens", "Tokens of the draft")
        self._accepted = counter("accepted_tokens", "Tokens of the draft that the target accepted")
        self._hits = counter("expert_hits", "Experts that were resident when needed, behind prefill")
        self._misses = counter("expert_misses", "Experts that were not, or whose copy had not ended")
        self._link = counter("link_bytes", "Bytes of experts copied, behind prefill")
        self._wait = seconds("queue", "Time in the line")
        self._time = seconds("generation", "Time on the engine")

    def watch(self, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        """Reads the number of waiting and of running requests at every scrape."""
        Gauge("specter_requests_waiting", "Requests in the line", registry=self._registry).set_function(waiting)
        Gauge("specter_requests_running", "Requests on the engine", registry=self._registry).set_function(running)

    def ended(self, outcome: Outcome) -> None:
        self._requests.labels(outcome).inc()

    def waited(self, seconds: float) -> None:
        self._wait.observe(seconds)

    def generated(self, generation: Generation, num_tokens: int, seconds: float) -> None:
        """Counts a generation whose answer has `num_tokens` tokens."""
        self._time.observe(seconds)
        self._prompt.inc(generation.prompt_len)
        self._cached.inc(generation.cached_len)
        self._completion.inc(num_tokens)
        self._rounds.inc(len(generation.rounds))
        for one in generation.rounds:
            self._drafted.inc(one.draft_len)
            self._accepted.inc(one.accepted_len)
            self._hits.inc(one.num_hits)
            self._misses.inc(one.num_late_hits + one.num_misses)
            self._link.inc(one.prefetch_bytes + one.fetch_bytes + one.writeback_bytes)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
