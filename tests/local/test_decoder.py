"""The text is a function of target, prompt, parameters and seed: not of trees, budgets or batches."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.draft.drafter import Drafter
from services.local.decoder import Step, decode
from services.speculation.sampling import Context, draw
from services.types.configuration import DraftConfig, TreeShape
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.types.tree import DraftTree
from services.verify.verifier import Verifier

Make = Callable[..., Any]

TEMPERATURES = (0.0, 0.7, 1.3)
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": {3: 4.0, 9: -math.inf, 7: 2.0}},
    "repetition penalty": {"repetition_penalty": 1.8},
    "frequency penalty": {"frequency_penalty": 1.9, "ignore_eos": True},
    "presence penalty": {"presence_penalty": 2.0, "ignore_eos": True},
    "negative penalties": {"frequency_penalty": -1.0, "presence_penalty": -0.5},
    "min-p": {"min_p": 0.2},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},
    "min tokens": {"min_tokens": 14, "logit_bias": dict.fromkeys((2, 7, 11), 5.0)},
    "stop tokens": {"stop_token_ids": tuple(range(20, 26)), "ignore_eos": True},
    "everything": {
        "logit_bias": {2: 3.0, 30: 1.5, 31: -1.0},
        "min_tokens": 6,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "min_p": 0.01,
        "top_k": 20,
        "top_p": 0.95,
        "stop_token_ids": (5, 17),
    },
}
CONFIGS = {
    "dynamic of the paper": DraftConfig(),
    "dynamic of one level": DraftConfig(levels=1, beam=3, budget=4),
    "dynamic, deep and narrow": DraftConfig(levels=9, beam=2, budget=64),
    "dynamic, wider than the vocabulary": DraftConfig(levels=2, beam=70, budget=33),
    "dynamic with more budget than candidates": DraftConfig(levels=2, beam=2, budget=64),
    "roots alone": DraftConfig(levels=2, beam=2, budget=1),
    "static": DraftConfig(shape=TreeShape.STATIC),
    "chain": DraftConfig(shape=TreeShape.CHAIN, levels=5),
}


def sessions_of_all_processors(seed: int) -> list[Session]:
    """Each processor at each temperature, in any order, with prompts and lengths of every size."""
    rng = random.Random(seed)
    sessions = []
    for temperature in TEMPERATURES:
        for name, options in PROCESSORS.items():
            prompt = tuple(rng.randrange(61) for _ in range(rng.choice([1, 2, 9, 17, 40])))
            params = SamplingParams(temperature=temperature, max_tokens=rng.randint(14, 30), **options)
            sessions.append(Session(f"{name} at {temperature}", prompt, params, rng.getrandbits(64)))
    rng.shuffle(sessions)
    return sessions


def by_eight(sessions: Sequence[Session]) -> list[Sequence[Session]]:
    return [sessions[i : i + 8] for i in range(0, len(sessions), 8)]


def acted_inside_paths(plain: Any, sessions: Sequence[Session], steps: Sequence[Step]) -> Counter[str]:
    """How often, at an accepted node, the tokens of its own path or the ban on ends decided the draw."""
    acted: Counter[str] = Counter()
    for session in sessions:
        params, ends = session.params, plain.ends(session)
        output = [t for step in steps if step.session == session.id for t in step.outcome.tokens]
        logits = plain.run((*session.prompt, *output))[1][len(session.prompt) - 1 :]
        begin = 0
        for step in [step for step in steps if step.session == session.id]:
            for at in range(begin + 1, begin + len(step.outcome.accepted) + 1):
                if at == begin + len(step.outcome.tokens):
                    break
                blind = [*output[:begin], *[0] * (at - begin)]
                contexts = [
                    Context(params, session.seed, session.prompt, blind, ends),
                    Context(replace(params, min_tokens=0), session.seed, session.prompt, output[:at], ends),
                ]
                without_path, without_ban = draw(logits[[at, at]], contexts)
                acted["penalty"] += params.penalised and without_path != output[at]
                acted["ban"] += without_ban != output[at]
            begin += len(step.outcome.tokens)
    return acted


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_trees_that_hide_the_text_leave_it_as_it_is(
    kind: str, plain: Make, target: Make, run: Make, oracle: Make, events: Make
) -> None:
    sessions = sessions_of_all_processors(1)
    streams = {s.id: plain(kind).stream(s, s.params.max_tokens + 9) for s in sessions}
    texts = {s.id: plain(kind).text(s, streams[s.id]) for s in sessions}
    known = {s.id: (*s.prompt, *streams[s.id]) for s in sessions}
    seen: Counter[str] = Counter()
    for batch in [*by_eight(sessions), *([s] for s in sessions)]:
        expected = {s.id: texts[s.id] for s in batch}
        assert run(target(kind), batch) == expected
        for seed in range(2):
            decoded = run(target(kind), batch, oracle(known, seed=seed))
            assert decoded == expected
            seen += events(decoded.steps) + acted_inside_paths(plain(kind), batch, decoded.steps)
    assert all(seen[f"depth {depth}"] > 0 for depth in range(9))
    assert seen["nodes 64"] > 0
    assert seen["first sibling"] > 0
    assert seen["later sibling"] > 0
    assert seen["end inside a path"] > 0
    assert seen["refused end"] > 0
    assert seen["penalty"] > 0
    assert seen["ban"] > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_head_of_any_tree_shape_leaves_the_text_as_it_is(
    kind: str, config: str, plain: Make, target: Make, head: Make, run: Make
) -> None:
    batch = random.Random(f"{kind} {config}").sample(sessions_of_all_processors(2), 8)
    vocabulary = torch.arange(1, 61, 2) if kind == "qwen3" else None
    drafter = Drafter(head(target(kind), vocabulary), CONFIGS[config], num_pages=1600, page_size=4)
    texts = {s.id: plain(kind).text(s) for s in batch}
    assert run(target(kind), batch, drafter) == texts
    assert run(target(kind), batch[:1], drafter) == {batch[0].id: texts[batch[0].id]}


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_text_of_every_processor_is_the_same_with_coupling_and_without(
    kind: str, coupled: bool, plain: Make, target: Make, head: Make, run: Make
) -> None:
    sessions = sessions_of_all_processors(3)
    texts = {s.id: plain(kind).text(s) for s in sessions}
    config = DraftConfig(levels=4, beam=6, budget=40, coupled=coupled)
    drafter = Drafter(head(target(kind)), config, num_pages=1600, page_size=4)
    for batch in by_eight(sessions):
        assert run(target(kind), batch, drafter) == {s.id: texts[s.id] for s in batch}
    assert (drafter.trees_coupled > 0) is coupled


@st.composite
def any_session(draw: st.DrawFn) -> Session:
    tokens = st.integers(0, 60)
    maximum = draw(st.integers(0, 20))
    params = SamplingParams(
        max_tokens=maximum,
        min_tokens=draw(st.integers(0, maximum)),
        temperature=draw(st.just(0.0) | st.floats(0.05, 3)),
        top_k=draw(st.integers(0, 70)),
        top_p=draw(st.floats(0.05, 1)),
        min_p=draw(st.floats(0, 1)),
        frequency_penalty=draw(st.floats(-2, 2)),
        presence_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0.5, 2)),
        logit_bias=draw(st.dictionaries(tokens, st.floats(-10, 10) | st.just(-math.inf), max_size=5)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=3))),
        ignore_eos=draw(st.booleans()),
    )
    prompt = tuple(draw(st.lists(tokens, min_size=1, max_size=40)))
    return Session("any", prompt, params, draw(st.integers(0, 2**64 - 1)))


@given(any_session(), st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 64))
@settings(max_examples=40)
def test_any_parameters_with_any_trees_give_the_text_of_the_definition(
    plain: Make, target: Make, run: Make, oracle: Make, session: Session, seed: int, levels: int, nodes: int
) -> None:
    stream = plain("llama").stream(session, session.params.max_tokens + levels)
    known = {"any": (*session.prompt, *stream)}
    decoded = run(target("llama"), [session], oracle(known, seed, levels, nodes))
    assert decoded == {"any": plain("llama").text(session, stream)}


def test_a_session_that_begins_with_output_goes_on_with_the_same_text(
    plain: Make, target: Make, head: Make, run: Make, oracle: Make
) -> None:
    rng = random.Random(4)
    batch = rng.sample(sessions_of_all_processors(3), 12)
    texts = {s.id: plain("llama").text(s) for s in batch}
    cuts = {id: rng.randint(0, len(text) - 1) for id, text in texts.items()}
    begun = [replace(s, output=texts[s.id][: cuts[s.id]]) for s in batch]
    rests = {id: text[cuts[id] :] for id, text in texts.items()}
    known = {s.id: (*s.prompt, *plain("llama").stream(s, s.params.max_tokens + 9)) for s in batch}
    assert run(target("llama"), begun, num_pages=800) == rests
    assert run(target("llama"), begun, oracle(known), 800) == rests
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=800, page_size=4)
    assert run(target("llama"), begun, drafter, 800) == rests


def test_the_next_turn_of_a_chat_goes_on_from_the_entries_of_the_one_before(
    plain: Make, target: Make, head: Make, idle: Make
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    verifier = Verifier(target("llama"), num_pages=100, page_size=4)
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=100, page_size=4)
    prompt: tuple[int, ...] = (5, 3, 8, 13)
    for turn in range(3):
        session = Session("a", prompt, params, turn)
        forwarded = drafter.tokens_forwarded
        text = tuple(t for step in decode(verifier, drafter, [session]) for t in step.outcome.tokens)
        assert text == plain("llama").text(session)
        # Behind the last full page: what the last round committed, at most 7 tokens, and what is asked now.
        if turn:
            assert drafter.tokens_forwarded - forwarded < 4 + 7 + 2 + len(text)
        prompt = (*prompt, *text, 20, 21)
        idle(verifier)
        idle(drafter)


def test_without_a_drafter_each_step_is_a_plain_one(target: Make, run: Make) -> None:
    session = Session("a", (1, 2, 3), SamplingParams(max_tokens=6, ignore_eos=True), 5)
    first, *rest = run(target("llama"), [session]).steps
    assert first.tree is None
    assert first.outcome.verified == 1
    assert [len(step.tree) for step in rest if step.tree] == [1] * 5
    assert all(step.outcome.verified == len(step.outcome.tokens) == 1 for step in rest)
    assert all(step.outcome.accepted == () for step in rest)


def test_steps_tell_which_tree_was_verified_and_which_of_its_nodes_were_accepted(
    plain: Make, target: Make, run: Make, oracle: Make
) -> None:
    session = Session("a", (1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True), 5)
    known = {"a": (*session.prompt, *plain("llama").stream(session, 40))}
    for step in run(target("llama"), [session], oracle(known)).steps[1:-1]:
        tree, outcome = step.tree, step.outcome
        assert tree is not None
        assert outcome.verified == len(tree)
        assert outcome.accepted == (tree.path(outcome.accepted[-1]) if outcome.accepted else ())
        assert outcome.tokens[:-1] == tuple(tree.tokens[node] for node in outcome.accepted)
        assert step.draft_s >= 0
        assert step.verify_s > 0


def test_logprobs_are_those_of_the_raw_logits_token_by_token_and_change_no_text(
    plain: Make, target: Make, run: Make, oracle: Make, events: Make
) -> None:
    sessions = random.Random(6).sample(sessions_of_all_processors(6), 16)
    tops = dict(zip((s.id for s in sessions), itertools.cycle((None, 0, 3, 20)), strict=False))
    asking = [replace(s, params=replace(s.params, logprobs=tops[s.id])) for s in sessions]
    streams = {s.id: plain("llama").stream(s, s.params.max_tokens + 9) for s in sessions}
    known = {s.id: (*s.prompt, *streams[s.id]) for s in sessions}
    texts = {s.id: plain("llama").text(s, streams[s.id]) for s in sessions}
    trees = run(target("llama"), asking, oracle(known), 800)
    assert events(trees.steps)["end inside a path"] > 0
    for decoded in (run(target("llama"), asking, num_pages=800), trees):
        assert decoded == texts
        for s in sessions:
            top = tops[s.id]
            outcomes = [step.outcome for step in decoded.steps if step.session == s.id]
            if top is None:
                assert not any(outcome.logprobs for outcome in outcomes)
                continue
            assert all(len(outcome.logprobs) == len(outcome.tokens) for outcome in outcomes)
            told = [one for outcome in outcomes for one in outcome.logprobs]
            logits = plain("llama").run((*s.prompt, *texts[s.id]))[1][len(s.prompt) - 1 : -1]
            for row, token, one in zip(logits.log_softmax(-1), texts[s.id], told, strict=True):
                assert one.logprob == pytest.approx(float(row[token]), abs=1e-5)
                assert [value for _, value in one.top] == pytest.approx(row.topk(top).values, abs=1e-5)
                assert [value for _, value in one.top] == pytest.approx(
                    [float(row[other]) for other, _ in one.top], abs=1e-5
                )
                assert list(one.top) == sorted(one.top, key=lambda pair: (-pair[1], pair[0]))


def test_another_seed_gives_another_text_and_seeds_count_modulo_two_to_the_64(
    target: Make, run: Make
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    seeds = {"one": 1, "two": 2, "one again": 1 + 2**64, "high": 2**63 + 1}
    texts = run(target("llama"), [Session(id, (1, 2), params, seed) for id, seed in seeds.items()])
    assert texts["one"] == texts["one again"]
    assert len({texts["one"], texts["two"], texts["high"]}) == 3


def test_decoding_neither_reads_nor_changes_global_random_state(target: Make, head: Make, run: Make) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.3)
    sessions = [Session(str(i), (i, 2 * i), params, i) for i in range(1, 4)]
    texts = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=200)
            before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
            texts.append(run(target("llama"), sessions, drafter))
            assert torch.equal(torch.get_rng_state(), before[0])
            assert (random.getstate(), str(numpy.random.get_state())) == before[1:]
    assert texts[0] == texts[1]


class Broken:
    """A tree source that fails, or proposes nonsense, from its third round on."""

    def __init__(self, nonsense: DraftTree | None) -> None:
        self.nonsense = nonsense
        self.rounds = 0
        self.pending: dict[str, int] = {}

    def open(self, id: str, tokens: Sequence[int], config: Any = None, drawing: Any = None) -> int:
        self.pending[id] = tokens[-1]
        return 0

    def propose(self, ids: Sequence[str], terms: Any = None) -> list[DraftTree]:
        self.rounds += 1
        if self.rounds < 3:
            return [DraftTree.root(self.pending[id]) for id in ids]
        if self.nonsense is None:
            raise RuntimeError("the drafter broke")
        return [self.nonsense for _ in ids]

    def advance(self, id: str, tokens: Sequence[int], features: torch.Tensor) -> None:
        self.pending[id] = [self.pending[id], *tokens][-1]

    def learn(self, id: str, nodes: int, accepted: Sequence[int]) -> int:
        return 0

    def close(self, id: str) -> None:
        self.pending.pop(id, None)


@pytest.mark.parametrize(("nonsense", "error"), [(None, RuntimeError), (DraftTree.root(60), WealdError)])
def test_a_failing_drafter_leaves_nothing_open(
    nonsense: DraftTree | None, error: type[Exception], target: Make, idle: Make
) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={60: -math.inf})
    sessions = [Session(str(i), (1, i), params, i) for i in range(3)]
    verifier, drafter = Verifier(target("llama"), num_pages=60, page_size=4), Broken(nonsense)
    with pytest.raises(error):
        list(decode(verifier, drafter, sessions))
    idle(verifier)
    assert not drafter.pending


@pytest.mark.parametrize("steps", range(1, 8))
def test_leaving_early_frees_everything(steps: int, target: Make, head: Make, idle: Make) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    sessions = [Session(str(i), (1, i), params, i) for i in range(3)]
    verifier = Verifier(target("llama"), num_pages=60, page_size=4)
    drafter = Drafter(head(target("llama")), DraftConfig(levels=2, beam=2, budget=5), num_pages=60)
    decoding = decode(verifier, drafter, sessions)
    for _ in range(steps):
        next(decoding)
    decoding.close()
    idle(verifier)
    idle(drafter)


def test_an_error_while_opening_closes_what_was_opened_before(target: Make, head: Make, idle: Make) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    good, bad = Session("good", (1, 2), params, 0), Session("bad", (1, 61), params, 0)
    verifier = Verifier(target("llama"), num_pages=60)
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=60)
    with pytest.raises(WealdError, match="token 61 is not in the target's vocabulary of 61"):
        list(decode(verifier, drafter, [good, bad]))
    idle(verifier)
    idle(drafter)


def test_the_same_id_twice_is_refused_and_leaves_nothing_open(target: Make, idle: Make) -> None:
    session = Session("a", (1, 2), SamplingParams(max_tokens=9, ignore_eos=True), 0)
    verifier = Verifier(target("llama"), num_pages=60)
    with pytest.raises(WealdError) as refused:
        list(decode(verifier, None, [session, session]))
    assert refused.value.code is ErrorCode.ALREADY_EXISTS
    idle(verifier)


def test_an_id_that_someone_else_has_open_is_refused_and_stays_open(
    plain: Make, target: Make, head: Make, idle: Make
) -> None:
    session = Session("a", (1, 2), SamplingParams(max_tokens=9, ignore_eos=True), 0)
    verifier = Verifier(target("llama"), num_pages=60)
    drafter = Drafter(head(target("llama")), DraftConfig(), num_pages=60)
    first = decode(verifier, drafter, [session])
    steps = [next(first), next(first)]
    with pytest.raises(WealdError) as refused:
        list(decode(verifier, drafter, [session]))
    assert refused.value.code is ErrorCode.ALREADY_EXISTS
    steps += first
    assert tuple(t for step in steps for t in step.outcome.tokens) == plain("llama").text(session)
    idle(verifier)
    idle(drafter)


def test_too_few_pages_end_the_run_with_an_error_and_free_everything(target: Make, idle: Make) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    verifier = Verifier(target("llama"), num_pages=10, page_size=4)
    with pytest.raises(WealdError) as refused:
        list(decode(verifier, None, [Session(str(i), (1, i), params, i) for i in range(2)]))
    assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
    idle(verifier)


def test_two_runs_can_share_one_verifier_and_one_drafter(
    plain: Make, target: Make, head: Make, idle: Make
) -> None:
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    sessions = [Session(str(i), tuple(range(1, 4 + i)), params, i) for i in range(4)]
    verifier = Verifier(target("llama"), num_pages=80)
    drafter = Drafter(head(target("llama")), DraftConfig(levels=3, beam=3, budget=9), num_pages=80)
    runs = [decode(verifier, drafter, sessions[:2]), decode(verifier, drafter, sessions[2:])]
    texts: dict[str, tuple[int, ...]] = {}
    while runs:
        for decoding in list(runs):
            if step := next(decoding, None):
                texts[step.session] = texts.get(step.session, ()) + step.outcome.tokens
            else:
                runs.remove(decoding)
    assert texts == {s.id: plain("llama").text(s) for s in sessions}
    idle(verifier)
    idle(drafter)
