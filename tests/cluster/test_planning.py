"""What fits is placed, what does not is refused in words, and nothing is refused that plainly fits."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.configuration import ClusterConfig, parse
from cluster.planning import Node, can_surge, matches, refusals, steps, verify_placement

TYPE = "ray.io/accelerator-type"
ZONES = st.sampled_from([None, "a", "b"])
GPUS = st.sampled_from([0.0, 0.25, 0.4, 0.6, 1.0, 2.0])


def node(name: str = "n", *, type: str | None = None, labels: Mapping[str, str] = {}, **has: float) -> Node:
    return Node(name, has, {**labels, **({TYPE: type} if type else {})})


def asking(cpus: float = 0.0, gpus: float = 0.0, zone: str | None = None) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": gpus, "labels": {"zone": zone} if zone else {}}


def described(
    ranks: int = 1,
    verify: Mapping[str, Any] = {"num_cpus": 1},
    draft: Mapping[str, Any] = {"num_cpus": 0},
    gateway: Mapping[str, Any] = {"num_cpus": 0},
    replicas: tuple[int, int, int] = (1, 1, 1),
) -> ClusterConfig:
    return parse(
        {
            "model": "m",
            "verify": {"tensor_parallel_size": ranks, "resources": verify, "replicas": replicas[0]},
            "draft": {"resources": draft, "replicas": replicas[1]},
            "gateway": {"resources": gateway, "replicas": replicas[2]},
        }
    )


@st.composite
def small(draw: st.DrawFn) -> tuple[ClusterConfig, list[Node]]:
    """A description and so few nodes that all packings can be tried."""
    needs = [asking(draw(st.sampled_from([0.5, 1.0, 2.0])), draw(GPUS), draw(ZONES)) for _ in range(3)]
    ranks = draw(st.integers(1, 3))
    if ranks > 1:
        needs[0]["num_gpus"] = float(round(needs[0]["num_gpus"]))
    config = described(ranks, *needs, replicas=(1, draw(st.integers(1, 2)), 1))
    nodes = [
        node(
            f"n{i}",
            labels={"zone": zone} if (zone := draw(ZONES)) else {},
            CPU=float(draw(st.integers(0, 6))),
            GPU=float(draw(st.integers(0, 3))),
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    return config, nodes


Left = tuple[float, tuple[float, ...]]
"""Of a node: CPUs, and of each GPU."""


def packable(config: ClusterConfig, nodes: Sequence[Node], strict: bool) -> bool:
    """Whether any assignment of processes to nodes and GPUs holds them all, by trying each."""
    kinds = [config.verify.resources, config.draft.resources, config.gateway.resources]
    ranks = config.verify.tensor_parallel_size
    counts = [config.verify.replicas.min * ranks, config.draft.replicas.min, config.gateway.replicas]
    todo = [kind for kind, count in enumerate(counts) for _ in range(count)]
    seen = set()

    def search(at: int, left: tuple[Left, ...], first: int | None) -> bool:
        if at == len(todo):
            return True
        if (at, left, first) in seen:
            return False
        seen.add((at, left, first))
        kind = todo[at]
        for i, (cpus, gpus) in enumerate(left):
            if not matches(kinds[kind].selector, nodes[i].labels) or cpus < kinds[kind].num_cpus:
                continue
            if strict and kind == 0 and at % ranks and i != first:
                continue
            for rest in shares(gpus, kinds[kind].num_gpus):
                after = (*left[:i], (cpus - kinds[kind].num_cpus, rest), *left[i + 1 :])
                if search(at + 1, after, i):
                    return True
        return False

    whole = tuple((n.resources.get("CPU", 0.0), (1.0,) * int(n.resources.get("GPU", 0))) for n in nodes)
    return search(0, whole, None)


def shares(gpus: tuple[float, ...], wanted: float) -> set[tuple[float, ...]]:
    """What can be left of GPUs when a process takes its own: whole ones, or a part of one."""
    each, count = min(wanted, 1.0), 1 if wanted <= 1 else int(wanted)
    return {
        tuple(sorted(round(g - each * (i in some), 4) for i, g in enumerate(gpus)))
        for some in combinations(range(len(gpus)), count if wanted else 0)
        if all(gpus[i] >= each for i in some)
    }


def is_short(config: ClusterConfig, nodes: Sequence[Node]) -> bool:
    """Whether some kinds together ask for more than all nodes have that any of them may use."""
    verify, draft, gateway = config.verify, config.draft, config.gateway
    kinds = [
        (verify.resources, verify.replicas.min * verify.tensor_parallel_size),
        (draft.resources, draft.replicas.min),
        (gateway.resources, gateway.replicas),
    ]
    for some in (some for n in (1, 2, 3) for some in combinations(kinds, n)):
        usable = [n for n in nodes if any(matches(each.selector, n.labels) for each, _ in some)]
        for name in ("CPU", "GPU"):
            if sum(each.asked.get(name, 0) * count for each, count in some) > 1e-6 + sum(
                n.resources.get(name, 0) for n in usable
            ):
                return True
    return False


@given(cluster=small())
def test_what_is_not_refused_can_be_packed(cluster: tuple[ClusterConfig, list[Node]]) -> None:
    config, nodes = cluster
    if not refusals(config, nodes):
        assert packable(config, nodes, verify_placement(config, nodes).strategy == "STRICT_PACK")


@given(cluster=small())
def test_what_is_refused_by_its_sum_is_short_and_cannot_be_packed(
    cluster: tuple[ClusterConfig, list[Node]],
) -> None:
    config, nodes = cluster
    by_sum = [said for said in refusals(config, nodes) if "or add nodes" in said]
    assert bool(by_sum) == is_short(config, nodes)
    if by_sum:
        assert not packable(config, nodes, strict=False)


@st.composite
def packed(draw: st.DrawFn) -> tuple[ClusterConfig, list[Node]]:
    """A description made of a packing of equal processes, which fills its nodes."""
    ranks, spanning = draw(st.integers(1, 4)), draw(st.booleans())
    resources = asking(draw(st.sampled_from([0.1, 1.0, 3.0])), draw(st.sampled_from([0.0, 1.0, 2.0])))
    slots = [ranks, 2, *draw(st.lists(st.integers(1, 9), max_size=6))]
    """Of each node, how many processes it holds: one verify replica and two others at least."""
    most = (sum(slots) - 2) // ranks if spanning else sum(n // ranks for n in slots[2:]) + 1
    replicas = draw(st.integers(1, most))
    others = sum(slots) - replicas * ranks
    drafts = draw(st.integers(1, others - 1))
    config = described(ranks, resources, resources, resources, (replicas, drafts, others - drafts))
    cpus, gpus = resources["num_cpus"], resources["num_gpus"]
    return config, [node(f"n{i}", CPU=n * cpus, GPU=n * gpus) for i, n in enumerate(slots)]


@given(cluster=packed())
def test_a_packing_of_equal_processes_that_fills_the_nodes_is_found(
    cluster: tuple[ClusterConfig, list[Node]],
) -> None:
    assert refusals(*cluster) == []


@given(cluster=small())
def test_each_rank_has_its_bundle_and_all_stay_together_where_they_can(
    cluster: tuple[ClusterConfig, list[Node]],
) -> None:
    config, nodes = cluster
    placement = verify_placement(config, nodes)
    ranks = config.verify.tensor_parallel_size
    assert placement.bundles == (config.verify.resources.asked,) * ranks
    assert placement.label_selectors == (config.verify.resources.selector,) * ranks
    alone = described(ranks, config.verify.resources.model_dump())
    one_node_is_enough = any(packable(alone, [n], strict=True) for n in nodes)
    assert one_node_is_enough or placement.strategy == "PACK"
    if one_node_is_enough and placement.strategy == "PACK":
        assert not packable(config, nodes, strict=True)


def test_ranks_span_nodes_where_none_holds_them_all_or_too_few_do() -> None:
    gpu = asking(gpus=1)
    large, small = node(GPU=4.0), node(GPU=2.0)
    assert verify_placement(described(4, gpu), [small, large]).strategy == "STRICT_PACK"
    assert verify_placement(described(4, gpu), [small, small]).strategy == "PACK"
    two = described(4, gpu, replicas=(2, 1, 1))
    assert verify_placement(two, [large, small, small]).strategy == "PACK"
    assert verify_placement(two, [large, large, small]).strategy == "STRICT_PACK"
    assert verify_placement(two, [large]).strategy == "STRICT_PACK"
    assert verify_placement(described(4, gpu), []).strategy == "PACK"


def test_too_few_gpus_of_a_type_are_refused_with_their_number_and_what_to_lower() -> None:
    h200 = {"num_gpus": 1, "num_cpus": 0, "accelerator_type": "H200"}
    config = described(4, h200, replicas=(2, 1, 1))
    assert refusals(config, [node(type="H200", GPU=4.0), node(type="L4", GPU=8.0)]) == [
        "verify asks for 8 GPUs of type H200 (2 replicas of 4 ranks), the cluster has 4; lower "
        "verify.replicas, verify.tensor_parallel_size or verify.resources, or add nodes"
    ]
    assert "of type H200 (2 replicas of 4 ranks), the cluster has none" in refusals(config, [node()])[0]


def test_every_kind_is_counted_and_every_shortage_told() -> None:
    l4 = {"num_gpus": 1, "num_cpus": 1, "accelerator_type": "L4"}
    config = described(2, asking(1, 1), l4, asking(0.5), replicas=(2, 3, 1))
    assert refusals(config, [node(type="L4", CPU=8.0, GPU=2.0), node(CPU=8.0, GPU=4.0)]) == [
        "draft asks for 3 GPUs of type L4 (3 replicas), the cluster has 2; lower draft.replicas or "
        "draft.resources, or add nodes",
    ]
    assert refusals(config, [node(type="L4", CPU=4.0, GPU=5.0)]) == [
        "verify (2 replicas of 2 ranks) and draft (3 replicas) together ask for 7 CPUs, the nodes that they "
        "may use have 4; lower verify.replicas, verify.tensor_parallel_size, verify.resources, "
        "draft.replicas or draft.resources, or add nodes",
        "verify (2 replicas of 2 ranks) and gateway (1 replica) together ask for 4.5 CPUs, the nodes that "
        "they may use have 4; lower verify.replicas, verify.tensor_parallel_size, verify.resources or "
        "gateway.resources, or add nodes",
        "verify (2 replicas of 2 ranks) and draft (3 replicas) together ask for 7 GPUs, the nodes that they "
        "may use have 5; lower verify.replicas, verify.tensor_parallel_size, verify.resources, "
        "draft.replicas or draft.resources, or add nodes",
    ]


def test_what_is_there_in_sum_but_nowhere_in_one_place_is_told_apart() -> None:
    config = described(1, asking(2, 2), replicas=(2, 1, 1))
    assert refusals(config, [node(CPU=8.0, GPU=1.0), node(CPU=8.0, GPU=3.0)]) == [
        "verify (2 replicas) does not find room, though there is enough in sum: each replica needs 2 CPUs "
        "and 2 GPUs in one place; lower verify.replicas or verify.resources, or add larger nodes"
    ]


def test_shares_of_gpus_come_from_one_gpu_each() -> None:
    config = described(1, asking(1), asking(0, 0.6), replicas=(1, 3, 1))
    assert "draft (3 replicas) does not find room" in refusals(config, [node(CPU=1.0, GPU=2.0)])[0]
    assert refusals(config, [node(CPU=1.0, GPU=3.0)]) == []
    config = described(1, asking(1), asking(0, 0.1), replicas=(1, 20, 1))
    assert refusals(config, [node(CPU=1.0, GPU=2.0)]) == []


def test_those_who_may_go_anywhere_leave_room_for_those_who_may_not() -> None:
    config = described(1, asking(1), asking(1, zone="a"), asking(1))
    plain, zoned = node(CPU=2.0), node(labels={"zone": "a"}, CPU=1.0)
    assert refusals(config, [zoned, plain]) == refusals(config, [plain, zoned]) == []


def test_memory_that_is_filled_is_held_against_what_ray_found_on_a_node() -> None:
    config = described(1, asking(1), replicas=(2, 1, 1))
    gib = 2.0**30
    nodes = [node(CPU=2.0, memory=3 * gib, object_store_memory=gib)]
    assert refusals(config, nodes, {"verify": 2 * 2**30}) == []
    assert refusals(config, nodes, {"verify": 3 * 2**30}) == [
        "verify asks for 6 GiB of memory (2 replicas), the cluster has 4 GiB; lower verify.replicas or "
        "verify.kv_cache_memory, or add nodes"
    ]
    assert refusals(config, [node(CPU=2.0)], {"verify": 3 * 2**30}) == []


def test_what_no_cluster_could_hold_is_refused_without_knowing_the_nodes() -> None:
    assert "asks for nothing" in refusals(described(2, asking()), [])[0]
    assert "cannot share a GPU" in refusals(described(2, asking(gpus=0.5)), [])[0]
    assert refusals(described(2, asking(gpus=1)), []) == []


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("L4", {"L4"}),
        ("!L4", {"H200", "A100", None}),
        ("in(L4, H200)", {"L4", "H200"}),
        ("in(L4,A100)", {"L4", "A100"}),
        ("!in(L4, H200)", {"A100", None}),
    ],
)
def test_a_selector_means_the_nodes_that_ray_takes_it_for(wanted: str, meant: set[str | None]) -> None:
    types = ["L4", "H200", "A100", None]
    assert {type for type in types if matches({TYPE: wanted}, node(type=type).labels)} == meant


def test_new_replicas_come_first_only_where_one_more_finds_room() -> None:
    config = described(2, {"num_cpus": 1}, {"num_cpus": 0.5})
    for cpus, first in ((2.5, set()), (3.0, {"draft"}), (4.5, {"verify", "draft"})):
        nodes = [node(CPU=cpus)]
        assert {key for key in ("verify", "draft") if can_surge(key, config, config, nodes)} == first
    assert can_surge("gateway", config, config, [node(CPU=2.5)])


def test_replicas_that_ask_for_something_else_come_after_those_before_them() -> None:
    nodes = [node(CPU=100.0)]
    config, wider = described(1), described(2)
    assert can_surge("verify", config, config, nodes)
    assert not can_surge("verify", config, wider, nodes)
    assert can_surge("draft", config, wider, nodes)
    assert not can_surge("draft", config, described(draft={"num_cpus": 2}), nodes)


def test_replicas_are_replaced_before_their_number_changes() -> None:
    one, two = described(replicas=(1, 1, 1)), described(replicas=(2, 1, 1))
    assert steps(one, one) == [one]
    assert steps(one, two) == [two], "nothing is replaced"
    wider = described(2, replicas=(2, 1, 1))
    assert steps(two, wider) == [wider], "the number is the same"
    for before, after in ((one, wider), (wider, one)):
        first, last = steps(before, after)
        assert last == after
        assert first.verify.replicas.min == first.verify.replicas.max == 1
        assert first.verify.tensor_parallel_size == after.verify.tensor_parallel_size
