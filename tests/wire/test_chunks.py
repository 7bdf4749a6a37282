from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.types.errors import invalid
from services.types.messages import Failure, FeatureBlock, Features, Load, Replies, Reply, StepTimings
from services.types.outcome import Outcome
from services.wire.chunks import CHUNK_BYTES, pieces, split
from services.wire.convert import response_to_proto
from services.wire.transport import MESSAGE_LIMIT


def block(start: int, rows: int, width: int) -> FeatureBlock:
    """Float64 rows that differ from each other."""
    data = b"".join(row.to_bytes(8, "little") * width for row in range(rows))
    return FeatureBlock(start, rows, width, "float64", data)


def joined(blocks: list[FeatureBlock]) -> FeatureBlock:
    """One block of consecutive ones."""
    whole = blocks[0]
    for part in blocks[1:]:
        assert part.start == whole.start + whole.rows
        assert (part.width, part.dtype) == (whole.width, whole.dtype)
        whole = replace(whole, rows=whole.rows + part.rows, data=whole.data + part.data)
    return whole


def replies_of(*features: FeatureBlock | None) -> Replies:
    """Replies that want trees, with the given features."""
    return Replies(
        tuple(
            Reply(f"s{i}", 1, 0, 9, Outcome((1,), (), 1, None), 1, True, block, 0)
            for i, block in enumerate(features)
        ),
        StepTimings(1, 2, 3, 4),
        Load(1, 2, 3),
    )


@given(start=st.integers(0, 99), rows=st.integers(1, 40), width=st.integers(1, 40_000))
def test_chunks_are_within_the_limit_and_together_the_block(start: int, rows: int, width: int) -> None:
    whole = block(start, rows, width)
    chunks = split(whole)
    assert joined(chunks) == whole
    for chunk in chunks:
        assert len(chunk.data) == chunk.rows * width * 8 <= CHUNK_BYTES
    assert len(chunks) == -(-rows // (CHUNK_BYTES // (8 * width)))


def test_a_row_wider_than_a_chunk_travels_alone() -> None:
    assert [chunk.rows for chunk in split(block(0, 2, CHUNK_BYTES // 8 + 1))] == [1, 1]


def test_no_rows_are_no_chunks() -> None:
    assert split(FeatureBlock(5, 0, 4, "float32", b"")) == []


def test_features_of_a_long_prefill_travel_in_chunks() -> None:
    features = Features("s", 3, block(7, 600, 1024))
    sent = pieces(features)
    assert len(sent) > 1
    assert all(isinstance(piece, Features) and (piece.session, piece.epoch) == ("s", 3) for piece in sent)
    assert joined([piece.block for piece in sent if isinstance(piece, Features)]) == features.block


@pytest.mark.parametrize("response", [replies_of(block(0, 8, 1024), None), Failure("s", 1, invalid("why"))])
def test_what_is_small_enough_travels_as_it_is(response: Replies | Failure) -> None:
    assert pieces(response) == [response]


def test_features_too_large_for_the_replies_travel_ahead_of_them() -> None:
    blocks = [block(9 + i, 200, 1024) for i in range(3)]
    replies = replies_of(blocks[0], None, *blocks[1:])
    *ahead, last = pieces(replies)
    assert last == replies_of(None, None, None, None)
    for session, features in (("s0", blocks[0]), ("s2", blocks[1]), ("s3", blocks[2])):
        own = [piece.block for piece in ahead if isinstance(piece, Features) and piece.session == session]
        assert joined(own) == features
    assert all(response_to_proto(piece).ByteSize() < MESSAGE_LIMIT / 2 for piece in [*ahead, last])
