import pytest

from services.bench.stopwatch import watched


class Work:
    """Something with a method to watch."""

    def run(self, fail: bool = False) -> str:
        """Say who ran, or fail."""
        if fail:
            raise ValueError("failed")
        return "ran"


def test_calls_are_counted_in_while_watched_and_the_method_is_restored() -> None:
    work, method = Work(), Work.run
    with watched(work, "run") as watch:
        assert work.run() == "ran"
        first = watch.seconds
        assert first > 0
        with pytest.raises(ValueError, match="failed"):
            work.run(fail=True)
        assert watch.seconds > first
        counted = watch.seconds
    work.run()
    assert watch.seconds == counted
    assert "run" not in vars(work)
    with watched(Work, "run") as watch:
        assert work.run() == "ran"
    assert watch.seconds > 0
    assert Work.run is method
