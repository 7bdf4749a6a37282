"""Lines of the log: what they say, and what they are about."""

import json
import logging

import pytest

from services.telemetry.logs import LogFormat, LogLevel, about, log_to_stderr

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no handlers yet."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def test_for_machines_a_line_is_an_object_with_the_session_and_the_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_stderr(LogFormat.JSON, LogLevel.INFO)
    logging.getLogger("weald.here").info(
        "moved to %s", "a:1", extra=about("s-1", f"00-{TRACE}-{'b' * 16}-01")
    )
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time")
    assert line == {
        "level": "INFO",
        "logger": "weald.here",
        "message": "moved to a:1",
        "session": "s-1",
        "trace": TRACE,
    }


def test_for_people_a_line_ends_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogFormat.PRETTY, LogLevel.INFO)
    logging.warning("moved", extra=about("s-1"))
    logging.warning("moved again", extra=about("s-1", f"00-{TRACE}-{'b' * 16}-01"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING moved session=s-1")
    assert second.endswith(f"WARNING moved again session=s-1 trace={TRACE}")


def test_what_is_below_the_level_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogFormat.PRETTY, LogLevel.ERROR)
    logging.warning("so what")
    assert capsys.readouterr().err == ""
