"""The overlay `cpu-trial` runs as it stands: its commands, users, volumes and names; no container engine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.manifest import manifest
from tests.k8s.kubelet import TOKEN, Cluster, can_isolate, cluster
from tests.k8s.rendering import K8S, one, render, serve_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not can_isolate(), reason="this machine lets its users have no namespaces of their own"
    ),
]
PASSWORD, KEY = "a-password", "a-key"
SECRETS = {
    "weald-redis": {"password": PASSWORD, "url": f"redis://:{PASSWORD}@redis:6379"},
    "weald-api-keys": {"keys": KEY, "scrape": KEY},
}
ASKED = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "temperature": 0,
    "max_tokens": 24,
    "weald": True,
}


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Redis, head, draft and verify pods, ready by their own probes, and Serve told as KubeRay tells it."""
    objects = render(K8S / "overlays/cpu-trial")
    with cluster(objects, SECRETS, tmp_path_factory.mktemp("pods")) as found:
        redis = found.pod("redis")
        container = redis.pods.container
        redis.start([*container["command"], *container["args"]])
        redis.wait("startupProbe")
        found.pod("otel-collector").start(["python", str(Path(__file__).with_name("collector.py"))])
        found.ray("head").wait("startupProbe")
        for kind in ("draft", "verify"):
            found.ray(kind).wait("startupProbe")
        submit(found, serve_config(objects))
        for name in ("redis", "head", "draft", "verify"):
            found.running[name].wait("readinessProbe")
            assert found.running[name].holds(found.running[name].pods.container["livenessProbe"])
        yield found


def submit(found: Cluster, config: Any) -> None:
    """Give Serve a configuration, as KubeRay does, and wait until all of it runs."""
    head = found.running["head"]
    url = f"http://{head.address}:8265/api/serve/applications/"
    curl = ["curl", "-fsS", "--noproxy", "*", "-H", f"Authorization: Bearer {TOKEN}", url]
    found.run([*curl, "-X", "PUT", "-H", "Content-Type: application/json", "-d", json.dumps(config)])
    deadline = time.monotonic() + 300
    while True:
        states = {
            name: (application["status"], application["message"])
            for name, application in json.loads(found.run(curl))["applications"].items()
        }
        if {state for state, _ in states.values()} == {"RUNNING"}:
            return
        assert "DEPLOY_FAILED" not in {state for state, _ in states.values()}, states
        assert time.monotonic() < deadline, states
        time.sleep(1)


def ask(found: Cluster, key: str | None, pod: str = "draft", **more: Any) -> tuple[int, Any]:
    """Status and answer of a chat, asked as a client of the service `weald` does."""
    service = one(found.objects, "Service", "weald")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["selector"].items() <= found.running[pod].pods.labels.items()
    url = f"http://{found.address(pod)}:{found.running[pod].port(port['targetPort'])}/v1/chat/completions"
    keyed = ["-H", f"Authorization: Bearer {key}"] if key else []
    told = found.run(
        [
            *("curl", "-sS", "--noproxy", "*", "-m", "200", "-w", "\n%{http_code}", *keyed, url),
            *("-H", "Content-Type: application/json", "-d", json.dumps(ASKED | more)),
        ]
    )
    body, _, status = told.rpartition("\n")
    return int(status), json.loads(body)


def test_the_overlay_as_it_stands_answers_with_trees_what_plain_decoding_says(trial: Cluster) -> None:
    status, answer = ask(trial, KEY)
    assert status == 200, answer
    status, plain = ask(trial, KEY, speculative=False)
    assert status == 200, plain
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 24


def test_without_a_key_nobody_is_answered(trial: Cluster) -> None:
    assert ask(trial, None)[0] == 401


def test_every_service_tells_the_collector_its_spans(trial: Cluster) -> None:
    told = trial.running["otel-collector"].log
    deadline = time.monotonic() + 30
    while {line.split()[0] for line in told.read_text().splitlines()} != {
        "weald-gateway",
        "weald-draft",
        "weald-verify",
    }:
        assert time.monotonic() < deadline, told.read_text()
        time.sleep(0.5)


def test_no_container_has_a_right_or_a_place_that_the_manifest_does_not_give(trial: Cluster) -> None:
    for pod in trial.running.values():
        status = dict(
            line.split(":\t", 1) for line in pod.run(["cat", "/proc/self/status"]).stdout.splitlines()
        )
        assert status["Uid"].split() == [str(pod.user)] * 4
        assert int(status["CapEff"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        for place in ("/", "/etc", "/usr/local", str(Path(__file__).parent)):
            assert pod.run(["touch", f"{place}/new"]).returncode != 0
    assert trial.running["draft"].run(["touch", "/tmp/new"]).returncode == 0


def test_the_status_command_in_the_head_pod_shows_all_replicas(trial: Cluster) -> None:
    told = trial.running["head"].run(["weald", "status", "--json"])
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout)["replicas"]
    assert sorted((row["role"], row["node"]) for row in rows) == [
        ("draft", "draft"),
        ("gateway", "draft"),
        ("verify", "verify"),
    ]


def test_what_a_rayservice_describes_is_changed_nowhere_else(trial: Cluster) -> None:
    told = trial.running["head"].run(["weald", "scale", "draft", "2"])
    assert told.returncode != 0
    assert "a RayService describes what runs here" in told.stderr


def replicas(found: Cluster) -> dict[str, str]:
    """Addresses of the replicas that run, by role; there is one of each."""
    told = found.running["head"].run(["weald", "status", "--json"])
    assert told.returncode == 0, told.stderr
    running = [row for row in json.loads(told.stdout)["replicas"] if row["state"] == "running"]
    return {row["role"]: row["address"] for row in running}


def test_other_numbers_replace_nobody_and_other_trees_the_draft_replica_alone(trial: Cluster) -> None:
    described = yaml.safe_load((K8S / "overlays/cpu-trial/weald.yaml").read_text())
    before = replicas(trial)
    described["draft"]["replicas"] = {"min": 1, "max": 2}
    submit(trial, yaml.safe_load(manifest(described)))
    assert replicas(trial) == before
    described["draft"] |= {"replicas": 1, "speculative_eagle_topk": 4}
    submit(trial, yaml.safe_load(manifest(described)))
    after = replicas(trial)
    assert {role for role in before if after[role] != before[role]} == {"draft"}
    assert ask(trial, KEY)[0] == 200
