"""`weald generate`: one text from a model, in this process or by a draft service."""

import json
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from services.cli.options import Authority, Certificate, Device, Dtype, Key, Model, mutual_tls
from services.cli.show_tree import draw_round
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import invalid
from services.types.messages import Call
from services.types.sampling import SEED_BITS, SamplingParams
from services.types.session import Session

if TYPE_CHECKING:
    from services.gateway.tokenizer import Tokenizer

_DRAFT = DraftConfig()


def _sampling(help: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling", **options)


def _speculation(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Speculation", **options)


def _output(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Output")


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The text; absent or -: from standard input.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A draft replica that generates; absent: this process does."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a draft replica may take.")
    ] = 600.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_tokens: Annotated[int, _sampling("Output tokens at most.")] = 128,
    min_tokens: Annotated[int, _sampling("No end or stop token before so many tokens.")] = 0,
    temperature: Annotated[float, _sampling("0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int, _sampling("Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, _sampling("Keep the most likely tokens whose mass reaches p.")] = 1.0,
    min_p: Annotated[float, _sampling("Keep tokens this likely relative to the most likely one.")] = 0.0,
    seed: Annotated[int | None, _sampling("Same seed, same text; one is drawn and told if absent.")] = None,
    frequency_penalty: Annotated[float, _sampling("Per occurrence in the output.")] = 0.0,
    presence_penalty: Annotated[float, _sampling("For any occurrence in the output.")] = 0.0,
    repetition_penalty: Annotated[float, _sampling("Factor for tokens of prompt and output.")] = 1.0,
    logit_bias: Annotated[
        list[str] | None,
        _sampling("Added to a token id's logit; -inf bans. Repeatable.", metavar="TOKEN=BIAS"),
    ] = None,
    stop: Annotated[
        list[str] | None, _sampling("End right before this text. Repeatable.", metavar="TEXT")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, _sampling("End at this token. Repeatable.", metavar="TOKEN")
    ] = None,
    ignore_eos: Annotated[bool, _sampling("Go on after the end of sequence.", "--ignore-eos")] = False,
    speculative: Annotated[
        Literal["on", "off"], _speculation("off: plain steps, the same text.", metavar="on|off")
    ] = "on",
    speculative_model: Annotated[
        str | None, _speculation("The draft head, a directory or hub name; smollm2-135m brings its own.")
    ] = None,
    tree: Annotated[
        TreeShape, _speculation("Shape of the trees: dynamic, static or chain.", metavar="SHAPE")
    ] = _DRAFT.shape,
    speculative_num_draft_tokens: Annotated[
        int, _speculation("Nodes of a dynamic tree, root included.")
    ] = _DRAFT.budget,
    speculative_eagle_topk: Annotated[
        int, _speculation("Nodes that a dynamic tree expands per level, and children of each.")
    ] = _DRAFT.beam,
    speculative_num_steps: Annotated[
        int, _speculation("Levels of a dynamic tree or a chain.")
    ] = _DRAFT.levels,
    as_json: Annotated[bool, _output("Print one JSON object and nothing else.", "--json")] = False,
    show_tree: Annotated[bool, _output("Draw each round's draft tree.", "--show-tree")] = False,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
) -> None:
    """Answer a prompt, streaming the text while draft trees grow it."""
    if as_json and show_tree:
        raise typer.BadParameter("use one of --json and --show-tree")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(logit_bias or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    draft = DraftConfig(tree, speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens)
    text = _standard_input() if prompt is None or prompt == "-" else prompt

    tls = mutual_tls(tls_certificate, tls_key, tls_authority)

    from services.local.generation import Generation

    speculating = speculative == "on"
    if endpoint:
        from services.cli.endpoint import generated, tokenizer_of

        tokenizer = tokenizer_of(model)
        prompt_ids = _prompt(tokenizer, text, chat)
        call = Call(uuid.uuid4().hex, prompt_ids, (), params, speculating, draft, want_trees=True)
        used, steps = generated(endpoint, call, tls, timeout)
    else:
        from services.local.models import load

        models = load(model, speculative_model, speculative=speculating, device=device, dtype=dtype)
        tokenizer, used = models.tokenizer, secrets.randbits(SEED_BITS) if seed is None else seed
        steps = models.decode(Session("0", _prompt(tokenizer, text, chat), params, used), draft)
    generation = Generation(tokenizer, used, stop or ())
    console = Console(highlight=False)
    for step in steps:
        fresh = generation.add(step)
        if show_tree and step.tree:
            title = f"round {generation.rounds}, τ {figure(generation.tau)}"
            console.print(draw_round(step.tree, step.outcome, title, tokenizer.text_of))
        elif not (show_tree or as_json):
            typer.echo(fresh, nl=False)
        if generation.finish:
            break
    result = generation.result()
    if as_json:
        typer.echo(json.dumps(asdict(result), ensure_ascii=False))
        return
    typer.echo(result.text if show_tree else "")
    count, speed = len(result.token_ids), len(result.token_ids) / result.timings.total_s
    figures = f"{count} tokens, {result.rounds} rounds, τ {figure(result.tau)}, {speed:.1f} tokens/s"
    typer.secho(f"{figures}, seed {result.seed}", err=True, dim=True)


def figure(tau: float | None) -> str:
    """τ as it is shown; a dash when no round had a tree."""
    return "–" if tau is None else f"{tau:.2f}"


def _prompt(tokenizer: "Tokenizer", text: str, chat: bool) -> tuple[int, ...]:
    return tuple(tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text))


def _logit_bias(entries: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, _, bias in (entry.partition("=") for entry in entries)}
    except ValueError as error:
        raise typer.BadParameter(
            "write a token id and a number, like 42=-1.5", param_hint="'--logit-bias'"
        ) from error


def _standard_input() -> str:
    """All of standard input but the newline that ends its last line."""
    try:
        return typer.get_binary_stream("stdin").read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise invalid("standard input is not UTF-8; give the prompt as UTF-8 text") from error
