"""The drafter that knows: its trees hold what comes next as often as they say."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from services.bench.knowing import KnowingDrafter
from services.draft.drafter import Terms
from services.types.configuration import DraftConfig, TreeShape, sized
from services.types.tree import DraftTree

VOCABULARY = 90
PROMPT = 5
TREES = DraftConfig(levels=4, beam=5, budget=20)


def written(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(50) for _ in range(length)] for _ in range(count)]


def opened(
    texts: Sequence[Sequence[int]], sure: float, config: DraftConfig = TREES, heard: int = PROMPT
) -> KnowingDrafter:
    """A drafter with a session for each text, by its number, so much of which has been said."""
    drafter = KnowingDrafter(texts, sure, VOCABULARY, config)
    for number, text in enumerate(texts):
        first = drafter.open(str(number), text[:heard])
        drafter.advance(str(number), (), torch.zeros(heard - 1 - first, 7))
    return drafter


def path(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """Nodes that the text goes through."""
    nodes = [0]
    for token in text:
        if (node := tree.children[nodes[-1]].get(token)) is None:
            break
        nodes.append(node)
    return nodes[1:]


def rounds(drafter: KnowingDrafter, texts: Sequence[Sequence[int]]) -> list[tuple[DraftTree, int]]:
    """Every tree, and how many of its nodes were accepted, until all texts have nearly been said."""
    made, at = [], dict.fromkeys(map(str, range(len(texts))), PROMPT)
    while going := [id for id in at if at[id] + TREES.levels < len(texts[int(id)])]:
        for id, tree in zip(going, drafter.propose(going), strict=True):
            text = texts[int(id)]
            assert tree.tokens[0] == text[at[id] - 1]
            accepted = len(path(tree, text[at[id] :]))
            made.append((tree, accepted))
            drafter.advance(id, text[at[id] : at[id] + accepted + 1], torch.zeros(accepted + 1, 7))
            at[id] += accepted + 1
    return made


@pytest.mark.parametrize("sure", [0.85, 0.5, 0.2])
def test_the_first_child_is_right_as_often_as_asked_and_others_share_the_rest(sure: float) -> None:
    texts = written(1, PROMPT + 1)
    (tree,) = opened(texts, sure).propose(["0"])
    shares = [sure, *((1 - sure) / 2**rank for rank in range(1, TREES.beam))]
    level = [c for c, depth in zip(tree.confidences, tree.depths, strict=True) if depth == 1]
    assert sorted(level, reverse=True) == pytest.approx(sorted(shares, reverse=True)[: len(level)], rel=1e-5)
    assert len(set(tree.tokens[1 : 1 + len(level)])) == len(level)


@pytest.mark.parametrize("sure", [0.85, 0.5, 0.2])
def test_as_many_nodes_are_accepted_as_their_values_promise(sure: float) -> None:
    texts = written(20, 120)
    made = rounds(opened(texts, sure), texts)
    promised = sum(sum(tree.values[1:]) for tree, _ in made)
    accepted = sum(length for _, length in made)
    # Of one round the nodes accepted are at most as many as there are levels, which bounds their variance.
    assert abs(accepted - promised) < 3 * math.sqrt(TREES.levels * promised)
    assert accepted > 1.3 * sure * len(made)


def test_the_same_luck_befalls_every_kind_of_tree() -> None:
    texts = written(1, 60)
    for at in range(PROMPT, 50):
        lengths = [
            len(path(opened(texts, 0.7, config, at).propose(["0"])[0], texts[0][at:]))
            for config in (TREES, DraftConfig(TreeShape.CHAIN, levels=4), DraftConfig(levels=4, budget=64))
        ]
        # A chain holds the first children alone; a larger tree holds all of a smaller one.
        assert lengths[1] <= lengths[2]
        assert lengths[0] <= lengths[2]


def test_a_session_that_says_something_else_is_not_known_any_more() -> None:
    texts = written(2, 40)
    drafter = opened(texts, 0.9)
    other = (texts[0][PROMPT] + 1) % 50
    drafter.advance("0", (other,), torch.zeros(1, 7))
    drafter.open("new", (*texts[0][:3], 60))
    drafter.advance("new", (), torch.zeros(3, 7))
    lost, known, new = drafter.propose(["0", "1", "new"])
    size = len({token for text in texts for token in text})
    assert max(*lost.confidences[1:], *new.confidences[1:]) == pytest.approx(1 / size)
    assert known.confidences[1] == pytest.approx(0.9)


def test_of_texts_that_begin_alike_the_one_that_is_said_is_known() -> None:
    (one,) = written(1, 40)
    other = [*one[: PROMPT + 2], *((token + 1) % 50 for token in one[PROMPT + 2 :])]
    drafter = opened([one, other], 1.0)
    drafter.advance("0", other[PROMPT : PROMPT + 4], torch.zeros(4, 7))
    (tree,) = drafter.propose(["0"])
    assert len(path(tree, other[PROMPT + 4 :])) == TREES.levels


def test_a_tree_is_as_large_as_it_is_worth() -> None:
    texts = written(1, 40)
    drafter = opened(texts, 0.85, sized(TreeShape.DYNAMIC, "auto", 10, "auto"))
    (all,) = drafter.propose(["0"])
    (some,) = drafter.propose(["0"], {"0": Terms(price=0.4, pace=1.0)})
    (none,) = drafter.propose(["0"], {"0": Terms(price=2.0, pace=1.0)})
    assert len(all) == 64
    assert max(all.depths) == 8
    assert 2 <= len(some) < 20
    assert min(some.values) >= 0.2
    assert len(none) == 1


def test_pages_are_given_back_and_prompts_found_again() -> None:
    texts = written(1, 80)
    drafter = opened(texts, 0.85, heard=60)
    first = drafter.propose(["0"])
    assert drafter.open("again", texts[0][:60]) == 48
    drafter.advance("again", (), torch.zeros(11, 7))
    assert drafter.propose(["again"]) == first
    for id in ("0", "again"):
        drafter.close(id)
    drafter.check()
    assert drafter.pool.free_pages == drafter.pool.num_pages
