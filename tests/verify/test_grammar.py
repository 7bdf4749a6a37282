"""Texts by a JSON schema: documents of it, and the same ones whatever trees, batches and replicas do."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.speculation.sampling import Context, draw
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
from services.types.session import FinishReason, Session
from services.types.tree import DraftTree
from services.verify.grammar import Grammars
from services.verify.verifier import Verifier

Make = Callable[..., Any]

ENDS = frozenset({0, 1})


@dataclass(frozen=True)
class Kind:
    """A schema, and what its documents are, said by hand."""

    schema: dict[str, Any]
    holds: Callable[[Any], bool]

    @property
    def text(self) -> str:
        return json.dumps(self.schema)

    def complete(self, text: str) -> bool:
        """Whether a text is a document of the schema."""
        try:
            return self.holds(json.loads(text))
        except ValueError:
            return False


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = {
    "object": Kind({"type": "object"}, lambda d: isinstance(d, dict)),
    "person": Kind(
        PERSON,
        lambda d: d.keys() == {"name", "age"} and len(d["name"]) <= 4 and d["age"] in range(151),
    ),
    "list": Kind(
        {"type": "array", "items": {"enum": ["é12", True, None]}, "minItems": 1, "maxItems": 3},
        lambda d: 1 <= len(d) <= 3 and all(each in ("é12", True, None) for each in d),
    ),
    "integer": Kind({"type": "integer"}, lambda d: isinstance(d, int)),
    "constant": Kind({"const": {"é": [12, None]}}, lambda d: d == {"é": [12, None]}),
    "choice": Kind(
        {"anyOf": [{"type": "string", "pattern": "^a+b$"}, {"type": "boolean"}]},
        lambda d: isinstance(d, bool) or (set(d[:-1]) == {"a"} and d[-1] == "b"),
    ),
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "none": {},
    "hot": {"temperature": 2.0},
    "min tokens": {"min_tokens": 25},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "cuts": {"min_p": 0.05, "top_k": 9, "top_p": 0.8},
}


def session(id: str, kind: str, bias: dict[int, float] | None = None, **params: Any) -> Session:
    rng = random.Random(id)
    chosen = {"max_tokens": 40, "json_schema": KINDS[kind].text, "logit_bias": bias or {}} | params
    prompt = tuple(rng.randrange(2, 270) for _ in range(rng.randint(1, 20)))
    return Session(id, prompt, SamplingParams(**chosen), rng.getrandbits(64))


def sessions_of_all_kinds(writer: Any) -> list[Session]:
    """Each schema with each processor; what ends texts and strings is made likely enough."""
    bias = {writer.ids[word]: 3.0 for word in ('"', "}", "]", '"}')} | {0: 2.0, 1: 2.0}
    return [
        session(f"{kind}, {name}", kind, bias, **options)
        for kind in KINDS
        for name, options in PROCESSORS.items()
    ]


def by_definition(writer: Any, session: Session) -> tuple[int, ...]:
    """The text of a session: for each token a fresh pass over everything, and a fresh grammar."""
    params, output = session.params, list(session.output)
    while len(output) < params.max_tokens and not (output and output[-1] in ENDS):
        ids = torch.tensor([(*session.prompt, *output)])
        with torch.inference_mode():
            logits = writer.plain.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0]
        allowed = None
        if params.json_schema:
            allowed = writer.grammars.begin(params.json_schema, output, ENDS).allowed(())
        output += draw(logits, [Context(params, session.seed, session.prompt, output, ENDS, allowed)])
    return tuple(output[len(session.output) :])


@pytest.fixture(scope="module")
def texts(writer: Any) -> dict[str, tuple[Session, tuple[int, ...]]]:
    """Sessions of all kinds, and some without a schema, with their texts by definition."""
    free = [Session(f"free {i}", (5, 9, i), SamplingParams(max_tokens=30), i) for i in range(6)]
    return {s.id: (s, by_definition(writer, s)) for s in (*sessions_of_all_kinds(writer), *free)}


def known(writer: Any, texts: dict[str, tuple[Session, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Prompt, text, and for trees that go on behind an end anything."""
    behind = tuple(random.Random(1).randrange(writer.target.vocab_size) for _ in range(9))
    return {id: (*s.tokens, *text, *behind) for id, (s, text) in texts.items()}


def batches(sessions: Sequence[Session], seed: int) -> list[Sequence[Session]]:
    mixed = random.Random(seed).sample(sessions, len(sessions))
    return [mixed[i : i + 8] for i in range(0, len(mixed), 8)]


def walk(writer: Any, kind: str, seed: int, steps: int = 60) -> list[tuple[list[int], torch.Tensor]]:
    """Texts along a random walk through a grammar, each with what may follow; closing marks are likely."""
    weights = {writer.ids[space]: 0.01 for space in " \n\r\t"} | {writer.ids[mark]: 30.0 for mark in '"}]'}
    rng, grammar = random.Random(seed), writer.grammars.begin(KINDS[kind].text, (), ENDS)
    text: list[int] = []
    seen = []
    for _ in range(steps):
        allowed = grammar.allowed(())
        seen.append((list(text), allowed))
        tokens = allowed.nonzero().flatten().tolist()
        token = rng.choices(tokens, [weights.get(token, 1.0) for token in tokens])[0]
        if token in ENDS:
            break
        text.append(token)
        grammar.advance([token])
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_may_end_exactly_where_it_is_a_document_and_must_where_nothing_can_follow(
    kind: str, writer: Any
) -> None:
    ended = 0
    for seed in range(12):
        for tokens, allowed in walk(writer, kind, seed):
            complete = KINDS[kind].complete(writer.text(tokens))
            assert allowed[sorted(ENDS)].tolist() == [complete, complete]
            assert allowed.any()
            assert not allowed[-3:].any()
            if complete and kind != "integer":
                assert allowed.sum() == len(ENDS)
            ended += complete
    assert ended > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_follow_a_path_does_not_depend_on_the_paths_looked_at_before(kind: str, writer: Any) -> None:
    rng = random.Random(kind)
    grammar = writer.grammars.begin(KINDS[kind].text, (), ENDS)
    output: list[int] = []
    for _ in range(12):
        paths: list[list[int]] = [[]]
        for _ in range(8):
            path = rng.choice(paths)
            expected = writer.grammars.begin(KINDS[kind].text, (*output, *path), ENDS).allowed(())
            allowed = grammar.allowed(path)
            assert torch.equal(allowed, expected)
            for token in rng.sample(allowed.nonzero().flatten().tolist(), min(2, int(allowed.sum()))):
                if token in ENDS:
                    assert grammar.allowed([*path, token]) is None
                    assert grammar.allowed([*path, token, 0, 5]) is None
                else:
                    paths.append([*path, token])
        chosen = rng.choice(paths)
        grammar.advance(chosen)
        output += chosen


def test_texts_are_documents_and_the_same_with_trees_and_without(
    writer: Any, texts: dict[str, Any], run: Make, oracle: Make, events: Make
) -> None:
    sessions = [s for s, _ in texts.values()]
    accepted = ended = 0
    seen: Counter[str] = Counter()
    for seed, batch in enumerate([*batches(sessions, 1), *batches(sessions, 2)]):
        expected = {s.id: texts[s.id][1] for s in batch}
        plain = run(writer.target, batch, num_pages=800, grammars=writer.grammars)
        assert plain == expected
        trees = oracle(known(writer, texts), seed=seed, vocab_size=writer.target.vocab_size)
        decoded = run(writer.target, batch, trees, 800, writer.grammars)
        assert decoded == expected
        accepted += sum(len(step.outcome.accepted) for step in decoded.steps)
        for s in batch:
            if s.params.json_schema and decoded.finish(s.id) is FinishReason.STOP:
                text = writer.text(decoded[s.id])
                assert KINDS[s.id.partition(",")[0]].complete(text), text
                ended += 1
        seen += events(decoded.steps)
    assert accepted > 100
    assert ended > 40
    assert seen["end inside a path"] > 0


def test_a_session_that_is_opened_again_in_the_middle_goes_on_with_the_same_document(
    writer: Any, texts: dict[str, Any], run: Make, oracle: Make
) -> None:
    for offset in range(3):
        begun = {
            id: (replace(s, output=text[:cut]), text[cut:])
            for i, (id, (s, text)) in enumerate(texts.items())
            for cut in [(7 * i + 5 * offset) % len(text)]
        }
        sessions = [s for s, _ in begun.values()]
        rests = {id: rest for id, (_, rest) in begun.items()}
        trees = oracle(known(writer, begun), seed=offset, vocab_size=writer.target.vocab_size)
        assert run(writer.target, sessions, trees, 4000, writer.grammars) == rests


def one(verifier: Verifier, session: Session) -> tuple[FinishReason, list[int]]:
    """Why a session alone ended, and its tokens, by plain steps."""
    outcome = verifier.open(session).outcome
    tokens = [*outcome.tokens]
    while outcome.finish is None:
        outcome = verifier.verify({session.id: DraftTree.root(tokens[-1])})[session.id].outcome
        tokens += outcome.tokens
    return outcome.finish, tokens


@pytest.fixture
def verifier(writer: Any) -> Verifier:
    return Verifier(writer.target, num_pages=400, page_size=4, grammars=writer.grammars)


def test_min_tokens_lets_a_document_go_on_and_gives_way_where_it_cannot(
    writer: Any, verifier: Verifier
) -> None:
    no_zero, no_space = {writer.ids["0"]: -100.0}, {writer.ids[space]: -100.0 for space in " \n\r\t"}
    for temperature in (0.0, 1.0):
        longer = session("a", "integer", no_zero, min_tokens=10, temperature=temperature)
        _, tokens = one(verifier, longer)
        digits = writer.text(tokens)
        assert len(tokens) > 10
        assert digits.lstrip("-").isdecimal()
        short = session("b", "constant", no_space, min_tokens=40, temperature=temperature)
        finish, tokens = one(verifier, short)
        assert finish is FinishReason.STOP
        assert len(tokens) < 40
        assert KINDS["constant"].complete(writer.text(tokens))


def test_bans_give_way_to_the_grammar_where_the_two_leave_no_token(writer: Any, verifier: Verifier) -> None:
    everything = dict.fromkeys(range(writer.target.vocab_size), -math.inf)
    finish, tokens = one(verifier, session("a", "person", everything, seed=3, max_tokens=200))
    assert finish is FinishReason.LENGTH or KINDS["person"].complete(writer.text(tokens))
    unbanned = dict.fromkeys((writer.ids["true"], writer.ids['"']), -math.inf)
    for seed in range(9):
        s = replace(session("b", "choice", unbanned, min_tokens=2), seed=seed)
        finish, tokens = one(verifier, s)
        assert finish is FinishReason.STOP
        assert KINDS["choice"].complete(writer.text(tokens))
        assert writer.ids["true"] not in tokens


def test_stop_tokens_end_a_document_where_it_can_end_and_nowhere_else(
    writer: Any, verifier: Verifier
) -> None:
    stop = writer.ids["1"], writer.ids[" "]
    bias = {stop[1]: 50.0, stop[0]: 40.0, writer.ids["2"]: 30.0}
    s = session("a", "integer", bias, stop_token_ids=stop, min_tokens=4)
    finish, tokens = one(verifier, s)
    assert (finish, tokens) == (FinishReason.STOP, [writer.ids["2"]] * 4 + [stop[1]])


BAD = {
    '{"type": "objekt"}': "json_schema does not compile: Invalid type: objekt",
    '{"type": "string", "pattern": "(("}': "regex parse error: (( ^ error: unclosed group",
    '{"not": {"type": "string"}}': 'Unimplemented keys: ["not"]',
    '{"type": "integer", "minimum": 5, "maximum": 3}': "minimum (5) is greater than maximum (3)",
    '{"type": "object"': "json_schema does not compile: Expecting ',' delimiter",
    "": "json_schema does not compile: Expecting value",
    "[" * 60000: "json_schema does not compile: maximum recursion depth exceeded",
    '{"a":' * 200 + "1" + "}" * 200: "recursion limit exceeded",
    "[]": "it is no JSON object",
    "true": "it is no JSON object",
    'true }, {"lark_grammar": "start: /x/"': "json_schema does not compile: Extra data",
    '{"const": "\\ud800"}': "json_schema does not compile: ",
    '{"type": "array", "x-guidance": {"item_separator": ";"}}': "x-guidance is not supported",
    '{"$ref": "http://localhost/schema"}': "retrieving it failed",
}
ENDLESS = {
    "patterns": {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(30)]},
    "multiples": {"type": "integer", "multipleOf": 99999999},
}
"""Schemas that would keep llguidance busy for minutes."""


@pytest.mark.parametrize("schema", BAD, ids=lambda schema: schema[:40])
def test_a_schema_that_does_not_compile_is_refused_with_the_reason_and_owns_nothing(
    schema: str, verifier: Verifier, idle: Make
) -> None:
    bad = Session("bad", (5,), SamplingParams(json_schema=schema), 0)
    with pytest.raises(WealdError) as refused:
        verifier.open(bad)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert BAD[schema] in refused.value.message
    idle(verifier)
    assert one(verifier, session("bad", "constant"))[0] is FinishReason.STOP


@pytest.mark.slow
@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_that_takes_too_long_to_compile_is_refused(schema: str, verifier: Verifier) -> None:
    params = SamplingParams(json_schema=json.dumps(ENDLESS[schema]))
    with pytest.raises(WealdError, match="json_schema does not compile: it takes more than 3 s") as refused:
        verifier.open(Session("bad", (5,), params, 0))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def test_output_that_does_not_begin_a_document_is_refused(
    writer: Any, verifier: Verifier, idle: Make
) -> None:
    whole = [writer.ids[word] for word in ('{"', "é", '":', "[", "12", ",", "null", "]", "}")]
    for output in (whole[1:2], [*whole[:3], 0], [*whole, whole[-1]]):
        with pytest.raises(WealdError, match="cannot go on by its json_schema") as refused:
            verifier.open(replace(session("bad", "constant"), output=tuple(output)))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        idle(verifier)
    assert verifier.open(replace(session("good", "constant"), output=tuple(whole))).outcome.tokens[0] in ENDS


def test_what_a_target_cannot_do_is_refused(writer: Any, tmp_path: Path) -> None:
    for grammars, reason in (
        (None, "json_schema needs the target's tokenizer"),
        (Grammars(writer.directory, 300, frozenset()), "has no end-of-sequence token to end a document"),
        (Grammars(writer.directory, 200, ENDS), "cannot be had with this target's tokenizer"),
        (Grammars(tmp_path, 300, ENDS), "cannot be had with this target's tokenizer"),
    ):
        with pytest.raises(WealdError, match=reason) as refused:
            Verifier(writer.target, num_pages=40, grammars=grammars).open(session("a", "person"))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT


COSTLY = {"anyOf": [{"const": 12}, {"pattern": f"^({'|'.join(f'[a-z]{{{i}}}x' for i in range(1, 2000))})$"}]}
"""llguidance compiles it, but gives up inside the string."""


def test_a_grammar_that_fails_in_the_middle_of_a_text_ends_that_session_alone(
    writer: Any, verifier: Verifier, idle: Make
) -> None:
    schema = json.dumps(COSTLY)
    params = SamplingParams(max_tokens=40, json_schema=schema)
    quoted = replace(params, logit_bias={writer.ids['"']: 90.0, writer.ids[' "']: 90.0})
    neighbours = {
        "same schema": Session("same schema", (3,), replace(params, logit_bias={writer.ids["1"]: 90.0}), 0),
        "other": session("other", "person"),
        "free": Session("free", (5, 6), SamplingParams(max_tokens=20), 1),
    }
    pending = {}
    for s in neighbours.values():
        pending[s.id] = [*verifier.open(s).outcome.tokens]
    # The prefill draws the quote; what follows it fails.
    said = verifier.open(Session("bad", (7, 8), quoted, 2)).outcome.tokens
    trees = {id: DraftTree.root(tokens[-1]) for id, tokens in pending.items()}
    stepped = verifier.step(trees | {"bad": DraftTree.chain((said[-1], 5, 6))})
    assert stepped.failures.keys() == {"bad"}
    assert stepped.failures["bad"].code is ErrorCode.INVALID_ARGUMENT
    assert "too many expressions" in stepped.failures["bad"].message
    assert stepped.outcomes.keys() == neighbours.keys()
    verifier.check()
    for id, s in neighbours.items():
        tokens, outcome = pending[id], stepped.outcomes[id]
        tokens += outcome.tokens
        while outcome.finish is None:
            outcome = verifier.verify({id: DraftTree.root(tokens[-1])})[id].outcome
            tokens += outcome.tokens
        assert tuple(tokens) == by_definition(writer, s)
    idle(verifier)


def test_a_document_that_only_end_tokens_could_go_on_with_ends_in_an_error(
    writer: Any, verifier: Verifier, idle: Make
) -> None:
    closing = tuple(i for word, i in writer.ids.items() if "}" in word)
    params = SamplingParams(json_schema='{"const": "12}"}', stop_token_ids=closing)
    with pytest.raises(WealdError, match="has no token for what must follow") as failed:
        one(verifier, Session("a", (3,), params, 0))
    assert failed.value.code is ErrorCode.INVALID_ARGUMENT
    idle(verifier)
