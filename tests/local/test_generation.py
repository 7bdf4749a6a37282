"""Steps become one result, however the rounds group the tokens."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from services.gateway.tokenizer import Tokenizer
from services.local.decoder import Step
from services.local.generation import Generation, Result
from services.types.errors import WealdError
from services.types.messages import Moved
from services.types.outcome import Outcome
from services.types.replica import ReplicaKind
from services.types.session import FinishReason
from services.types.tree import DraftTree

END = 256


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, by its value; then the end token."""
    alphabet = {char: byte for byte, char in _characters()}
    core = tokenizers.Tokenizer(models.BPE(alphabet, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(core, frozenset({END}), {}, None)


def _characters() -> Iterator[tuple[int, str]]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    for byte in range(256):
        yield byte, chr(byte if byte in printable else next(spare))


TOKENIZER = byte_tokenizer()


def steps(groups: Sequence[Sequence[int]], finish: FinishReason = FinishReason.LENGTH) -> Iterator[Step]:
    """A prefill of the first group, then a round for each other one, from a chain with one node too many."""
    for index, group in enumerate(groups):
        tree = DraftTree.chain([0] * (len(group) + 1)) if index else None
        accepted = tuple(range(1, len(group)))
        ended = finish if index == len(groups) - 1 else None
        outcome = Outcome(tuple(group), accepted, len(group) + 1 if tree else 0, ended)
        yield Step("s", tree, outcome, 0.25 if tree else 0.0, 0.5)


def gathered(
    groups: Sequence[Sequence[int]], stops: Sequence[str] = (), finish: FinishReason = FinishReason.LENGTH
) -> tuple[Result, str]:
    """The result, and what was handed out piece by piece."""
    generation = Generation(TOKENIZER, 7, stops)
    streamed = ""
    for step in steps(groups, finish):
        streamed += generation.add(step)
        if generation.finish:
            break
    return generation.result(), streamed


def grouped(tokens: Sequence[int], cuts: set[int]) -> list[Sequence[int]]:
    """The tokens as a first one and rounds that end where it is said."""
    edges = [0, 1, *sorted(cut for cut in cuts if 1 < cut < len(tokens)), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges) if a < b]


@given(
    text=st.text(st.sampled_from("ab 木🌲"), min_size=1, max_size=20),
    cuts=st.sets(st.integers(2, 40), max_size=10),
    stops=st.lists(st.text(st.sampled_from("ab 木🌲"), min_size=1, max_size=3), max_size=3),
)
def test_text_tokens_and_finish_do_not_depend_on_how_rounds_group_the_tokens(
    text: str, cuts: set[int], stops: list[str]
) -> None:
    tokens = list(text.encode())
    result, streamed = gathered(grouped(tokens, cuts), stops)
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    if found:
        end, cut = min(found)
        assert result.text == text[:cut]
        assert result.token_ids == tuple(text[:end].encode())
        assert result.finish_reason is FinishReason.STOP
    else:
        assert result.text == text
        assert result.token_ids == tuple(tokens)
        assert result.finish_reason is FinishReason.LENGTH
    assert streamed == result.text


def test_the_token_that_ends_the_text_is_kept_and_has_no_text() -> None:
    result, _ = gathered([b"a", [98, END]], finish=FinishReason.STOP)
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (97, 98, END), FinishReason.STOP)


def test_a_stop_token_with_text_of_its_own_ends_the_text_before_it() -> None:
    assert gathered([b"a", b"b!"], finish=FinishReason.STOP)[0].text == "ab"


def test_an_end_token_that_is_ignored_stands_in_the_middle_without_text() -> None:
    assert gathered([b"a", [END, 98]])[0].text == "ab"


def test_a_stop_string_inside_a_round_drops_the_tokens_behind_it() -> None:
    result, streamed = gathered([b"a", b"bcdef", b"gh"], ["cd"])
    assert (result.text, result.token_ids) == ("ab", tuple(b"abcd"))
    assert streamed == "ab"
    assert (result.rounds, result.tau) == (1, 3.0)


def test_a_stop_string_that_the_last_token_completes_is_the_reason_of_the_finish() -> None:
    assert gathered([b"a", b"bc"], ["bc"])[0].finish_reason is FinishReason.STOP


def test_the_beginning_of_a_stop_string_is_text_when_the_session_ends_there() -> None:
    result, streamed = gathered([b"a", b"bc"], ["cd"])
    assert result.text == streamed == "abc"


def test_a_character_that_stays_unfinished_is_shown_as_such_at_the_end() -> None:
    assert gathered([b"a", "木".encode()[:2]])[0].text == "a\ufffd"


def test_rounds_nodes_and_times_are_summed_without_roots_and_prefill() -> None:
    result, _ = gathered([b"a", b"bcd", b"ef"])
    assert (result.rounds, result.tau) == (2, 2.5)
    assert (result.nodes_drafted, result.nodes_verified) == (3 + 2, 3 + 2)
    assert (result.timings.draft_s, result.timings.verify_s) == (0.5, 1.5)
    assert result.timings.total_s > 0
    assert result.seed == 7


def test_plain_steps_count_as_rounds_but_not_in_tau() -> None:
    generation = Generation(TOKENIZER, 7)
    generation.add(Step("s", None, Outcome((97,), (), 0, None), 0.0, 0.0))
    generation.add(Step("s", DraftTree.root(97), Outcome((98,), (), 1, None), 0.0, 0.0))
    assert generation.tau is None
    generation.add(Step("s", DraftTree.chain([98, 99]), Outcome((99, 100), (1,), 2, None), 0.0, 0.0))
    generation.add(
        Step("s", DraftTree.chain([100, 1]), Outcome((101,), (), 1, FinishReason.LENGTH), 0.0, 0.0)
    )
    result = generation.result()
    assert (result.rounds, result.tau, result.nodes_drafted, result.nodes_verified) == (3, 2.0, 2, 1)


@given(
    text=st.text(st.sampled_from("ab 木🌲"), min_size=1, max_size=20),
    cuts=st.sets(st.integers(2, 40), max_size=10),
    stops=st.lists(st.text(st.sampled_from("ab 木🌲"), min_size=1, max_size=3), max_size=2),
    known=st.integers(0, 40),
)
def test_who_has_the_text_of_the_first_tokens_is_told_what_became_final_behind_them(
    text: str, cuts: set[int], stops: list[str], known: int
) -> None:
    tokens = list(text.encode())
    earlier, shown = Generation(TOKENIZER, 7, stops), ""
    for token in tokens[: min(known, len(tokens) - 1)]:
        shown += earlier.add(Step("s", None, Outcome((token,), (), 0, None), 0.0, 0.0))
        if earlier.finish:
            return
    known = min(known, len(tokens) - 1)
    generation = Generation(TOKENIZER, 7, stops, known=known)
    for step in steps(grouped(tokens, cuts)):
        shown += generation.add(step)
        if generation.finish:
            break
    assert shown == generation.result().text == gathered([tokens], stops)[0].text


def test_the_session_is_named_and_only_moves_from_lost_replicas_are_recoveries() -> None:
    generation = Generation(TOKENIZER, 7, session="id")
    for lost in (True, False, True):
        generation.moved(Moved(ReplicaKind.DRAFT, "a:1", lost))
    generation.add(next(steps([b"a"])))
    result = generation.result()
    assert (result.session, result.recoveries) == ("id", 2)
    here, _ = gathered([b"a"])
    assert (here.session, here.recoveries) == (None, 0)


def test_a_session_that_was_allowed_no_token_has_an_empty_result() -> None:
    result, streamed = gathered([()])
    assert (result.text, result.token_ids, result.rounds, result.tau) == ("", (), 0, None)
    assert streamed == ""


def test_there_is_no_result_before_the_finish() -> None:
    with pytest.raises(ValueError, match="not finished"):
        Generation(TOKENIZER, 7).result()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(WealdError, match="must not be empty"):
        Generation(TOKENIZER, 7, [""])
