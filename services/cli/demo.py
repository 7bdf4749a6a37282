"""`weald demo`: one question answered with draft trees and without, and what the trees made of it."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from services.cli.generate import figure
from services.types.configuration import DraftConfig
from services.types.sampling import SamplingParams
from services.types.session import Session

if TYPE_CHECKING:
    # The command loads torch only when it runs.
    from services.local.generation import Result
    from services.local.models import Models

MODEL = "smollm2-135m"
QUESTION = "Why is the sky blue? Explain it in a few sentences."
MAX_TOKENS = 96
WARM_UP_TOKENS = 8
SEED = 7


def demo() -> None:
    """Answer a chat prompt with draft trees and without, and compare."""
    from services.local.models import load

    show(load(MODEL, None, speculative=True, device="auto", dtype="auto"), Console(highlight=False))


def show(models: "Models", console: Console) -> None:
    """Answer the question greedily and sampled, each with trees and without; end with a table."""
    with console.status("Warming up"):
        for trees in (True, False):
            _answer(models, 0, trees, WARM_UP_TOKENS)
    console.print(QUESTION, style="bold")
    table = Table(title=f"{MODEL} on {models.target.device.type}")
    table.add_column("mode", no_wrap=True)
    for name in ("tokens", "rounds", "τ", "tokens/s", "speedup", "identical"):
        table.add_column(name, justify="right")
    for temperature in (0, 1):
        console.print(f"\ntemperature {temperature}, with draft trees", style="dim")
        drafted = _answer(models, temperature, True, MAX_TOKENS, console)
        with console.status("The same without trees"):
            plain = _answer(models, temperature, False, MAX_TOKENS)
        speedup = _speed(drafted) / _speed(plain)
        identical = "yes" if drafted.token_ids == plain.token_ids else "no"
        table.add_row(f"temperature {temperature}, plain", *_figures(plain), "1.00", "")
        table.add_row(f"temperature {temperature}, trees", *_figures(drafted), f"{speedup:.2f}", identical)
    console.print()
    console.print(table)


def _answer(
    models: "Models", temperature: float, trees: bool, max_tokens: int, console: Console | None = None
) -> "Result":
    """One generation; its text goes to the console as it becomes final."""
    from services.local.generation import Generation

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    session = Session("0", tuple(models.chat(QUESTION)), params, SEED)
    generation = Generation(models.tokenizer, SEED)
    for step in models.decode(session, DraftConfig() if trees else None):
        fresh = generation.add(step)
        if console:
            console.out(fresh, end="", highlight=False)
    if console:
        console.print()
    return generation.result()


def _speed(result: "Result") -> float:
    """Tokens per second, prefill included."""
    return len(result.token_ids) / result.timings.total_s


def _figures(result: "Result") -> tuple[str, ...]:
    return str(len(result.token_ids)), str(result.rounds), figure(result.tau), f"{_speed(result):.1f}"
