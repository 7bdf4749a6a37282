"""Events of a session become the pieces of a text, however rounds group its tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from services.gateway.choices import (
    Alternative,
    Choice,
    Figures,
    Piece,
    Token,
    chat_logprobs,
    completion_logprobs,
    usage_of,
    weald_object,
)
from services.gateway.detokenizer import Detokenizer
from services.gateway.requests import Job
from services.gateway.tokenizer import BYTES, Tokenizer
from services.types.errors import WealdError
from services.types.messages import Call, Event, Finished, Moved, Round, Started
from services.types.outcome import TokenLogprobs
from services.types.replica import ReplicaKind
from services.types.sampling import SamplingParams
from services.types.session import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PROMPT = (1, 2, 3)
END = 256
LETTERS = "ab 木🌲"
byte_level = pytest.mark.parametrize("checkpoint", ["byte_level"], indirect=True)
byte_fallback = pytest.mark.parametrize("checkpoint", ["byte_fallback"], indirect=True)


def bytewise() -> Tokenizer:
    """One token for each byte, by its value; then the end token."""
    core = tokenizers.Tokenizer(models.BPE(BYTES, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(core, frozenset({END}), {}, None)


BYTEWISE = bytewise()


def job(
    stops: Sequence[str] = (),
    tokenizer: Tokenizer = BYTEWISE,
    prompt: tuple[int, ...] = PROMPT,
    continues: bool = False,
    include_stop: bool = False,
    n: int = 1,
    **params: Any,
) -> Job:
    params = {"max_tokens": 10_000, "seed": 7} | params
    calls = tuple(Call(f"s-{i}", prompt, (), SamplingParams(**params)) for i in range(n))
    return Job("s", calls, n, tokenizer, continues, tuple(stops), include_stop)


def told(place: int) -> TokenLogprobs:
    """What the target is played to say of the token at a place of the output."""
    return TokenLogprobs(-float(place), ((place, -0.5), (place + 1, -1.5)))


def events(groups: Sequence[Sequence[int]], finish: FinishReason | None = LENGTH) -> Iterator[Event]:
    """A session whose rounds bring these groups of tokens, each with a logprob by its place."""
    yield Started("s-0", 7, 2, "verifier:1")
    at = 0
    for index, group in enumerate(groups):
        logprobs = tuple(told(at + i) for i in range(len(group)))
        ended = finish if index == len(groups) - 1 else None
        yield Round(len(PROMPT) + at, tuple(group), 0, 1, 0, 0, finish=ended, logprobs=logprobs)
        at += len(group)
    if finish:
        yield Finished(finish, len(PROMPT), at, 2)


def pieces(of: Job, groups: Sequence[Sequence[int]], finish: FinishReason | None = LENGTH) -> list[Piece]:
    """What each event brings."""
    choice = Choice(of, 0)
    return [piece for event in events(groups, finish) if (piece := choice.take(event))]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces: Sequence[Piece]) -> list[Token]:
    return [token for piece in pieces for token in piece.tokens]


def grouped(tokens: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """The tokens in rounds that end where it is said, and at the end."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


def ended(
    tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str], include: bool, first: int, total: int
) -> tuple[str, int | None]:
    """The definition: the text of `tokens`, and how many of them completed a stop string; None if none does.

    A stop string is complete with the token that makes its last character final, at the end of the session
    with the last one of all. The first one counts; of several at one character, the longest; but none before
    token `first`.
    """
    detokenizer, known = Detokenizer(tokenizer), ""
    counts = [*range(1, len(tokens) + 1), total]
    for count, text in zip(counts, [*map(detokenizer.push, zip(tokens)), detokenizer.flush()], strict=True):
        for end in range(len(known) + 1, len(known) + len(text) + 1):
            complete = [len(stop) for stop in stops if (known + text)[:end].endswith(stop)]
            if complete and count >= first:
                return (known + text)[: end if include else end - max(complete)], count
        known += text
    return known, None


@given(data=st.data())
def test_text_finish_counts_and_tokens_do_not_depend_on_how_rounds_group_the_tokens(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    written = st.text(LETTERS + "the of.", max_size=12).map(tokenizer.encode)
    token = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    tokens = data.draw(st.lists(token | written, min_size=1).map(lambda parts: [*chain.from_iterable(parts)]))
    known = tokenizer.decode(tokens)
    part = st.text(LETTERS + "the of.", min_size=1, max_size=3)
    if known:
        part |= st.tuples(st.integers(0, len(known) - 1), st.integers(1, 6)).map(
            lambda at: known[at[0] : sum(at)]
        )
    stops = data.draw(st.lists(part, max_size=16))
    include, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 9))
    cuts = data.draw(st.lists(st.integers(1, 40)))
    finish = data.draw(st.sampled_from([STOP, LENGTH]))
    body = tokens[:-1] if finish is STOP else tokens
    expected, completed = ended(tokenizer, body, stops, include, min_tokens + 1, len(tokens))

    made = pieces(
        job(stops, tokenizer, include_stop=include, min_tokens=min_tokens, logprobs=0),
        grouped(tokens, cuts),
        finish,
    )

    assert text_of(made) == expected
    assert [piece.finish for piece in made[:-1]] == [None] * (len(made) - 1)
    assert made[-1].finish is (STOP if completed else finish)
    assert made[-1].figures.completion_tokens == (completed or len(tokens))
    told_of = tokens_of(made)
    assert [token.id for token in told_of] == body[: len(told_of)]
    assert [token.logprob for token in told_of] == [-float(place) for place in range(len(told_of))]
    offsets = [token.offset for token in told_of]
    assert offsets == sorted(offsets)
    if completed is None:
        assert len(told_of) == len(body)
    else:
        assert all(offset < len(expected) for offset in offsets)
    sent = 0
    for piece in made:
        sent += len(piece.text)
        assert all(token.offset < sent for token in piece.tokens) or piece.finish


@given(
    text=st.text(LETTERS, min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 40)),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=16),
    include=st.booleans(),
)
def test_the_bytes_of_the_tokens_told_are_the_text_up_to_the_character_that_is_cut(
    text: str, cuts: list[int], stops: list[str], include: bool
) -> None:
    made = pieces(job(stops, include_stop=include, logprobs=0), grouped(text.encode(), cuts))
    data = b"".join(token.bytes or b"" for token in tokens_of(made))
    assert data.decode() == text_of(made)
    for token in tokens_of(made):
        # A byte stands at the offset of its character.
        assert token.bytes is not None
        assert token.bytes[0] in text[token.offset].encode()


@given(text=st.text(LETTERS, min_size=1, max_size=20), cuts=st.lists(st.integers(1, 40)))
def test_a_token_comes_with_the_piece_that_brings_its_character(text: str, cuts: list[int]) -> None:
    sent = 0
    for piece in pieces(job(logprobs=0), grouped(text.encode(), cuts)):
        assert b"".join(token.bytes or b"" for token in piece.tokens).decode() == piece.text
        assert [token.offset for token in piece.tokens] == [
            place for place, character in enumerate(piece.text, sent) for _ in character.encode()
        ]
        sent += len(piece.text)


def test_a_character_comes_once_it_is_whole_with_all_its_tokens() -> None:
    first, *rest = "🌲".encode()
    made = pieces(job(logprobs=0), [[97], [first], rest, [98]])
    assert [piece.text for piece in made] == ["a", "🌲", "b"]
    assert [len(piece.tokens) for piece in made] == [1, 4, 1]
    assert [token.text for token in made[1].tokens] == [
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x8c",
        "bytes:\\xb2",
    ]


def test_a_character_that_stays_unfinished_is_told_at_the_end() -> None:
    made = pieces(job(logprobs=0), [[97], [*"木".encode()[:2]]])
    assert [piece.text for piece in made] == ["a", "\ufffd"]
    assert [token.offset for token in tokens_of(made)] == [0, 1, 1]


@byte_fallback
def test_a_run_of_fallback_bytes_and_the_letter_behind_it_have_their_own_offsets(
    tokenizer: Tokenizer,
) -> None:
    tokens = tokenizer.encode("木a")[1:]
    made = pieces(job(tokenizer=tokenizer, logprobs=0), [[token] for token in tokens])
    assert [piece.text for piece in made] == ["木a"]
    assert [token.offset for token in made[0].tokens] == [0, 0, 0, 1]


@byte_fallback
def test_a_chats_answer_is_a_text_of_its_own_and_a_completion_goes_on_behind_the_prompt(
    tokenizer: Tokenizer,
) -> None:
    prompt, tokens = tuple(tokenizer.encode("the")), tokenizer.encode("of")
    chat = pieces(job(tokenizer=tokenizer, prompt=prompt), [tokens])
    completion = pieces(job(tokenizer=tokenizer, prompt=prompt, continues=True), [tokens])
    assert (text_of(chat), text_of(completion)) == ("of", " of")


def test_the_beginning_of_a_stop_string_is_held_back_with_its_tokens() -> None:
    made = pieces(job(["cd"], logprobs=0), [b"abc", b"c", b"xy"])
    assert [piece.text for piece in made] == ["ab", "c", "cxy"]
    assert [[token.text for token in piece.tokens] for piece in made] == [["a", "b"], ["c"], ["c", "x", "y"]]


def test_a_stop_string_cuts_text_and_tokens_and_what_completed_it_counts() -> None:
    made = pieces(job(["cd"], logprobs=0), [b"a", b"bcdef", b"gh"])
    assert text_of(made) == "ab"
    assert [token.text for token in tokens_of(made)] == ["a", "b"]
    assert made[-1].finish is STOP
    assert made[-1].figures.completion_tokens == 4
    assert len(made) == 2


def test_a_stop_string_that_belongs_to_the_text_is_told_to_its_end() -> None:
    made = pieces(job(["cd"], include_stop=True, logprobs=0), [b"a", b"bc", b"def"])
    assert [piece.text for piece in made] == ["a", "bc", "d"]
    assert [token.text for token in tokens_of(made)] == ["a", "b", "c", "d"]
    assert made[-1].finish is STOP


@byte_level
def test_a_token_that_is_cut_inside_is_told_and_one_that_is_cut_whole_is_not(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the trees", special=False)
    assert [tokenizer.text_of(token) for token in tokens] == ["the", " trees"]
    for stop, texts in (("rees", ["the", " trees"]), (" trees", ["the"]), ("he", ["the"]), ("the", [])):
        made = pieces(job([stop], tokenizer, logprobs=0), [tokens])
        assert text_of(made) == "the trees"[: "the trees".index(stop)]
        assert [token.text for token in tokens_of(made)] == texts


def test_a_token_without_text_comes_with_the_one_behind_it_or_at_the_end_or_is_cut_with_it() -> None:
    made = pieces(job(logprobs=0), [[97], [END], [98], [END]])
    assert [(piece.text, [token.id for token in piece.tokens]) for piece in made] == [
        ("a", [97]),
        ("b", [END, 98]),
        ("", [END]),
    ]
    end = made[-1].tokens[0]
    assert (end.text, end.bytes, end.offset) == ("<|end|>", None, 2)
    cut = pieces(job(["b"], logprobs=0), [[97, END, 98]])
    assert [token.id for token in tokens_of(cut)] == [97]


def test_the_token_that_ends_the_text_counts_and_is_not_part_of_it() -> None:
    made = pieces(job(logprobs=0), [b"a", [98, END]], STOP)
    assert (text_of(made), made[-1].finish) == ("ab", STOP)
    assert [token.text for token in tokens_of(made)] == ["a", "b"]
    assert made[-1].figures.completion_tokens == 3


def test_the_beginning_of_a_stop_string_is_text_when_the_session_ends_there() -> None:
    for tokens, finish in ((b"abc", LENGTH), ([*b"abc", END], STOP)):
        made = pieces(job(["cd"], logprobs=0), [tokens], finish)
        assert (text_of(made), made[-1].finish) == ("abc", finish)
        assert len(tokens_of(made)) == 3


def test_a_stop_string_that_the_last_token_completes_is_the_reason_of_the_finish() -> None:
    assert pieces(job(["bc"]), [b"abc"])[-1].finish is STOP


def test_an_end_token_inside_a_stop_string_ends_the_text_before_it_is_complete() -> None:
    made = pieces(job(["bcd"]), [[*b"abc", END]], STOP)
    assert (text_of(made), made[-1].figures.completion_tokens) == ("abc", 4)


def test_a_stop_string_counts_when_its_last_token_comes_behind_the_least_number() -> None:
    def made(min_tokens: int) -> tuple[str, int]:
        of = pieces(job(["bc"], min_tokens=min_tokens), [b"abcbcbc"])
        return text_of(of), of[-1].figures.completion_tokens

    assert made(0) == made(2) == ("a", 3)
    assert made(3) == made(4) == ("abc", 5)
    assert made(5) == ("abcbc", 7)
    assert made(7) == ("abcbcbc", 7)


def test_without_logprobs_no_token_is_told() -> None:
    assert tokens_of(pieces(job(), [b"abc"])) == []


def test_as_many_alternatives_are_told_as_were_asked_for_and_no_infinite_logprob() -> None:
    def one(logprobs: int, said: TokenLogprobs) -> Token:
        piece = Choice(job(logprobs=logprobs), 0).take(Round(3, (97,), 0, 1, 0, 0, logprobs=(said,)))
        assert piece
        return piece.tokens[0]

    said = TokenLogprobs(-float("inf"), ((98, -0.5), (0xF0, -float("inf"))))
    assert one(0, said) == Token(97, "a", b"a", -9999.0, (), 0)
    assert one(1, said).top == (Alternative(98, "b", b"b", -0.5),)
    assert one(2, said).top[1] == Alternative(0xF0, "bytes:\\xf0", b"\xf0", -9999.0)


def test_tokens_of_the_journal_are_told_without_a_logprob() -> None:
    choice = Choice(job(logprobs=1), 0)
    replayed = choice.take(Round(3, (97, 98), 0, 0, 0, 0))
    assert replayed
    assert [(token.text, token.logprob, token.top) for token in replayed.tokens] == [
        ("a", None, ()),
        ("b", None, ()),
    ]
    assert replayed.figures.completion_tokens == 2
    assert replayed.figures.rounds == 0


def test_a_session_without_a_token_ends_with_an_empty_piece() -> None:
    choice = Choice(job(max_tokens=0), 0)
    assert choice.take(Started("s-0", 7, 0, "")) is None
    piece = choice.take(Finished(LENGTH, 3, 0, 0))
    assert piece == Piece("", (), LENGTH, Figures(3, seed=7))
    assert choice.finish is LENGTH


def test_nothing_comes_after_the_last_piece() -> None:
    choice = Choice(job(["b"]), 0)
    made = [choice.take(event) for event in events([b"ab", b"cd", b"ef"])]
    assert [piece.text for piece in made if piece] == ["a"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(WealdError, match="must not be empty"):
        Choice(job([""]), 0)


def test_figures_count_rounds_nodes_and_accepted_tokens_by_their_depth() -> None:
    choice = Choice(job(), 0)
    moves = Moved(ReplicaKind.VERIFY, "verifier:2", True), Moved(ReplicaKind.DRAFT, "drafter:2", False)
    seen = [
        choice.take(event)
        for event in (
            Started("s-0", 9, 2, "verifier:1"),
            Round(3, (97,), 0, 1, 0, 0),  # the prefill's
            Round(4, (98, 99, 100), 6, 5, 0, 0, accepted=(1, 3)),
            moves[0],
            Round(7, (101,), 0, 1, 0, 0),  # a plain step
            moves[1],
            Round(8, (102, 103), 4, 4, 0, 0, accepted=(2,)),
            Round(10, (104,), 4, 4, 0, 0),
            Round(11, (105, 106), 9, 9, 0, 0, accepted=(1, 2), finish=LENGTH),
        )
    ]
    assert seen[-1]
    figures = seen[-1].figures
    assert figures == Figures(
        prompt_tokens=3,
        seed=9,
        completion_tokens=10,
        cached_tokens=2,
        rounds=5,
        tree_rounds=4,
        tree_tokens=8,
        verified=4 + 3 + 3 + 8,
        accepted_per_position=(3, 2),
        verifier="verifier:2",
        moves=moves,
    )
    assert (figures.accepted, figures.tau) == (5, 2.0)


def test_draft_tokens_behind_a_stop_string_were_accepted_for_nothing() -> None:
    choice = Choice(job(["c"]), 0)
    piece = choice.take(Round(4, (98, 99, 100, 101), 6, 6, 0, 0, accepted=(1, 2, 3)))
    assert piece
    assert piece.figures.completion_tokens == 2
    assert (piece.figures.accepted, piece.figures.verified, piece.figures.tau) == (2, 5, 2.0)


def test_usage_sums_choices_and_counts_each_prompt_once() -> None:
    one = Figures(3, completion_tokens=5, cached_tokens=2, verified=9, accepted_per_position=(2, 1))
    other = replace(one, prompt_tokens=4, cached_tokens=1)
    usage = usage_of(job(n=2), [one, one, other, other])
    assert usage.model_dump() == {
        "prompt_tokens": 7,
        "completion_tokens": 20,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 24},
    }


def test_the_weald_object_tells_what_the_rounds_did() -> None:
    moves = (Moved(ReplicaKind.DRAFT, "drafter:2", lost=True),) * 2
    figures = Figures(3, 9, 10, 2, 5, 4, 8, 18, (3, 2), "verifier:2", moves)
    assert weald_object(figures).model_dump() == {
        "seed": 9,
        "rounds": 5,
        "tau": 2.0,
        "draft_tokens": 18,
        "accepted_per_position": [3, 2],
        "draft_rounds": 4,
        "verifier": "verifier:2",
        "moves": 2,
    }
    assert weald_object(Figures(3)).tau is None


TOKENS = [
    Token(97, "a", b"a", -1.0, (Alternative(98, "b", b"b", -0.5), Alternative(97, "a", b"a", -1.0)), 0),
    Token(240, "bytes:\\xf0", b"\xf0", None, (), 1),
    Token(256, "<|end|>", None, -2.0, (), 1),
]


def test_chats_tell_an_entry_for_each_token() -> None:
    assert chat_logprobs(TOKENS).model_dump(exclude_unset=True) == {
        "content": [
            {
                "token": "a",
                "logprob": -1.0,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.5, "bytes": [98]},
                    {"token": "a", "logprob": -1.0, "bytes": [97]},
                ],
            },
            {"token": "bytes:\\xf0", "logprob": None, "bytes": [240], "top_logprobs": []},
            {"token": "<|end|>", "logprob": -2.0, "bytes": None, "top_logprobs": []},
        ]
    }


def test_completions_tell_parallel_lists() -> None:
    told = completion_logprobs(TOKENS).model_dump()
    assert told == {
        "tokens": ["a", "bytes:\\xf0", "<|end|>"],
        "token_logprobs": [-1.0, None, -2.0],
        "top_logprobs": [{"b": -0.5, "a": -1.0}, None, {"<|end|>": -2.0}],
        "text_offset": [0, 1, 1],
    }
    assert list(told["top_logprobs"][0]) == ["b", "a"], "the likeliest first"


def test_of_alternatives_with_one_text_the_likelier_one_is_told_and_the_token_itself_always() -> None:
    top = (Alternative(1, "a", b"a", -0.1), Alternative(2, "b", b"b", -0.2), Alternative(3, "b", b"b", -0.3))
    told = completion_logprobs([Token(9, "a", b"a", -5.0, top, 0)])
    assert told.top_logprobs == [{"b": -0.2, "a": -5.0}]
