"""Sampling parameters: what a request asks of the target's distribution."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.types.errors import invalid

SEED_BITS = 64
MAX_LOGPROBS = 20
MAX_SCHEMA = 1 << 16
"""Characters of a JSON schema at most."""
MIN_TEMPERATURE = 1e-5
"""Below it float32 logits divided by the temperature overflow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, in the words and ranges of vLLM and the OpenAI API.

    Raises `WealdError(INVALID_ARGUMENT)` on construction when a value is out of range.
    """

    max_tokens: int = 16
    """Output tokens to generate; exactly this many unless the text ends before."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are banned before this many output tokens, unless `json_schema` leaves
    nothing else.
    """
    temperature: float = 1.0
    """0 takes the most likely token; above 0 divides the logits."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches p."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    seed: int | None = None
    """Any integer, taken modulo 2**64; None means that one is drawn when the session opens."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurs in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of the named tokens; -inf bans, unless `json_schema` leaves nothing else."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the text; with `json_schema` only where the document can end."""
    ignore_eos: bool = False
    """Go on after end-of-sequence tokens (not after `stop_token_ids`)."""
    logprobs: int | None = None
    """Tell the log-probability of each committed token, and of so many most likely ones at its place."""
    json_schema: str | None = None
    """The text is one JSON document of this JSON schema; `max_tokens` can still cut it off."""

    def __post_init__(self) -> None:
        def require(condition: bool, what: str) -> None:
            if not condition:
                raise invalid(what)

        def number(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            require(low <= value <= high, f"{name} must be in [{low:g}, {high:g}], got {value}")

        require(self.max_tokens >= 0, f"max_tokens must not be negative, got {self.max_tokens}")
        require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be in [0, max_tokens={self.max_tokens}], got {self.min_tokens}",
        )
        require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            f"temperature must be 0 (greedy) or a finite number from {MIN_TEMPERATURE:g} on, "
            f"got {self.temperature}",
        )
        require(self.top_k >= 0, f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        number("min_p", 0, 1)
        number("frequency_penalty", -2, 2)
        number("presence_penalty", -2, 2)
        number("repetition_penalty", 0.01, 100)
        for token, bias in self.logit_bias.items():
            require(token >= 0, f"logit_bias names token {token}; token ids start at 0")
            require(
                bias == -math.inf or -100 <= bias <= 100,
                f"logit_bias of token {token} must be in [-100, 100], or -inf to ban it, got {bias}",
            )
        for token in self.stop_token_ids:
            require(token >= 0, f"stop_token_ids names token {token}; token ids start at 0")
        if self.logprobs is not None:
            number("logprobs", 0, MAX_LOGPROBS)
        if self.json_schema is not None:
            require(
                len(self.json_schema) <= MAX_SCHEMA,
                f"json_schema has {len(self.json_schema)} characters; shorten it to {MAX_SCHEMA}",
            )
            require(
                not self.ignore_eos,
                "json_schema and ignore_eos exclude each other: a document ends where it is complete; "
                "leave one of them out",
            )

    @property
    def penalised(self) -> bool:
        """Whether the tokens seen so far change the distribution."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1
