"""/metrics: counters of this server and of the expert cache, in Prometheus' format."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinyserve_gguf.counters import PagerStats
from tinyserve_gguf.serve_llama import Cost
from tinyserve_gguf.stats import hit_rate

GONE = 499  # nginx's number for a client that did not wait; nobody receives it


class Metrics:
    """One registry for one server. `paging` gives the counters of the expert cache, None for a dense model; the others count requests."""

    def __init__(self, paging: Callable[[], PagerStats | None], running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._tokens = Counter("tinyserve_tokens", "Tokens computed.", ["phase"], registry=self.registry)
        self._lock = threading.Lock()
        self._n_tokens = {"prefill": 0, "decode": 0}
        self._reused = Counter("tinyserve_prompt_tokens_reused", "Prompt tokens that were in the KV cache already.", registry=self.registry)
        self._seconds = Counter("tinyserve_seconds", "Time spent computing tokens.", ["phase"], registry=self.registry)
        self._speed = Gauge("tinyserve_tokens_per_second", "Of the last reply.", ["phase"], registry=self.registry)
        self._answers = Counter("tinyserve_requests", "Answers by path and HTTP status.", ["path", "status"], registry=self.registry)
        self._errors = Counter("tinyserve_errors", "Answers that were errors, by HTTP status.", ["status"], registry=self.registry)
        self._gone = Counter("tinyserve_disconnects", "Replies that were given up because the client had gone.", registry=self.registry)
        Gauge("tinyserve_requests_running", "Replies being computed.", registry=self.registry).set_function(running)
        Gauge("tinyserve_queue_length", "Requests that wait for a context.", registry=self.registry).set_function(waiting)
        self.registry.register(_Paging(paging))

    def tokens(self) -> dict[str, int]:
        """Computed by replies that are over."""
        return dict(self._n_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def observe_answer(self, path: str, status: int) -> None:
        known = path if path.startswith("/v1/") or path in ("/health", "/metrics") else "/"
        self._answers.labels("other" if status == 404 else known, str(status)).inc()
        if status >= 400 and status != GONE:
            self._errors.labels(str(status)).inc()

    def observe_cost(self, cost: Cost) -> None:
        """Of a reply, also of one that was given up. Called from the threads that compute."""
        for phase, n, seconds in (("prefill", cost.read_tokens, cost.prefill_seconds), ("decode", cost.reply_tokens, cost.decode_seconds)):
            with self._lock:
                self._n_tokens[phase] += n
            self._tokens.labels(phase).inc(n)
            self._seconds.labels(phase).inc(seconds)
            if seconds > 0 and n > 0:
                self._speed.labels(phase).set(n / seconds)
        self._reused.inc(max(0, cost.prompt_tokens - cost.read_tokens))

    def observe_disconnect(self) -> None:
        self._gone.inc()


class _Paging(Collector):
    """The expert cache's own counters, read when they are asked for."""

    def __init__(self, paging: Callable[[], PagerStats | None]) -> None:
        self._paging = paging

    def collect(self) -> Iterator[Metric]:
        stats = self._paging()
        if stats is None:
            return
        lookups = CounterMetricFamily("tinyserve_expert_lookups", "Experts that tokens asked for.", labels=["phase", "result"])
        rates = GaugeMetricFamily("tinyserve_expert_hit_rate", "Hits over lookups, 0 to 1, since the start.", labels=["phase"])
        moved = CounterMetricFamily("tinyserve_link_bytes", "Bytes of experts over the link to the device.", labels=["phase"])
        evictions = CounterMetricFamily("tinyserve_expert_evictions", "Experts that left their slot for another.", labels=["phase"])
        for phase, counts in (("prefill", stats.prefill), ("decode", stats.decode)):
            lookups.add_metric([phase, "hit"], counts.hits)
            lookups.add_metric([phase, "miss"], counts.misses)
            if (rate := hit_rate(counts)) is not None:
                rates.add_metric([phase], rate)
            moved.add_metric([phase], counts.bytes_link)
            evictions.add_metric([phase], counts.evictions)
        slots = GaugeMetricFamily("tinyserve_expert_slots", "Slots of the expert cache.", labels=["state"])
        slots.add_metric(["total"], stats.slots_total)
        slots.add_metric(["resident"], stats.slots_used)
        yield from (lookups, rates, moved, evictions, slots)
