"""`weald bench paper`: on paper, which draft card, tree and draft vocabulary an 8B and a 70B target ask for.

Nothing is measured here. Bytes and collectives come from real shapes on the meta device and from real
messages, times from data sheets by the roofline and from assumptions, which the first table repeats.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import LlamaConfig

from services.bench.hardware import (
    CARDS,
    COMPUTE_SHARE,
    CONTROL,
    ETHERNET,
    IB,
    IB_4,
    MEMORY_SHARE,
    NVLINK,
    READ_SHARE,
    ROCE,
    Placement,
)
from services.bench.report import figures_table, write_json
from services.bench.rounds import (
    BEAM,
    COVERAGE,
    ENDS_S,
    FALL,
    LAYER_S,
    LEVELS,
    PASS_S,
    Choice,
    Served,
    Step,
    accepted,
    best,
    fitted,
    pass_seconds,
    wire_bytes,
)
from services.bench.shards import Head, absent, collectives, head_on_meta, shard, target_on_meta
from services.engine.pages import PAGE_SIZE
from services.types.tree import MAX_NODES

SMALL = 48e9
"""Memory of a small GPU at most, bytes."""
NODES = (1, 8, 16, 32, 48, 60)
"""Nodes of the steps shown."""


def llama(hidden: int, intermediate: int, layers: int, heads: int) -> LlamaConfig:
    """A Llama 3 of these sizes."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    )


SERVED = (
    Served("Llama-3.1-8B", llama(4096, 14_336, 32, 32), Placement(1), 60, 4.1),
    Served("Llama-3.3-70B", llama(8192, 28_672, 80, 64), Placement(8, 2), 48, 3.8),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A target with all that its rounds depend on."""

    step: Step
    head: Head
    hit: float
    """How often the head's likeliest child is right."""
    tried: tuple[Choice, ...]
    """The best tree of every card that holds the head, over every draft vocabulary."""

    @property
    def served(self) -> Served:
        """The target."""
        return self.step.served

    @property
    def watts(self) -> float:
        """Of all ranks' boards at most."""
        return self.served.placement.ranks * self.served.card.watts

    def tokens_per_kilojoule(self, choice: Choice) -> float:
        """Of all boards together, the draft card's too, at their greatest power."""
        return 1e3 * choice.rate / (self.watts + choice.card.watts)

    @property
    def chosen(self) -> dict[str, Choice]:
        """What to draft with, by what is asked for."""
        small = (choice for choice in self.tried if choice.card.memory <= SMALL)
        return {
            "a small GPU": max(small, key=lambda choice: choice.rate),
            "most tokens/s": max(self.tried, key=lambda choice: choice.rate),
            "most tokens/kJ": max(self.tried, key=self.tokens_per_kilojoule),
        }


def bench_paper(context: int, json_file: Path | None) -> None:
    """Plan both targets, show it, and write it.

    Args:
        context: tokens before the tree.
        json_file: where the figures go.
    """
    plans = [plan(served, context) for served in SERVED]
    figures = {
        "assumptions": _assumptions(plans),
        "ranks": [_ranks_row(plan) for plan in plans],
        "collectives": [row for plan in plans for row in _collective_rows(plan)],
        "steps": [_step_row(plan, nodes) for plan in plans for nodes in NODES],
        "links": [_link_row(plan) for plan in plans],
        "cards": [row for plan in plans for row in _card_rows(plan)],
        "placements": [row for plan in plans for row in _placement_rows(plan)],
        "choice": [
            _choice_row(plan, asked, choice) for plan in plans for asked, choice in plan.chosen.items()
        ],
    }
    if json_file:
        write_json(json_file, "paper", {"context": context}, figures)
    titles = {
        "assumptions": "assumed",
        "ranks": f"one rank, bfloat16, pages of {PAGE_SIZE} tokens",
        "collectives": "collectives of a round: a plain step, and the small GPU's tree",
        "steps": f"one target step by its nodes, {context} tokens before, ms",
        "links": "over each link in a round with the small GPU's tree, bytes each way",
        "cards": "draft cards: the best tree over all draft vocabularies, and over the whole vocabulary",
        "placements": "where the ranks stand, the small GPU drafting",
        "choice": "to choose",
    }
    console = Console()
    for name, title in titles.items():
        console.print(figures_table(title, figures[name]))


def plan(served: Served, context: int) -> Plan:
    """Try every card and draft vocabulary for a target."""
    ranks = served.placement.ranks
    if ranks == 1:
        step = Step(served, shard(target_on_meta(served.config, None)), context, (), ())
    else:
        with absent(ranks) as rank:
            target = target_on_meta(served.config, rank)
            plain, tree = (
                tuple(collectives(target, *sizes)) for sizes in ((1, 0), (MAX_NODES, accepted(served.tau)))
            )
            step = Step(served, shard(target), context, plain, tree)
    head, hit = head_on_meta(served.config), fitted(served.tau, served.budget)
    tried = (
        best(step, head, hit, card, vocabulary)
        for card in CARDS
        for vocabulary in COVERAGE
        if head.memory(served.config.vocab_size, vocabulary) <= card.usable
    )
    return Plan(step, head, hit, tuple(tried))


def _assumptions(plans: list[Plan]) -> list[dict[str, Any]]:
    def row(what: str, value: str) -> dict[str, Any]:
        return {"assumed": what, "value": value}

    ranks = sorted({plan.served.card.name for plan in plans})
    return [
        *(
            row(
                f"card {card.name}",
                f"{card.bandwidth / 1e9:g} GB/s, {card.flops / 1e12:g} dense bfloat16 TFLOP/s, "
                f"{card.memory / 1e9:g} GB, {card.watts:g} W",
            )
            for card in CARDS
        ),
        row("card of a target's ranks", ", ".join(ranks)),
        *(
            row(
                f"link {link.name}",
                f"{link.bandwidth / 1e9:g} GB/s each way, {link.latency * 1e6:g} µs",
            )
            for link in (NVLINK, IB_4, IB, ROCE, ETHERNET)
        ),
        row("reached of memory bandwidth, of FLOP/s", f"{READ_SHARE:g}, {COMPUTE_SHARE:g}"),
        row("memory for weights and pages", f"{MEMORY_SHARE:g}"),
        row("fixed time of a layer, of a head pass", f"{LAYER_S * 1e6:g} µs, {PASS_S * 1e6:g} µs"),
        row("both services' own work in a round", f"{ENDS_S * 1e3:g} ms"),
        *(
            row(
                f"τ of {plan.served.name} at temperature 0",
                f"{plan.served.tau:g} with D {LEVELS}, k {BEAM}, m {plan.served.budget}: "
                f"the likeliest child is right {plan.hit:.3f} of the time",
            )
            for plan in plans
        ),
        row("the i-th likeliest child", f"is right i^-{FALL:g} times as often, at every level"),
        *(
            row(f"a draft vocabulary of {size}", f"holds {share:g} of the text")
            for size, share in COVERAGE.items()
        ),
    ]


def _ranks_row(plan: Plan) -> dict[str, Any]:
    served, held = plan.served, plan.step.shard
    pages = int(served.card.usable - held.weights) // held.page
    return {
        "target": served.name,
        "ranks": served.placement.ranks,
        "parameters": held.parameters,
        "weights_of_a_rank": held.weights,
        "page_keys_and_values": PAGE_SIZE * held.kv_token,
        "page_features": PAGE_SIZE * held.feature_token,
        "pages_that_fit": pages,
        "tokens_that_fit": pages * PAGE_SIZE,
        "head": plan.head.weights,
        "LM_head": served.config.vocab_size * plan.head.row,
    }


def _collective_rows(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "target": plan.served.name,
            "nodes": nodes,
            "collective": f"{one.kind}, control" if one.kind in CONTROL else one.kind,
            "count": one.count,
            "bytes_of_a_rank": one.size,
            "between_hosts": round(one.link_bytes(plan.served.placement.ranks)),
            "ms": 1e3 * one.seconds(plan.served.placement),
        }
        for nodes in (1, plan.chosen["a small GPU"].budget)
        for one in plan.step.collectives(nodes)
    ]


def _step_row(plan: Plan, nodes: int) -> dict[str, Any]:
    step = plan.step
    return {
        "target": plan.served.name,
        "nodes": nodes,
        "compute": 1e3 * step.compute(nodes),
        "model_collectives": 1e3 * step.talk(nodes, False),
        "control": 1e3 * step.talk(nodes, True),
        "step": 1e3 * step.seconds(nodes),
    }


def _link_row(plan: Plan) -> dict[str, Any]:
    served, choice = plan.served, plan.chosen["a small GPU"]
    config, count = served.config, accepted(choice.tau)
    up, down = wire_bytes(config.vocab_size, config.hidden_size, choice.budget, count)
    over = {
        nodes: sum(
            one.link_bytes(served.placement.ranks)
            for one in plan.step.collectives(nodes)
            if one.kind not in CONTROL
        )
        for nodes in (1, choice.budget)
    }
    return {
        "target": served.name,
        "nodes": choice.budget,
        "accepted": count,
        "draft_to_verify": up,
        "verify_to_draft": down,
        "between_hosts": round(over[choice.budget]),
        "between_hosts,_plain_step": round(over[1]),
    }


def _card_rows(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for card in CARDS:
        tried = [choice for choice in plan.tried if choice.card is card]
        whole = plan.served.config.vocab_size
        shown = {max(tried, key=lambda choice: choice.rate)} if tried else set()
        shown |= {choice for choice in tried if choice.vocabulary == whole}
        for choice in sorted(shown, key=lambda choice: choice.vocabulary):
            seconds = pass_seconds(card, plan.head, choice.vocabulary, choice.beam, plan.step.context)
            rows.append({"target": plan.served.name} | _row(plan, choice) | {"pass_ms": 1e3 * seconds})
    return rows


def _placement_rows(plan: Plan) -> list[dict[str, Any]]:
    ranks, small = plan.served.placement.ranks, plan.chosen["a small GPU"]
    if ranks == 1:
        return []
    rows = []
    for placement in (Placement(ranks), *(Placement(ranks, 2, link) for link in (IB_4, IB, ROCE))):
        step = replace(plan.step, served=replace(plan.served, placement=placement))
        there = replace(plan, step=step)
        choice = best(step, plan.head, plan.hit, small.card, small.vocabulary)
        row = {"target": plan.served.name, "slowest_link": placement.slowest.name}
        rows.append(row | {"plain_ms": 1e3 * step.seconds(1)} | _row(there, choice))
    return rows


def _choice_row(plan: Plan, asked: str, choice: Choice) -> dict[str, Any]:
    return {
        "target": plan.served.name,
        "asked_for": asked,
        **_row(plan, choice),
        "plain_tokens_per_s": plan.step.rate,
        "tokens_per_kJ": plan.tokens_per_kilojoule(choice),
        "plain_tokens_per_kJ": 1e3 * plan.step.rate / plan.watts,
    }


def _row(plan: Plan, choice: Choice) -> dict[str, Any]:
    return {
        "card": choice.card.name,
        "draft_vocabulary": choice.vocabulary,
        "D": choice.levels,
        "k": choice.beam,
        "m": choice.budget,
        "τ": choice.tau,
        "draft_ms": 1e3 * choice.draft,
        "link_ms": 1e3 * choice.link,
        "step_ms": 1e3 * choice.step,
        "round_ms": 1e3 * choice.round,
        "tokens_per_s": choice.rate,
        "×_plain": choice.rate / plan.step.rate,
    }
