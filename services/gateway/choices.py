"""One choice of an answer: from the events of its session to pieces of text that can never change."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from services.gateway.detokenizer import Detokenizer
from services.gateway.requests import Job
from services.gateway.schemas import (
    CachedTokens,
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    NodeObject,
    PredictedTokens,
    RoundObject,
    TopLogprob,
    Usage,
    WealdObject,
)
from services.gateway.stops import StopMatcher
from services.types.messages import Event, Finished, Moved, Round, Started
from services.types.outcome import TokenLogprobs
from services.types.replica import ReplicaKind
from services.types.session import FinishReason

UNLIKELY = -9999.0
"""The least logprob that is told, as OpenAI does: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have stood somewhere."""

    token: int
    text: str
    """As it is shown: one that is no text by itself looks like `bytes:\\xf0\\x9f`."""
    bytes: bytes | None
    """What it adds to a text; None for a special token, which adds nothing."""
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the text."""

    id: int
    text: str
    bytes: bytes | None
    """Both as of an `Alternative`."""
    logprob: float | None
    """Of the raw logits; None where a lost replica took it along."""
    top: tuple[Alternative, ...]
    """The most likely ones, as many as were asked for."""
    offset: int
    """Characters of the choice's text before it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a session did so far."""

    prompt_tokens: int
    seed: int = 0
    """In use."""
    completion_tokens: int = 0
    """Up to the token the text ends with: an end token, or the one that completes a stop string."""
    cached_tokens: int = 0
    """Prompt tokens that needed no computation."""
    rounds: int = 0
    """Target steps after the prefill."""
    tree_rounds: int = 0
    """Of these, those that verified more than a root."""
    tree_tokens: int = 0
    """Completion tokens that these committed."""
    verified: int = 0
    """Draft nodes that stood in a target step, roots not counted."""
    accepted_per_position: tuple[int, ...] = ()
    """Draft tokens that became completion tokens, by their depth in the tree, from 1 on."""
    verifier: str = ""
    """host:port of the verify replica that serves it."""
    moves: tuple[Moved, ...] = ()
    """To other replicas, at which it went on."""

    @property
    def accepted(self) -> int:
        """Draft tokens that became completion tokens."""
        return sum(self.accepted_per_position)

    @property
    def tau(self) -> float | None:
        """Tokens committed per round that verified more than its root; None without one."""
        return self.tree_tokens / self.tree_rounds if self.tree_rounds else None


@dataclass(frozen=True, slots=True)
class Piece:
    """What became final of a choice."""

    text: str
    tokens: tuple[Token, ...]
    """Those whose text begins in this piece; none unless the request asks for logprobs."""
    finish: FinishReason | None
    """Set in the last piece."""
    figures: Figures
    """So far."""
    round: RoundObject | None = None
    """That brought it, where the request asks for rounds."""


class Choice:
    """The text of one session's output, and the tokens it is made of.

    Tokens are taken one by one, so that nothing depends on how rounds group them. A token is told when the
    first character of its text is final; one without text, like a special token, with the token behind it.
    End tokens, and tokens whose text is cut off by a stop string, are not part of the text, so they are not
    told; they count as completion tokens up to the one that ends the text.
    """

    def __init__(self, job: Job, index: int) -> None:
        """Begin before the first event of the job's call `index`."""
        call = job.calls[index]
        self._tokenizer = job.tokenizer
        self._min_tokens = call.params.min_tokens
        self._top = call.params.logprobs
        self._rounds = call.want_trees
        self._detokenizer = Detokenizer(job.tokenizer, call.prompt if job.continues else ())
        self._stops = StopMatcher(job.stops, job.include_stop)
        self._unread: list[tuple[int, TokenLogprobs | None]] = []
        """Tokens to tell whose text the detokeniser holds back."""
        self._placed: deque[tuple[int, TokenLogprobs | None, int]] = deque()
        """Tokens to tell whose text begins behind so many characters, but is not out."""
        self._read = 0
        """Characters that the detokeniser has brought."""
        self._out = 0
        """Of these, those that are out."""
        self._completed = 0
        """Completion tokens."""
        self._figures = Figures(len(call.prompt))
        self.finish: FinishReason | None = None
        """Set with the last piece: by the session's end, or by a stop string before it."""

    def take(self, event: Event) -> Piece | None:
        """Take the session's next event; return what became final by it, if anything did.

        The last piece has the reason of the finish; no piece follows it, whatever the session goes on with.
        """
        if self.finish:
            return None
        match event:
            case Started(seed=seed, cached_tokens=cached, verifier=verifier):
                self._figures = replace(self._figures, seed=seed, cached_tokens=cached, verifier=verifier)
            case Moved(kind=kind, address=address):
                verifier = address if kind is ReplicaKind.VERIFY else self._figures.verifier
                moves = (*self._figures.moves, event)
                self._figures = replace(self._figures, verifier=verifier, moves=moves)
            case Round():
                told = round_object(event, self._tokenizer.text_of) if self._rounds else None
                return self._piece(self._take_round(event), told)
            case Finished(finish_reason=reason):
                # The session ended without a token left to bring.
                return self._piece(self._end(reason))
        return None

    def _take_round(self, round: Round) -> str:
        """The text that goes out by a round."""
        before, text = self._completed, ""
        logprobs = round.logprobs or (None,) * len(round.tokens)
        for token, told in zip(round.tokens, logprobs, strict=True):
            self._completed += 1
            if round.finish is FinishReason.STOP and self._completed == before + len(round.tokens):
                break
            if self._top is not None:
                self._unread.append((token, told))
            text += self._take_text(*self._detokenizer.read(token))
            if self.finish:
                break
        self._count(round, self._completed - before)
        return text + self._end(round.finish) if round.finish and not self.finish else text

    def _take_text(self, earlier: str, own: str) -> str:
        """What goes out when the latest token brings text of those before it, and of its own."""
        if earlier:
            latest = self._unread[-1:]
            self._place(self._unread[:-1], earlier)
            self._unread = latest
        if own:
            self._place(self._unread, own)
            self._unread = []
        return self._match(earlier + own)

    def _end(self, finish: FinishReason) -> str:
        """What goes out when the session ends."""
        held = self._detokenizer.flush()
        self._place(self._unread, held)
        text = self._match(held)
        if not self.finish:
            self.finish = finish
            text += self._stops.flush()
        return text

    def _place(self, tokens: Sequence[tuple[int, TokenLogprobs | None]], text: str) -> None:
        """The text of these tokens comes next."""
        self._placed.extend((*token, self._read) for token in tokens)
        self._read += len(text)

    def _match(self, text: str) -> str:
        """What goes out of the text that comes next, and of what was held back."""
        text, found = self._stops.push(text, armed=self._completed > self._min_tokens)
        if found:
            self.finish = FinishReason.STOP
        return text

    def _piece(self, text: str, round: RoundObject | None = None) -> Piece | None:
        self._out += len(text)
        # Without a cut, what has no text at the very end is told, too.
        whole = self.finish and self._out == self._read
        tokens = []
        while self._placed and (whole or self._placed[0][2] < self._out):
            tokens.append(self._told(*self._placed.popleft()))
        if not (text or tokens or self.finish or round):
            return None
        figures = replace(self._figures, completion_tokens=self._completed)
        return Piece(text, tuple(tokens), self.finish, figures, round)

    def _told(self, token: int, told: TokenLogprobs | None, offset: int) -> Token:
        logprob = max(told.logprob, UNLIKELY) if told else None
        top = [
            Alternative(one, *self._shown(one), max(logprob, UNLIKELY))
            for one, logprob in (told.top[: self._top] if told else ())
        ]
        return Token(token, *self._shown(token), logprob, tuple(top), offset)

    def _shown(self, token: int) -> tuple[str, bytes | None]:
        """A token as text and as bytes."""
        data = self._tokenizer.bytes_of(token)
        if data is None:
            return self._tokenizer.text_of(token), None
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def _count(self, round: Round, tokens: int) -> None:
        """Add a round that brought so many completion tokens. Those of prefill and journal are none."""
        figures = self._figures
        if not round.verified or round.position == figures.prompt_tokens:
            return
        figures = replace(figures, rounds=figures.rounds + 1, verified=figures.verified + round.verified - 1)
        if round.verified > 1:
            depth = min(len(round.accepted), tokens)
            counts = zip_longest(figures.accepted_per_position, (1,) * depth, fillvalue=0)
            figures = replace(
                figures,
                tree_rounds=figures.tree_rounds + 1,
                tree_tokens=figures.tree_tokens + tokens,
                accepted_per_position=tuple(map(sum, counts)),
            )
        self._figures = figures


def usage_of(job: Job, figures: Sequence[Figures]) -> Usage:
    """The usage of a request, or of that much of it.

    Args:
        job: the request.
        figures: of all its choices, by index.
    """
    prompt = sum(one.prompt_tokens for one in figures[:: job.n])
    completion = sum(one.completion_tokens for one in figures)
    accepted = sum(one.accepted for one in figures)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(one.cached_tokens for one in figures[:: job.n])),
        completion_tokens_details=PredictedTokens(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(one.verified for one in figures) - accepted,
        ),
    )


def weald_object(figures: Figures) -> WealdObject:
    """What a choice tells of its rounds."""
    return WealdObject(
        seed=figures.seed,
        rounds=figures.rounds,
        tau=figures.tau,
        draft_rounds=figures.tree_rounds,
        draft_tokens=figures.verified,
        accepted_per_position=list(figures.accepted_per_position),
        verifier=figures.verifier,
        moves=len(figures.moves),
    )


def round_object(round: Round, text_of: Callable[[int], str]) -> RoundObject:
    """What a chunk tells of the round that brought it; `text_of` gives the text of a token."""
    tree = round.tree
    nodes = [
        NodeObject(
            text=text_of(tree.tokens[node]),
            parent=tree.parents[node],
            confidence=tree.confidences[node],
            value=tree.values[node],
            verified=bool(round.nodes >> node & 1),
            accepted=node in round.accepted,
        )
        for node in range(len(tree) if tree else 0)
        if tree
    ]
    return RoundObject(
        tokens=[text_of(token) for token in round.tokens],
        accepted=min(len(round.accepted), len(round.tokens)),
        drafted=round.drafted,
        verified=round.verified,
        draft_ms=round.draft_ns / 1e6,
        verify_ms=round.verify_ns / 1e6,
        nodes=nodes,
    )


def chat_logprobs(tokens: Sequence[Token]) -> ChatLogprobs:
    """Tokens as chats tell them."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=_numbers(token.bytes),
                top_logprobs=[
                    TopLogprob(token=one.text, logprob=one.logprob, bytes=_numbers(one.bytes))
                    for one in token.top
                ],
            )
            for token in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[Token]) -> CompletionLogprobs:
    """Tokens as completions tell them: the one that stands there is always among the likely ones."""
    return CompletionLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_likely(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _likely(token: Token) -> dict[str, float] | None:
    """Logprobs by text; of tokens with the same one, the likeliest counts, but for the token itself."""
    if token.logprob is None:
        return None
    likely: dict[str, float] = {}
    for one in token.top:
        likely.setdefault(one.text, one.logprob)
    likely[token.text] = token.logprob
    return likely


def _numbers(data: bytes | None) -> list[int] | None:
    return None if data is None else list(data)
