"""Processors against a plain reference, one loop per sentence of the parameters' documentation."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from services.speculation.noise import gumbel, signed
from services.speculation.sampling import Context, draw, logprobs, process
from services.types.sampling import SamplingParams

V = 8
ROUNDING = 1e-9
"""Numbers nearer to each other than this may compare either way by rounding alone."""

TOKENS = st.integers(0, V - 1)
TEXTS = st.lists(st.integers(0, V // 2), max_size=8)
LOGITS = st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=V, max_size=V)
"""Few enough values for ties, exact in every dtype."""


def either(neutral: float, low: int, high: int) -> st.SearchStrategy[float]:
    """The value that changes nothing, or any number of hundredths in a range."""
    return st.one_of(st.just(neutral), st.integers(low, high).map(lambda x: x / 100))


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    min_tokens=st.sampled_from([0, 3, 4, 5]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-math.inf, -1.5, 0.125, 2.0]), max_size=3),
    repetition_penalty=either(1.0, 50, 200),
    frequency_penalty=either(0.0, -200, 200),
    presence_penalty=either(0.0, -200, 200),
    temperature=st.one_of(st.just(0.0), either(1.0, 10, 300)),
    min_p=either(0.0, 1, 50),
    top_k=st.integers(0, V + 1),
    top_p=either(1.0, 1, 99),
)
CONTEXTS = st.builds(
    Context,
    PARAMS,
    st.integers(-(2**65), 2**65),
    TEXTS.filter(bool),
    TEXTS,
    st.frozensets(TOKENS, max_size=2),
    st.none() | st.lists(st.booleans(), min_size=V, max_size=V).filter(any).map(torch.tensor),
)


def softmax(scores: dict[int, float]) -> dict[int, float]:
    highest = max(scores.values())
    weights = {token: math.exp(score - highest) for token, score in scores.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def biased(scores: dict[int, float], context: Context) -> None:
    given_scores = dict(scores)
    for token, bias in context.params.logit_bias.items():
        scores[token] += bias
    if len(context.output) < context.params.min_tokens:
        for token in context.ends:
            scores[token] = -math.inf
    if context.allowed is not None:
        for token, allowed in enumerate(context.allowed.tolist()):
            if not allowed:
                scores[token] = given_scores[token] = -math.inf
        if max(scores.values()) == -math.inf:
            scores.update(given_scores)


def penalised(scores: dict[int, float], context: Context) -> None:
    params = context.params
    for token in scores:
        if token in context.prompt or token in context.output:
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
    for token in context.output:
        scores[token] -= params.frequency_penalty
    for token in scores:
        if token in context.output:
            scores[token] -= params.presence_penalty


def kept(scores: dict[int, float], params: SamplingParams) -> dict[int, float]:
    """The tokens that can be drawn; a token that cannot is not in the result."""
    left = {token: score / params.temperature for token, score in scores.items() if score > -math.inf}
    chances = softmax(left)
    assume(all(a == b or abs(a - b) > ROUNDING for a, b in combinations(left.values(), 2)))
    if params.min_p > 0:
        bar = params.min_p * max(chances.values())
        assume(all(abs(chance - bar) > ROUNDING for chance in chances.values()))
        left = {token: score for token, score in left.items() if chances[token] >= bar}
    if params.top_k:
        best = sorted(left.values(), reverse=True)[: params.top_k]
        left = {token: score for token, score in left.items() if score >= best[-1]}
    if params.top_p < 1:
        chances = softmax(left)
        nucleus: set[int] = set()
        mass = 0.0
        for token in sorted(chances, key=lambda token: (-chances[token], token)):
            assume(abs(mass - params.top_p) > ROUNDING)
            if mass < params.top_p:
                nucleus.add(token)
            mass += chances[token]
        left = {token: score for token, score in left.items() if token in nucleus}
    return left


def reference(logits: Sequence[float], context: Context) -> list[float]:
    scores = dict(enumerate(logits))
    biased(scores, context)
    penalised(scores, context)
    if context.params.temperature > 0 and max(scores.values()) > -math.inf:
        scores = kept(scores, context.params)
    return [scores.get(token, -math.inf) for token in range(V)]


def double(logits: Sequence[float]) -> Tensor:
    return torch.tensor([logits], dtype=torch.float64)


def context(
    prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int = 0, **values: Any
) -> Context:
    return Context(SamplingParams(max_tokens=100, **values), seed, prompt, output, frozenset())


@settings(max_examples=600)
@given(logits=LOGITS, one=CONTEXTS)
def test_the_scores_are_those_of_the_plain_reference(logits: list[float], one: Context) -> None:
    (scores,) = process(double(logits), [one]).tolist()
    assert scores == pytest.approx(reference(logits, one), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [2.0, 1.0, -1.0, 0.0]),
        ({"logit_bias": {1: 0.5, 2: -math.inf}}, [2.0, 1.5, -math.inf, 0.0]),
        ({"repetition_penalty": 2.0}, [1.0, 0.5, -2.0, 0.0]),
        ({"frequency_penalty": 0.5}, [2.0, 0.0, -1.5, 0.0]),
        ({"presence_penalty": 0.5}, [2.0, 0.5, -1.5, 0.0]),
        ({"repetition_penalty": 2.0, "logit_bias": {0: -3.0}}, [-2.0, 0.5, -2.0, 0.0]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 0.5, "temperature": 0.5}, [2.0, -1.0, -5.0, 0.0]),
        ({"min_p": 0.5}, [2.0, -math.inf, -math.inf, -math.inf]),
        ({"min_p": 1.0}, [2.0, -math.inf, -math.inf, -math.inf]),
        ({"top_k": 2}, [2.0, 1.0, -math.inf, -math.inf]),
        ({"top_p": 0.7}, [2.0, 1.0, -math.inf, -math.inf]),
        ({"top_p": 0.6}, [2.0, -math.inf, -math.inf, -math.inf]),
        ({"top_p": 1e-9}, [2.0, -math.inf, -math.inf, -math.inf]),
        ({"top_k": 2, "top_p": 0.7}, [2.0, -math.inf, -math.inf, -math.inf]),
    ],
)
def test_penalties_count_the_output_once_per_occurrence_and_repetition_the_prompt_too(
    values: dict[str, Any], expected: list[float]
) -> None:
    """Chances 0.64, 0.24, 0.03, 0.09. Top-p sees the mass that top-k left: 0.73 and 0.27."""
    one = context(prompt=[0, 3], output=[1, 2, 1], **values)
    assert process(double([2.0, 1.0, -1.0, 0.0]), [one])[0].tolist() == expected


def test_equals_at_the_threshold_stay_in_top_k_and_the_earlier_enter_top_p() -> None:
    logits = double([1.0, 2.0, 1.0, 1.0])
    assert process(logits, [context(top_k=2)]).isfinite().tolist() == [[True] * 4]
    assert process(logits, [context(top_p=0.6)]).isfinite().tolist() == [[True, True, False, False]]


def test_ends_are_banned_until_the_minimum_counting_the_path() -> None:
    params = SamplingParams(min_tokens=2)
    for output, banned in [((), True), ((4,), True), ((4, 4), False), ((4, 4, 4), False)]:
        scores = process(double([5.0, 1.0, 5.0]), [Context(params, 0, [1, 1], output, frozenset({0, 2}))])
        assert scores.tolist() == [[-math.inf, 1.0, -math.inf] if banned else [5.0, 1.0, 5.0]]


@given(logits=LOGITS, prompt=TEXTS, output=TEXTS, values=st.sampled_from(["frequency", "presence"]))
def test_a_token_moved_from_prompt_to_output_is_penalised_from_then_on(
    logits: list[float], prompt: list[int], output: list[int], values: str
) -> None:
    penalty = {f"{values}_penalty": 0.5}
    inside = process(double(logits), [context([*prompt, *output], [], **penalty)])
    after = process(double(logits), [context(prompt or [0], output, **penalty)])
    assert torch.equal(inside, double(logits))
    assert {i for i in range(V) if after[0, i] < inside[0, i]} == set(output)


@given(
    rows=st.lists(st.tuples(LOGITS, CONTEXTS), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_row_alone_is_scored_and_drawn_as_in_any_batch(
    rows: list[tuple[list[float], Context]], dtype: torch.dtype
) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=dtype)
    given_logits = logits.clone()
    contexts = [one for _, one in rows]
    together, drawn = process(logits, contexts), draw(logits, contexts)
    for i, one in enumerate(contexts):
        assert torch.equal(process(logits[i : i + 1], [one])[0], together[i])
        assert draw(logits[i : i + 1], [one]) == [drawn[i]]
    assert torch.equal(logits, given_logits)


@given(logits=LOGITS, one=CONTEXTS)
def test_the_draw_is_the_best_score_plus_the_noise_of_its_position(logits: list[float], one: Context) -> None:
    scores = process(double(logits), [one])
    assume(scores.max() > -math.inf)
    if one.params.temperature > 0:
        position = len(one.prompt) + len(one.output)
        scores += gumbel(torch.tensor([signed(one.seed)]), torch.tensor([position]), V)
    (token,) = draw(double(logits), [one])
    assert scores[0, token] == scores.max()


@given(logits=LOGITS, seed=st.integers(0, 2**64 - 1), output=TEXTS)
def test_every_dtype_draws_with_the_same_noise(logits: list[float], seed: int, output: list[int]) -> None:
    one = context(output=output, seed=seed)
    noise = gumbel(torch.tensor([signed(seed)]), torch.tensor([1 + len(output)]), V)
    expected = (double(logits) + noise).argmax(-1).tolist()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert draw(double(logits).to(dtype), [one]) == expected


@given(logits=st.lists(st.floats(-20, 20), min_size=V, max_size=V), one=CONTEXTS)
def test_half_precision_is_processed_in_float32(logits: list[float], one: Context) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        half = double(logits).to(dtype)
        assert process(half, [one]).dtype == torch.float32
        assert torch.equal(process(half, [one]), process(half.float(), [one]))
        assert draw(half, [one]) == draw(half.float(), [one])


@given(logits=LOGITS, one=CONTEXTS, seed=st.integers())
def test_at_temperature_0_the_seed_and_what_cuts_tokens_do_not_matter(
    logits: list[float], one: Context, seed: int
) -> None:
    params = replace(one.params, temperature=0.0)
    uncut = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    (token,) = draw(double(logits), [replace(one, params=params)])
    assert [token] == draw(double(logits), [replace(one, params=uncut, seed=seed)])
    scores = dict(enumerate(logits))
    biased(scores, one)
    penalised(scores, one)
    assert scores[token] == pytest.approx(max(scores.values()), abs=1e-12)


@given(logits=LOGITS, one=CONTEXTS)
def test_no_draw_leaves_the_grammar_whatever_is_banned(logits: list[float], one: Context) -> None:
    assume(one.allowed is not None)
    assert one.allowed is not None
    banning = dict.fromkeys(range(0, V, 2), -math.inf) | {1: 50.0}
    for bias in (one.params.logit_bias, banning, dict.fromkeys(range(V), -math.inf)):
        params = replace(one.params, logit_bias=bias)
        (token,) = draw(double(logits), [replace(one, params=params)])
        assert one.allowed[token]


@given(rows=st.lists(st.tuples(LOGITS, TOKENS, st.integers(0, V + 2)), min_size=1, max_size=4))
def test_logprobs_are_those_of_the_raw_logits_and_the_most_likely_come_first(
    rows: list[tuple[list[float], int, int]],
) -> None:
    logits, tokens, tops = zip(*rows, strict=True)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        told = logprobs(torch.tensor(logits, dtype=dtype), tokens, tops)
        for row, token, top, one in zip(logits, tokens, tops, told, strict=True):
            # The logits are exact in every dtype.
            chances = softmax(dict(enumerate(row)))
            assert one.logprob == pytest.approx(math.log(chances[token]), abs=tolerance)
            best = sorted(range(V), key=lambda other, row=row: (-row[other], other))[:top]
            assert [other for other, _ in one.top] == best
            expected = [math.log(chances[other]) for other in best]
            assert [value for _, value in one.top] == pytest.approx(expected, abs=tolerance)


def test_no_rows_draw_nothing() -> None:
    assert draw(torch.empty(0, V), []) == []


DRAWS = 20_000
ALPHA = 1e-4
WEIGHTS = [2.0, 1.5, 1.0, 0.0, -0.5, -1.0, 0.5, 0.25]


def drawn(params: dict[str, Any], position: int = 0, logits: Sequence[float] = WEIGHTS) -> Tensor:
    """One draw for each of many consecutive seeds."""
    contexts = [context(output=[0] * position, seed=seed, **params) for seed in range(DRAWS)]
    return torch.tensor(draw(torch.tensor([logits]).expand(DRAWS, -1), contexts))


def chance(tokens: Tensor, law: Tensor) -> float:
    """Chance of counts at least as far from `law` as these."""
    support = law > 0
    counts = torch.bincount(tokens, minlength=len(law))
    assert not counts[~support].any()
    return float(stats.chisquare(counts[support].numpy(), (law[support] * len(tokens)).numpy()).pvalue)


@pytest.mark.parametrize(
    ("params", "scores"),
    [
        ({}, WEIGHTS),
        ({"temperature": 0.7}, [w / 0.7 for w in WEIGHTS]),
        ({"temperature": 1.3}, [w / 1.3 for w in WEIGHTS]),
        ({"top_k": 3}, [2.0, 1.5, 1.0, *[-math.inf] * 5]),
        ({"logit_bias": {0: -math.inf, 5: 2.0}}, [-math.inf, 1.5, 1.0, 0.0, -0.5, 1.0, 0.5, 0.25]),
    ],
)
def test_draws_over_many_seeds_follow_the_softmax_of_the_scores(
    params: dict[str, Any], scores: list[float]
) -> None:
    law = double(scores)[0].softmax(-1)
    assert chance(drawn(params), law) > ALPHA


def test_a_temperature_nine_percent_off_would_be_noticed() -> None:
    law, off = double(WEIGHTS)[0].softmax(-1), double(WEIGHTS)[0].div(1.09).softmax(-1)
    effect = float(((off - law) ** 2 / law).sum())
    critical = stats.chi2.isf(ALPHA, V - 1)
    assert stats.ncx2.sf(critical, V - 1, DRAWS * effect) > 0.999
    assert chance(drawn({}, logits=[w / 1.09 for w in WEIGHTS]), law) < ALPHA


def test_draws_at_neighbouring_positions_and_of_neighbouring_seeds_are_independent() -> None:
    law = double(WEIGHTS)[0].softmax(-1)
    here, there = drawn({}), drawn({}, position=1)
    joint = torch.outer(law, law).flatten()
    assert chance(here * V + there, joint) > ALPHA
    assert chance(here[0::2] * V + here[1::2], joint) > ALPHA
    assert chance(here[:-1:2] * V + there[1::2], joint) > ALPHA
    copied = torch.where(torch.arange(DRAWS) % 25 == 0, here, there)
    assert chance(here * V + copied, joint) < ALPHA, "one draw in 25 repeated would be noticed"
