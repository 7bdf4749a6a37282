"""The real model: SmolLM2-135M-Instruct with the head that Weald trained for it, in float32."""

from typing import Any

import pytest

from services.local.generation import Generation, Result
from services.local.models import Models, load
from services.types.configuration import DraftConfig, TreeShape
from services.types.sampling import SamplingParams
from services.types.session import Session

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Models:
    """Target, tokenizer and packaged head."""
    return load("smollm2-135m", None, speculative=True, device="cpu", dtype="float32")


def answer(models: Models, config: DraftConfig | None, **params: Any) -> Result:
    """The answer to one question of a few dozen tokens."""
    prompt = tuple(models.chat("Name three animals that live in the sea, and say what they eat."))
    session = Session("0", prompt, SamplingParams(max_tokens=40, **params), 7)
    generation = Generation(models.tokenizer, session.seed)
    for step in models.decode(session, config):
        generation.add(step)
    return generation.result()


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}],
    ids=["greedy", "sampled", "processed"],
)
def test_trees_of_every_shape_give_the_text_of_plain_decoding(
    smollm2: Models, params: dict[str, Any]
) -> None:
    plain = answer(smollm2, None, **params)
    assert plain.tau is None
    for shape in TreeShape:
        drafted = answer(smollm2, DraftConfig(shape), **params)
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert drafted.tau is not None


def test_the_packaged_head_saves_a_third_of_the_target_steps(smollm2: Models) -> None:
    drafted = answer(smollm2, DraftConfig(), temperature=0.0)
    assert drafted.tau is not None
    assert drafted.tau > 1.5
    assert drafted.rounds < len(drafted.token_ids) / 1.5
