"""The pages in a real browser: an answer streams, its trees appear, a trace opens, nothing complains."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from services.bench.replicas import replica
from services.cli.trace import page as trace_page
from services.cli.trace import texts
from services.telemetry.file import read
from services.telemetry.requests import requests

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; on Debian: apt install chromium"),
]
KEY = "a-key"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, width: int = 1280) -> Iterator[Page]:
    """A page on which nothing goes wrong unseen."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert complaints == []


@pytest.fixture(scope="module")
def services(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a gateway that asks for a key, and the file of its traces."""
    file = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    traced = "--trace-file", file
    with (
        replica(*tiny.verify, *traced) as verifier,
        replica(*tiny.draft(verifier.address), *traced, "--trace-content") as drafter,
        replica(*tiny.gateway(drafter.address), *traced, "--api-key", KEY) as gateway,
    ):
        yield f"http://{gateway.address}", file


@pytest.mark.parametrize("width", [1280, 360], ids=["wide", "phone"])
def test_the_playground_streams_an_answer_and_draws_the_trees_of_its_rounds(
    browser: Browser, services: tuple[str, Path], width: int
) -> None:
    with opened(browser, width) as page:
        page.goto(f"{services[0]}/ui")
        page.get_by_label("Message").fill("abc")
        page.get_by_label("Tokens").fill("24")
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
        expect(page.get_by_role("alert")).to_be_empty()
        rounds = page.locator("#answer span")
        assert 3 < rounds.count() <= 24
        assert len({rounds.nth(i).evaluate("it => it.style.background") for i in range(3)}) == 3
        expect(page.locator("#title")).to_contain_text("Draft tree of round")
        assert page.locator("#tree circle").count() > 3
        expect(page.locator("#figures")).to_contain_text("τ")
        expect(page.locator("#replicas tr")).to_have_count(1)
        # By keyboard alone from round to round.
        page.locator("#answer").focus()
        before = page.locator("#title").text_content()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#title").text_content() != before
        # Nothing but what scrolls by itself is wider than the screen.
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_without_trees_the_playground_shows_plain_steps(browser: Browser, services: tuple[str, Path]) -> None:
    with opened(browser) as page:
        page.goto(f"{services[0]}/ui")
        page.get_by_label("Message").fill("abc")
        page.get_by_label("Tokens").fill("6")
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("Draft trees").uncheck()
        page.get_by_label("Message").press("Control+Enter")
        expect(page.locator("#title")).to_contain_text("a plain step", timeout=30_000)


def test_without_the_key_the_playground_says_so_and_shows_nothing(
    browser: Browser, services: tuple[str, Path]
) -> None:
    page = browser.new_page()
    page.goto(f"{services[0]}/ui")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("API key", timeout=30_000)
    assert page.locator("#replicas tr").count() == 0
    assert httpx.get(f"{services[0]}/replicas").status_code == 401
    page.close()


def test_the_page_of_a_trace_draws_its_rounds_and_trees(
    browser: Browser, services: tuple[str, Path], tmp_path: Path
) -> None:
    url, file = services
    body = {"model": "tiny", "prompt": [1, 5, 3], "max_tokens": 30, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert answer.status_code == 200
    request = None
    while request is None or len(request.processes) < 3:
        named = [one for one in requests(read(file)) if one.named(answer.json()["id"])]
        request = named[0] if named else None
    html = tmp_path / "trace.html"
    html.write_text(trace_page(request, texts(request)))
    with opened(browser) as page:
        page.goto(html.as_uri())
        expect(page.locator("#about")).to_contain_text("3 processes")
        assert page.get_by_role("option").count() == len(request.rounds)
        assert page.locator("#lanes rect").count() == len(request.told)
        assert page.locator("#tree circle").count() == len(request.rounds[1].tree or ())
        page.get_by_role("listbox").focus()
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("option").nth(2)).to_have_attribute("aria-selected", "true")
        expect(page.locator("#title")).to_contain_text("round 2")
        assert page.locator("#answer span").count() == len(request.rounds)
