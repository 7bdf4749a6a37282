"""Trees are what the head says of true features behind a prefix, whatever was drafted before."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from services.draft.drafter import Drafter
from services.engine.head import EagleHead
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError
from services.types.tree import DraftTree

Make = Callable[..., Any]

CONFIGS = {
    "dynamic": DraftConfig(levels=5, beam=6, budget=64),
    "dynamic, small": DraftConfig(levels=3, beam=2, budget=6),
    "one level": DraftConfig(levels=1, beam=4, budget=5),
    "static": DraftConfig(shape=TreeShape.STATIC),
    "chain": DraftConfig(shape=TreeShape.CHAIN, levels=7),
}
SOME = torch.tensor([3, 0, 60, 17, 18, 19, 40, 33, 8])
TOLERANCE = 1e-6
"""The norm of a Llama layer rounds to float32; the same rows in another batch can differ by that."""


@dataclass
class Story:
    """What a session commits over time, made up: any features do."""

    tokens: list[int]
    features: Tensor
    """Of all positions but the last, `[n, H]`."""
    generator: torch.Generator = field(repr=False)

    @classmethod
    def begin(cls, prompt: int, seed: int) -> "Story":
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(61, (prompt + 1,), generator=generator).tolist()
        return cls(tokens, torch.randn(prompt, 32, generator=generator, dtype=torch.float64), generator)

    def go_on(self, count: int) -> tuple[list[int], Tensor]:
        """Commit `count` tokens: they, and the features of the positions that filled."""
        tokens = torch.randint(61, (count,), generator=self.generator).tolist()
        features = torch.randn(count, 32, generator=self.generator, dtype=torch.float64)
        self.tokens += tokens
        self.features = torch.cat([self.features, features])
        return tokens, features


def log_probs_alone(twin: EagleHead, story: Story, tree: DraftTree) -> list[Tensor]:
    """For every node, the log-probabilities of what follows its path, run alone behind all true entries.

    Each pass is made of the true features and of those predicted along the node's own path.
    """
    predicted: dict[int, Tensor] = {}
    for node in range(len(tree)):
        path = tree.path(node)
        along = [predicted[tree.parents[step]] for step in path]
        features = torch.cat([story.features, *(feature[None] for feature in along)])
        tokens = torch.tensor([*story.tokens[1:], *(tree.tokens[step] for step in path)])
        positions = torch.arange(len(tokens))
        predicted[node] = twin(features[None], tokens[None], positions[None])[0, -1]
    return [twin.log_probs(predicted[node]) for node in range(len(tree))]


def assert_says_what_the_head_says(tree: DraftTree, story: Story, twin: EagleHead) -> None:
    """Root, confidences and, wherever a node was expanded, the best children."""
    assert tree.tokens[0] == story.tokens[-1]
    column = {token: i for i, token in enumerate(twin.vocabulary.tolist())}
    log_probs = log_probs_alone(twin, story, tree)
    for node, children in enumerate(tree.children):
        drafted = torch.tensor([tree.confidences[child] for child in children.values()], dtype=torch.float64)
        columns = [column[token] for token in children]
        torch.testing.assert_close(drafted, log_probs[node][columns].exp(), rtol=0, atol=TOLERANCE)
        best = log_probs[node].topk(len(children)).values
        torch.testing.assert_close(log_probs[node][columns], best, rtol=0, atol=TOLERANCE)


def assert_same(tree: DraftTree, other: DraftTree) -> None:
    assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
    assert tree.confidences == pytest.approx(other.confidences, abs=TOLERANCE)


@pytest.mark.parametrize("vocabulary", [None, SOME], ids=["all tokens", "a draft vocabulary"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_node_equals_its_path_run_alone_behind_the_true_prefix_round_after_round(
    config: str, vocabulary: Tensor | None, target: Make, head: Make, idle: Make
) -> None:
    rng = random.Random(config)
    sizes = {"max_position_embeddings": 16}
    twin = head(target("llama"), vocabulary, "sdpa", **sizes)
    drafter = Drafter(head(target("llama"), vocabulary, **sizes), CONFIGS[config], num_pages=300, page_size=4)
    stories = {"a": Story.begin(1, 1), "b": Story.begin(30, 2), "c": Story.begin(9, 3)}
    for id, story in stories.items():
        drafter.open(id, story.tokens, story.features)
    for _ in range(4):
        ids = rng.sample(sorted(stories), rng.randint(2, 3))
        for id, tree in zip(ids, drafter.propose(ids), strict=True):
            assert_says_what_the_head_says(tree, stories[id], twin)
        drafter.check()
        for id in ids:
            for _ in range(rng.randint(0, 2)):
                drafter.advance(id, *stories[id].go_on(rng.randint(1, 6)))
    for id in stories:
        drafter.close(id)
    idle(drafter)


def test_rounds_of_drafting_leave_the_same_entries_as_one_pass_over_the_whole_prefix(
    target: Make, head: Make
) -> None:
    rng = random.Random(5)
    config = DraftConfig(levels=6, beam=10, budget=60)
    drafter = Drafter(head(target("llama")), config, num_pages=200, page_size=4)
    story = Story.begin(7, 4)
    drafter.open("a", story.tokens, story.features)
    for _ in range(12):
        drafter.propose(["a"])
        drafter.advance("a", *story.go_on(rng.randint(1, 7)))
    late = Drafter(head(target("llama")), config, num_pages=200, page_size=4)
    late.open("a", story.tokens, story.features)
    assert_same(drafter.propose(["a"])[0], late.propose(["a"])[0])


def test_a_tree_depends_on_neither_its_neighbours_nor_how_often_it_was_asked_for(
    target: Make, head: Make
) -> None:
    config = CONFIGS["dynamic"]
    stories = {str(n): Story.begin(n, n) for n in (1, 2, 17, 40)}
    together = Drafter(head(target("llama")), config, num_pages=300, page_size=4)
    for id, story in stories.items():
        together.open(id, story.tokens, story.features)
    first = dict(zip(stories, together.propose(list(stories)), strict=True))
    backwards = dict(zip(reversed(stories), together.propose(list(reversed(stories))), strict=True))
    for id, story in stories.items():
        alone = Drafter(head(target("llama")), config, num_pages=300, page_size=16)
        alone.open(id, story.tokens, story.features)
        assert_same(first[id], alone.propose([id])[0])
        assert_same(backwards[id], first[id])
        assert_same(together.propose([id])[0], first[id])


@pytest.mark.parametrize("length", [511, 512, 513, 1100])
def test_a_prompt_of_several_chunks_is_extended_like_a_short_one(
    length: int, target: Make, head: Make
) -> None:
    twin = head(target("llama"), attention="sdpa")
    drafter = Drafter(head(target("llama")), CONFIGS["dynamic, small"], num_pages=120)
    stories = {"long": Story.begin(length, 1), "short": Story.begin(5, 2)}
    for id, story in stories.items():
        drafter.open(id, story.tokens, story.features)
    for id, tree in zip(stories, drafter.propose(list(stories)), strict=True):
        assert_says_what_the_head_says(tree, stories[id], twin)


@pytest.mark.parametrize(
    ("config", "nodes", "depth"),
    [
        (DraftConfig(), 60, 6),
        (DraftConfig(levels=6, beam=10, budget=64), 64, 6),
        (DraftConfig(levels=2, beam=2, budget=64), 7, 2),
        (DraftConfig(levels=2, beam=2, budget=1), 1, 0),
        (DraftConfig(shape=TreeShape.STATIC), 26, 5),
        (DraftConfig(shape=TreeShape.CHAIN, levels=9), 10, 9),
    ],
)
def test_trees_have_the_size_of_their_configuration(
    config: DraftConfig, nodes: int, depth: int, target: Make, head: Make
) -> None:
    drafter = Drafter(head(target("llama")), config, num_pages=60)
    story = Story.begin(6, 1)
    drafter.open("a", story.tokens, story.features)
    (tree,) = drafter.propose(["a"])
    assert len(tree) == nodes
    assert tree.depths[-1] <= depth
    assert tree.depths[-1] == depth or config.shape is TreeShape.DYNAMIC


def test_draft_tokens_are_ids_of_the_target(target: Make, head: Make) -> None:
    drafter = Drafter(head(target("llama"), SOME), DraftConfig(), num_pages=60)
    story = Story.begin(6, 1)
    drafter.open("a", story.tokens, story.features)
    (tree,) = drafter.propose(["a"])
    assert {3, 40, 60} < set(tree.tokens[1:]) <= set(SOME.tolist())


def test_an_id_that_is_open_cannot_be_opened_again(target: Make, head: Make, idle: Make) -> None:
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=60)
    story, other = Story.begin(6, 1), Story.begin(6, 2)
    drafter.open("a", story.tokens, story.features)
    with pytest.raises(WealdError, match="session a is already open") as refused:
        drafter.open("a", other.tokens, other.features)
    assert refused.value.code is ErrorCode.ALREADY_EXISTS
    assert drafter.propose(["a"])[0].tokens[0] == story.tokens[-1]
    drafter.close("a")
    drafter.close("a")
    idle(drafter)


@pytest.mark.parametrize("num_pages", range(6, 20))
def test_want_of_pages_loses_nothing_that_was_told(
    num_pages: int, target: Make, head: Make, idle: Make
) -> None:
    """Whichever session and pass lack them, the same trees come as soon as another session has ended."""
    config = CONFIGS["dynamic, small"]
    stories = {str(n): Story.begin(n, n) for n in (12, 5, 17)}
    drafter = Drafter(head(target("llama")), config, num_pages=num_pages, page_size=4)
    for id, story in stories.items():
        drafter.open(id, story.tokens, story.features)
    waiting = list(stories)
    trees: list[DraftTree] = []
    while not trees:
        try:
            trees = drafter.propose(waiting)
        except WealdError as refused:
            if refused.code is not ErrorCode.RESOURCE_EXHAUSTED:
                raise
            drafter.check()
            drafter.close(waiting.pop())
    assert len(trees) == 1 + (num_pages >= 7) + (num_pages >= 13)
    for id, tree in zip(waiting, trees, strict=True):
        alone = Drafter(head(target("llama")), config, num_pages=60)
        alone.open(id, stories[id].tokens, stories[id].features)
        assert_same(tree, alone.propose([id])[0])
        drafter.close(id)
    idle(drafter)


def test_the_integrity_check_catches_a_leaked_page(target: Make, head: Make) -> None:
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=60)
    story = Story.begin(6, 1)
    drafter.open("a", story.tokens, story.features)
    drafter.propose(["a"])
    page = drafter._sessions["a"].pages.pop()
    with pytest.raises(WealdError, match=rf"KV pages leaked: \[{page}\]"):
        drafter.check()


def test_a_session_that_is_not_open_is_named_and_no_sessions_need_no_pass(target: Make, head: Make) -> None:
    llama = target("llama")
    drafter = Drafter(head(llama), DraftConfig(), num_pages=4)
    assert drafter.propose([]) == []
    for call in (lambda: drafter.propose(["a"]), lambda: drafter.advance("a", [1], torch.zeros(1, 32))):
        with pytest.raises(WealdError, match="session a is not open") as refused:
            call()
        assert refused.value.code is ErrorCode.UNKNOWN_SESSION
