"""What `weald demo` shows: a question answered over HTTP with draft trees and without, and what they gave."""

import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from services.cli.generate import figure
from services.cli.trace import page, summary, texts
from services.telemetry.file import read
from services.telemetry.requests import requests
from services.telemetry.spans import Trace
from services.types.errors import invalid

if TYPE_CHECKING:
    # The command loads its client only when it runs.
    from openai import OpenAI

MODEL = "smollm2-135m"
QUESTION = "Why is the sky blue? Explain it in a few sentences."
MAX_TOKENS = 96
WARM_UP_TOKENS = 8
SEED = 7


def compare(service: AbstractContextManager[str], model: str, console: Console) -> Trace:
    """Start a service, ask it over HTTP with draft trees and without, and stop it again.

    Returns:
        The trace of the greedy answer with trees.

    Args:
        service: started by entering it, which gives the gateway's base URL; stopped at the end.
        model: by the name clients call it.
        console: where answers and table go.

    Raises:
        WealdError: `INVALID_ARGUMENT` without the Python package openai; what `service` raises.
    """
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError as error:
        raise invalid(
            "the demo asks the gateway through the Python package openai; run: pip install openai"
        ) from error
    with ExitStack() as stack:
        with console.status(f"Starting verify, draft and gateway with {model}"):
            url = stack.enter_context(service)
        # A proxy of the environment is for what lies outside.
        http = DefaultHttpxClient(trust_env=False)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        return show(stack.enter_context(client), model, console)


def traced(trace: Trace, file: Path, console: Console) -> None:
    """Draw a request's trace on a page beside the file that holds it, and say where both are."""
    request = next(one for one in requests(read(file)) if one.id == trace.id)
    html = file.with_suffix(".html")
    html.write_text(page(request, texts(request)))
    console.print(summary(request))
    console.print(
        f"its trace: {file}; as a page: {html}; in the terminal: weald trace show {trace.id} --file {file}"
    )


def show(client: "OpenAI", model: str, console: Console) -> Trace:
    """Answer the question greedily and sampled, each with trees and without; end with a table."""
    ask, trace = partial(_answer, client, model), Trace.begin(1.0)
    with console.status("Warming up"):
        for trees in (True, False):
            ask(0, trees, WARM_UP_TOKENS)
    console.print(QUESTION, style="bold")
    table = Table(title=f"{model} over HTTP")
    table.add_column("mode", no_wrap=True)
    for name in ("tokens", "rounds", "τ", "tokens/s", "speedup", "same"):
        table.add_column(name, justify="right")
    for temperature in (0, 1):
        console.print(f"\ntemperature {temperature}, with draft trees", style="dim")
        of = None if temperature else trace
        drafted = ask(temperature, True, MAX_TOKENS, console, of)
        with console.status("The same without trees"):
            plain = ask(temperature, False, MAX_TOKENS)
        speedup = drafted.speed / plain.speed
        identical = "yes" if drafted.text == plain.text else "no"
        table.add_row(f"temperature {temperature}, plain", *plain.figures, "1.00", "")
        table.add_row(f"temperature {temperature}, trees", *drafted.figures, f"{speedup:.2f}", identical)
    console.print()
    console.print(table)
    return trace


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    tokens: int
    rounds: int
    tau: float | None
    seconds: float
    """From the request to the end of the stream."""

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def figures(self) -> tuple[str, ...]:
        """Cells of the table."""
        return str(self.tokens), str(self.rounds), figure(self.tau), f"{self.speed:.1f}"


def _answer(
    client: "OpenAI",
    model: str,
    temperature: float,
    trees: bool,
    max_tokens: int,
    console: Console | None = None,
    trace: Trace | None = None,
) -> _Answer:
    """One answer; its text goes to the console as it comes. With a trace its spans stand below that."""
    began = time.perf_counter()
    text, tokens = "", 0
    weald: dict[str, Any] = {}
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=max_tokens,
        temperature=temperature,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculative": trees, "weald": True},
        extra_headers={"traceparent": str(trace)} if trace else {},
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                fresh = choice.delta.content or ""
                text += fresh
                if console:
                    console.out(fresh, end="", highlight=False)
                weald = (choice.model_extra or {}).get("weald", weald)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
    if console:
        console.print()
    return _Answer(text, tokens, weald["rounds"], weald["tau"], time.perf_counter() - began)
