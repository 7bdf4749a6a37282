"""A session: one generation, from its prompt to its finish."""

from dataclasses import dataclass
from enum import StrEnum

from services.types.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a session ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Session:
    """What a generation is a function of, besides the target (DESIGN section 4)."""

    id: str
    prompt: tuple[int, ...]
    """Token ids; at least one."""
    params: SamplingParams
    seed: int
    """The seed actually used: the request's, or a random one."""
    output: tuple[int, ...] = ()
    """Tokens committed before the session was opened here; it goes on behind them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return self.prompt + self.output
