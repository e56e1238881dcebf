"""The metrics of a server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sheepop.generate.request import Request
from sheepop.generate.scheduler import Scheduler
from sheepop.serve.served_model import ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters and times of requests; the state of the engines is read when the metrics are."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        own = self._registry = CollectorRegistry()
        self.requests = Counter(
            "sheepop_requests", "Requests by endpoint and status.", ["path", "status"], registry=own
        )
        self.prompt_tokens = Counter("sheepop_prompt_tokens", "Prompt tokens.", ["model"], registry=own)
        self.cached_tokens = Counter("sheepop_cached_tokens", "Prompt tokens from the cache.", ["model"], registry=own)
        self.queued = Histogram(
            "sheepop_queue_seconds", "From a request to its first step.", ["model"], buckets=_SECONDS, registry=own
        )
        self.completion_tokens = Counter("sheepop_completion_tokens", "Generated tokens.", ["model"], registry=own)
        self.first_token = Histogram(
            "sheepop_time_to_first_token_seconds", "From a request to its first token.", ["model"], buckets=_SECONDS,
            registry=own,
        )  # fmt: skip
        self.per_token = Histogram(
            "sheepop_time_per_token_seconds", "Between two tokens of a text.", ["model"], buckets=_SECONDS, registry=own
        )
        self.duration = Histogram(
            "sheepop_request_seconds", "From a request to its end.", ["path"], buckets=_SECONDS, registry=own
        )
        self.unrecorded = Counter(
            "sheepop_unrecorded", "Answers and votes that could not be written to the log.", registry=own
        )
        self.open = Gauge("sheepop_open_connections", "Requests whose answers are not complete.", registry=own)
        self._registry.register(_Engines(models))

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Engines(Collector):
    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yields the current gauges of the engines."""
        schedulers = {each.name: each.worker.scheduler for each in self._models() if each.base is None}
        preemptions = CounterMetricFamily(
            "sheepop_preemptions", "Requests that gave their cache to others.", labels=["model"]
        )
        for model, scheduler in schedulers.items():
            preemptions.add_metric([model], scheduler.num_preemptions)
        yield preemptions
        gauges: dict[str, tuple[str, Callable[[Scheduler[Request]], float]]] = {
            "sheepop_running_requests": ("Running requests.", lambda scheduler: len(scheduler.running)),
            "sheepop_waiting_requests": ("Waiting requests.", lambda scheduler: len(scheduler.waiting)),
            "sheepop_cache_use": ("Share of the cache that running requests use.", _cache_use),
        }
        for name, (meaning, value) in gauges.items():
            family = GaugeMetricFamily(name, meaning, labels=["model"])
            for model, scheduler in schedulers.items():
                family.add_metric([model], value(scheduler))
            yield family


def _cache_use(scheduler: Scheduler[Request]) -> float:
    """The share of the cache's blocks that running requests use, in the fullest kind."""
    free, counts = scheduler.manager.num_free, scheduler.manager.num_blocks
    return 1 - min(unused / count for unused, count in zip(free, counts, strict=True))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Returns the families as they are."""
        return self._families


def merged(front: bytes, replicas: Mapping[str, bytes]) -> bytes:
    """Merges the metrics of a front, about requests, with those of its replicas, about models."""
    families = {family.name: family for family in text_string_to_metric_families(front.decode())}
    for replica, text in replicas.items():
        for family in text_string_to_metric_families(text.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            of_models = [sample for sample in family.samples if "model" in sample.labels]
            known.samples += [sample._replace(labels={**sample.labels, "replica": replica}) for sample in of_models]
    running = GaugeMetricFamily("sheepop_replicas", "Replicas that answer.", value=len(replicas))
    registry = CollectorRegistry()
    registry.register(_Families([*families.values(), running]))
    return generate_latest(registry)


class Timing:
    """Times the tokens of a request."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._first, self._next = metrics.first_token.labels(model), metrics.per_token.labels(model)
        self._started = time.monotonic()
        self._last: float | None = None

    def token(self) -> None:
        """Records the arrival of a token, or of several from one step."""
        now = time.monotonic()
        if self._last is None:
            self._first.observe(now - self._started)
        else:
            self._next.observe(now - self._last)
        self._last = now
