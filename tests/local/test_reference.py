"""The in-process p/q reference: the target's distribution, exact lengths, nothing left open."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from services.local.reference import decode_sampled
from services.speculation.sampling import Context, process
from services.types.configuration import DraftConfig, TreeShape
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.verify.verifier import Verifier

Make = Callable[..., Any]

SMALL: dict[str, Any] = {"vocab_size": 6, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
STATIC = DraftConfig(shape=TreeShape.STATIC)
CHAIN = DraftConfig(shape=TreeShape.CHAIN, levels=3)


def tokens_of(verifier: Verifier, head: Any, config: DraftConfig, session: Session) -> tuple[int, ...]:
    steps = list(decode_sampled(verifier, head, config, session))
    assert steps[0].tree is None
    assert steps[-1].outcome.finish is not None
    return tuple(token for step in steps for token in step.outcome.tokens)


@pytest.mark.parametrize("config", [STATIC, CHAIN], ids=["static", "chain"])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 7, 20])
def test_a_text_without_end_has_exactly_max_tokens(
    config: DraftConfig, max_tokens: int, target: Make, head: Make, idle: Make
) -> None:
    verifier = Verifier(target("llama"), num_pages=20)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for seed in (1, 2**64 - 1):
        text = tokens_of(verifier, head(target("llama")), config, Session("a", (1, 2, 3), params, seed))
        assert len(text) == max_tokens
    idle(verifier)


def test_an_end_token_is_the_last_token(target: Make, head: Make, idle: Make) -> None:
    verifier = Verifier(target("llama"), num_pages=20)
    params = SamplingParams(max_tokens=60, logit_bias=dict.fromkeys((2, 7, 11), 1.0))
    for seed in range(5):
        session = Session("a", (1, 2, 3), params, seed)
        *_, last = decode_sampled(verifier, head(target("llama")), STATIC, session)
        assert last.outcome.finish is FinishReason.STOP
        assert last.outcome.tokens[-1] in {2, 7, 11}
    idle(verifier)


def test_leaving_early_frees_everything(target: Make, head: Make, idle: Make) -> None:
    verifier = Verifier(target("llama"), num_pages=20)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    decoding = decode_sampled(verifier, head(target("llama")), CHAIN, Session("a", (1, 2, 3), params, 0))
    next(decoding)
    next(decoding)
    decoding.close()
    idle(verifier)


def test_global_random_state_is_neither_read_nor_changed(target: Make, head: Make) -> None:
    verifier = Verifier(target("llama"), num_pages=20)
    session = Session("a", (1, 2, 3), SamplingParams(max_tokens=12, ignore_eos=True), 4)
    texts = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            drafter = head(target("llama"))
            before = torch.get_rng_state()
            texts.append(tokens_of(verifier, drafter, STATIC, session))
            assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("config", [STATIC, CHAIN], ids=["static", "chain"])
def test_the_text_has_the_targets_distribution(
    config: DraftConfig, plain: Make, target: Make, head: Make
) -> None:
    """Chi-square over all pairs of the second and third token: 1,200 texts, α = 0.001 at a fixed seed."""
    params = SamplingParams(max_tokens=3, temperature=1.3, top_p=0.97)
    prompt = (1, 2, 3)
    vocabulary = torch.tensor([4, 0, 5, 2, 1])
    drafting = head(target("llama", **SMALL), vocabulary, vocab_size=6)

    def probabilities(output: tuple[int, ...]) -> torch.Tensor:
        logits = plain("llama", **SMALL).run((*prompt, *output))[1][-1:]
        return process(logits, [Context(params, 0, prompt, output, frozenset())])[0].softmax(-1)

    expected: Counter[tuple[int, int]] = Counter()
    for first in range(6):
        for second in range(6):
            before = probabilities(())[first] * probabilities((first,))[second]
            for third, chance in enumerate(probabilities((first, second)).tolist()):
                expected[second, third] += float(before) * chance

    verifier = Verifier(target("llama", **SMALL), num_pages=20)
    count = 1200
    seen = Counter(
        tokens_of(verifier, drafting, config, Session("a", prompt, params, seed))[1:] for seed in range(count)
    )
    pairs = [pair for pair in product(range(6), repeat=2) if expected[pair] * count > 1]
    assert all(expected[pair] > 0 for pair in seen)
    observed = [seen[pair] for pair in pairs]
    wanted = [expected[pair] * count for pair in pairs]
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [value * scale for value in wanted]).pvalue > 0.001
