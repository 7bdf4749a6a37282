"""`weald generate`: one text from a model, in this process or by draft replicas."""

import json
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from services.cli.options import (
    Authority,
    Certificate,
    Device,
    Dtype,
    Key,
    Model,
    mutual_tls,
    shared,
    size,
)
from services.cli.show_tree import draw_round
from services.types.configuration import DraftConfig, Priority, TreeShape, sized
from services.types.errors import invalid
from services.types.messages import Call, Moved
from services.types.sampling import SEED_BITS, SamplingParams
from services.types.session import Cursor, Session

if TYPE_CHECKING:
    from services.gateway.tokenizer import Tokenizer

_DRAFT = DraftConfig()
_SAMPLING = "Sampling"


def _sampling(help: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_SAMPLING, **options)


def _service(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Service", **options)


def _speculation(help: str, **options: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Speculation", **options)


def _output(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Output")


def generate(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The text; absent or -: from standard input.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    endpoint: Annotated[
        list[str] | None,
        _service("A draft replica to generate; repeatable. Absent: this process does.", metavar="HOST:PORT"),
    ] = None,
    store: Annotated[
        str | None,
        _service("Where draft replicas register: redis://…, or what weald store tells.", metavar="URL"),
    ] = None,
    resume: Annotated[
        str | None,
        _service("Go on with this session of the journal, behind what was delivered.", metavar="CURSOR"),
    ] = None,
    timeout: Annotated[float, _service("How long draft replicas may take.", metavar="SECONDS")] = 600.0,
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
    speculative_budget: Annotated[
        str, _speculation("Nodes of a dynamic tree, root included; auto: what pays.", metavar="auto|N")
    ] = "auto",
    speculative_eagle_topk: Annotated[
        int, _speculation("Nodes that a dynamic tree expands per level at most, and children of each.")
    ] = _DRAFT.beam,
    speculative_num_steps: Annotated[
        str, _speculation("Levels of a dynamic tree or a chain; auto: what pays.", metavar="auto|N")
    ] = "auto",
    speculative_coupling: Annotated[
        Literal["on", "off"],
        _speculation("on: rank candidates by the noise of the draws.", metavar="on|off"),
    ] = "on",
    priority: Annotated[
        Priority, _speculation("What counts where sessions compete for the target.", metavar="PRIORITY")
    ] = Priority.NORMAL,
    as_json: Annotated[bool, _output("Print one JSON object and nothing else.", "--json")] = False,
    show_tree: Annotated[bool, _output("Draw each round's draft tree.", "--show-tree")] = False,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
) -> None:
    """Answer a prompt, streaming the text while draft trees grow it."""
    if as_json and show_tree:
        raise typer.BadParameter("use one of --json and --show-tree")
    cursor = _cursor(context, resume) if resume else None
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
    levels, budget = size(speculative_num_steps), size(speculative_budget)
    draft = sized(tree, levels, speculative_eagle_topk, budget, speculative_coupling == "on")
    if prompt is None or prompt == "-":
        prompt = "" if cursor else _standard_input()

    tls = mutual_tls(tls_certificate, tls_key, tls_authority)
    store = shared(store) if store else None

    from services.local.generation import Generation

    speculating, session = speculative == "on", None
    if endpoint or store:
        from services.cli.endpoint import generated, tokenizer_of
        from services.gateway.drafters import found

        tokenizer = tokenizer_of(model)
        prompt_ids = () if cursor else _prompt(tokenizer, prompt, chat)
        session = cursor.session if cursor else uuid.uuid4().hex
        call = Call(session, prompt_ids, (), params, speculating, draft, want_trees=True, priority=priority)
        used, steps = generated(found(endpoint or (), store, model, tls), call, timeout, cursor)
    else:
        from services.local.models import load

        models = load(model, speculative_model, speculative=speculating, device=device, dtype=dtype)
        tokenizer, used = models.tokenizer, secrets.randbits(SEED_BITS) if seed is None else seed
        steps = models.decode(Session("0", _prompt(tokenizer, prompt, chat), params, used), draft)
    known = cursor.delivered if cursor else 0
    generation = Generation(tokenizer, used, stop or (), session, known)
    console = Console(highlight=False)
    for step in steps:
        if isinstance(step, Moved):
            generation.moved(step)
            continue
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
    served = f", session {result.session}" if result.session else ""
    typer.secho(f"{figures}, seed {result.seed}{served}", err=True, dim=True)


def figure(tau: float | None) -> str:
    """τ as it is shown; a dash when no round had a tree."""
    return "–" if tau is None else f"{tau:.2f}"


def _prompt(tokenizer: "Tokenizer", text: str, chat: bool) -> tuple[int, ...]:
    tokens = tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    if not tokens:
        raise invalid("the prompt is empty; give some text")
    return tuple(tokens)


def _cursor(context: typer.Context, text: str) -> Cursor:
    """Where a session goes on. What the journal has of it cannot be said again."""
    for option in context.command.params:
        fixed = option.name in {"prompt", "chat"} or getattr(option, "rich_help_panel", None) == _SAMPLING
        source = context.get_parameter_source(str(option.name))
        if fixed and option.name != "stop" and source and source.name != "DEFAULT":
            raise typer.BadParameter(f"leave {option.opts[0]} out with --resume: the session has its own")
    if not (context.params["endpoint"] or context.params["store"]):
        raise typer.BadParameter("--resume needs draft replicas; name them with --endpoint or --store")
    return Cursor.parse(text)


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
