"""What data sheets state of GPUs and links, and how long work takes on them at best: the roofline."""

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

READ_SHARE = 0.8
"""Of the memory bandwidth of the data sheet, what kernels that read weights reach."""
COMPUTE_SHARE = 0.6
"""Of the dense bfloat16 rate of the data sheet, what matrix products reach."""
MEMORY_SHARE = 0.9
"""Of a card's memory, what weights and pages may take."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    name: str
    bandwidth: float
    """Of its memory, bytes/s."""
    flops: float
    """Dense bfloat16 operations with float32 sums, 1/s."""
    memory: float
    """Bytes."""
    watts: float
    """Of the whole board at most."""

    def seconds(self, read: float, operations: float) -> float:
        """Time of a pass that reads so many bytes of memory and does so many operations."""
        return max(read / (self.bandwidth * READ_SHARE), operations / (self.flops * COMPUTE_SHARE))

    @property
    def usable(self) -> float:
        """Bytes for weights and pages."""
        return self.memory * MEMORY_SHARE


L4 = Card("L4", 300e9, 121e12, 24e9, 72)
A10 = Card("A10", 600e9, 125e12, 24e9, 150)
L40S = Card("L40S", 864e9, 362e12, 48e9, 350)
RTX_4090 = Card("RTX 4090", 1008e9, 165e12, 24e9, 450)
A100 = Card("A100 80GB", 2039e9, 312e12, 80e9, 400)
H100 = Card("H100 SXM", 3350e9, 989e12, 80e9, 700)
CARDS = (L4, A10, L40S, RTX_4090, A100, H100)


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two ranks, hosts or services."""

    name: str
    bandwidth: float
    """Each way, bytes/s."""
    latency: float
    """Of a message that weighs nothing, one way; of a link between ranks, what it adds to a collective. s."""


NVLINK = Link("NVLink, one host", 450e9, 12e-6)
IB_4 = Link("4 × 400 Gb/s InfiniBand", 200e9, 15e-6)
IB = Link("400 Gb/s InfiniBand", 50e9, 15e-6)
ROCE = Link("100 Gb/s RoCE", 12.5e9, 25e-6)
ETHERNET = Link("25 Gb/s Ethernet, TCP", 3.125e9, 25e-6)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a target stand: as many on each host."""

    ranks: int
    hosts: int = 1
    between: Link = IB
    """Between two hosts; within one, ranks are linked by NVLink."""

    @property
    def slowest(self) -> Link:
        """The link that a ring over all ranks waits for."""
        return self.between if self.hosts > 1 and self.between.bandwidth < NVLINK.bandwidth else NVLINK

    @property
    def latency(self) -> float:
        """Of a collective that moves nothing: within the hosts, then over a tree of hosts. s."""
        return NVLINK.latency + ceil(log2(self.hosts)) * self.between.latency


Kind = Literal["all-reduce", "all-gather", "gather", "broadcast", "answer"]
CONTROL: tuple[Kind, ...] = ("broadcast", "answer")
"""Collectives of what rank 0 tells and hears, over TCP; all others are the model's own."""


@dataclass(frozen=True, slots=True)
class Collective:
    """What all ranks do together, some times in a step."""

    kind: Kind
    size: int
    """Bytes that a rank brings."""
    count: int = 1

    def link_bytes(self, ranks: int) -> float:
        """Bytes over a link of a ring through all ranks, each way, over all times.

        An all-reduce by ring moves `2 (p - 1) / p` of its size over each link (Patarasuk and Yuan, 2009), and
        what is gathered passes the link before its last rank.
        """
        times = {"broadcast": 1.0, "all-gather": ranks - 1, "gather": ranks - 1}
        return self.count * self.size * times.get(self.kind, 2 * (ranks - 1) / ranks)

    def seconds(self, placement: Placement) -> float:
        """Time of all of them, one after the other."""
        if placement.ranks == 1:
            return 0.0
        if self.kind in CONTROL:
            hops = ceil(log2(placement.ranks)) * (2 if self.kind == "answer" else 1)
            return self.count * hops * (ETHERNET.latency + self.size / ETHERNET.bandwidth)
        moved = self.link_bytes(placement.ranks) / placement.slowest.bandwidth
        return self.count * placement.latency + moved
