"""What verifying one tree did to its session."""

from dataclasses import dataclass

from services.types.session import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the target found a committed token, before all processors."""

    logprob: float
    """Natural logarithm of its probability under the softmax of the raw logits."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens at its place with theirs: most likely first, ties by the lower token id."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one round for one session."""

    tokens: tuple[int, ...]
    """Tokens committed by this round: the accepted path, then the bonus token, cut at the finish."""
    accepted: tuple[int, ...]
    """Node indices of the accepted path, root excluded; parallel to the first tokens."""
    verified: int
    """Nodes that stood in the target step, root included."""
    finish: FinishReason | None
    """Set when the session is over."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Parallel to `tokens` where the session asks for them."""
