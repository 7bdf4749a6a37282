"""What Prometheus scrapes of a draft or verify replica, read from its counters when it asks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from services.telemetry.names import Metric
from services.types.configuration import Place
from services.types.errors import invalid

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Reading(NamedTuple):
    """A value of a metric now."""

    metric: Metric
    value: float
    labels: Mapping[str, str] = {}


@contextmanager
def scraped(place: Place, read: Callable[[], Iterable[Reading]]) -> Iterator[str]:
    """Answer `GET /metrics` as long as the context lasts; host:port where, empty if nowhere.

    Args:
        place: of the replica.
        read: called, in a thread of its own, whenever somebody asks.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    if place.metrics_port is None:
        yield ""
        return
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector(read))  # type: ignore[arg-type]
    with exposed(place, place.metrics_port, registry) as address:
        yield address


@contextmanager
def exposed(place: Place, port: int, registry: "CollectorRegistry") -> Iterator[str]:
    """Answer `GET /metrics` with what a registry collects, as long as the context lasts; host:port where.

    Args:
        place: of the process.
        port: 0 takes a free one.
        registry: asked in a thread of its own.

    Raises:
        WealdError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    from prometheus_client import start_http_server

    host = place.host
    try:
        server, thread = start_http_server(port, host.strip("[]"), registry)
    except OSError as error:
        raise invalid(f"cannot listen at {host}:{port}: {error}; choose another --metrics-port") from error
    try:
        yield place.metrics(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    """Families of the readings, in prometheus_client's terms."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> Iterable[object]:
        """Nothing: what there is depends on what has happened."""
        return ()

    def collect(self) -> Iterator[object]:
        """All metrics, each with the values of all its labels."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric, value, labels in self._read():
            if metric.name not in families:
                kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
                families[metric.name] = kind(metric.name, metric.what, labels=metric.labels)
            families[metric.name].add_metric([labels[name] for name in metric.labels], value)
        yield from families.values()
