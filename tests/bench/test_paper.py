"""`weald bench paper`: its bytes and collectives are those of real ranks, its times behave as times do."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from services.bench.hardware import CARDS, CONTROL, Card, Collective, Kind, Link, Placement
from services.bench.paper import SERVED, Plan, bench_paper, plan
from services.bench.rounds import (
    BEAM,
    COVERAGE,
    ENOUGH,
    LEVELS,
    Served,
    Step,
    accepted,
    best,
    expected,
    fitted,
    hits,
    link_seconds,
    pass_seconds,
    wire_bytes,
)
from services.bench.shards import Shard, absent, collectives, head_on_meta, shard, target_on_meta
from services.engine.head import EagleHead, head_config
from services.engine.ranks import free_port
from services.types.tree import MAX_NODES

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 61}

WORKER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import torch
from services.bench.shards import Counted, shard
from services.engine.attention import Batch, tree_segment
from services.engine.ranks import Ranks, follow
from services.engine.target import Target
from services.types.tree import DraftTree

torch.set_num_threads(1)
cpu, (directory, port, rank, nodes, accepted) = torch.device("cpu"), sys.argv[1:]
ranks = Ranks.join(int(rank), 2, "127.0.0.1", int(port), cpu, 100.0)
target = Target.load(Path(directory), torch.bfloat16, cpu, ranks)
said = {"shard": asdict(shard(target))}
if ranks.rank:
    follow(target)
else:
    cache, count, tree = target.new_cache(4, 16), int(accepted), DraftTree.chain(range(int(nodes)))
    slots, counted = torch.arange(len(tree)), Counted()
    with counted:
        target.forward(slots, Batch([tree_segment(slots, tree)], cache), slots)
        cache.move(slots[:count], slots[:count])
        cache.features(slots[: count + 1])
    said["collectives"] = [asdict(one) for one in counted.collectives()]
    ranks.stop()
print(json.dumps(said))
"""


def tiny(**overrides: Any) -> LlamaConfig:
    options = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": None} | overrides
    return LlamaConfig(**options, bos_token_id=None, eos_token_id=0)


def of_rank(config: LlamaConfig, rank: int, size: int) -> Shard:
    with absent(size, rank) as ranks:
        return shard(target_on_meta(config, ranks))


def in_a_round(config: LlamaConfig, size: int, nodes: int, accepted: int) -> list[Collective]:
    with absent(size) as ranks:
        return collectives(target_on_meta(config, ranks), nodes, accepted)


@pytest.mark.slow
def test_what_is_computed_on_paper_is_what_two_real_ranks_hold_and_do(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("ranks run on the CPU only where no accelerator is in sight")
    config = tiny()
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    arguments = [sys.executable, "-c", WORKER, str(tmp_path), str(free_port())]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen([*arguments, str(rank), "9", "2"], stdout=subprocess.PIPE, text=True, env=env)
        for rank in (0, 1)
    ]
    said = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    assert [Shard(**one["shard"]) for one in said] == [of_rank(config, rank, 2) for rank in (0, 1)]
    # Ranks on the CPU need no answer: their collectives wait by themselves.
    planned = [one for one in in_a_round(config, 2, 9, 2) if one.kind != "answer"]
    real = [Collective(**one) for one in said[0]["collectives"]]
    assert sorted(real, key=str) == sorted(planned, key=str)


@pytest.mark.parametrize("served", SERVED, ids=lambda served: served.name)
def test_the_targets_have_their_published_numbers_of_parameters(served: Served) -> None:
    parameters = shard(target_on_meta(served.config, None)).parameters
    assert round(parameters / 1e9, 2) == {"Llama-3.1-8B": 8.03, "Llama-3.3-70B": 70.55}[served.name]


@settings(max_examples=12)
@given(size=st.sampled_from([2, 4]), vocabulary=st.integers(20, 90), intermediate=st.integers(8, 60))
def test_the_shards_of_all_ranks_are_the_model_and_its_norms_once_more_each(
    size: int, vocabulary: int, intermediate: int
) -> None:
    config = tiny(vocab_size=vocabulary, intermediate_size=intermediate)
    whole = shard(target_on_meta(config, None))
    shards = [of_rank(config, rank, size) for rank in range(size)]
    norms = 2 * (2 * config.num_hidden_layers + 1) * config.hidden_size
    assert sum(one.weights for one in shards) == 2 * whole.parameters + (size - 1) * norms
    assert sum(one.embedding for one in shards) == 2 * vocabulary * config.hidden_size
    assert sum(one.page for one in shards) == whole.page
    assert all(one.parameters == whole.parameters for one in shards)


@settings(max_examples=10)
@given(nodes=st.integers(2, MAX_NODES), accepted=st.integers(0, 1))
def test_the_collectives_of_a_step_grow_with_its_nodes_as_real_steps_do(nodes: int, accepted: int) -> None:
    config = tiny()
    served = Served("tiny", config, Placement(4, 2), 60, 3.0)
    plain, tree = (tuple(in_a_round(config, 4, *sizes)) for sizes in ((1, 0), (MAX_NODES, accepted)))
    step = Step(served, of_rank(config, 0, 4), 10, plain, tree)

    def of_the_model(ones: Any) -> set[Collective]:
        return {one for one in ones if one.kind not in CONTROL}

    real = in_a_round(config, 4, nodes, accepted)
    assert of_the_model(step.collectives(nodes)) == of_the_model(real)
    assert step.collectives(1) == plain
    sums = next(one for one in real if one.kind == "all-reduce")
    assert sums == Collective("all-reduce", 2 * nodes * config.hidden_size, 2 * config.num_hidden_layers + 1)


def test_the_head_on_paper_weighs_what_a_real_head_weighs() -> None:
    config = tiny(num_key_value_heads=2)
    weight = torch.zeros(config.vocab_size, config.hidden_size)
    real = EagleHead(head_config(config), weight, weight).to(torch.bfloat16)
    head = head_on_meta(config)
    assert head.weights == sum(parameter.nbytes for parameter in real.parameters())
    assert head.kv_token == real.token_bytes
    assert head.memory(61, 40) == head.weights + (61 + 40) * 32 * 2


seconds = st.floats(1e-6, 1e-3)
links = st.builds(Link, st.just("link"), st.floats(1e9, 1e12), seconds)
kinds: st.SearchStrategy[Kind] = st.sampled_from(
    ["all-reduce", "all-gather", "gather", "broadcast", "answer"]
)
collective = st.builds(Collective, kinds, st.integers(0, 10**8), st.integers(1, 200))


@given(collective, st.integers(1, 64), st.integers(0, 6), st.integers(0, 6), links)
def test_over_more_hosts_nothing_becomes_cheaper(
    one: Collective, ranks: int, fewer: int, more: int, link: Link
) -> None:
    fewer, more = sorted((fewer, more))
    times = [one.seconds(Placement(ranks, 2**hosts, link)) for hosts in (fewer, more)]
    assert times[0] <= times[1]


@given(collective, st.integers(2, 64), links, st.floats(1, 10), st.floats(0.1, 1))
def test_over_a_better_link_nothing_takes_longer(
    one: Collective, ranks: int, link: Link, faster: float, sooner: float
) -> None:
    better = Link("better", link.bandwidth * faster, link.latency * sooner)
    assert one.seconds(Placement(ranks, 2, better)) <= one.seconds(Placement(ranks, 2, link))


@given(collective, st.integers(2, 64), st.integers(0, 10**8))
def test_bytes_over_a_link_grow_with_what_a_rank_brings_and_ranks_only_add_to_it(
    one: Collective, ranks: int, size: int
) -> None:
    assert (one.link_bytes(ranks) <= replace(one, size=size).link_bytes(ranks)) == (one.size <= size)
    assert one.link_bytes(ranks) <= one.link_bytes(ranks + 1)


@given(st.integers(1, 64), st.integers(0, 10))
def test_wider_features_and_larger_trees_are_more_bytes_on_the_wire(nodes: int, accepted: int) -> None:
    accepted = min(accepted, nodes - 1)
    narrow, wide = (wire_bytes(128_256, hidden, nodes, accepted) for hidden in (4096, 8192))
    assert narrow[0] == wide[0]
    assert wide[1] - narrow[1] >= (accepted + 1) * 4096 * 2
    if nodes < MAX_NODES:
        assert wire_bytes(128_256, 4096, nodes + 1, accepted)[0] > narrow[0]


@given(st.floats(0, 1e12), st.floats(0, 1e15), st.floats(1, 10), st.floats(1, 10), st.sampled_from(CARDS))
def test_a_faster_card_is_never_slower(
    read: float, operations: float, wider: float, quicker: float, card: Card
) -> None:
    faster = replace(card, bandwidth=card.bandwidth * wider, flops=card.flops * quicker)
    assert faster.seconds(read, operations) <= card.seconds(read, operations)
    assert card.seconds(read, operations) <= card.seconds(2 * read, operations)


def test_more_rows_cost_a_head_pass_nothing_until_arithmetic_is_the_limit() -> None:
    head = head_on_meta(SERVED[0].config)
    for card, vocabulary in product(CARDS, COVERAGE):
        one, ten, many = (pass_seconds(card, head, vocabulary, rows, 100) for rows in (1, 10, 10_000))
        assert one == ten < many
    assert pass_seconds(CARDS[0], head, 8_000, 1, 100) < pass_seconds(CARDS[0], head, 32_000, 1, 100)


@given(st.floats(0.01, 0.7), st.integers(1, 8))
def test_a_chain_commits_the_sum_of_its_powers(hit: float, levels: int) -> None:
    taus = expected(hit, 1.0, levels, 1)
    powers = [hit**depth for depth in range(levels + 1)]
    assert taus[1] == 1
    assert taus[levels + 1] == taus[MAX_NODES] == pytest.approx(sum(powers))


@given(st.floats(0.05, 0.7), st.integers(2, 7))
def test_two_levels_commit_the_most_valuable_of_all_their_nodes(hit: float, beam: int) -> None:
    shares = hits(hit, 1.0, beam).tolist()
    values = sorted([*shares, *(a * b for a, b in product(shares, shares))], reverse=True)
    taus = expected(hit, 1.0, 2, beam)
    for budget in range(1, MAX_NODES + 1):
        assert taus[budget] == pytest.approx(1 + sum(values[: budget - 1]))


@settings(max_examples=30)
@given(st.floats(0.05, 0.7), st.sampled_from(list(COVERAGE.values())), st.integers(1, 6), st.integers(1, 8))
def test_deeper_wider_and_larger_trees_commit_no_less(
    hit: float, coverage: float, levels: int, beam: int
) -> None:
    taus = expected(hit, coverage, levels, beam)
    assert len(taus) == MAX_NODES + 1
    assert list(taus) == sorted(taus)
    for other in (
        expected(hit, coverage, levels + 1, beam),
        expected(hit, coverage, levels, beam + 1),
        expected(hit, 1.0, levels, beam),
    ):
        assert all(ours <= theirs + 1e-6 for ours, theirs in zip(taus, other, strict=True))


@pytest.mark.parametrize("served", SERVED, ids=lambda served: served.name)
def test_the_model_of_acceptance_gives_the_published_tau_for_the_published_tree(served: Served) -> None:
    hit = fitted(served.tau, served.budget)
    assert expected(hit, 1.0, LEVELS, BEAM)[served.budget] == pytest.approx(served.tau, abs=1e-4)
    assert float(hits(hit, 1.0, BEAM).sum()) < 1


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(SERVED[0], 2048)


def test_the_chosen_trees_are_about_the_best_and_a_faster_card_makes_no_fewer_tokens(planned: Plan) -> None:
    step, config = planned.step, planned.served.config
    for choice in planned.tried[::3]:
        taus = expected(planned.hit, COVERAGE[choice.vocabulary], choice.levels, choice.beam)
        draft = choice.levels * pass_seconds(
            choice.card, planned.head, choice.vocabulary, choice.beam, step.context
        )
        assert choice.draft == draft
        for nodes in range(2, MAX_NODES + 1):
            whole = draft + link_seconds(config, nodes, taus[nodes]) + step.seconds(nodes)
            assert choice.rate >= ENOUGH * taus[nodes] / whole
        card = choice.card
        faster = replace(card, bandwidth=2 * card.bandwidth, flops=2 * card.flops)
        assert best(step, planned.head, planned.hit, faster, choice.vocabulary).rate >= ENOUGH * choice.rate


def test_a_card_that_cannot_hold_the_head_is_not_tried(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(CARDS[0], memory=planned.head.memory(128_256, 32_000) / 0.9 + 1)
    monkeypatch.setattr("services.bench.paper.CARDS", (small,))
    assert {choice.vocabulary for choice in plan(SERVED[0], 2048).tried} == {32_000, 16_000, 8_000}


@pytest.mark.slow
def test_the_plan_in_the_docs_is_what_the_command_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "paper.json"
    bench_paper(2048, file)
    shown = capsys.readouterr().out
    now, kept = (json.loads(path.read_text()) for path in (file, ROOT / "docs" / "figures" / "paper.json"))
    for record in (now, kept):
        del record["environment"]
    assert now.keys() == kept.keys()
    for name in now.keys() - {"benchmark", "settings"}:
        for ours, theirs in zip(now[name], kept[name], strict=True):
            assert ours.keys() == theirs.keys()
            for column, value in ours.items():
                same = pytest.approx(theirs[column], rel=1e-6) if isinstance(value, float) else theirs[column]
                assert value == same
    for row in now["choice"]:
        assert row["round_ms"] == pytest.approx(row["draft_ms"] + row["link_ms"] + row["step_ms"])
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["τ"] / row["round_ms"])
        assert f"{row['tokens_per_s']:.2f}" in shown
    crossing = [row for row in now["collectives"] if row["collective"] == "all-reduce"]
    assert {row["count"] for row in crossing} == {2 * 80 + 1}
    assert accepted(SERVED[1].tau) == 3
