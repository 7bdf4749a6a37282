"""What goes where: from a description and the nodes there are to bundles, or to why there is no room."""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Literal, Self

from cluster.configuration import ClusterConfig, Kind, Replicas, Resources

HELD = "held memory"
"""Stands among the amounts for bytes that a process fills, which Ray does not count."""
_GPU = "GPU"
_BYTES = frozenset({HELD, "memory", "object_store_memory"})
_UNITS = 10_000
"""Ray counts in ten-thousandths; whole numbers of them add up exactly."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, as Ray lists it."""

    name: str
    resources: Mapping[str, float]
    """All that it has, in use or not."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement group of one verify replica."""

    bundles: tuple[dict[str, float], ...]
    """Of each rank."""
    strategy: Literal["STRICT_PACK", "PACK"]
    label_selectors: tuple[dict[str, str], ...]
    """Of each rank."""


def verify_placement(config: ClusterConfig, nodes: Sequence[Node]) -> Placement:
    """Where the ranks of a verify replica go: together on one node, unless they have to span nodes.

    Args:
        config: of the cluster.
        nodes: all there are; none when they are not known.
    """
    verify = config.verify
    ranks = range(verify.tensor_parallel_size)
    return Placement(
        tuple(verify.resources.asked for _ in ranks),
        _strategy(config, nodes),
        tuple(verify.resources.selector for _ in ranks),
    )


def refusals(
    config: ClusterConfig, nodes: Sequence[Node], held: Mapping[str, int] | None = None
) -> list[str]:
    """Why the nodes cannot hold the least number of replicas of every kind, in sentences; none when they can.

    Args:
        config: of the cluster.
        nodes: all there are; none when they are not known.
        held: bytes that each process of a kind fills of its node's memory, by the kind's key in the file.
    """
    found = _senseless(config)
    if not nodes:
        return found
    kinds = _kinds(config, held or {}, strict=_strategy(config, nodes) == "STRICT_PACK")
    shortages = _shortages(kinds, nodes)
    short = {kind.key for shortage in shortages for kind in shortage.kinds}
    lost = _lost([kind for kind in kinds if kind.key not in short], nodes)
    return [*found, *(shortage.told() for shortage in shortages), *([lost.told()] if lost else [])]


def can_surge(
    key: Kind,
    before: ClusterConfig,
    after: ClusterConfig,
    nodes: Sequence[Node],
) -> bool:
    """Whether in an update a new replica can come before an old one goes: only where one more finds room.

    A rule on the safe side: one that asks for something else than those before it comes after them.

    Args:
        key: of the kind, in the file.
        before: what runs.
        after: what is to run.
        nodes: all there are.
    """
    old, new = getattr(before, key), getattr(after, key)
    ranks = {one.verify.tensor_parallel_size for one in (before, after)}
    if old.resources != new.resources or (key == "verify" and len(ranks) > 1):
        return False
    return not any(refusals(_with_one_more(key, config), nodes) for config in (before, after))


def _with_one_more(key: str, config: ClusterConfig) -> ClusterConfig:
    part = getattr(config, key)
    most = part.replicas if isinstance(part.replicas, int) else part.replicas.max
    more = most + 1 if isinstance(part.replicas, int) else Replicas(min=most + 1, max=most + 1)
    return config.model_copy(update={key: part.model_copy(update={"replicas": more})})


def steps(before: ClusterConfig, after: ClusterConfig) -> list[ClusterConfig]:
    """What to deploy one after the other: first what runs is replaced, then the numbers change.

    Both at once, Serve would keep replicas until others are there that need their room.

    Args:
        before: what runs.
        after: what is to run.
    """
    pairs = {
        key: (getattr(before, key).replicas, getattr(after, key).replicas) for key in ("verify", "draft")
    }
    if all(old == new for old, new in pairs.values()):
        return [after]
    least = {key: min(old.min, new.min) for key, (old, new) in pairs.items()}
    first = _numbered(after, least)
    return [after] if first == _numbered(before, least) else [first, after]


def _numbered(config: ClusterConfig, numbers: Mapping[str, int]) -> ClusterConfig:
    parts = {
        key: getattr(config, key).model_copy(update={"replicas": Replicas(min=number, max=number)})
        for key, number in numbers.items()
    }
    return config.model_copy(update=parts)


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that a selector means, by Ray's rules.

    A label is to have a value, `in(…)` some values, or with `!` in front none of them.
    """
    return all(_allows(wanted, labels.get(key)) for key, wanted in selector.items())


def _allows(wanted: str, value: str | None) -> bool:
    values = wanted.removeprefix("!")
    if values.startswith("in(") and values.endswith(")"):
        among = [one.strip() for one in values[3:-1].split(",")]
    else:
        among = [values]
    return (value in among) != wanted.startswith("!")


def _strategy(config: ClusterConfig, nodes: Sequence[Node]) -> Literal["STRICT_PACK", "PACK"]:
    together, spread = (_kinds(config, {}, strict=strict) for strict in (True, False))
    one = replace(together[0], replicas=1)
    if not nodes:
        return "PACK"
    if _lost([one], nodes):
        return "PACK"  # no node holds all ranks
    if _lost(together, nodes) and not _lost(spread, nodes):
        return "PACK"  # not enough nodes do
    return "STRICT_PACK"


@dataclass(frozen=True, slots=True)
class _Kind:
    """The replicas of one kind, at their least number."""

    key: str
    """In the file."""
    replicas: int
    ranks: int
    """Processes of a replica."""
    strict: bool
    """Whether all of a replica have to be on one node."""
    amounts: Mapping[str, int]
    """Of each process, in units."""
    selector: Mapping[str, str]

    def total(self, name: str) -> int:
        return self.amounts[name] * self.ranks * self.replicas

    @property
    def size(self) -> tuple[bool, int, int]:
        """Larger ones are placed first."""
        together = self.ranks if self.strict else 1
        return self.strict, together * self.amounts.get(_GPU, 0), together * sum(self.amounts.values())

    @property
    def counted(self) -> str:
        replicas = f"{self.replicas} replica{'s' * (self.replicas > 1)}"
        return f"{replicas} of {self.ranks} ranks" if self.ranks > 1 else replicas

    @property
    def nodes(self) -> str:
        """Which it may use, as the end of a phrase."""
        others = dict(self.selector)
        typed = others.pop("ray.io/accelerator-type", None)
        labels = ", ".join(f"{key}={value}" for key, value in others.items())
        return (f" of type {typed}" if typed else "") + (f" on nodes labelled {labels}" if labels else "")

    def told(self) -> str:
        """That it does not find room."""
        together = self.ranks if self.strict else 1
        amounts = _listed([_amount(name, together * units) for name, units in self.amounts.items()])
        who = f"a replica of {self.ranks} ranks" if together > 1 else "each rank"
        return (
            f"{self.key} ({self.counted}) does not find room, though there is enough in sum: "
            f"{who if self.ranks > 1 else 'each replica'} needs {amounts or 'a node'}{self.nodes} in one "
            f"place; lower {_listed(self.keys(), 'or')}, or add larger nodes"
        )

    def keys(self, name: str | None = None) -> list[str]:
        """Keys of the file that make it ask for less of a resource."""
        last = "kv_cache_memory" if name == HELD else "resources"
        several = {"replicas": self.replicas > 1, "tensor_parallel_size": self.ranks > 1 and name != HELD}
        return [f"{self.key}.{key}" for key in (*(key for key in several if several[key]), last)]


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Kinds that ask for more of a resource than all nodes have that they may use."""

    kinds: tuple[_Kind, ...]
    name: str
    asked: int
    there: float

    def told(self) -> str:
        keys = [key for kind in self.kinds for key in kind.keys(self.name)]
        there = _number(self.name, self.there) if self.there else "none"
        if len(self.kinds) == 1:
            kind = self.kinds[0]
            asks = f"{kind.key} asks for {_amount(self.name, self.asked)}{kind.nodes} ({kind.counted})"
            return f"{asks}, the cluster has {there}; lower {_listed(keys, 'or')}, or add nodes"
        who = _listed([f"{kind.key} ({kind.counted})" for kind in self.kinds])
        return (
            f"{who} together ask for {_amount(self.name, self.asked)}, the nodes that they may use have "
            f"{there}; lower {_listed(keys, 'or')}, or add nodes"
        )


def _senseless(config: ClusterConfig) -> list[str]:
    """What no cluster could hold."""
    resources, ranks = config.verify.resources, config.verify.tensor_parallel_size
    if not resources.asked:
        return ["verify.resources asks for nothing, which Ray cannot place; give num_cpus or num_gpus"]
    if ranks > 1 and 0 < resources.num_gpus < 1:
        return [
            f"verify.resources.num_gpus is {resources.num_gpus:g}, but ranks of one replica cannot share a "
            "GPU; give 1, or 0 for the CPU"
        ]
    return []


def _kinds(config: ClusterConfig, held: Mapping[str, int], *, strict: bool) -> list[_Kind]:
    verify, draft, gateway = config.verify, config.draft, config.gateway

    def kind(key: str, replicas: int, ranks: int, resources: Resources) -> _Kind:
        asked = {**resources.asked, HELD: held.get(key, 0)}
        amounts = {name: units for name, amount in asked.items() if (units := round(amount * _UNITS))}
        return _Kind(key, replicas, ranks, strict and ranks > 1, amounts, resources.selector)

    return [
        kind("verify", verify.replicas.min, verify.tensor_parallel_size, verify.resources),
        kind("draft", draft.replicas.min, 1, draft.resources),
        kind("gateway", gateway.replicas, 1, gateway.resources),
    ]


def _shortages(kinds: Sequence[_Kind], nodes: Sequence[Node]) -> list[_Shortage]:
    """Of each resource, the smallest sets of kinds that the nodes have too little of it for."""
    rooms = [_Room.whole(node) for node in nodes]
    found: list[_Shortage] = []
    for name in dict.fromkeys(name for kind in kinds for name in kind.amounts):
        asking = [kind for kind in kinds if name in kind.amounts]
        short: list[set[str]] = []
        for some in (some for n in range(1, len(asking) + 1) for some in combinations(asking, n)):
            keys = {kind.key for kind in some}
            asked = sum(kind.total(name) for kind in some)
            usable = (r for r in rooms if any(matches(kind.selector, r.labels) for kind in some))
            there = sum(room.left(name) for room in usable)
            if asked > there and not any(smaller <= keys for smaller in short):
                short.append(keys)
                found.append(_Shortage(some, name, asked, there))
    return found


@dataclass(slots=True)
class _Room:
    """What a node has left, in units."""

    labels: Mapping[str, str]
    amounts: dict[str, float]
    gpus: list[int]
    """What is left of each: a process that asks for less than one has it from one alone."""

    @classmethod
    def whole(cls, node: Node) -> Self:
        """All that a node has."""
        amounts: dict[str, float] = {name: round(n * _UNITS) for name, n in node.resources.items()}
        gpus = [_UNITS] * int(node.resources.get(_GPU, 0))
        # What Ray sets apart for its own objects is only taken as far as there are any.
        memory = [amounts[name] for name in ("memory", "object_store_memory") if name in amounts]
        amounts[HELD] = sum(memory) if memory else math.inf
        return cls(node.labels, amounts, gpus)

    def __copy__(self) -> "_Room":
        return _Room(self.labels, dict(self.amounts), list(self.gpus))

    def left(self, name: str) -> float:
        return sum(self.gpus) if name == _GPU else self.amounts.get(name, 0)

    def take(self, kind: _Kind, count: int = 1) -> "_Room | None":
        """What is left when so many processes of a kind come here; None when they do not fit."""
        if not matches(kind.selector, self.labels):
            return None
        room = copy(self)
        for _ in range(count):
            for name, units in kind.amounts.items():
                if name == _GPU:
                    if not room._take_gpus(units):
                        return None
                elif room.left(name) < units:
                    return None
                else:
                    room.amounts[name] -= units
        return room

    def _take_gpus(self, units: int) -> bool:
        share = min(units, _UNITS)
        for _ in range(units // share):
            fitting = [gpu for gpu, left in enumerate(self.gpus) if left >= share]
            if not fitting:
                return False
            self.gpus[min(fitting, key=lambda gpu: self.gpus[gpu])] -= share
        return True


def _lost(kinds: Sequence[_Kind], nodes: Sequence[Node]) -> _Kind | None:
    """A kind that does not find room beside the others; None when all do.

    Kinds are placed one after the other, the largest first, each process in the first place that takes it; in
    another order when that fails. What is found is a packing; that none is found proves nothing.
    """
    rooms = [_Room.whole(node) for node in nodes]
    orders = permutations(sorted(kinds, key=lambda kind: kind.size, reverse=True))
    first: _Kind | None = None
    for order in orders:
        lost = _first_lost(order, rooms)
        if lost is None:
            return None
        first = first or lost
    return first


def _first_lost(kinds: Iterable[_Kind], rooms: Sequence[_Room]) -> _Kind | None:
    left = list(rooms)
    for kind in kinds:
        count = kind.ranks if kind.strict else 1
        for _ in range(kind.replicas * kind.ranks // count):
            taken = ((i, after) for i, room in enumerate(left) if (after := room.take(kind, count)))
            at, room = next(taken, (0, None))
            if room is None:
                return kind
            left[at] = room
    return None


def _amount(name: str, units: float) -> str:
    number = _number(name, units)
    if name in _BYTES:
        return f"{number} of memory"
    if name in ("CPU", _GPU):
        return f"{number} {name}{'s' * (units != _UNITS)}"
    return f"{number} of {name}"


def _number(name: str, units: float) -> str:
    return f"{units / _UNITS / 2**30:.3g} GiB" if name in _BYTES else f"{units / _UNITS:g}"


def _listed(words: Sequence[str], last: str = "and") -> str:
    *first, end = words or [""]
    return f"{', '.join(first)} {last} {end}" if first else end
