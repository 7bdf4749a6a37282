"""Both services in virtual time: nothing is lost, the seed says it all, and auto pays."""

from itertools import pairwise

import numpy as np
import pytest

from services.bench.machines import Linear, fitted
from services.bench.simulate import AUTO, Hardware, Load, jobs, measure, modes
from services.bench.traces import Guess, drawn
from services.bench.virtual import Job, Ledger, Setting, simulate
from services.types.configuration import TreeShape, VerifyLimits

MODES = modes(60)
FLAT = Linear((6e-3, 2e-6, 0.0), (0.5e-3, 1e-6, 0.0), 0.5e-3)
LINEAR = Linear((2e-3, 1e-3, 0.0), (0.5e-3, 0.05e-3, 0.0), 0.5e-3)
LIMITS = VerifyLimits(max_num_batched_tokens=4096, max_num_seqs=64, max_waiting=1 << 30)


@pytest.fixture(scope="module")
def guesses() -> dict[TreeShape, tuple[Guess, ...]]:
    """Of a head with a τ of 4.1."""
    return drawn(4.1, 60, 1.0, 1000, seed=0).guesses


def serve(
    guesses: dict[TreeShape, tuple[Guess, ...]],
    mode: str,
    load: Load,
    count: int,
    machine: Linear = FLAT,
    limits: VerifyLimits = LIMITS,
    **options: float,
) -> Ledger:
    """So many jobs in a mode, eight at once."""
    config = MODES[mode]
    made = jobs(load, guesses[config.shape if config else TreeShape.DYNAMIC], count)
    return simulate(Setting(machine, config, limits, **options), made, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_a_session_commits_exactly_the_tokens_of_its_trace(
    guesses: dict[TreeShape, tuple[Guess, ...]], mode: str
) -> None:
    ledger = serve(guesses, mode, Load(20, 50, None, 3), 24)
    for served in ledger.served:
        job, position = served.job, 0
        for root, nodes, accepted in served.rounds:
            assert root == position
            path = job.guesses[(job.start + root) % len(job.guesses)].path
            assert accepted <= min(len(path), nodes, job.output - 1 - root)
            position += accepted + 1
        assert position + 1 == job.output
    assert sum(n for _, n in ledger.tokens) == sum(served.job.output for served in ledger.served)
    assert mode == "plain" or any(served.rounds[0][1] for served in ledger.served)


def test_one_plain_session_makes_a_token_in_each_step(guesses: dict[TreeShape, tuple[Guess, ...]]) -> None:
    job = Job(10, 64, guesses[TreeShape.DYNAMIC], 0)
    machine = Linear((6e-3, 1e-5, 2e-5), (1e-3, 0.0, 0.0))
    (served,) = simulate(Setting(machine, None, LIMITS), [job], 1).served
    assert served.time_per_token == pytest.approx(machine.step(1, 1, 0))


@pytest.mark.parametrize("mode", [AUTO, "fixed 60"])
def test_every_session_that_arrives_finishes_and_no_page_is_lost(
    guesses: dict[TreeShape, tuple[Guess, ...]], mode: str
) -> None:
    tight = Linear((6e-3, 1e-5, 0.0), (1e-3, 0.0, 0.0), pages=40)
    limits = VerifyLimits(max_num_batched_tokens=256, max_num_seqs=16, max_waiting=1 << 30)
    ledger = serve(guesses, mode, Load(60, 40, 100.0, 5), 60, tight, limits)
    assert len(ledger.served) == 60
    assert all(sum(a + 1 for *_, a in served.rounds) >= served.job.output - 20 for served in ledger.served)
    assert max(served.ended for served in ledger.served) < np.inf
    assert ledger.idle_pages
    assert ledger.counters["preemptions"] > 0


def test_a_seed_says_it_all(guesses: dict[TreeShape, tuple[Guess, ...]]) -> None:
    def ended(seed: int) -> list[float]:
        ledger = serve(
            guesses, AUTO, Load(20, 40, 50.0, 1), 24, noise=0.1, seed=seed, drafters=2, verifiers=2
        )
        return [served.ended for served in ledger.served]

    assert ended(0) == ended(0)
    assert ended(0) != ended(1)


def test_sessions_arrive_at_the_rate_asked_for(guesses: dict[TreeShape, tuple[Guess, ...]]) -> None:
    made = jobs(Load(100, 50, 20.0, 0), guesses[TreeShape.DYNAMIC], 4000)
    arrivals = [job.arrival or 0.0 for job in made]
    gaps = np.diff(arrivals)
    # Of 4000 exponential gaps the mean is off by four standard errors once in 16,000 times.
    assert 20 * gaps.mean() == pytest.approx(1, abs=4 / np.sqrt(4000))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert np.mean([job.prompt for job in made]) == pytest.approx(100, rel=0.02)
    assert all(25 <= job.output <= 75 for job in made)


@pytest.mark.parametrize("sessions", [1, 4, 8])
@pytest.mark.parametrize("machine", [FLAT, LINEAR], ids=["flat", "linear"])
def test_auto_is_never_slower_than_plain_nor_than_fixed_trees(
    guesses: dict[TreeShape, tuple[Guess, ...]], machine: Linear, sessions: int
) -> None:
    shape = Hardware("8b", machine, guesses, MODES, LIMITS)
    rates = {mode: measure(shape, mode, Load(20, 100, None, 0), sessions)["tokens_per_s"] for mode in MODES}
    assert rates[AUTO] > 0.98 * rates["plain"]
    # On the flat machine whole trees are best, and what is tried besides them is not free.
    assert rates[AUTO] > 0.95 * max(rates["fixed 60"], rates["static"])


def test_shared_processors_do_one_after_the_other(guesses: dict[TreeShape, tuple[Guess, ...]]) -> None:
    shared = Linear((6e-3, 0.0, 0.0), (1e-3, 0.0, 0.0), shared=True)
    ledger = serve(guesses, "fixed 60", Load(20, 40, None, 3), 24, shared)
    busy = sorted([*ledger.verifying, *ledger.drafting])
    assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(busy))


def test_what_was_counted_tells_what_each_thing_takes() -> None:
    counts = [(1, 1, 1), (1, 60, 1), (1, 4, 4), (1, 240, 4), (1, 16, 16)]
    seconds = [3e-2 * a + 2e-3 * b + 5e-3 * c for a, b, c in counts]
    assert fitted(counts, seconds) == pytest.approx([3e-2, 2e-3, 5e-3])
    # A part that would have to be negative is left out.
    assert fitted([(1, 1), (1, 2), (1, 3)], [3.0, 2.9, 2.8])[1] == 0.0
