"""The theorem: with the same draws, the text does not depend on the trees. Laws are in `test_exactness`."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.speculation.acceptance import Draw, Walk, walk
from services.speculation.growth import flatten, grow, rerank
from services.speculation.sampling import Context, draw
from services.speculation.shapes import plan_for
from services.speculation.stopping import cut, end_tokens
from services.types.configuration import DraftConfig, TreeShape
from services.types.sampling import SamplingParams
from services.types.tree import DraftTree

Text = tuple[int, ...]
Say = Callable[[Text], int]
"""Text → the token that follows it, all dice thrown."""

TREE = DraftTree((0, 5, 6, 7, 5, 8), (-1, 0, 0, 2, 2, 4), (1.0,) * 6)
"""0 → 5; 0 → 6 → 7; 0 → 6 → 5 → 8."""


def saying(words: dict[int, int]) -> Draw:
    """The token said at each node of one tree; no node is asked twice."""
    left = dict(words)
    return lambda going: [left.pop(node) for _, node in going]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({0: 9}, Walk((), 9)),
        ({0: 8}, Walk((), 8)),
        ({0: 5, 1: 8}, Walk((1,), 8)),
        ({0: 6, 2: 6}, Walk((2,), 6)),
        ({0: 6, 2: 7, 3: 0}, Walk((2, 3), 0)),
        ({0: 6, 2: 5, 4: 8, 5: 8}, Walk((2, 4, 5), 8)),
    ],
)
def test_the_walk_goes_on_where_a_child_says_what_the_target_says(
    words: dict[int, int], expected: Walk
) -> None:
    assert walk([TREE], saying(words)) == [expected]


def test_trees_that_walk_together_go_level_by_level_and_each_its_own_way() -> None:
    asked: list[list[tuple[int, int]]] = []
    words = {(0, 0): 6, (0, 2): 5, (0, 4): 1, (1, 0): 3, (2, 0): 4, (2, 1): 9}

    def target(going: list[tuple[int, int]]) -> list[int]:
        asked.append(going)
        return [words[place] for place in going]

    walks = walk([TREE, DraftTree.root(0), DraftTree.chain([0, 4])], target)
    assert walks == [Walk((2, 4), 1), Walk((), 3), Walk((1,), 9)]
    assert asked == [[(0, 0), (1, 0), (2, 0)], [(0, 2), (2, 1)], [(0, 4)]]


def test_no_trees_need_no_draw() -> None:
    assert walk([], saying({})) == []


@st.composite
def trees_near(draw: st.DrawFn, say: Say, text: Text, vocab_size: int) -> DraftTree:
    """A tree of someone who knows the dice, and hides what is said among other tokens."""
    paths: list[Text] = [()]
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(paths))
        knows = draw(st.booleans())
        token = say(text + parent) if knows else draw(st.integers(0, vocab_size - 1))
        if (*parent, token) not in paths:
            paths.append((*parent, token))
    paths.sort(key=len)
    parents = [paths.index(path[:-1]) for path in paths[1:]]
    root = text[-1] if text else 0
    return DraftTree((root, *(path[-1] for path in paths[1:])), (-1, *parents), (1.0,) * len(paths))


@given(data=st.data(), seed=st.integers(0, 2**32))
def test_whoever_made_the_trees_and_whatever_they_knew_the_text_is_the_same(
    data: st.DataObject, seed: int
) -> None:
    def say(text: Text) -> int:
        return random.Random(repr((seed, text))).randrange(4)

    plain: Text = ()
    while len(plain) < 12:
        plain += (say(plain),)

    text: Text = ()
    drawn: list[Text] = []
    while len(text) < 12:
        tree = data.draw(trees_near(say, text, 4))

        def target(going: list[tuple[int, int]], tree: DraftTree = tree, text: Text = text) -> list[int]:
            contexts = [text + tuple(tree.tokens[i] for i in tree.path(node)) for _, node in going]
            drawn.extend(contexts)
            return [say(context) for context in contexts]

        (went,) = walk([tree], target)
        assert went.path == tree.path(went.path[-1] if went.path else 0)
        text += (*(tree.tokens[node] for node in went.path), went.bonus)
    assert text[:12] == plain
    assert [len(context) for context in drawn] == list(range(len(text))), "each position is drawn once"


VOCABULARY = 6
PROMPT = (3, 1, 3)
EOS = frozenset({5})


def logits(seed: int, text: Text) -> Tensor:
    """What a model says after the last two tokens; little enough that rounds meet the same logits again."""
    rng = np.random.default_rng([seed, *text[-2:]])
    return torch.from_numpy(rng.normal(scale=2, size=VOCABULARY))


def generated(seed: int, params: SamplingParams, trees: Callable[[Text], DraftTree]) -> tuple[Text, int]:
    """The text, and how many draft tokens were accepted on the way."""
    output: Text = ()
    accepted = 0
    finish = None
    ends = end_tokens(params, EOS)
    while finish is None:
        tree = trees(PROMPT + output)

        def target(going: list[tuple[int, int]], tree: DraftTree = tree, output: Text = output) -> list[int]:
            outputs = [output + tuple(tree.tokens[i] for i in tree.path(node)) for _, node in going]
            rows = torch.stack([logits(seed, PROMPT + one) for one in outputs])
            return draw(rows, [Context(params, seed, PROMPT, one, ends) for one in outputs])

        (went,) = walk([tree], target)
        said = (*(tree.tokens[node] for node in went.path), went.bonus)
        tokens, finish = cut(said, params.max_tokens - len(output), ends)
        output += tokens
        accepted += len(went.path)
    return output, accepted


def grown(seed: int, config: DraftConfig, text: Text) -> DraftTree:
    """A tree of a head that is the target, slightly off."""
    passes: list[Text] = [text]

    def log_probs(texts: Sequence[Text]) -> Tensor:
        rows = torch.stack([logits(seed, one) + 0.3 * logits(seed + 1, one) for one in texts])
        return rows.log_softmax(-1).float()[None]

    def expand(tokens: Tensor, rows: Tensor) -> Tensor:
        passes[:] = [
            (*passes[row], token) for token, row in zip(tokens[0].tolist(), rows[0].tolist(), strict=True)
        ]
        return log_probs(passes)

    candidates = grow(log_probs(passes)[:, 0], expand, plan_for(config), torch.arange(VOCABULARY))
    (tree,) = flatten(candidates, rerank(candidates, config.budget - 1), [text[-1]])
    return tree


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.3]),
        "min_tokens": st.integers(0, 12),
        "top_k": st.sampled_from([0, 2, 4]),
        "top_p": st.sampled_from([0.6, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {2: -np.inf, 4: 1.5}]),
        "stop_token_ids": st.sampled_from([(), (0,)]),
        "ignore_eos": st.booleans(),
    }
)
DRAFTS = st.builds(
    DraftConfig,
    st.sampled_from(TreeShape),
    levels=st.integers(1, 6),
    beam=st.integers(1, 6),
    budget=st.integers(1, 64),
)


@given(values=SAMPLING, seed=st.integers(0, 2**32), config=DRAFTS)
def test_one_seed_gives_one_text_with_any_parameters_and_any_drafted_trees(
    values: dict[str, Any], seed: int, config: DraftConfig
) -> None:
    params = SamplingParams(max_tokens=14, **values)
    plain, _ = generated(seed, params, lambda text: DraftTree.root(text[-1]))
    text, _ = generated(seed, params, partial(grown, seed, config))
    assert text == plain


def test_the_trees_of_a_good_head_are_accepted_so_that_the_theorem_says_something() -> None:
    params = SamplingParams(max_tokens=100, temperature=0.7, frequency_penalty=0.1, ignore_eos=True)
    _, accepted = generated(1, params, partial(grown, 1, DraftConfig()))
    assert accepted > 50


def test_generating_touches_no_global_random_state() -> None:
    def states() -> tuple[list[int], object, str]:
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))

    before = states()
    generated(1, SamplingParams(top_k=5, top_p=0.9, min_p=0.01), partial(grown, 1, DraftConfig()))
    assert states() == before
