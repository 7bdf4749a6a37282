"""Every node of every tree sees its session's prefix, its ancestors and itself, and nothing else."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.attention import Batch, Segment, causal_segment, tree_segment
from services.engine.cache import PagedCache
from services.engine.target import Target
from services.types.tree import DraftTree

Make = Callable[..., Any]

KINDS = ("llama", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
TOLERANCE = {"gemma2": 1e-5}
"""Gemma 2's own attention takes its softmax in float32; the norms of all models round to float32 too."""


@dataclass
class Row:
    """One session of a step: its prefix, its tree, and where its positions are."""

    prefix: tuple[int, ...]
    tree: DraftTree
    slots: Tensor

    @property
    def prefix_slots(self) -> Tensor:
        return self.slots[: len(self.prefix)]

    @property
    def tree_slots(self) -> Tensor:
        return self.slots[len(self.prefix) : len(self.prefix) + len(self.tree)]


def star(rng: random.Random) -> DraftTree:
    """60 children of the root, and three more below the first."""
    tokens = (*rng.sample(range(61), 61), 0, 1, 2)
    return DraftTree(tokens, (-1, *(0,) * 60, 1, 1, 1), (1.0,) * 64)


def any_tree(hidden: Make, rng: random.Random, nodes: int = 64) -> DraftTree:
    text = [rng.randrange(61) for _ in range(min(9, nodes - 1))]
    tree: DraftTree = hidden(rng.randrange(61), text, 61, nodes, rng)[0]
    return tree


def chain(rng: random.Random) -> DraftTree:
    """64 nodes one below the other."""
    return DraftTree.chain([rng.randrange(61) for _ in range(64)])


def rows_on_shuffled_pages(
    cache: PagedCache,
    num_pages: int,
    page_size: int,
    prefixes: Sequence[int],
    trees: Sequence[DraftTree],
    rng: Any,
) -> list[Row]:
    pages = rng.sample(range(num_pages), num_pages)
    rows = []
    for length, tree in zip(prefixes, trees, strict=True):
        end = length + len(tree)
        table = [pages.pop() for _ in range(-(-end // page_size))]
        prefix = tuple(rng.randrange(61) for _ in range(length))
        rows.append(Row(prefix, tree, cache.slots(table, 0, end)))
    return rows


def prefill(target: Target, cache: PagedCache, rows: Sequence[Row]) -> None:
    """All prefixes in one step."""
    segments = [causal_segment(row.prefix_slots, len(row.prefix)) for row in rows]
    tokens = torch.tensor([token for row in rows for token in row.prefix])
    target.forward(tokens, Batch(segments, cache), torch.arange(0))


def verify(target: Target, cache: PagedCache, rows: Sequence[Row]) -> list[Tensor]:
    """All trees in one step: the logits of each."""
    segments = [tree_segment(row.slots, row.tree) for row in rows]
    tokens = torch.tensor([token for row in rows for token in row.tree.tokens])
    logits = target.forward(tokens, Batch(segments, cache), torch.arange(len(tokens)))
    return list(logits.split([len(row.tree) for row in rows]))


def alone(plain: Any, row: Row) -> tuple[Tensor, Tensor]:
    """Features and logits of every node, each path run alone behind the prefix by transformers."""
    tree = row.tree
    features: dict[int, Tensor] = {}
    logits: dict[int, Tensor] = {}
    inner = set(tree.parents)
    for leaf in (node for node in range(len(tree)) if node not in inner):
        path = (0, *tree.path(leaf))
        hidden, scores = plain.run((*row.prefix, *(tree.tokens[node] for node in path)))
        for node, feature, score in zip(path, hidden[-len(path) :], scores[-len(path) :], strict=True):
            features[node], logits[node] = feature, score
    order = range(len(tree))
    return torch.stack([features[i] for i in order]), torch.stack([logits[i] for i in order])


def assert_equal(kind: str, actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE.get(kind, 1e-6))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_equals_its_path_run_alone(
    kind: str, page_size: int, plain: Make, target: Make, hidden: Make
) -> None:
    rng = random.Random(f"{kind} {page_size}")
    num_pages = 500 // page_size
    cache = target(kind).new_cache(num_pages, page_size)
    trees = [any_tree(hidden, rng), star(rng), chain(rng), DraftTree.root(9), any_tree(hidden, rng, 12)]
    assert [len(tree) for tree in trees] == [64, 64, 64, 1, 12]
    rows = rows_on_shuffled_pages(cache, num_pages, page_size, [17, 3, 40, 1, 70], trees, rng)
    prefill(target(kind), cache, rows)
    for row, logits in zip(rows, verify(target(kind), cache, rows), strict=True):
        features, expected = alone(plain(kind), row)
        assert_equal(kind, logits, expected)
        assert_equal(kind, cache.features(row.tree_slots), features)
        assert_equal(kind, cache.features(row.prefix_slots), plain(kind).run(row.prefix)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_come_for_the_rows_asked_for_and_no_others(kind: str, target: Make, hidden: Make) -> None:
    rng = random.Random(kind)
    cache = target(kind).new_cache(40, 4)
    (row,) = rows_on_shuffled_pages(cache, 40, 4, [9], [any_tree(hidden, rng, 20)], rng)
    prefill(target(kind), cache, [row])
    (everything,) = verify(target(kind), cache, [row])
    wanted = torch.tensor([19, 0, 7])
    batch = Batch([tree_segment(row.slots, row.tree)], cache)
    some = target(kind).forward(torch.tensor(row.tree.tokens), batch, wanted)
    torch.testing.assert_close(some, everything[wanted], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_a_prompt_in_chunks_beside_trees_equals_one_pass(
    kind: str, plain: Make, target: Make, hidden: Make
) -> None:
    """Chunks of more rows than a tree has run beside small segments in the same step."""
    rng = random.Random(kind)
    cache = target(kind).new_cache(120, 4)
    row, prompt = rows_on_shuffled_pages(
        cache, 120, 4, [11, 200], [any_tree(hidden, rng, 30), DraftTree.root(5)], rng
    )
    prefill(target(kind), cache, [row])
    logits = []
    for start, end in [(0, 90), (90, 93), (93, 200)]:
        segments = [
            causal_segment(prompt.slots[:end], end - start),
            tree_segment(row.slots, row.tree),
        ]
        tokens = torch.tensor([*prompt.prefix[start:end], *row.tree.tokens])
        logits.append(target(kind).forward(tokens, Batch(segments, cache), torch.arange(len(tokens))))
        assert_equal(kind, logits[-1][end - start :], alone(plain(kind), row)[1])
    features, expected = plain(kind).run(prompt.prefix)
    assert_equal(kind, torch.cat([each[:-30] for each in logits]), expected)
    assert_equal(kind, cache.features(prompt.prefix_slots), features)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_nothing_outside_a_sessions_own_slots_is_read(
    kind: str, plain: Make, target: Make, hidden: Make
) -> None:
    """Every other slot, also the unused ones of the session's last page, holds not-a-number."""
    rng = random.Random(kind)
    page_size, num_pages = 16, 30
    cache = target(kind).new_cache(num_pages, page_size)
    keys, _ = cache.read(0, slice(0, num_pages * page_size))
    poison = torch.full_like(keys, torch.nan)
    for layer in range(2):
        cache.write(layer, torch.arange(num_pages * page_size), poison, poison)
    trees = [any_tree(hidden, rng, nodes) for nodes in (5, 64, 2)]
    rows = rows_on_shuffled_pages(cache, num_pages, page_size, [3, 50, 33], trees, rng)
    prefill(target(kind), cache, rows)
    for row, logits in zip(rows, verify(target(kind), cache, rows), strict=True):
        assert_equal(kind, logits, alone(plain(kind), row)[1])


def test_a_row_sees_what_its_word_says(hidden: Make) -> None:
    rng = random.Random(0)
    for tree in (any_tree(hidden, rng), chain(rng), star(rng)):
        segment: Segment = tree_segment(torch.arange(5 + len(tree)), tree)
        assert segment.start == 5
        assert segment.rows == len(tree)
        assert segment.positions.tolist() == [5 + depth for depth in tree.depths]
        for node in range(len(tree)):
            seen = set(segment.visible[node].nonzero().flatten().tolist())
            assert seen == {0, node, *tree.path(node)}
