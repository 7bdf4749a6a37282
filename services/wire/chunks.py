"""Features in pieces that fit the wire."""

from dataclasses import replace

from services.types.messages import FeatureBlock, Features, Replies, Response

CHUNK_BYTES = 1024 * 1024
"""Bytes of features in one message at most; far below the message limit."""


def split(block: FeatureBlock) -> list[FeatureBlock]:
    """The same rows in blocks of at most `CHUNK_BYTES`, in order of position, but at least one row each."""
    row = len(block.data) // max(block.rows, 1)
    step = max(CHUNK_BYTES // max(row, 1), 1)
    return [
        FeatureBlock(
            block.start + first,
            min(step, block.rows - first),
            block.width,
            block.dtype,
            block.data[first * row : (first + step) * row],
        )
        for first in range(0, block.rows, step)
    ]


def pieces(response: Response) -> list[Response]:
    """Responses that say the same and fit the wire each.

    Features become chunks. Replies whose features are too large for one message send them all ahead.
    """
    match response:
        case Features(session, epoch, block):
            return [Features(session, epoch, chunk) for chunk in split(block)]
        case Replies(replies) if sum(len(r.features.data) for r in replies if r.features) > CHUNK_BYTES:
            ahead = [
                Features(reply.session, reply.epoch, chunk)
                for reply in replies
                if reply.features
                for chunk in split(reply.features)
            ]
            bare = tuple(replace(reply, features=None) for reply in replies)
            return [*ahead, replace(response, replies=bare)]
    return [response]
