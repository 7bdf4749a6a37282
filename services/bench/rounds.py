"""One round of one session on paper: how long its parts take, how much it commits, which tree pays best."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product

import torch
from torch import Tensor
from transformers import LlamaConfig

from services.bench.hardware import CONTROL, ETHERNET, H100, Card, Collective, Placement
from services.bench.shards import DTYPE, Head, Shard
from services.engine.transfer import to_block
from services.speculation.growth import DynamicPlan, as_given, grow
from services.types.messages import Load, Proposal, Proposals, Replies, Reply, StepTimings
from services.types.outcome import Outcome
from services.types.tree import MAX_NODES, DraftTree
from services.wire import convert

LAYER_S = 20e-6
"""Of a decoder layer, whatever its size: the small kernels of a captured graph."""
PASS_S = 100e-6
"""Of a head pass likewise, with the choice of the nodes."""
ENDS_S = 2.3e-3
"""Of a round at both services besides head, target and network: as `weald bench link` measured it on two
shared cores, the stream's two ends and each service's own work."""
FALL = 2.5
"""The i-th likeliest child is right `i ** -FALL` times as often as the likeliest."""
LEVELS, BEAM = 6, 10
"""D and k of the trees by which τ was published, and of the widest tree that is considered."""
DEEPEST = 8
"""Levels of the deepest tree that is considered."""
COVERAGE = {128_256: 1.0, 64_000: 0.99, 32_000: 0.97, 16_000: 0.93, 8_000: 0.88}
"""Draft vocabularies, most frequent tokens first, and the share of the text that they hold."""
ENOUGH = 0.995
"""Where trees reach this share of the best one's rate, the smallest is chosen: it leaves room for others."""


@dataclass(frozen=True, slots=True)
class Served:
    """A target, where it stands, and what is published of its head."""

    name: str
    config: LlamaConfig
    placement: Placement
    budget: int
    """m of the tree by which τ was published (EAGLE-2, arXiv 2406.16858, section 5)."""
    tau: float
    """At temperature 0, about (EAGLE-3, arXiv 2503.01840, table 1, mean of the row of EAGLE-2)."""
    card: Card = H100
    """Of each rank."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a target step takes and does on one rank."""

    served: Served
    shard: Shard
    context: int
    """Tokens before the tree."""
    plain: tuple[Collective, ...]
    """Of a step with one node."""
    tree: tuple[Collective, ...]
    """Of a step with `MAX_NODES`, and of what follows it in the round."""

    def collectives(self, nodes: int) -> tuple[Collective, ...]:
        """Of a step with so many nodes: what the model sums and gathers grows with them."""
        if nodes == 1:
            return self.plain
        return tuple(
            Collective(c.kind, c.size * nodes // MAX_NODES, c.count)
            if c.kind in ("all-reduce", "all-gather")
            else c
            for c in self.tree
        )

    def compute(self, nodes: int) -> float:
        """Seconds of this rank's own work: weights and the session's pages are read once for all nodes."""
        config, ranks = self.served.config, self.served.placement.ranks
        layers, hidden = config.num_hidden_layers, config.hidden_size
        matrices = self.shard.weights - self.shard.embedding
        attention = 4 * layers * (hidden // ranks) * self.context
        operations = nodes * (2 * matrices // DTYPE.itemsize + attention)
        read = matrices + self.context * self.shard.kv_token
        return self.served.card.seconds(read, operations) + layers * LAYER_S

    def talk(self, nodes: int, control: bool) -> float:
        """Seconds of the collectives: of rank 0's control, or of the model's own."""
        placement = self.served.placement
        chosen = (c for c in self.collectives(nodes) if (c.kind in CONTROL) is control)
        return sum(c.seconds(placement) for c in chosen)

    def seconds(self, nodes: int) -> float:
        """Of the whole step."""
        return self.compute(nodes) + self.talk(nodes, True) + self.talk(nodes, False)

    @property
    def rate(self) -> float:
        """Tokens per second of plain decoding."""
        return 1 / self.seconds(1)


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to draft, and what comes of it."""

    card: Card
    vocabulary: int
    levels: int
    beam: int
    budget: int
    tau: float
    draft: float
    """Seconds of a round, as the two below."""
    link: float
    step: float

    @property
    def round(self) -> float:
        """Seconds of a round."""
        return self.draft + self.link + self.step

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tau / self.round


def hits(hit: float, coverage: float, beam: int) -> Tensor:
    """How often each child of a node on the accepted path is the right one, likeliest first, `[beam]`."""
    return hit * coverage * torch.arange(1, beam + 1, dtype=torch.float64) ** -FALL


@cache
def expected(hit: float, coverage: float, levels: int, beam: int) -> tuple[float, ...]:
    """τ by tree budget, 0 to `MAX_NODES`, if the children of every node are right as often as `hits` says.

    The product's own growth finds the nodes. τ is 1 for the bonus token, and the sum of the nodes' values.
    """
    profile = hits(hit, coverage, beam).log()
    candidates = grow(
        profile[None],
        lambda tokens, parents: profile.expand(*tokens.shape, -1),
        DynamicPlan(levels, beam),
        torch.arange(beam),
        score=as_given,
    )
    values = candidates.log_values[0].exp().sort(descending=True).values[: MAX_NODES - 1].tolist()
    values += [0.0] * (MAX_NODES - 1 - len(values))
    return (1.0, *accumulate(values, initial=1.0))


def fitted(tau: float, budget: int) -> float:
    """How often the likeliest child is right, if a tree of the published sizes commits so many tokens."""
    low, high = 0.0, 1 / float(hits(1.0, 1.0, BEAM).sum())
    for _ in range(40):
        middle = (low + high) / 2
        if expected(middle, 1.0, LEVELS, BEAM)[budget] < tau:
            low = middle
        else:
            high = middle
    return low


def accepted(tau: float) -> int:
    """Whole draft nodes accepted in a round."""
    return round(tau - 1)


def pass_seconds(card: Card, head: Head, vocabulary: int, rows: int, context: int) -> float:
    """Of one head pass over so many rows: weights, LM head and entries are read once for all of them."""
    weights = head.weights + vocabulary * head.row
    read = weights + context * head.kv_token
    return card.seconds(read, 2 * rows * weights / DTYPE.itemsize) + PASS_S


@cache
def wire_bytes(vocabulary: int, hidden: int, nodes: int, accepted: int) -> tuple[int, int]:
    """Bytes of a round's messages, to the verify service and back, as they are on the wire."""
    tokens = tuple(i * vocabulary // nodes for i in range(nodes))
    tree = DraftTree(tokens, (-1, *(i // BEAM for i in range(nodes - 1))), (1.0, *[0.5] * (nodes - 1)))
    session, epoch, number, position = "0" * 32, 1_800_000_000_000, 100, 2048
    path = tuple(range(1, accepted + 1))
    outcome = Outcome(tokens[-accepted - 1 :], path, nodes, None)
    block = to_block(position, torch.zeros(accepted + 1, hidden, dtype=DTYPE))
    reply = Reply(session, epoch, number, position, outcome, (1 << nodes) - 1, True, block, 10**7)
    request = convert.request_to_proto(Proposals((Proposal(session, epoch, number, position, tree),)))
    timings = StepTimings(queue=10**5, forward=10**7, accept=10**6, commit=10**5)
    response = convert.response_to_proto(Replies((reply,), timings, Load(1, 0, 1000)))
    return request.ByteSize(), response.ByteSize()


def link_seconds(config: LlamaConfig, nodes: int, tau: float) -> float:
    """Of a round's messages over the network, and of both services' own work."""
    size = sum(wire_bytes(config.vocab_size, config.hidden_size, nodes, min(accepted(tau), nodes - 1)))
    return 2 * ETHERNET.latency + size / ETHERNET.bandwidth + ENDS_S


def best(step: Step, head: Head, hit: float, card: Card, vocabulary: int) -> Choice:
    """The smallest tree of those that make about the most tokens per second on this card."""
    config = step.served.config
    steps = {nodes: step.seconds(nodes) for nodes in range(2, MAX_NODES + 1)}
    every: list[Choice] = []
    for levels, beam in product(range(1, DEEPEST + 1), range(1, BEAM + 1)):
        draft = levels * pass_seconds(card, head, vocabulary, beam, step.context)
        taus = expected(hit, COVERAGE[vocabulary], levels, beam)
        every += (
            Choice(
                card, vocabulary, levels, beam, nodes, tau, draft, link_seconds(config, nodes, tau), seconds
            )
            for nodes, seconds in steps.items()
            if (tau := taus[nodes]) > taus[nodes - 1]
        )
    enough = ENOUGH * max(choice.rate for choice in every)
    near = (choice for choice in every if choice.rate >= enough)
    return min(near, key=lambda choice: (choice.budget, choice.beam, choice.levels))
