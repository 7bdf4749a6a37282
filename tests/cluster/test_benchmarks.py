"""The benchmarks of a cluster: short runs, in which nothing fails and what is written is what was counted."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

WEALD = "from cluster.command import main; main()"
SHORT = """
import sys
from pathlib import Path

from cluster import bench_scale

bench_scale.UP_S, bench_scale.DOWN_S = 4.0, 4.0
bench_scale.STEADY_S, bench_scale.LEAST_S, bench_scale.MOST_S = 1.0, 2.0, 400.0
sys.exit(not bench_scale.bench_scale(2, Path(sys.argv[1]), Path(sys.argv[2])))
"""
"""Two replicas of each side at most; they come slowly, since a busy machine has peaks of a second or two."""


def said(program: str, *arguments: object) -> str:
    """What a program with a Ray of its own prints, when nothing is wrong."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_each_side_scales_by_its_own_load_and_no_text_changes(tmp_path: Path) -> None:
    file, plot = tmp_path / "scale.json", tmp_path / "scale.svg"
    assert "many texts" in said(SHORT, file, plot)
    record = json.loads(file.read_text())
    assert [(row["draft_replicas"], row["verify_replicas"]) for row in record["rows"]] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (1, 1),
    ]
    assert all(row["requests"] >= row["callers"] for row in record["rows"])
    assert not any(row["failed"] or row["changed"] for row in record["rows"])
    assert not record["problems"]
    _, long_prompts, many_texts, _ = record["samples"]
    assert max(sample["verify"]["load"] for sample in long_prompts) > 0.7
    assert median(sample["draft"]["load"] for sample in long_prompts) <= 0.3
    assert max(sample["draft"]["load"] for sample in many_texts) > 0.3
    assert "<svg" in plot.read_text()


@pytest.mark.slow
def test_what_ray_costs_is_counted_part_by_part_in_answers_that_are_the_same(
    tiny: Any, tmp_path: Path
) -> None:
    from cluster.processes import RAYS_OWN, SERVICES

    file = tmp_path / "ray.json"
    models = ("--model", tiny.target, "--speculative-model", tiny.head, "--dtype", "float64")
    told = said(WEALD, "bench", "ray", *models, "--answers", 3, "--max-tokens", 24, "--json", file)
    assert "controller" in told
    record = json.loads(file.read_text())
    assert record["same_texts"] == len(record["answers"]) == 3
    for answer in record["answers"]:
        assert answer["plain"]["tokens"] == answer["ray"]["tokens"] == 24
        assert answer["plain"]["spent"].keys() == set(SERVICES)
        assert answer["ray"]["spent"].keys() == {*SERVICES, *RAYS_OWN}
    for row in record["parts"]:
        assert row["ray"] > 0
        assert (row["plain"] > 0) == (row["part"] in SERVICES)
    for cost in record["costs"].values():
        assert cost["low"] <= cost["mean"] <= cost["high"]
    assert record["costs"]["Ray's own processes"]["low"] > 0


def test_the_time_of_a_process_is_counted_apart_from_that_of_those_it_started() -> None:
    from cluster.processes import seconds, tree

    work = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\ninput()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin
        assert parent.stdout
        parent.stdout.readline()
        family = tree(parent.pid)
        assert family[0] == parent.pid
        assert len(family) == 2
        assert set(family).isdisjoint(tree(os.getpid(), without=[parent.pid]))
        counted = seconds(family)
        assert counted[family[1]] >= 1 > counted[parent.pid]
        parent.stdin.write(b"\n")
    assert seconds(family) == {}


def test_the_thread_that_asks_for_times_is_not_counted() -> None:
    from cluster.processes import seconds

    before = seconds([os.getpid()])[os.getpid()]
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        pass
    assert seconds([os.getpid()])[os.getpid()] - before < 0.25


def test_a_replica_that_came_without_a_load_of_its_own_side_is_told() -> None:
    from cluster.bench_scale import EVERY_S, LAG_S, UP_S, Sample, Side, unasked
    from services.types.replica import ReplicaKind

    def samples(draft_loads: Sequence[float], draft: Sequence[int]) -> list[Sample]:
        return [
            Sample(
                i * EVERY_S,
                {ReplicaKind.DRAFT: Side(load, wanted, 1), ReplicaKind.VERIFY: Side(0.1, 1, 1)},
            )
            for i, (load, wanted) in enumerate(zip(draft_loads, draft, strict=True))
        ]

    assert unasked(samples([0.1, 0.5, 0.1, 0.1], [1, 1, 1, 2])) == []
    assert unasked(samples([0.1, 0.5, 0.1, 0.1], [1, 1, 1, 3])) == [
        "2 s: a draft replica came that its load had not asked for"
    ]
    quiet = int((UP_S + LAG_S) / EVERY_S)
    assert len(unasked(samples([0.5] + [0.1] * quiet, [1] * quiet + [2]))) == 1
