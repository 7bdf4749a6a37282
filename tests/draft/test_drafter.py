"""Trees are what the head says of true features behind a prefix, whatever was drafted before."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
import torch
from torch import Tensor

from services.draft.drafter import SLACK, Drafter, Terms
from services.engine.head import EagleHead
from services.speculation.calibration import REFRESH, Band
from services.speculation.coupling import Drawing
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
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


def features_of(tokens: Sequence[int]) -> Tensor:
    """Made-up features; each is a function of the tokens up to its own position, as a target's are."""
    features, seen = [], b""
    for token in tokens:
        seen = blake2b(seen + bytes([token])).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seen[:7]))
        features.append(torch.randn(32, generator=generator, dtype=torch.float64))
    return torch.stack(features) if features else torch.empty(0, 32, dtype=torch.float64)


class Story:
    """What a session commits over time."""

    def __init__(self, tokens: Sequence[int], seed: int = 0) -> None:
        self.tokens = list(tokens)
        self.features = features_of(self.tokens[:-1])
        """Of all positions but the last, `[n, H]`."""
        self._rng = random.Random(seed)

    @classmethod
    def begin(cls, prompt: int, seed: int) -> "Story":
        """A prompt of so many random tokens and the first one behind it."""
        rng = random.Random(seed)
        return cls([rng.randrange(61) for _ in range(prompt + 1)], seed)

    def go_on(self, count: int) -> tuple[list[int], Tensor]:
        """Commit `count` tokens: they, and the features of the positions that filled."""
        tokens, known = [self._rng.randrange(61) for _ in range(count)], len(self.features)
        self.tokens += tokens
        self.features = features_of(self.tokens[:-1])
        return tokens, self.features[known:]


def begin(drafter: Drafter, id: str, story: Story, config: DraftConfig | None = None) -> int:
    """Open a session and tell the features it needs; the first position of those."""
    needed = drafter.open(id, story.tokens, config)
    drafter.advance(id, (), story.features[needed:])
    return needed


def tree_alone(head: EagleHead, config: DraftConfig, story: Story) -> DraftTree:
    """The tree that a drafter grows which has nothing else, and nothing in its cache."""
    drafter = Drafter(head, config, num_pages=400, page_size=4)
    assert begin(drafter, "alone", story) == 0
    return drafter.propose(["alone"])[0]


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
    return [twin.logits(predicted[node]).log_softmax(-1) for node in range(len(tree))]


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
        begin(drafter, id, story)
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
    begin(drafter, "a", story)
    for _ in range(12):
        drafter.propose(["a"])
        drafter.advance("a", *story.go_on(rng.randint(1, 7)))
    late = Drafter(head(target("llama")), config, num_pages=200, page_size=4)
    begin(late, "a", story)
    assert_same(drafter.propose(["a"])[0], late.propose(["a"])[0])


def test_a_tree_depends_on_neither_its_neighbours_nor_how_often_it_was_asked_for(
    target: Make, head: Make
) -> None:
    config = CONFIGS["dynamic"]
    stories = {str(n): Story.begin(n, n) for n in (1, 2, 17, 40)}
    together = Drafter(head(target("llama")), config, num_pages=300, page_size=4)
    for id, story in stories.items():
        begin(together, id, story)
    first = dict(zip(stories, together.propose(list(stories)), strict=True))
    backwards = dict(zip(reversed(stories), together.propose(list(reversed(stories))), strict=True))
    for id, story in stories.items():
        alone = Drafter(head(target("llama")), config, num_pages=300, page_size=16)
        begin(alone, id, story)
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
        begin(drafter, id, story)
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
    begin(drafter, "a", story)
    (tree,) = drafter.propose(["a"])
    assert len(tree) == nodes
    assert tree.depths[-1] <= depth
    assert tree.depths[-1] == depth or config.shape is TreeShape.DYNAMIC


def test_draft_tokens_are_ids_of_the_target(target: Make, head: Make) -> None:
    drafter = Drafter(head(target("llama"), SOME), DraftConfig(), num_pages=60)
    story = Story.begin(6, 1)
    begin(drafter, "a", story)
    (tree,) = drafter.propose(["a"])
    assert {3, 40, 60} < set(tree.tokens[1:]) <= set(SOME.tolist())


def test_an_id_that_is_open_cannot_be_opened_again(target: Make, head: Make, idle: Make) -> None:
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=60)
    story, other = Story.begin(6, 1), Story.begin(6, 2)
    begin(drafter, "a", story)
    with pytest.raises(WealdError, match="session a is already open") as refused:
        drafter.open("a", other.tokens)
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
        begin(drafter, id, story)
    waiting, trees = list(stories), list[DraftTree]()
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
        begin(alone, id, stories[id])
        assert_same(tree, alone.propose([id])[0])
        drafter.close(id)
    idle(drafter)


def test_the_integrity_check_catches_a_leaked_page(target: Make, head: Make) -> None:
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=60)
    story = Story.begin(6, 1)
    begin(drafter, "a", story)
    drafter.propose(["a"])
    page = drafter._sessions["a"].pages.pop()
    with pytest.raises(WealdError, match=rf"KV pages leaked: \[{page}\]"):
        drafter.check()


def test_a_session_that_is_not_open_is_named_and_no_sessions_need_no_pass(target: Make, head: Make) -> None:
    llama = target("llama")
    drafter = Drafter(head(llama), DraftConfig(), num_pages=4)
    assert drafter.propose([]) == []
    calls = (
        lambda: drafter.propose(["a"]),
        lambda: drafter.advance("a", [1], torch.zeros(1, 32)),
        lambda: drafter.ready("a"),
        lambda: drafter.retire("a"),
    )
    for call in calls:
        with pytest.raises(WealdError, match="session a is not open") as refused:
            call()
        assert refused.value.code is ErrorCode.UNKNOWN_SESSION


@pytest.mark.parametrize("prompt", range(1, 15))
def test_a_prompt_seen_before_needs_only_what_lies_behind_its_last_full_page_but_one_entry_at_least(
    prompt: int, target: Make, head: Make, idle: Make
) -> None:
    config, story = CONFIGS["dynamic, small"], Story.begin(prompt, 1)
    drafter = Drafter(head(target("llama")), config, num_pages=60, page_size=4)
    for expected in (0, (prompt - 1) // 4 * 4, (prompt - 1) // 4 * 4):
        forwarded = drafter.tokens_forwarded
        assert begin(drafter, "a", story) == expected
        assert_same(drafter.propose(["a"])[0], tree_alone(head(target("llama")), config, story))
        assert drafter.tokens_forwarded == forwarded + prompt - expected
        drafter.close("a")
        idle(drafter)


def test_the_next_turn_of_a_chat_forwards_only_what_is_new(target: Make, head: Make, idle: Make) -> None:
    rng, config = random.Random(3), CONFIGS["dynamic"]
    twin = head(target("llama"), attention="sdpa")
    drafter = Drafter(head(target("llama")), config, num_pages=90, page_size=4)
    story, entries = Story.begin(21, 5), 0
    for turn in range(4):
        forwarded = drafter.tokens_forwarded
        assert begin(drafter, str(turn), story) == entries // 4 * 4
        for _ in range(5):
            (tree,) = drafter.propose([str(turn)])
            assert_says_what_the_head_says(tree, story, twin)
            now = len(story.features)
            drafter.advance(str(turn), *story.go_on(rng.randint(1, 7)))
        assert drafter.tokens_forwarded - forwarded == now - entries // 4 * 4
        entries = now
        drafter.close(str(turn))
        idle(drafter)
        story.go_on(11)


@pytest.mark.parametrize("shared", range(11))
def test_two_prompts_share_the_entries_that_depend_on_their_common_tokens_alone(
    shared: int, target: Make, head: Make, idle: Make
) -> None:
    """The first stays open, and both grow trees and go on, in turns."""
    config = CONFIGS["dynamic, small"]
    drafter = Drafter(head(target("llama")), config, num_pages=90, page_size=4)
    one = Story.begin(13, 1)
    other = Story([*one.tokens[:shared], (one.tokens[shared] + 1) % 61, *one.tokens[shared + 1 :]], 2)
    assert begin(drafter, "one", one) == 0
    drafter.propose(["one"])
    assert begin(drafter, "other", other) == max(0, shared - 1) // 4 * 4
    for _ in range(3):
        for id, story in (("one", one), ("other", other)):
            assert_same(drafter.propose([id])[0], tree_alone(head(target("llama")), config, story))
            drafter.check()
            drafter.advance(id, *story.go_on(3))
    drafter.close("one")
    assert_same(drafter.propose(["other"])[0], tree_alone(head(target("llama")), config, other))
    drafter.close("other")
    idle(drafter)


def test_equal_prompts_that_are_extended_in_the_same_pass_do_not_disturb_each_other(
    target: Make, head: Make, idle: Make
) -> None:
    config = CONFIGS["dynamic"]
    drafter = Drafter(head(target("llama")), config, num_pages=90, page_size=4)
    stories = {str(i): Story(Story.begin(13, 1).tokens, i) for i in range(3)}
    for id, story in stories.items():
        assert begin(drafter, id, story) == 0
    for _ in range(3):
        for id, tree in zip(stories, drafter.propose(list(stories)), strict=True):
            assert_same(tree, tree_alone(head(target("llama")), config, stories[id]))
            drafter.advance(id, *stories[id].go_on(3))
    for id in stories:
        drafter.close(id)
        drafter.check()
    assert drafter.open("again", stories["2"].tokens) == 16
    drafter.close("again")
    idle(drafter)


def test_entries_in_the_cache_give_way_to_sessions_that_need_the_pages(
    target: Make, head: Make, idle: Make
) -> None:
    """Room for one session: each finds what the one before it left, as long as no other came between."""
    config = CONFIGS["dynamic, small"]
    drafter = Drafter(head(target("llama")), config, num_pages=8, page_size=4)
    stories = [Story.begin(22, seed) for seed in range(3)]
    for n, needed in ((0, 0), (0, 20), (1, 0), (1, 20), (2, 0), (0, 0)):
        assert begin(drafter, "a", stories[n]) == needed
        assert_same(drafter.propose(["a"])[0], tree_alone(head(target("llama")), config, stories[n]))
        drafter.check()
        drafter.close("a")
        idle(drafter)


@pytest.mark.parametrize("seed", range(4))
def test_features_in_any_portions_give_the_same_trees(seed: int, target: Make, head: Make) -> None:
    rng, config = random.Random(seed), CONFIGS["dynamic, small"]
    drafter = Drafter(head(target("llama")), config, num_pages=90, page_size=4)
    story = Story.begin(rng.randint(1, 40), seed)
    # The prompt alone: its last feature comes before the token that it is paired with.
    told = needed = drafter.open("a", story.tokens[:-1])
    assert needed == 0
    waiting = story.tokens[-1:]
    for _ in range(4):
        while waiting or told < len(story.features):
            tokens = [waiting.pop(0) for _ in range(rng.randint(0, len(waiting)))]
            rows = rng.randint(0, len(story.features) - told)
            drafter.advance("a", tokens, story.features[told : told + rows])
            told += rows
            assert drafter.ready("a") or waiting or told < len(story.features)
        assert drafter.ready("a")
        assert_same(drafter.propose(["a"])[0], tree_alone(head(target("llama")), config, story))
        waiting = story.go_on(rng.randint(1, 9))[0]


def test_a_session_is_ready_when_exactly_the_features_below_its_pending_token_are_there(
    target: Make, head: Make
) -> None:
    config, story = CONFIGS["dynamic, small"], Story.begin(9, 1)
    nothing = story.features[:0]
    drafter = Drafter(head(target("llama")), config, num_pages=60, page_size=4)
    begin(drafter, "ready", Story.begin(5, 2))

    def assert_not_ready(sentence: str) -> None:
        assert not drafter.ready("a")
        forwarded = drafter.tokens_forwarded
        with pytest.raises(WealdError, match=sentence) as refused:
            drafter.propose(["ready", "a"])
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        assert drafter.tokens_forwarded == forwarded

    drafter.open("a", story.tokens[:1])
    assert_not_ready("session a has features of 0 positions and 0 below its pending token")
    drafter.advance("a", (), story.features[:1])
    assert_not_ready("features of 1 positions and 0 below")
    drafter.advance("a", story.tokens[1:4], story.features[1:8])
    assert_not_ready("features of 8 positions and 3 below")
    drafter.advance("a", story.tokens[4:], nothing)
    assert_not_ready("features of 8 positions and 9 below")
    drafter.advance("a", (), story.features[8:])
    assert drafter.ready("a")
    assert_same(drafter.propose(["a"])[0], tree_alone(head(target("llama")), config, story))
    assert drafter.ready("a")
    # Plain steps, whose features come later.
    for _ in range(3):
        (tokens, _) = story.go_on(1)
        drafter.advance("a", tokens, nothing)
    assert_not_ready("features of 9 positions and 12 below")
    drafter.advance("a", (), story.features[9:])
    assert_same(drafter.propose(["a"])[0], tree_alone(head(target("llama")), config, story))


def test_sessions_of_several_configurations_share_the_extending_and_grow_as_if_alone(
    target: Make, head: Make, idle: Make
) -> None:
    trained = head(target("llama"))
    passes: list[int] = []
    trained.register_forward_hook(lambda _, inputs, __: passes.append(inputs[1].numel()))
    drafter = Drafter(trained, CONFIGS["one level"], num_pages=300, page_size=4)
    stories = {f"{name} {i}": Story.begin(5 + i, i) for i in range(2) for name in CONFIGS}
    for id, story in stories.items():
        begin(drafter, id, story, CONFIGS[id[:-2]])
    begin(drafter, "default", Story.begin(3, 3))
    ids = random.Random(1).sample([*stories], len(stories))
    for round in range(2):
        passes.clear()
        for id, tree in zip(ids, drafter.propose(ids), strict=True):
            assert_same(tree, tree_alone(head(target("llama")), CONFIGS[id[:-2]], stories[id]))
            drafter.advance(id, *stories[id].go_on(3))
        assert passes[0] == (3 * len(ids) if round else sum(len(s.features) - 3 for s in stories.values()))
        assert len(passes) == 1 + 4 + 2 + 0 + 4 + 6
    assert len(drafter.propose(["default"])[0]) == 5
    for id in (*stories, "default"):
        drafter.close(id)
    idle(drafter)


def test_a_retired_session_holds_nothing_and_takes_no_more_part(target: Make, head: Make, idle: Make) -> None:
    config = CONFIGS["dynamic, small"]
    drafter = Drafter(head(target("llama")), config, num_pages=60, page_size=4)
    story, other = Story.begin(9, 1), Story.begin(6, 2)
    begin(drafter, "a", story)
    begin(drafter, "other", other)
    drafter.propose(["a"])
    drafter.advance("a", *story.go_on(3))
    drafter.retire("a")
    idle(drafter)
    drafter.advance("a", *story.go_on(3))
    assert not drafter.ready("a")
    with pytest.raises(WealdError, match="session a has been retired; go on by plain steps") as refused:
        drafter.propose(["other", "a"])
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert_same(drafter.propose(["other"])[0], tree_alone(head(target("llama")), config, other))
    drafter.retire("a")
    drafter.check()
    drafter.close("a")
    assert begin(drafter, "a", story) == 8
    assert_same(drafter.propose(["a"])[0], tree_alone(head(target("llama")), config, story))


def test_an_entry_that_others_read_is_never_written(target: Make, head: Make) -> None:
    drafter = Drafter(head(target("llama")), CONFIGS["dynamic, small"], num_pages=60, page_size=4)
    story = Story.begin(9, 1)
    begin(drafter, "a", story)
    drafter.propose(["a"])
    drafter._sessions["a"].entries -= 2
    drafter.advance("a", (), story.features[7:])
    with pytest.raises(WealdError, match="were to be written") as broken:
        drafter.propose(["a"])
    assert broken.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("seed", range(3))
def test_storms_of_sessions_with_common_beginnings_leave_every_tree_right_and_every_page_accounted_for(
    seed: int, target: Make, head: Make, idle: Make
) -> None:
    rng, llama = random.Random(seed), head(target("llama"))
    configs = [CONFIGS[name] for name in ("dynamic, small", "one level", "chain")]
    drafter = Drafter(llama, configs[0], num_pages=40, page_size=4)
    texts = [Story.begin(rng.randint(8, 24), n).tokens for n in range(6)]
    stories: dict[str, tuple[Story, DraftConfig]] = {}
    found = refused = 0
    for n in range(200):
        if not stories or rng.random() < 0.4:
            text = rng.choice(texts)
            story = Story([*text[: rng.randint(len(text) // 2, len(text))], rng.randrange(61)], n)
            stories[str(n)] = story, rng.choice(configs)
            found += begin(drafter, str(n), *stories[str(n)])
        elif rng.random() < 0.7:
            ids = rng.sample([*stories], rng.randint(1, min(3, len(stories))))
            try:
                trees = drafter.propose(ids)
            except WealdError as error:
                if error.code is not ErrorCode.RESOURCE_EXHAUSTED:
                    raise
                refused += 1
                for id in ids:
                    drafter.close(id)
                    del stories[id]
                continue
            id, tree = rng.choice(list(zip(ids, trees, strict=True)))
            assert_same(tree, tree_alone(llama, stories[id][1], stories[id][0]))
            for id in ids:
                drafter.advance(id, *stories[id][0].go_on(rng.randint(1, 4)))
        else:
            id = rng.choice([*stories])
            rng.choice([drafter.close, drafter.retire])(id)
            drafter.close(id)
            texts[rng.randrange(6)] = stories.pop(id)[0].tokens
        drafter.check()
    assert found > 200
    assert refused > 0
    for id in stories:
        drafter.close(id)
    idle(drafter)


def test_a_session_needs_a_token(target: Make, head: Make, idle: Make) -> None:
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=4)
    with pytest.raises(WealdError, match="session a has no tokens; give at least one") as refused:
        drafter.open("a", ())
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    idle(drafter)


AUTO = DraftConfig(levels=5, beam=6, budget=64, adaptive_levels=True, adaptive_budget=True)


def test_where_neither_time_nor_nodes_have_a_price_adaptive_trees_are_whole(target: Make, head: Make) -> None:
    loaded, story = head(target("llama")), Story.begin(9, 4)
    drafter = Drafter(loaded, AUTO, num_pages=100, page_size=4)
    begin(drafter, "a", story)
    (tree,) = drafter.propose(["a"], {"a": Terms()})
    assert_same(tree, tree_alone(loaded, CONFIGS["dynamic"], story))


def test_nodes_that_are_not_worth_their_price_are_not_sent(target: Make, head: Make) -> None:
    loaded, story = head(target("llama")), Story.begin(9, 4)
    drafter = Drafter(loaded, AUTO, num_pages=100, page_size=4)
    whole = tree_alone(loaded, CONFIGS["dynamic"], story)
    between = sorted(set(whole.values))[len(whole) // 2 - 1 : len(whole) // 2 + 1]
    price = sum(between) / 2 / SLACK
    begin(drafter, "a", story)
    begin(drafter, "b", story)
    cut, free = drafter.propose(["a", "b"], {"a": Terms(price=price)})
    assert_same(free, whole)
    assert 1 < len(cut) < len(whole)
    assert min(cut.values) >= SLACK * price
    kept = [node for node in range(len(whole)) if whole.values[node] >= SLACK * price]
    assert_same(cut, whole.keep(kept))


def test_a_drafter_in_a_hurry_grows_fewer_levels(target: Make, head: Make) -> None:
    drafter = Drafter(head(target("llama")), AUTO, num_pages=100, page_size=4)
    for rows in (1, 8):
        drafter.passes.observe(rows, 1.0)
    begin(drafter, "a", Story.begin(9, 4))
    (tree,) = drafter.propose(["a"], {"a": Terms(pace=10.0)})
    assert max(tree.depths) == 1
    (tree,) = drafter.propose(["a"], {"a": Terms(pace=1e-6)})
    assert max(tree.depths) == 5


def test_what_became_of_a_tree_is_held_against_the_heads_own_confidences(target: Make, head: Make) -> None:
    """A head whose nodes never come is believed less; the order of siblings stays."""
    loaded, story = head(target("llama")), Story.begin(9, 4)
    drafter = Drafter(loaded, AUTO, num_pages=100, page_size=4)
    whole = tree_alone(loaded, CONFIGS["dynamic"], story)
    drafter.open("a", story.tokens, replace(AUTO, coupled=False), Drawing(SamplingParams(temperature=1.0)))
    drafter.advance("a", (), story.features)
    first = [node for node in range(1, len(whole)) if whole.parents[node] == 0]
    decided = 0
    while decided < 2 * REFRESH:
        (tree,) = drafter.propose(["a"])
        decided += drafter.learn("a", (1 << len(tree)) - 1, ())
    (tree,) = drafter.propose(["a"])
    likeliest, before = tree.confidences[1], whole.confidences[first[0]]
    assert tree.tokens[1] == whole.tokens[first[0]]
    assert before / 4.01 <= likeliest < before
    assert drafter.calibration.bins(Band.of(0.0)) == []
    seen = drafter.calibration.bins(Band.of(1.0))
    assert sum(bin.count for bin in seen) == decided
    assert all(bin.accepted == 0 for bin in seen)
    assert seen[-1].confidence == pytest.approx(before, rel=0.2)
    assert seen[-1].confidence > likeliest


def test_paper_trees_are_ranked_by_what_the_head_says(target: Make, head: Make) -> None:
    loaded, story = head(target("llama")), Story.begin(9, 4)
    drafter = Drafter(loaded, replace(CONFIGS["dynamic"], coupled=False), num_pages=100, page_size=4)
    begin(drafter, "a", story)
    for _ in range(300):
        (tree,) = drafter.propose(["a"])
        drafter.learn("a", (1 << len(tree)) - 1, ())
    assert_same(tree, tree_alone(loaded, CONFIGS["dynamic"], story))
