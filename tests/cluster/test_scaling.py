"""Replicas follow their load: enough of them, not too many, and none that comes and goes."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling import MARGIN, Aims, Observed, Patience, decide, draft_load, verify_load

ROOT = Path(__file__).resolve().parent.parent.parent
AIMS = st.builds(Aims, st.floats(0.2, 1.0), st.integers(0, 8), st.integers(0, 12))
LOADS = st.lists(st.floats(0.0, 4.0), max_size=8)


@st.composite
def moments(draw: st.DrawFn) -> tuple[Observed, Patience]:
    """Any replicas at any moment, and anything remembered."""
    least = draw(st.integers(1, 5))
    loads = draw(LOADS)
    observed = Observed(
        loads=loads,
        running=draw(st.integers(len(loads), 9)),
        target=draw(st.integers(1, 12)),
        least=least,
        most=draw(st.integers(least, 10)),
        now=draw(st.floats(0, 100)),
    )
    since = st.none() | st.floats(0, 100)
    return observed, Patience(draw(since), draw(st.integers(0, 10)), draw(since))


@dataclass
class Cluster:
    """Replicas that start late and report later still; work is spread evenly over those that run."""

    aims: Aims
    least: int = 1
    most: int = 10
    target: int = 1
    start_s: int = 3
    report_s: int = 2
    now: float = 0.0
    ages: list[int] = field(default_factory=lambda: [1000])
    patience: Patience = field(default_factory=Patience)
    history: list[int] = field(default_factory=list)

    def observe(self, load: float) -> Observed:
        running = [age for age in self.ages if age >= self.start_s]
        known = sum(age >= self.start_s + self.report_s for age in running)
        each = load / max(1, len(running))
        return Observed([each] * known, len(running), self.target, self.least, self.most, self.now)

    def live(self, load: float, seconds: int) -> list[int]:
        """Numbers of replicas that were decided, second by second."""
        for _ in range(seconds):
            observed = self.observe(load)
            self.target, self.patience = decide(self.aims, observed, self.patience)
            self.ages = [*(age + 1 for age in self.ages[: self.target]), *[0] * self.target][: self.target]
            self.now += 1
            self.history.append(self.target)
        return self.history[-seconds:]

    def settle(self, load: float) -> int:
        """Until nothing can change any more: every replica has come or gone."""
        wait = self.start_s + self.report_s + max(self.aims.upscale_delay_s, self.aims.downscale_delay_s) + 2
        return self.live(load, int(wait) * (self.most + 2))[-1]


CLUSTERS = st.builds(Cluster, AIMS, start_s=st.integers(0, 5), report_s=st.integers(0, 5))


@given(moment=moments(), aims=AIMS)
def test_the_bounds_are_kept_and_replicas_go_one_at_a_time(
    moment: tuple[Observed, Patience], aims: Aims
) -> None:
    observed, patience = moment
    wanted, _ = decide(aims, observed, patience)
    assert observed.least <= wanted <= observed.most
    assert wanted >= min(max(observed.target, observed.least), observed.most) - 1


@given(moment=moments(), aims=AIMS, more=st.lists(st.floats(0.0, 2.0), min_size=8, max_size=8))
def test_more_load_never_means_fewer_replicas(
    moment: tuple[Observed, Patience], aims: Aims, more: list[float]
) -> None:
    observed, patience = moment
    higher = [load + rise for load, rise in zip(observed.loads, more, strict=False)]
    assert decide(aims, replace(observed, loads=higher), patience)[0] >= decide(aims, observed, patience)[0]


@given(moment=moments(), aims=AIMS)
def test_a_replica_goes_only_when_the_others_stay_well_below_the_load_aimed_at(
    moment: tuple[Observed, Patience], aims: Aims
) -> None:
    observed, patience = moment
    wanted, _ = decide(aims, observed, patience)
    if wanted < min(observed.target, observed.most):
        assert sum(observed.loads) <= MARGIN * aims.target_load * wanted
        assert len(observed.loads) == observed.running > 0


@given(cluster=CLUSTERS, load=st.floats(0.0, 12.0))
def test_under_a_constant_load_enough_replicas_come_and_then_nothing_changes(
    cluster: Cluster, load: float
) -> None:
    settled = cluster.settle(load)
    assert settled == cluster.most or load <= settled * cluster.aims.target_load + 1e-6
    assert settled == cluster.least or load > MARGIN * cluster.aims.target_load * (settled - 1)
    assert set(cluster.live(load, 100)) == {settled}


@given(cluster=CLUSTERS, load=st.floats(0.0, 12.0), then=st.floats(0.0, 12.0))
def test_a_change_of_load_moves_the_number_of_replicas_in_one_direction_only(
    cluster: Cluster, load: float, then: float
) -> None:
    before = cluster.settle(load)
    after = cluster.settle(then)
    changes = cluster.history[-int(len(cluster.history) / 2) :]
    assert changes in (sorted(changes), sorted(changes, reverse=True))
    assert after >= before or then < load
    assert after <= before or then > load


@given(cluster=CLUSTERS, load=st.floats(0.0, 6.0), spike=st.floats(0.0, 40.0), data=st.data())
def test_a_spike_or_a_lull_shorter_than_the_delay_changes_nothing(
    cluster: Cluster, load: float, spike: float, data: st.DataObject
) -> None:
    settled = cluster.settle(load)
    aims = cluster.aims
    delay = aims.upscale_delay_s if spike > load else aims.downscale_delay_s
    lasts = data.draw(st.integers(0, int(delay)))
    cluster.live(spike, lasts)
    assert {*cluster.live(load, 30)} == {settled}


@given(rise=st.floats(1.5, 4.0), spike=st.floats(5.0, 10.0))
def test_a_spike_at_the_end_of_a_rise_brings_only_what_the_rise_wanted(rise: float, spike: float) -> None:
    aims = Aims(0.7, 5, 60)
    alone, topped = Cluster(aims), Cluster(aims)
    alone.live(rise, 6)
    topped.live(rise, 5)
    topped.live(spike, 1)
    assert topped.target == alone.target > 1


def test_replicas_on_their_way_are_waited_for() -> None:
    cluster = Cluster(Aims(0.5, 0, 0), start_s=20, report_s=20)
    assert cluster.live(1.9, 30) == [4] * 30


def test_a_silent_replica_keeps_the_others_from_going() -> None:
    aims = Aims(0.7, 0, 0)
    silent = Observed([0.1, 0.1], running=3, target=3, least=1, most=5, now=9.0)
    assert decide(aims, silent, Patience())[0] == 3
    assert decide(aims, replace(silent, loads=[0.1, 0.1, 0.1]), Patience())[0] == 2
    assert decide(aims, replace(silent, loads=[], running=0), Patience())[0] == 3


def test_replicas_that_find_no_room_can_be_given_up() -> None:
    waiting = Observed([0.1, 0.1], running=2, target=5, least=1, most=5, now=9.0)
    assert decide(Aims(0.7, 0, 0), waiting, Patience())[0] == 4


def test_a_clock_that_is_set_back_delays_but_does_not_stop_a_decision() -> None:
    aims = Aims(0.7, 5.0, 5.0)
    busy = Observed([2.0], running=1, target=1, least=1, most=5, now=1000.0)
    wanted, patience = decide(aims, busy, Patience())
    wanted, patience = decide(aims, replace(busy, now=10.0), patience)
    assert wanted == 1
    assert decide(aims, replace(busy, now=15.0), patience)[0] == 3


POLICY = """
import sys, warnings
warnings.simplefilter("ignore")
from ray import cloudpickle
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

aims = {"target_load": 0.5, "upscale_delay_s": 2.0, "downscale_delay_s": 4.0}
made = AutoscalingPolicy(policy_function="cluster.scaling:LoadPolicy", policy_kwargs=aims)
made.get_policy()
written = made.get_serialized_policy_def()

# Where Serve decides there need be nothing of Weald.
for name in [name for name in sys.modules if name.partition(".")[0] in ("cluster", "services")]:
    del sys.modules[name]
sys.modules["cluster"] = sys.modules["services"] = None
read = AutoscalingPolicy.from_serialized_policy_def(made.model_dump(), written)
policy = read.get_policy()(**read.policy_kwargs)

state, target, decided = {}, 1, []
for second in range(12):
    loads = {"a": 0.9} if second < 5 else {"a": 0.1, "b": 0.1}
    context = AutoscalingContext(
        deployment_id=None, deployment_name="Verify", app_name="weald", current_num_replicas=len(loads),
        target_num_replicas=target, running_replicas=[*loads], total_num_requests=0.0,
        total_queued_requests=0.0, aggregated_metrics=lambda: {"load": loads}, raw_metrics=None,
        capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=3, policy_state=state,
        last_scale_up_time=None, last_scale_down_time=None, current_time=1e9 + second, config=None,
    )
    target, state = policy(context)
    decided.append(target)
print(decided)
"""


def test_serve_can_take_the_policy_to_where_weald_is_not() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    run = subprocess.run(
        [sys.executable, "-c", POLICY], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str([1, 1, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1])


VERIFY = {
    "running": st.integers(0, 64),
    "waiting": st.integers(0, 100),
    "free_pages": st.integers(0, 100),
    "tokens_per_step": st.floats(0, 2048),
}


def load_of(**observed: float) -> float:
    return verify_load(**{"max_num_seqs": 64, "num_pages": 100, "max_num_batched_tokens": 2048} | observed)


@given(observed=st.fixed_dictionaries(VERIFY))
def test_a_verify_replica_is_as_loaded_as_what_it_is_shortest_of(observed: dict[str, float]) -> None:
    load = load_of(**observed)
    sessions = (observed["running"] + observed["waiting"]) / 64
    pages = 1 - observed["free_pages"] / 100
    assert load >= max(sessions, observed["tokens_per_step"] / 2048)
    if observed["running"]:
        assert load >= pages - 1e-9
    if not observed["waiting"] and observed["running"]:
        assert abs(load - max(sessions, pages, observed["tokens_per_step"] / 2048)) < 1e-9


@given(
    observed=st.fixed_dictionaries(VERIFY),
    waiting=st.integers(0, 9),
    pages=st.integers(0, 9),
    extra=st.floats(0, 9),
)
def test_a_verify_replica_with_more_to_do_is_not_less_loaded(
    observed: dict[str, float], waiting: int, pages: int, extra: float
) -> None:
    more = {
        **observed,
        "waiting": observed["waiting"] + waiting,
        "free_pages": max(0, observed["free_pages"] - pages),
        "tokens_per_step": observed["tokens_per_step"] + extra,
    }
    assert load_of(**more) >= load_of(**observed)


def test_work_that_waits_makes_a_load_above_all_that_can_be_taken() -> None:
    full = {"running": 64, "free_pages": 50, "tokens_per_step": 100.0}
    assert load_of(**full, waiting=0) == 1.0
    assert load_of(**full, waiting=32) == 1.5
    assert load_of(running=10, waiting=10, free_pages=0, tokens_per_step=100.0) == 2.0
    assert load_of(running=0, waiting=0, free_pages=100, tokens_per_step=0.0) == 0.0


@given(sessions=st.integers(0, 512), busy=st.floats(0, 1))
def test_a_draft_replica_is_as_loaded_as_its_places_or_its_head(sessions: int, busy: float) -> None:
    assert draft_load(sessions, 256, busy) == max(sessions / 256, busy)
