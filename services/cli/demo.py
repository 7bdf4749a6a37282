"""What `weald demo` shows: a question answered over HTTP with draft trees and without, and what they gave."""

import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from services.cli.generate import figure
from services.types.errors import invalid

if TYPE_CHECKING:
    # The command loads its client only when it runs.
    from openai import OpenAI

MODEL = "smollm2-135m"
QUESTION = "Why is the sky blue? Explain it in a few sentences."
MAX_TOKENS = 96
WARM_UP_TOKENS = 8
SEED = 7


def compare(service: AbstractContextManager[str], model: str, console: Console) -> None:
    """Start a service, ask it over HTTP with draft trees and without, and stop it again.

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
        show(stack.enter_context(client), model, console)


def show(client: "OpenAI", model: str, console: Console) -> None:
    """Answer the question greedily and sampled, each with trees and without; end with a table."""
    ask = partial(_answer, client, model)
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
        drafted = ask(temperature, True, MAX_TOKENS, console)
        with console.status("The same without trees"):
            plain = ask(temperature, False, MAX_TOKENS)
        speedup = drafted.speed / plain.speed
        identical = "yes" if drafted.text == plain.text else "no"
        table.add_row(f"temperature {temperature}, plain", *plain.figures, "1.00", "")
        table.add_row(f"temperature {temperature}, trees", *drafted.figures, f"{speedup:.2f}", identical)
    console.print()
    console.print(table)


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
) -> _Answer:
    """One answer; its text goes to the console as it comes."""
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
