"""Steps measured before the first session: of every size that the pages hold, and nothing is left of them."""

from collections.abc import Callable
from typing import Any

import pytest

from services.speculation.cost import Cost
from services.verify import warmup
from services.verify.verifier import Verifier
from services.verify.warmup import warm_up

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("pages", "most", "sizes"),
    [
        (48, 2048, [1, 2, 4, 8, 16, 32, 64, 128]),
        (400, 100, [1, 2, 4, 8, 16, 32, 64]),
        (24, 2048, [1, 2, 4, 8, 16, 32, 64]),
        (23, 2048, []),
    ],
)
def test_steps_of_all_sizes_that_fit_are_measured(
    target: Make, monkeypatch: pytest.MonkeyPatch, pages: int, most: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(warmup, "WITHIN_S", 60.0)
    verifier, cost = Verifier(target("llama"), num_pages=pages, page_size=4), Cost()
    warm_up(verifier, cost, most)
    assert [rows for rows, _ in cost.curve()] == sizes
    assert all(seconds > 0 for _, seconds in cost.curve())
    assert verifier.pool.free_pages == verifier.pool.num_pages
    verifier.check()
    assert verifier.tokens_forwarded == verifier.tokens_prefilled == 0


def test_what_does_not_come_about_in_time_is_left_alone(
    target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "WITHIN_S", 1e-9)
    cost = Cost()
    warm_up(Verifier(target("llama"), num_pages=400, page_size=4), cost, 2048)
    assert not cost.known


def test_a_context_too_short_for_a_tree_is_not_measured(target: Make) -> None:
    cost = Cost()
    warm_up(Verifier(target("llama"), num_pages=400, page_size=4, max_model_len=31), cost, 2048)
    assert not cost.known
