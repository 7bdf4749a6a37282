"""Coupled drafting: the drafter's dice are the target's, and what they are rolled for stays the target's."""

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.acceptance import walk
from services.speculation.coupling import Drawing, Odds
from services.speculation.growth import DynamicPlan, flatten, grow, rerank
from services.speculation.noise import gumbel, signed
from services.speculation.rejection import accept_sampled
from services.speculation.sampling import Context, draw
from services.types.sampling import SamplingParams
from services.types.tree import DraftTree

V = 40
PROCESSORS = {
    "nothing": SamplingParams(),
    "temperature": SamplingParams(temperature=0.3),
    "greedy": SamplingParams(temperature=0.0),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7),
    "min-p": SamplingParams(min_p=0.2),
    "bias": SamplingParams(logit_bias={3: 4.0, 7: -math.inf}),
    "penalties": SamplingParams(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3),
    "minimum": SamplingParams(max_tokens=64, min_tokens=50, stop_token_ids=(1, 2)),
    "greedy bias": SamplingParams(temperature=0.0, logit_bias={3: 4.0, 7: -math.inf}),
}


def odds_for(
    drawings: Sequence[Drawing], committed: Sequence[Sequence[int]], ids: torch.Tensor, known: dict[int, int]
) -> Odds:
    pending = [len(tokens) - 1 for tokens in committed]
    return Odds(drawings, pending, committed.__getitem__, ids, known)


def odds_of(
    params: SamplingParams,
    seed: int,
    tokens: Sequence[int],
    prompt: int,
    ids: torch.Tensor,
    coupled: bool = True,
) -> Odds:
    known = {token: index for index, token in enumerate(ids.tolist())}
    return odds_for([Drawing(params, seed, prompt, coupled)], [tokens], ids, known)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("path", [(), (5,), (5, 3, 3)])
def test_where_the_head_is_right_the_likeliest_candidate_is_the_one_that_is_drawn(
    name: str, path: tuple[int, ...]
) -> None:
    """The draft vocabulary is in an order of its own."""
    generator = torch.Generator().manual_seed(7)
    ids, tokens, params = torch.randperm(V, generator=generator), [4, 9, 3, 8, 3], PROCESSORS[name]
    for seed in (0, 1, 2**64 - 1, *range(2, 40)):
        logits = 2 * torch.randn(V, generator=generator, dtype=torch.float64)
        context = Context(params, seed, tokens[:2], [*tokens[2:], *path], frozenset(params.stop_token_ids))
        odds = odds_of(params, seed, tokens, 2, ids)
        chances = odds(len(path) + 1, logits[ids][None, None], torch.tensor([[path]]))
        assert chances.exp().sum() == pytest.approx(1.0)
        assert ids[chances.argmax()].item() == draw(logits[None], [context])[0]


@pytest.mark.parametrize("name", PROCESSORS)
def test_tokens_that_the_head_does_not_know_stay_out_of_it(name: str) -> None:
    """Half of the vocabulary is unknown, and so are half of the tokens committed, biased and stopped at."""
    ids = torch.arange(1, V, 2)
    odds = odds_of(PROCESSORS[name], 5, [4, 9, 3, 8, 3], 2, ids)
    chances = odds(2, torch.randn(1, 3, len(ids)).log_softmax(-1), torch.tensor([[[8], [3], [0]]]))
    assert chances.shape == (1, 3, len(ids))
    assert chances.exp().sum(-1) == pytest.approx(torch.ones(1, 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_of_the_head_can_be_drawn_none_has_a_chance(temperature: float) -> None:
    ids = torch.arange(1, V, 2)
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(ids.tolist(), -math.inf))
    chances = odds_of(params, 5, [4, 9, 3], 2, ids)(2, torch.randn(1, 1, len(ids)), torch.tensor([[[8]]]))
    assert chances.exp().eq(0).all()


def test_without_the_noise_chances_are_those_before_the_dice_fall() -> None:
    log_probs, paths = torch.randn(2, 3, V).log_softmax(-1), torch.zeros(2, 3, 1, dtype=torch.long)
    ids = torch.arange(V)
    known = dict(zip(range(V), range(V), strict=True))
    drawings = [Drawing(SamplingParams(temperature=t), 3, 1, coupled=False) for t in (1.0, 0.0)]
    assert odds_for(drawings, [[1, 2], [3]], ids, known)(2, log_probs, paths).allclose(log_probs)
    drawings = [Drawing(SamplingParams(temperature=t), 3, 1, coupled=False) for t in (0.5, 0.0)]
    chances = odds_for(drawings, [[1, 2], [3]], ids, known)(2, log_probs, paths)
    torch.testing.assert_close(chances[0], (log_probs[0] / 0.5).log_softmax(-1))
    torch.testing.assert_close(chances[1], log_probs[1])


def test_sessions_of_one_batch_have_their_own_dice() -> None:
    ids, log_probs = torch.arange(V), torch.randn(4, 2, V).log_softmax(-1)
    known = dict(zip(range(V), range(V), strict=True))
    drawings = [
        Drawing(PROCESSORS[name], seed, 1, coupled=True)
        for name, seed in (("nothing", 1), ("greedy", 1), ("top-p", 2), ("nothing", 2))
    ]
    committed = [[1, 2, 3], [1, 2], [5, 6, 7, 8], [1, 2, 3]]
    paths = torch.randint(V, (4, 2, 2))
    together = odds_for(drawings, committed, ids, known)(3, log_probs, paths)
    for i, drawing in enumerate(drawings):
        one = odds_for([drawing], [committed[i]], ids, known)
        torch.testing.assert_close(one(3, log_probs[i : i + 1], paths[i : i + 1])[0], together[i])
    assert not torch.equal(together[0].argsort(), together[3].argsort())


def test_noise_of_some_tokens_is_the_noise_of_all_in_another_process_bit_for_bit() -> None:
    seeds, positions, some = [0, 5, 2**64 - 1], [0, 17, 100_000], [0, 3, 49_151, 128_255]
    drawn = gumbel(torch.tensor([signed(s) for s in seeds]), torch.tensor(positions), torch.tensor(some))
    program = (
        "import torch; from services.speculation.noise import gumbel, signed\n"
        f"noise = gumbel(torch.tensor([signed(s) for s in {seeds}]), torch.tensor({positions}), 128_256)\n"
        f"print(noise[:, {some}].contiguous().view(torch.int64).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(drawn.view(torch.int64).tolist())


@given(seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]))
def test_values_never_rise_along_a_path_of_a_coupled_tree(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)

    def expand(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        return torch.randn(1, tokens.shape[1], V, generator=generator).log_softmax(-1)

    odds = odds_of(SamplingParams(temperature=temperature), seed, [1, 2], 1, torch.arange(V))
    first = torch.randn(1, V, generator=generator).log_softmax(-1)
    candidates = grow(first, expand, DynamicPlan(4, 4), torch.arange(V), score=odds)
    (tree,) = flatten(candidates, rerank(candidates, 20), [2])
    assert all(tree.values[node] <= tree.values[tree.parents[node]] for node in range(1, len(tree)))


# The law of the text, by enumeration: each token of a vocabulary of 3 has one of so many values of noise.

GRID = 14
LEVELS = [-math.log(-math.log((i + 0.5) / GRID)) for i in range(GRID)]
P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]).log()
"""The target's distributions, behind each token."""
Q = torch.tensor([[0.1, 0.2, 0.7], [0.4, 0.2, 0.4], [0.3, 0.4, 0.3]]).log()
"""The head's."""


def noises() -> Iterator[torch.Tensor]:
    for values in product(LEVELS, repeat=3):
        yield torch.tensor(values)


def test_the_text_is_the_one_without_trees_whatever_the_dice_and_so_is_its_law() -> None:
    """A chain of two drafted by the noise; one position at a time has all the values there are."""
    fixed = torch.tensor([0.3, -0.2, 0.9])
    law, plain = [torch.zeros(3, 3) for _ in range(2)]
    accepted = 0
    for noise in noises():
        for dice in ((noise, fixed), (fixed, noise)):
            drafted: list[int] = [0]
            for at in range(2):
                drafted.append(int((Q[drafted[-1]] + dice[at]).argmax()))

            def rule(nodes: list[tuple[int, int]]) -> list[int]:
                ((_, node),) = nodes
                return [int((P[drafted[node]] + dice[node]).argmax())] if node < 2 else [0]  # noqa: B023

            (walked,) = walk([DraftTree.chain(drafted)], rule)
            said = [drafted[node] for node in walked.path] + [walked.bonus]
            accepted += len(walked.path)
            first = int((P[0] + dice[0]).argmax())
            second = int((P[first] + dice[1]).argmax())
            assert said[:2] == [first, second][: len(said)]
            behind = said[1] if len(said) > 1 else int((P[said[0]] + dice[1]).argmax())
            law[said[0], behind] += 1
            plain[first, second] += 1
    assert torch.equal(law, plain)
    assert accepted > GRID**3 / 2


def test_under_the_p_q_rule_the_noise_of_the_candidate_must_not_draw_its_replacement() -> None:
    """Enumerated: with noise of its own the law is the target's, with the shared noise it is not."""
    p, q = P[0].exp(), torch.zeros(3)
    for noise in noises():
        q[int((Q[0] + noise).argmax())] += 1 / GRID**3
    own, shared, others = torch.zeros(3), torch.zeros(3), list(noises())
    for noise in noises():
        candidate = int((Q[0] + noise).argmax())
        for law, dice in ((shared, [noise]), (own, others[:: len(others) // 50])):
            for other in dice:
                chances: list[float] = []
                rejected = accept_sampled(
                    p,
                    q,
                    [candidate],
                    lambda chance: bool(chances.append(chance)),  # noqa: B023
                    lambda rest: int((rest.log() + other).argmax()),  # noqa: B023
                )
                accepted = chances[0] if chances else 1.0
                law[candidate] += accepted / len(dice)
                law[rejected[0]] += (1 - accepted) / len(dice)
    assert (own / GRID**3).tolist() == pytest.approx(p.tolist(), abs=0.02)
    assert (shared / GRID**3 - p).abs().max() > 0.04
