"""Traces: what they replay is what a decoder does, and what is drawn has the τ asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.bench.machines import Linear
from services.bench.traces import SHAPES, Trace, drawn, follow, read, write
from services.bench.virtual import Job, Setting, simulate
from services.draft.drafter import Drafter
from services.engine.head import EagleHead
from services.engine.target import Target
from services.types.configuration import DraftConfig, TreeShape, VerifyLimits
from services.types.errors import WealdError
from services.types.sampling import SamplingParams
from services.types.session import Session

TOKENS = 40
MACHINE = Linear((1.0, 0.0, 0.0), (0.1, 0.0, 0.0))


@pytest.fixture(scope="module")
def made(checkpoints: Any) -> tuple[Target, EagleHead, Session, Trace]:
    """A tiny target with an undecided head, a session, and its trace."""
    target = Target.load(checkpoints.target, torch.float64, torch.device("cpu"))
    head = EagleHead.load(checkpoints.head, *target.embeddings())
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True)
    session = Session("s", (3, 1, 4, 1, 5), params, 7)
    return target, head, session, follow(target, head, session)


@pytest.mark.parametrize(
    "config",
    [
        DraftConfig(levels=8, beam=10, budget=64),
        DraftConfig(levels=8, beam=10, budget=12),
        DraftConfig(levels=8, beam=10, budget=3),
        DraftConfig(shape=TreeShape.STATIC),
    ],
    ids=["64 nodes", "12 nodes", "3 nodes", "static"],
)
def test_a_replay_accepts_in_every_round_what_the_decoder_does(
    made: tuple[Target, EagleHead, Session, Trace], run: Callable[..., Any], config: DraftConfig
) -> None:
    target, head, session, trace = made
    decoded = run(target, [session], Drafter(head, config, num_pages=400, page_size=4))
    rounds = [(len(step.tree.cut(TOKENS)), len(step.outcome.accepted)) for step in decoded.steps if step.tree]
    job = Job(len(session.prompt), TOKENS, trace.guesses[config.shape], 0)
    (served,) = simulate(Setting(MACHINE, config, VerifyLimits()), [job], 1).served
    # The last rounds have room for less than the whole tree.
    assert [accepted for *_, accepted in served.rounds] == [accepted for _, accepted in rounds]
    assert [nodes + 1 for _, nodes, _ in served.rounds[:-8]] == [nodes for nodes, _ in rounds[:-8]]
    assert sum(accepted for _, accepted in rounds) > 2


def test_what_is_written_is_read_again(
    made: tuple[Target, EagleHead, Session, Trace], tmp_path: Path
) -> None:
    *_, trace = made
    named = [Trace("some", 1.0, trace.guesses), Trace("other", 0.0, trace.guesses)]
    write(tmp_path / "once.npz", named)
    once = read(tmp_path / "once.npz")
    write(tmp_path / "twice.npz", once)
    twice = read(tmp_path / "twice.npz")
    assert [(t.task, t.temperature) for t in once] == [("some", 1.0), ("other", 0.0)]
    for shape in SHAPES:
        for was, one, two in zip(
            trace.guesses[shape], once[1].guesses[shape], twice[1].guesses[shape], strict=True
        ):
            assert one.path == was.path == two.path
            assert one.tree.parents == was.tree.parents
            assert one.tree.values == pytest.approx(was.tree.values, rel=0.06)
            assert two.tree.values == pytest.approx(one.tree.values)


def test_a_file_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.npz").write_text("nothing")
    with pytest.raises(WealdError, match="holds no traces"):
        read(tmp_path / "empty.npz")


def test_a_drawn_head_has_the_tau_asked_for_and_is_as_sure_as_it_is_right() -> None:
    (trace,) = [drawn(3.8, 48, 1.0, 2000, seed=1)]
    guesses = trace.guesses[TreeShape.DYNAMIC]
    trees = [guess.part(6, 48) for guess in guesses]
    accepted = np.array([len(guess.accepted(tree)) for guess, tree in zip(guesses, trees, strict=True)])
    promised = np.array([sum(tree.values[1:]) for tree in trees])
    assert 1 + promised.mean() == pytest.approx(3.8, abs=0.02)
    # The mean of 2000 draws: four standard errors.
    assert abs(accepted.mean() - promised.mean()) < 4 * accepted.std() / np.sqrt(len(guesses))
    # Easy and hard tokens differ, and the head knows it.
    assert np.corrcoef(promised, accepted)[0, 1] > 0.1
    static = [(len(guess.path), sum(guess.tree.values[1:])) for guess in trace.guesses[TreeShape.STATIC]]
    assert np.mean([n for n, _ in static]) == pytest.approx(np.mean([v for _, v in static]), abs=0.15)
    assert all(len(guess.tree) == 26 for guess in trace.guesses[TreeShape.STATIC])
