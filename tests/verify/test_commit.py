"""After a commit by compaction, a session stands as if its text had been its prompt."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.verifier import Verified, Verifier

Make = Callable[..., Any]

ENDLESS = SamplingParams(max_tokens=60, ignore_eos=True)
TOLERANCE = 1e-6
"""The norms of transformers' models round to float32; the same rows in another step can differ by that."""


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def written(target: Any) -> Tensor:
    """Slots that the last step wrote, in the order of its rows."""
    slots: Tensor = target.batches[-1].slots
    return slots


def fresh_slots(target: Any, tokens: Sequence[int]) -> Tensor:
    """Prefill `tokens` on another cache of the same target; the slots of all of them."""
    Verifier(target, num_pages=60, page_size=4).open(Session("fresh", tuple(tokens), ENDLESS, 0))
    return written(target)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2"])
def test_keys_values_and_features_after_each_commit_equal_a_fresh_prefill(
    kind: str, plain: Make, watched: Make, hidden: Make
) -> None:
    rng = random.Random(kind)
    target, other = watched(kind), watched(kind)
    verifier = Verifier(target, num_pages=200, page_size=4)
    sessions = [
        Session(name, tuple(rng.randrange(61) for _ in range(length)), ENDLESS, length)
        for name, length in {"a": 3, "b": 21, "c": 34}.items()
    ]
    streams = {s.id: plain(kind).stream(s, 40) for s in sessions}
    output: dict[str, list[int]] = {}
    slots: dict[str, Tensor] = {}
    for session in sessions:
        opened = verifier.open(session)
        output[session.id] = [*opened.outcome.tokens]
        slots[session.id] = written(target)
        close(opened.features, plain(kind).run(session.prompt)[0])
    moved = 0
    for _ in range(5):
        chosen = rng.sample(sessions, rng.randint(2, 3))
        trees = {}
        for s in chosen:
            at = len(output[s.id])
            text = streams[s.id][at : at + rng.randint(1, 6)]
            trees[s.id] = hidden(output[s.id][-1], text, 61, 40, rng)[0]
        results: dict[str, Verified] = verifier.verify(trees)
        rows = written(target).split([r.outcome.verified for r in results.values()])
        for s, result, table in zip(chosen, results.values(), rows, strict=True):
            outcome, below = result.outcome, len(s.prompt) + len(output[s.id]) - 1
            assert len(outcome.accepted) > 0
            moved += outcome.accepted != tuple(range(1, len(outcome.accepted) + 1))
            output[s.id] += outcome.tokens
            committed = (*s.prompt, *output[s.id][:-1])
            slots[s.id] = torch.cat([slots[s.id], table[: len(outcome.accepted) + 1]])
            assert len(slots[s.id]) == len(committed)
            fresh = fresh_slots(other, committed)
            for layer in range(2):
                pairs = zip(
                    target.cache.read(layer, slots[s.id]), other.cache.read(layer, fresh), strict=True
                )
                for kept, expected in pairs:
                    close(kept, expected)
            close(target.cache.features(slots[s.id]), other.cache.features(fresh))
            close(result.features, plain(kind).run(committed)[0][below:])
        verifier.check()
    assert moved > 0
    assert all(tuple(output[s.id]) == streams[s.id][: len(output[s.id])] for s in sessions)


def test_a_session_goes_on_by_plain_steps_after_a_tree_as_after_a_prompt(
    plain: Make, target: Make, hidden: Make
) -> None:
    rng = random.Random(0)
    session = Session("a", (4, 5, 6), ENDLESS, 9)
    stream = plain("qwen3").stream(session, 30)
    verifier = Verifier(target("qwen3"), num_pages=60, page_size=4)
    output = [*verifier.open(session).outcome.tokens]
    while len(output) < 20:
        text = stream[len(output) : len(output) + 4]
        output += verifier.verify({"a": hidden(output[-1], text, 61, 64, rng)[0]})["a"].outcome.tokens
        for _ in range(2):
            plain_step = verifier.verify({"a": DraftTree.root(output[-1])})["a"].outcome
            assert len(plain_step.tokens) == plain_step.verified == 1
            output += plain_step.tokens
    assert tuple(output) == stream[: len(output)]


def test_sessions_left_out_of_a_round_are_as_if_it_had_not_been(plain: Make, target: Make) -> None:
    sessions = [Session(str(i), (1, 2 + i), ENDLESS, i) for i in range(3)]
    streams = {s.id: plain("llama").stream(s, 14) for s in sessions}
    verifier = Verifier(target("llama"), num_pages=60, page_size=4)
    output = {s.id: [*verifier.open(s).outcome.tokens] for s in sessions}
    rng = random.Random(3)
    for _ in range(20):
        chosen = rng.sample(sorted(output), rng.randint(1, 3))
        results = verifier.verify({id: DraftTree.root(output[id][-1]) for id in chosen})
        assert list(results) == chosen
        for id, result in results.items():
            output[id] += result.outcome.tokens
    for id, tokens in output.items():
        assert tuple(tokens[:14]) == streams[id][: len(tokens)]


@pytest.mark.parametrize("length", [511, 512, 513, 1100])
def test_a_prompt_of_several_chunks_equals_one_pass(length: int, plain: Make, target: Make) -> None:
    sizes = {"max_position_embeddings": 2048}
    rng = random.Random(length)
    session = Session("a", tuple(rng.randrange(61) for _ in range(length)), ENDLESS, 9)
    opened = Verifier(target("llama", **sizes), num_pages=80).open(session)
    assert opened.outcome.tokens == plain("llama", **sizes).stream(session, 1)
    close(opened.features, plain("llama", **sizes).run(session.prompt)[0])
