"""The application on a Ray of four nodes: a draft node and two verify nodes, in processes of their own."""

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
RANK, VERIFY_REPLICA = "ray::Rank", "ray::ServeReplica:weald:Verify"
VERIFY = (RANK, VERIFY_REPLICA)
FAULTS = (
    (RANK, signal.SIGSTOP),
    (RANK, signal.SIGKILL),
    (VERIFY_REPLICA, signal.SIGKILL),
    ("ray::ServeReplica:weald:Draft", signal.SIGKILL),
    ("ray::ServeController", signal.SIGKILL),
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_target_whose_ranks_span_two_nodes_says_the_same(
    running: Any, tiny: Any, callers: Make, ranks: int
) -> None:
    from ray.util import placement_group_table

    each = {"resources": {"resources": {"verify": 4 / ranks}}}
    running.deploy(tiny, verify={"tensor_parallel_size": ranks} | each)
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [len(group["bundles"]) for group in groups] == [ranks]
    assert len(set(groups[0]["bundles_to_node_id"].values())) == 2
    with callers(running.url, [tiny], 2) as calling:
        calling.more(6)


@pytest.mark.timeout(1500)
def test_streams_survive_hung_ranks_dead_groups_drafters_controllers_and_nodes(
    running: Any, tiny: Any, callers: Make, workers: Make
) -> None:
    running.deploy(tiny, hang_timeout=5, verify={"tensor_parallel_size": 2, "replicas": {"min": 2, "max": 2}})
    with callers(running.url, [tiny], 3) as calling:
        calling.more(3)
        for title, how in FAULTS:
            before = running.addresses("verify")
            workers(title)[0].send_signal(how)
            if title in VERIFY:
                running.lost("verify", before)
            calling.more(6)
            running.settled("verify", 2)
            running.settled("draft", 1)
        running.nodes.remove_node(running.verify_nodes.pop(), allow_graceful=False)
        running.settled("verify", 1)
        calling.more(6)
        running.verify_nodes.append(running.nodes.add_node(num_cpus=1, resources={"verify": 2}))
        running.settled("verify", 2)
    assert not calling.wrong


def test_a_new_head_replaces_draft_replicas_alone_and_a_new_target_both_and_no_request_fails(
    running: Any, tiny: Any, other: Any, callers: Make, eventually: Make
) -> None:
    running.deploy(tiny)
    verify, draft = running.addresses("verify"), running.addresses("draft")
    with callers(running.url, [tiny], 2) as calling:
        calling.more(2)
        running.deploy(replace(tiny, head=other.head))
        eventually(lambda: draft.isdisjoint(running.addresses("draft")))
        calling.more(4)
        assert running.addresses("verify") == verify
    assert not calling.wrong
    with callers(running.url, [tiny, other], 2) as calling:
        calling.more(2)
        running.deploy(other)
        eventually(lambda: verify.isdisjoint(running.addresses("verify")))
        calling.more(4)
    assert not calling.wrong
    with callers(running.url, [other], 1) as calling:
        calling.more(2)


def test_sessions_leave_a_replica_that_is_scaled_down(running: Any, tiny: Any, callers: Make) -> None:
    two = {"replicas": {"min": 2, "max": 2}}
    running.deploy(tiny, verify=two, draft=two)
    with callers(running.url, [tiny], 3) as calling:
        calling.more(3)
        running.deploy(tiny)
        running.settled("verify", 1)
        running.settled("draft", 1)
        calling.more(3)
    assert not calling.wrong
