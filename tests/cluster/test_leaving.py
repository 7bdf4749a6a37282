"""Nodes that are left, gateways asked one by one, and mutual TLS between replicas, on a Ray of four nodes."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from services.sessions.opening import opened
from services.types.replica import ReplicaKind

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
COMMAND = (sys.executable, "-c", "from cluster.command import main; main()")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`tls` of a description: one certificate for all replicas."""
    directory: Path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("weald")
    issued.private_key_pem.write_to_path(directory / "tls.key")
    issued.cert_chain_pems[0].write_to_path(directory / "tls.crt")
    authority.cert_pem.write_to_path(directory / "ca.crt")
    files = {"certificate": "tls.crt", "key": "tls.key", "authority": "ca.crt"}
    return {key: str(directory / name) for key, name in files.items()}


def test_replicas_in_mutual_tls_say_the_same_and_answer_nobody_without(
    running: Any, tiny: Any, callers: Make, certificates: dict[str, str]
) -> None:
    running.deploy(tiny, tls=certificates)
    with callers(running.url, [tiny], 2) as calling:
        calling.more(4)
    for role in ("draft", "verify"):
        assert {row["load"] != "" for row in running.replicas(role)} == {True}
        (address,) = running.addresses(role)
        told = subprocess.run([*COMMAND, "status", address], capture_output=True, text=True)
        assert told.returncode != 0
        assert "cannot be reached" in told.stderr


def test_every_gateway_tells_its_own_metrics(running: Any, tiny: Any, callers: Make) -> None:
    running.deploy(tiny, gateway={"replicas": 2})
    with callers(running.url, [tiny], 2) as calling:
        calling.more(4)
    listed = httpx.get(f"{running.url}/metrics/targets").json()
    gateways = [
        address for one in listed if one["labels"]["service"] == "weald-gateway" for address in one["targets"]
    ]
    assert len(set(gateways)) == 2
    told = [success(httpx.get(f"http://{address}/metrics").text) for address in gateways]
    assert sum(told) == calling.answered


def success(exposition: str) -> float:
    """Choices that a gateway brought to their end."""
    families = text_string_to_metric_families(exposition)
    (family,) = [each for each in families if each.name == "weald_request_success"]
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def test_a_node_that_is_to_end_is_left_by_its_replicas_and_no_request_fails(
    running: Any, tiny: Any, callers: Make
) -> None:
    from cluster.launch import vacate

    running.deploy(tiny)
    with callers(running.url, [tiny], 2) as calling:
        calling.more(2)
        (before,) = running.addresses("verify")
        (node,) = [each for each in running.verify_nodes if each.node_id in homes(running)]
        assert vacate(node.node_id, 60)
        (after,) = running.addresses("verify")
        assert after != before
        running.nodes.remove_node(node, allow_graceful=False)
        calling.more(4)
    assert not calling.wrong


def homes(running: Any) -> set[str]:
    """Ids of nodes that have a verify replica."""
    store = asyncio.run(listed(running.store.as_uri()))
    return {one.node for one in store}


async def listed(url: str) -> list[Any]:
    """Verify replicas of a store."""
    async with opened(url) as store:
        return await store.replicas(ReplicaKind.VERIFY)
