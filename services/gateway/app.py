"""The HTTP API: OpenAI's paths, and those of probes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse

import weald
from services.gateway.answers import answer
from services.gateway.choices import Piece, usage_of
from services.gateway.drafters import Drafters, found
from services.gateway.errors import HttpError, answered, install
from services.gateway.limits import Limits, Places, authorised, bounded, identified
from services.gateway.metrics import Metrics
from services.gateway.prompts import Longest
from services.gateway.readiness import Readiness
from services.gateway.requests import Job, conversation, job_of, kind_of, new_id
from services.gateway.resumption import Delivery, EventId, Point
from services.gateway.schemas import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    ErrorAnswer,
    ModelList,
    ReplicaList,
    ReplicaObject,
    ScrapeTargets,
    ServedModel,
    StreamOptions,
    Tokenized,
    TokenizeRequest,
)
from services.gateway.shapes import Shape, joined, shape_of
from services.gateway.streaming import EventStream, Stream, kept_alive
from services.gateway.tokenizer import Tokenizer
from services.gateway.tracing import Tracer
from services.sessions.opening import opened
from services.sessions.registry import everyone
from services.telemetry.export import exporting
from services.telemetry.pages import filled
from services.telemetry.spans import Trace
from services.types.configuration import Tracing
from services.types.errors import ErrorCode, WealdError, invalid
from services.wire.transport import Tls


@dataclass(frozen=True, slots=True)
class Settings:
    """What a gateway serves, and to whom."""

    model: str
    """The name that clients call it by."""
    target: str
    """The name that draft replicas register with."""
    directory: Path
    """Of the target's tokenizer and chat template."""
    endpoints: tuple[str, ...] = ()
    """host:port of draft replicas."""
    store: str | None = None
    """URL of the store that lists further ones."""
    tls: Tls | None = None
    """Of the connections to them."""
    api_keys: tuple[str, ...] = ()
    """One of them is needed; none: everybody is served."""
    origins: tuple[str, ...] = ()
    """Of web pages that may call; `*` for all."""
    limits: Limits = field(default_factory=Limits)
    tracing: Tracing = field(default_factory=Tracing)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes of a running gateway share."""

    settings: Settings
    tokenizer: Tokenizer
    longest: Longest
    drafters: Drafters
    metrics: Metrics
    tracer: Tracer
    readiness: Readiness
    started: int
    """Unix time, seconds."""
    ending: asyncio.Future[None]
    """Done when answers have to end."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: Settings) -> AsyncIterator[Self]:
        """Read the tokenizer, and look for the draft replicas as long as the context lasts.

        Raises:
            WealdError: `INCOMPATIBLE_CHECKPOINT` when there is no tokenizer; `INVALID_ARGUMENT` when the URL
                of the store is none.
        """
        tokenizer = Tokenizer.load(settings.directory)
        longest = Longest.of(settings.directory, tokenizer)
        with exporting(settings.tracing, "weald-gateway") as sink:
            async with found(settings.endpoints, settings.store, settings.target, settings.tls) as drafters:
                yield cls(
                    settings,
                    tokenizer,
                    longest,
                    drafters,
                    Metrics(),
                    Tracer(sink, settings.tracing, settings.model),
                    Readiness(drafters),
                    int(time.time()),
                    asyncio.get_running_loop().create_future(),
                )

    def check(self, model: str | None) -> None:
        """Raises `HttpError` when a request names another model."""
        if model not in (None, self.settings.model):
            raise HttpError(
                HTTPStatus.NOT_FOUND,
                f"there is no model `{model}` here; /v1/models lists what there is",
                param="model",
                code="model_not_found",
            )

    async def pieces(self, job: Job) -> AsyncGenerator[tuple[int, Piece]]:
        """All that becomes final of a job, as `answer` gives it."""
        async with aclosing(answer(job, self.drafters, self.settings.limits.within_s)) as pieces:
            try:
                async for piece in pieces:
                    yield piece
            except WealdError as error:
                # `calls.generate` has added how the command line goes on.
                raise error.__cause__ if isinstance(error.__cause__, WealdError) else error from None


async def _of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Serving = Annotated[Gateway, Depends(_of)]
LastEventId = Annotated[
    str | None, Header(description="The last `id` of a stream that was lost, to get the rest of it.")
]
TraceParent = Annotated[str, Header(description="W3C trace context.")]
_FAILS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
# Without a schema: tools disagree on whether it would be of the whole stream or of each event.
_STREAM: dict[str, dict[str, Any]] = {"text/event-stream": {}}
_PAGE = Path(__file__).with_name("ui.html")
_ALONE = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
}
"""The page loads nothing and talks to nobody but this gateway."""
router = APIRouter(responses=_FAILS)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": ChatCompletion, "content": _STREAM, "description": "As a whole or streamed."}},
)
async def chat(
    body: ChatRequest, gateway: Serving, last_event_id: LastEventId = None, traceparent: TraceParent = ""
) -> Response:
    """The assistant's next message in a conversation."""
    return await _generated(gateway, body, last_event_id, traceparent)


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": Completion, "content": _STREAM, "description": "As a whole or streamed."}},
)
async def complete(
    body: CompletionRequest,
    gateway: Serving,
    last_event_id: LastEventId = None,
    traceparent: TraceParent = "",
) -> Response:
    """Text that goes on behind a prompt."""
    return await _generated(gateway, body, last_event_id, traceparent)


async def _generated(
    gateway: Gateway, body: ChatRequest | CompletionRequest, last_event_id: str | None, traceparent: str
) -> Response:
    began, began_ns = time.perf_counter(), time.time_ns()
    gateway.check(body.model)
    lost = EventId.parse(last_event_id) if last_event_id else None
    trace, parent = gateway.tracer.begin(traceparent)
    carried = str(trace or Trace.parse(traceparent) or "")
    gateway.longest.check(body)
    id = lost.request if lost else new_id(body)
    job = await asyncio.to_thread(job_of, body, gateway.tokenizer, id, carried)
    at = lost or EventId(id, (Point(),) * len(job.calls))
    if len(at.points) != len(job.calls) or not id.startswith(f"{kind_of(body)}-"):
        raise invalid("`Last-Event-ID` is of another request; send the very request whose stream was lost")
    told = gateway.pieces(job)
    if trace:
        told = gateway.tracer.watched(job, trace, parent, told, began_ns)
    pieces = kept_alive(gateway.metrics.watched(job, told, began), gateway.ending)
    shape = shape_of(body, id, int(time.time()))
    if body.stream:
        stream = Stream(job, shape, at, body.stream_options or StreamOptions())
        return await EventStream.begin(stream.events(pieces))
    return Response(await _whole(job, shape, at, pieces), media_type="application/json")


async def _whole(
    job: Job, shape: Shape, at: EventId, pieces: AsyncGenerator[tuple[int, Piece] | None]
) -> str:
    """The answer that is not streamed: all of it, also where some of it was streamed before."""
    deliveries = [Delivery(point) for point in at.points]
    gathered: list[list[Piece]] = [[] for _ in job.calls]
    async with aclosing(pieces):
        async for item in pieces:
            if item:
                index, piece = item
                deliveries[index].take(piece)
                gathered[index].append(piece)
    texts = [joined(pieces) for pieces in gathered]
    usage = usage_of(job, [text.figures for text in texts])
    return shape.whole(texts, usage).model_dump_json(exclude_unset=True)


@router.get("/v1/models")
async def models(gateway: Serving) -> ModelList:
    """The models that are served."""
    return ModelList(object="list", data=[_served(gateway)])


@router.get("/v1/models/{model:path}")
async def model(model: str, gateway: Serving) -> ServedModel:
    """A model that is served."""
    gateway.check(model)
    return _served(gateway)


def _served(gateway: Gateway) -> ServedModel:
    return ServedModel(id=gateway.settings.model, object="model", created=gateway.started, owned_by="weald")


@router.post("/tokenize", response_model_exclude_unset=True)
async def tokenize(body: TokenizeRequest, gateway: Serving) -> Tokenized:
    """The tokens of a text or a conversation."""
    gateway.check(body.model)
    gateway.longest.check(body)
    return await asyncio.to_thread(_tokenized, body, gateway.tokenizer)


def _tokenized(body: TokenizeRequest, tokenizer: Tokenizer) -> Tokenized:
    if body.messages is not None:
        tokens = tokenizer.chat(conversation(body.messages))
    else:
        tokens = tokenizer.encode(body.prompt or "", special=body.add_special_tokens is not False)
    told = {"token_strs": [tokenizer.text_of(token) for token in tokens]} if body.return_token_strs else {}
    return Tokenized(count=len(tokens), tokens=tokens, **told)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, gateway: Serving) -> Detokenized:
    """The text of tokens, special ones included."""
    gateway.check(body.model)
    return Detokenized(prompt=gateway.tokenizer.decode(body.tokens, skip_special=False))


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether this process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(gateway: Serving) -> dict[str, str]:
    """Whether a draft replica and a verify replica behind it can serve."""
    if not await gateway.readiness.now():
        raise WealdError(
            ErrorCode.UNAVAILABLE,
            "no draft replica with a verify replica behind it can be reached; start them, or wait a moment",
        )
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of Weald."""
    return {"version": weald.__version__}


@router.get("/replicas")
async def replicas(gateway: Serving) -> ReplicaList:
    """The draft replicas that answer this gateway's requests, and the verify replicas behind them."""
    addresses = sorted(gateway.drafters.live())
    told = await asyncio.gather(*(gateway.readiness.ask(address) for address in addresses))
    return ReplicaList(
        object="list",
        data=[
            ReplicaObject(
                address=address,
                running=status.running if status else None,
                verifiers=dict(status.verifiers) if status else {},
            )
            for address, status in zip(addresses, told, strict=True)
        ],
    )


@router.get("/metrics/targets")
async def targets(gateway: Serving) -> list[ScrapeTargets]:
    """Where Prometheus finds the replicas that the store lists, in the form of its HTTP service discovery."""
    if gateway.settings.store is None:
        return []
    async with opened(gateway.settings.store) as store:
        listed = await everyone(store)
    return [
        ScrapeTargets(targets=[one.metrics], labels={"service": f"weald-{one.kind}", "node": one.node})
        for one in listed
        if one.metrics
    ]


@router.get("/ui", response_class=HTMLResponse)
async def playground(gateway: Serving) -> Response:
    """A page to try the model and to see its rounds."""
    # As it stands within a string of the page's script.
    name = json.dumps(gateway.settings.model)[1:-1].replace("<", "\\u003c")
    guarded = "yes" if gateway.settings.api_keys else "no"
    return HTMLResponse(filled(_PAGE, model=name, guarded=guarded), headers=_ALONE)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(gateway: Serving) -> Response:
    """What Prometheus scrapes."""
    return Response(gateway.metrics.exposition(), media_type=Metrics.media_type)


def create_app(gateway: Gateway) -> FastAPI:
    """The application of one worker."""
    settings, limits = gateway.settings, gateway.settings.limits
    places = Places(limits, gateway.metrics.observe_load)
    middleware = [
        *_cors(settings.origins),
        Middleware(identified),
        Middleware(answered),
        *([Middleware(authorised, keys=settings.api_keys)] if settings.api_keys else []),
        Middleware(bounded, limits=limits, places=places),
    ]
    app = FastAPI(
        title="Weald",
        version=weald.__version__,
        middleware=middleware,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    install(app)
    app.include_router(router)
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    ]
