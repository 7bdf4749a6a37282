import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoints import load_model
from services.engine.head import EagleHead, head_config
from services.engine.target import embeddings
from services.training.corpus import Sequences
from services.training.features import batches_by_length, corpus_features
from services.training.trainer import Trainer, TrainingConfig
from services.types.errors import WealdError

CONFIG = TrainingConfig(epochs=2, batch_tokens=64, warmup_steps=4, learning_rate=3e-3)


class KilledError(Exception):
    """Stands for a process that was killed."""


@pytest.fixture(scope="module")
def corpus() -> Sequences:
    """Sequences of 2 to 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 21, (60,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return Sequences(torch.randint(0, 15, (int(starts[-1]),), generator=generator), starts)


@pytest.fixture(scope="module")
def start(
    checkpoints: Any, corpus: Sequences, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Trainer]:
    """`start(out, config)` prepares or resumes the same run every time."""
    model = load_model(checkpoints.target, torch.float32, torch.device("cpu"), "sdpa")
    features = corpus_features(model, corpus, tmp_path_factory.mktemp("features") / "features.bin", 64)

    def trainer(out: Path, config: TrainingConfig = CONFIG) -> Trainer:
        torch.manual_seed(config.seed)
        head = EagleHead(head_config(model.config), *embeddings(model), attention="sdpa")
        head.start_from_features()
        out.mkdir(exist_ok=True)
        return Trainer(head, corpus, features, config, out)

    return trainer


def test_features_of_a_corpus_are_those_of_every_sequence_alone(
    checkpoints: Any, corpus: Sequences, tmp_path: Path
) -> None:
    model = load_model(checkpoints.target, torch.float32, torch.device("cpu"), "sdpa")
    features = corpus_features(model, corpus, tmp_path / "features.bin", 64)
    for number in range(len(corpus)):
        start, end = corpus.starts[number : number + 2].tolist()
        with torch.inference_mode():
            alone = model.get_decoder()(input_ids=corpus.tokens[None, start:end]).last_hidden_state[0]
        torch.testing.assert_close(features[start:end].float(), alone, rtol=0.02, atol=0.02)


def test_an_interrupted_feature_run_goes_on_where_it_stopped(
    checkpoints: Any, corpus: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checkpoints.target, torch.float32, torch.device("cpu"), "sdpa")
    whole = corpus_features(model, corpus, tmp_path / "whole.bin", 64)
    calls: list[int] = []
    decoder = model.get_decoder()
    forward = decoder.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:
            raise KilledError
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder, "forward", failing)
    with pytest.raises(KilledError):
        corpus_features(model, corpus, tmp_path / "parts.bin", 64)
    parts = corpus_features(model, corpus, tmp_path / "parts.bin", 64)
    assert torch.equal(whole, parts)
    assert len(calls) == len(batches_by_length(corpus, 64)) + 1


def test_features_of_another_corpus_in_the_same_place_are_computed_anew(
    checkpoints: Any, corpus: Sequences, tmp_path: Path
) -> None:
    model = load_model(checkpoints.target, torch.float32, torch.device("cpu"), "sdpa")
    corpus_features(model, corpus, tmp_path / "features.bin", 64)
    other = Sequences((corpus.tokens + 1) % 15, corpus.starts)
    again = corpus_features(model, other, tmp_path / "features.bin", 64)
    assert torch.equal(again, corpus_features(model, other, tmp_path / "fresh.bin", 64))


def test_batches_hold_every_sequence_once_within_their_tokens(corpus: Sequences) -> None:
    batches = batches_by_length(corpus, 64)
    assert sorted(s for batch in batches for s in batch) == list(range(len(corpus)))
    lengths = corpus.lengths()
    assert all(len(batch) * int(lengths[batch].max()) <= 64 for batch in batches)
    assert len(batches_by_length(corpus, 1)) == len(corpus)


def test_training_lowers_the_held_out_cross_entropy_at_both_levels(
    start: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = start(tmp_path)
    before = trainer.validate()
    trainer.run(validate_every=10)
    after = trainer.validate()
    assert after["ce_level1"] < before["ce_level1"]
    assert after["ce_level2"] < before["ce_level2"]


def test_a_run_that_was_killed_and_resumed_ends_like_one_that_was_not(
    start: Callable[..., Trainer], tmp_path: Path
) -> None:
    config = TrainingConfig(epochs=2, batch_tokens=64, warmup_steps=4, noise=0.0)
    whole = start(tmp_path / "whole", config)
    whole.run(validate_every=5)
    killed = start(tmp_path / "killed", config)
    train, steps = killed._train, []

    def until_killed(batch: list[int]) -> float:
        steps.append(batch)
        if len(steps) == 8:
            raise KilledError
        return train(batch)

    killed._train = until_killed  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        killed.run(validate_every=5)
    resumed = start(tmp_path / "killed", config)
    assert resumed.step == 5
    resumed.run(validate_every=5)
    assert resumed.step == whole.step == whole.total_steps
    for one, other in zip(whole.head.parameters(), resumed.head.parameters(), strict=True):
        assert torch.equal(one, other)
    strip = [{k: v for k, v in point.items() if k != "seconds"} for point in whole.curve]
    assert strip == [{k: v for k, v in point.items() if k != "seconds"} for point in resumed.curve]


def test_a_run_of_another_configuration_is_not_resumed(start: Callable[..., Trainer], tmp_path: Path) -> None:
    start(tmp_path).run()
    with pytest.raises(WealdError, match="another corpus or configuration"):
        start(tmp_path, TrainingConfig(epochs=3, batch_tokens=64, warmup_steps=4, learning_rate=3e-3))


def test_what_a_run_leaves_is_a_head_that_loads_with_its_curve(
    start: Callable[..., Trainer], checkpoints: Any, tmp_path: Path
) -> None:
    trainer = start(tmp_path)
    trainer.run()
    head = EagleHead.load(tmp_path, trainer.head.embedding, trainer.head.lm_head)
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(tensor, trainer.head.state_dict()[name].bfloat16().float())
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["curve"][-1]["step"] == trainer.total_steps
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
