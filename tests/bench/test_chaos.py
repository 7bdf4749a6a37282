"""`weald bench chaos`: a short run passes, and its account misses nothing."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.bench.chaos import bench_chaos
from services.bench.stages import STAGES
from services.bench.streams import Account, Stream, Text, account
from services.types.messages import Finished, Round
from services.types.replica import SIDES
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session

PROMPT = (7, 8, 9)
TOKENS = (1, 2, 3, 4, 5, 6)


def stream(*rounds: tuple[int, Sequence[int]], finished: bool = True) -> Stream:
    """A stream of the text `TOKENS` that heard rounds of (output position, tokens)."""
    text = Text(Session("s", PROMPT, SamplingParams(max_tokens=6), 0), TOKENS, FinishReason.LENGTH)
    heard = [Round(len(PROMPT) + at, tuple(tokens), 0, 1, 0, 0) for at, tokens in rounds]
    counts = FinishReason.LENGTH, len(PROMPT), len(TOKENS), 0
    return Stream(text, rounds=heard, finished=Finished(*counts) if finished else None)


def test_a_stream_that_is_its_text_is_sound() -> None:
    total = account([stream((0, (1, 2)), (2, (3, 4, 5)), (5, (6,))), stream((0, TOKENS))])
    assert total == Account(streams=2, finished=2, delivered=12)
    assert total.sound


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([(0, (1, 2)), (3, (4, 5, 6))], Account(1, 1, 5, lost=1)),
        ([(0, (1, 2, 3, 4))], Account(1, 1, 4, lost=2)),
        ([(0, (1, 2, 3)), (2, (3, 4, 5, 6))], Account(1, 1, 7, repeated=1)),
        ([(0, (1, 2, 3)), (0, (1, 2, 3)), (3, (4, 5, 6))], Account(1, 1, 9, repeated=3)),
        ([(0, (1, 2, 0)), (3, (4, 5, 6))], Account(1, 1, 6, changed=1)),
        ([(0, TOKENS), (6, (7,))], Account(1, 1, 7, changed=1)),
    ],
    ids=["lost", "lost at the end", "repeated", "a round repeated", "changed", "too many"],
)
def test_a_token_that_is_lost_repeated_or_changed_is_noticed(
    rounds: list[tuple[int, tuple[int, ...]]], expected: Account
) -> None:
    total = account([stream(*rounds)])
    assert total == expected
    assert not total.sound


def test_a_stream_without_an_end_is_not_sound_but_has_lost_nothing() -> None:
    total = account([stream((0, (1, 2)), finished=False)])
    assert total == Account(streams=1, finished=0, delivered=2)
    assert not total.sound


def test_what_comes_again_when_a_session_is_resumed_counts_once_unless_it_is_other() -> None:
    resumed = stream((0, (1, 2)), finished=False)
    resumed.continued(stream((0, (1, 2, 3)), (3, (4, 5, 6))))
    assert account([resumed]) == Account(streams=1, finished=1, delivered=6)
    changed = stream((0, (1, 2)), finished=False)
    changed.continued(stream((0, (1, 0, 3)), (3, (4, 5, 6))))
    assert account([changed]).changed == 1


@pytest.mark.slow
def test_a_short_run_kills_at_every_stage_and_changes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("services.bench.chaos.FROZEN_S", 5.0)
    file = tmp_path / "chaos.json"
    assert bench_chaos(None, None, "auto", seed=5, seconds=0.0, streams=6, max_tokens=120, json_file=file)
    record = json.loads(file.read_text())
    killed = {(row["process"], row["stage"]) for row in record["kills"] if row["kills"]}
    stages = {(kind, stage) for kind in SIDES for stage in STAGES[kind]}
    assert killed == stages | {(kind, "any moment") for kind in (*SIDES, "redis")}
    streams = record["streams"]
    assert streams["finished"] == streams["streams"] > 6
    assert (streams["lost"], streams["repeated"], streams["changed"]) == (0, 0, 0)
    assert record["recoveries"]["verify replica lost"] > 0
    assert record["recoveries"]["draft replica lost"] > 0
    assert record["recoveries"]["resumed by id from the journal"] >= 6
    assert record["pause_p50_s"] <= record["pause_p99_s"]
    assert "draft replica lost" in capsys.readouterr().out
