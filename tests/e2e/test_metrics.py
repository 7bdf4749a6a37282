"""What Prometheus can scrape of real processes, and that dashboard and alerts ask for nothing else."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.bench.replicas import replica
from services.sessions.embedded import embedded

pytestmark = pytest.mark.slow
OBSERVABILITY = Path(__file__).parents[2] / "k8s" / "components" / "monitoring"


@pytest.fixture(scope="module")
def scraped(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, float]]]:
    """Values by name and labels, of a gateway, a draft and a verify replica after some answers."""
    with embedded(tmp_path_factory.mktemp("store")) as redis:
        told = "--store", redis.file.as_uri(), "--metrics-port", 0
        with (
            replica(*tiny.verify, *told),
            replica(*tiny.draft(), *told),
            replica(*tiny.gateway(), *told[:2]) as gateway,
        ):
            until_ready(gateway.address)
            for temperature in (0, 1):
                body = {"model": "tiny", "prompt": [1, 5, 3, 8], "max_tokens": 60, "ignore_eos": True}
                answer = httpx.post(
                    f"http://{gateway.address}/v1/completions",
                    json=body | {"temperature": temperature, "seed": 3},
                    timeout=60,
                )
                assert answer.status_code == 200, answer.text
            found = httpx.get(f"http://{gateway.address}/metrics/targets").json()
            targets = {one["labels"]["service"]: one["targets"] for one in found}
            assert len(found) == 2
            addresses = {"gateway": gateway.address, **{name: t for name, (t,) in targets.items()}}
            yield {
                name.removeprefix("weald-"): values(f"http://{address}/metrics")
                for name, address in addresses.items()
            }


def until_ready(address: str) -> None:
    """Wait for replicas to find each other."""
    deadline = time.monotonic() + 30
    while httpx.get(f"http://{address}/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def values(url: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(httpx.get(url).text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_gateway_and_verify_replica_count_the_same_rounds(scraped: dict[str, dict[str, float]]) -> None:
    gateway, verify = scraped["gateway"], scraped["verify"]
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        metric = f"weald_spec_decode_num_{name}_total"
        assert gateway[metric] == verify[metric] > 0
    depths = [value for name, value in verify.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(depths) == verify["weald_spec_decode_num_accepted_tokens_total"]
    assert depths == sorted(depths, reverse=True)


def test_replicas_tell_what_they_are_busy_with(scraped: dict[str, dict[str, float]]) -> None:
    verify, draft = scraped["verify"], scraped["draft"]
    assert verify["weald_num_sessions_running"] == draft["weald_num_sessions_running"] == 0
    assert 0 < verify["weald_forward_time_seconds_total"] < verify["weald_step_time_seconds_total"]
    assert 0 <= verify["weald_kv_cache_usage_perc"] < 1
    assert verify["weald_step_cost_seconds{tokens=1}"] > 0
    assert draft["weald_verifiers_connected"] == 1
    assert draft["weald_trees_drafted_total"] > draft["weald_trees_coupled_total"] > 0
    assert 0 < draft["weald_calibration_error{band=greedy}"] < 1
    assert draft["weald_nodes_decided_total"] > 0


@pytest.mark.parametrize("file", ["dashboard.json", "alerts.yaml"])
def test_every_metric_that_is_asked_for_exists(file: str, scraped: dict[str, dict[str, float]]) -> None:
    told = {re.split(r"[{]", name)[0] for of in scraped.values() for name in of}
    asked = set(re.findall(r"weald_[a-z0-9_]+", (OBSERVABILITY / file).read_text()))
    assert len(asked) > 5
    assert asked - told == set()
