"""The head computes the same on pages as in one pass, and loads only what fits its target."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from services.engine.attention import Batch, causal_segment
from services.engine.head import EagleHead, head_config
from services.types.errors import ErrorCode, WealdError

Make = Callable[..., Any]

LAYER = {
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}
SOME = torch.tensor([3, 0, 60, 17, 18, 19, 40])
"""A draft vocabulary, in an order of its own."""
CONFIGS: dict[str, dict[str, Any]] = {
    "of the target's sizes": {},
    "beyond its own context": {"max_position_embeddings": 16},
    "with another RoPE": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "without grouped queries": {"num_key_value_heads": 4},
    "without bias": {"bias": False},
    "with biased attention": {"attention_bias": True},
}


@pytest.fixture
def entries() -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """`entries(n, seed)`: random features `[n, H]` and tokens `[n]`."""

    def entries(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(count, 32, generator=generator, dtype=torch.float64)
        return features, torch.randint(61, (count,), generator=generator)

    return entries


def one_pass(twin: EagleHead, features: Tensor, tokens: Tensor) -> Tensor:
    """Predictions `[n, H]` of a head that runs on transformers' own attention."""
    predicted: Tensor = twin(features[None], tokens[None], torch.arange(len(tokens))[None])[0]
    return predicted


@pytest.mark.parametrize("config", CONFIGS)
def test_extending_in_any_chunks_equals_one_pass_over_the_whole_prefix(
    config: str, target: Make, head: Make, entries: Make
) -> None:
    rng = random.Random(config)
    paged = head(target("llama"), **CONFIGS[config])
    twin = head(target("llama"), attention="sdpa", **CONFIGS[config])
    cache = paged.new_cache(90, 4)
    pages = rng.sample(range(90), 90)
    sessions = [
        (*entries(n, n), cache.slots([pages.pop() for _ in range(-(-n // 4))], 0, n)) for n in (150, 5, 70)
    ]
    done = [0, 0, 0]
    predicted: list[list[Tensor]] = [[], [], []]
    while going := [i for i, (_, tokens, _) in enumerate(sessions) if done[i] < len(tokens)]:
        some = rng.sample(going, rng.randint(1, len(going)))
        ends = [min(len(sessions[i][1]), done[i] + rng.choice([1, 2, 7, 80])) for i in some]
        rows = [(sessions[i], done[i], end) for i, end in zip(some, ends, strict=True)]
        batch = Batch([causal_segment(slots[:end], end - start) for (*_, slots), start, end in rows], cache)
        features = torch.cat([features[start:end] for (features, *_), start, end in rows])
        tokens = torch.cat([tokens[start:end] for (_, tokens, _), start, end in rows])
        output = paged(features[None], tokens[None], batch.positions[None], batch)[0]
        counts = [end - start for _, start, end in rows]
        for i, end, chunk in zip(some, ends, output.split(counts), strict=True):
            predicted[i].append(chunk)
            done[i] = end
    for (features, tokens, _), chunks in zip(sessions, predicted, strict=True):
        expected = one_pass(twin, features, tokens)
        torch.testing.assert_close(torch.cat(chunks), expected, rtol=0, atol=1e-6)


def by_hand(tensors: dict[str, Tensor], embedding: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
    """EAGLE's head from its public tensors: 4 heads over 2 of keys and values, each of size 8."""
    w = {key.removeprefix("layers.0.").removesuffix(".weight"): v for key, v in tensors.items()}
    n = len(tokens)
    hidden = torch.cat([embedding[tokens], features], -1) @ w["fc"].T + w["fc.bias"]
    angles = torch.arange(n)[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)

    def turned(x: Tensor) -> Tensor:
        first, second = x[..., :4], x[..., 4:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def heads(name: str) -> Tensor:
        return (hidden @ w[f"self_attn.{name}_proj"].T).view(n, -1, 8)

    keys, values = turned(heads("k")).repeat_interleave(2, 1), heads("v").repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", turned(heads("q")), keys) / 8**0.5
    scores += torch.full((n, n), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(n, 32)
    hidden = hidden + attended @ w["self_attn.o_proj"].T
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["post_attention_layernorm"]
    gate, up = (normed @ w[f"mlp.{name}_proj"].T for name in ("gate", "up"))
    return hidden + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj"].T


def test_the_public_tensors_mean_what_they_mean_to_eagle(
    target: Make, head: Make, entries: Make, tmp_path: Path
) -> None:
    head(target("llama")).save(tmp_path, torch.float64)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding, lm_head = target("llama").embeddings()
    loaded = EagleHead.load(tmp_path, embedding, lm_head, attention="sdpa")
    features, tokens = entries(12)
    expected = by_hand(tensors, embedding, features, tokens)
    torch.testing.assert_close(one_pass(loaded, features, tokens), expected, rtol=0, atol=1e-5)


def test_positions_far_beyond_the_configured_context_differ_from_one_another(
    target: Make, head: Make, entries: Make
) -> None:
    twin = head(target("llama"), attention="sdpa", max_position_embeddings=16)
    features, tokens = entries(40)
    late = twin(features[None], tokens[None], 5000 + torch.arange(40)[None])[0]
    torch.testing.assert_close(late, one_pass(twin, features, tokens), rtol=0, atol=5e-3)
    stretched = twin(features[None], tokens[None], 5000 + 2 * torch.arange(40)[None])[0]
    assert (late - stretched).abs().max() > 0.1


def test_a_draft_vocabulary_gives_the_targets_distribution_over_its_own_tokens(
    target: Make, head: Make, entries: Make
) -> None:
    features = entries(9)[0]
    everything = head(target("llama"))
    some = head(target("llama"), SOME)
    assert everything.vocabulary.tolist() == list(range(61))
    assert some.vocabulary.tolist() == SOME.tolist()
    scores = features @ target("llama").embeddings()[1].T
    torch.testing.assert_close(everything.logits(features), scores)
    torch.testing.assert_close(some.logits(features), scores[:, SOME])


def test_log_probabilities_of_a_half_precision_head_are_float32(target: Make, head: Make) -> None:
    half = head(target("llama")).to(torch.bfloat16)
    assert half.logits(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("vocabulary", [None, SOME])
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_saved_in_the_public_layout_loads_as_the_same_head(
    bias: bool, vocabulary: Tensor | None, target: Make, head: Make, entries: Make, tmp_path: Path
) -> None:
    saved = head(target("llama"), vocabulary, "sdpa", bias=bias)
    saved.save(tmp_path, torch.float64)
    keys = (
        {"fc.weight", *LAYER}
        | ({"fc.bias"} if bias else set())
        | ({"d2t"} if vocabulary is not None else set())
    )
    assert load_file(tmp_path / "model.safetensors").keys() == keys
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bias"] is bias
    assert config["num_hidden_layers"] == 1
    assert config.get("draft_vocab_size") == (None if vocabulary is None else 7)
    loaded = EagleHead.load(tmp_path, *target("llama").embeddings(), attention="sdpa")
    assert loaded.fc.weight.dtype == torch.float64
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(loaded.vocabulary, saved.vocabulary)
    features, tokens = entries(20)
    assert torch.equal(one_pass(loaded, features, tokens), one_pass(saved, features, tokens))
    assert torch.equal(loaded.logits(features), saved.logits(features))


@pytest.mark.parametrize(
    ("kind", "more"), [("mistral", set()), ("qwen2", {f"layers.0.self_attn.{n}_proj.bias" for n in "qkv"})]
)
def test_a_head_can_be_a_layer_of_another_family(
    kind: str, more: set[str], target: Make, entries: Make, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = AutoConfig.for_model(kind, hidden_size=32, intermediate_size=40, vocab_size=61, **heads)
    EagleHead(config, *target("llama").embeddings()).save(tmp_path, torch.float32)
    assert load_file(tmp_path / "model.safetensors").keys() == {"fc.weight", "fc.bias", *LAYER, *more}
    loaded = EagleHead.load(tmp_path, *target("llama").embeddings(), attention="sdpa")
    assert loaded.config.model_type == kind
    assert one_pass(loaded, *entries(5)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loaded_head_has_the_dtype_of_the_target_but_exact_rotary_frequencies(
    dtype: torch.dtype, target: Make, head: Make, tmp_path: Path
) -> None:
    head(target("llama")).save(tmp_path, torch.float32)
    embedding, lm_head = (tensor.to(dtype) for tensor in target("llama").embeddings())
    loaded = EagleHead.load(tmp_path, embedding, lm_head)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    frequencies = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(loaded.rotary.inv_freq.float(), frequencies, rtol=1e-6, atol=0)


@pytest.fixture
def saved(target: Make, head: Make, tmp_path: Path) -> Path:
    """A saved head with a bias."""
    head(target("llama")).save(tmp_path, torch.float32)
    return tmp_path


def edit(saved: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    config = json.loads((saved / "config.json").read_text()) | changes
    (saved / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(saved: Path, **changes: Tensor | None) -> None:
    """Change tensors; None removes one."""
    tensors = load_file(saved / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, saved / "model.safetensors")


@pytest.fixture
def load(target: Make) -> Callable[[Path], EagleHead]:
    """Load a head for the llama target."""
    return lambda directory: EagleHead.load(directory, *target("llama").embeddings())


def assert_refused(load: Make, saved: Path, *sides: str) -> None:
    """Loading fails with a sentence that names all of these."""
    with pytest.raises(WealdError) as refused:
        load(saved)
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT
    for side in sides:
        assert side in refused.value.message


def test_a_config_without_the_key_bias_means_a_bias(saved: Path, load: Make) -> None:
    edit(saved, bias=None)
    assert load(saved).fc.bias is not None
    rewrite(saved, fc__bias=None)
    assert_refused(load, saved, "lacks fc.bias", "set bias to false in its config.json")


def test_a_config_without_model_type_means_llama(saved: Path, load: Make) -> None:
    edit(saved, model_type=None, architectures=None)
    assert load(saved).config.model_type == "llama"


def test_a_bias_that_the_config_denies_is_refused(saved: Path, load: Make) -> None:
    edit(saved, bias=False)
    assert_refused(load, saved, "unknown tensors: fc.bias")


def test_tensors_that_belong_to_the_target_are_not_needed_and_not_used(
    saved: Path, load: Make, target: Make
) -> None:
    rewrite(saved, embed_tokens__weight=torch.zeros(61, 32), lm_head__weight=torch.zeros(61, 32))
    embedding, lm_head = target("llama").embeddings()
    assert torch.equal(load(saved).embedding, embedding)
    assert torch.equal(load(saved).lm_head, lm_head)


def test_another_hidden_size_names_both(saved: Path, load: Make) -> None:
    edit(saved, hidden_size=64)
    assert_refused(load, saved, "the head's hidden size is 64, the target's is 32")


def test_another_vocabulary_names_both(saved: Path, load: Make) -> None:
    edit(saved, vocab_size=100)
    assert_refused(load, saved, "the head's vocabulary has 100 tokens, the target's has 61")


def test_missing_tensors_are_named(saved: Path, load: Make) -> None:
    rewrite(saved, layers__0__mlp__up_proj__weight=None)
    assert_refused(load, saved, str(saved), "lacks layers.0.mlp.up_proj.weight")


def test_unknown_tensors_are_named(saved: Path, load: Make) -> None:
    rewrite(saved, layers__0__input_layernorm__weight=torch.ones(32), norm__weight=torch.ones(32))
    assert_refused(load, saved, "unknown tensors: layers.0.input_layernorm.weight, norm.weight")


def test_a_misshapen_tensor_names_both_shapes(saved: Path, load: Make) -> None:
    rewrite(saved, fc__weight=torch.zeros(32, 96))
    assert_refused(load, saved, "fc.weight has shape [32, 96]", "config.json asks for [32, 64]")


def test_other_layer_sizes_name_both_shapes(saved: Path, load: Make) -> None:
    edit(saved, intermediate_size=50)
    assert_refused(load, saved, "has shape", "[48, 32]", "[50, 32]")


def test_a_draft_vocabulary_must_be_what_the_config_declares(saved: Path, load: Make) -> None:
    edit(saved, draft_vocab_size=7)
    assert_refused(load, saved, "draft_vocab_size 7", "no d2t")
    rewrite(saved, d2t=torch.zeros(9, dtype=torch.int64))
    assert_refused(load, saved, "draft_vocab_size 7", "a d2t of 9 tokens")
    edit(saved, draft_vocab_size=9)
    assert load(saved).vocabulary.tolist() == list(range(9))


@pytest.mark.parametrize("offset", [59, -3])
def test_a_draft_vocabulary_beyond_the_targets_is_refused(offset: int, saved: Path, load: Make) -> None:
    edit(saved, draft_vocab_size=3)
    rewrite(saved, d2t=torch.tensor([0, 0, offset]))
    assert_refused(load, saved, "d2t", "61")


def test_an_unknown_model_type_is_refused(saved: Path, load: Make) -> None:
    edit(saved, model_type="no-such-model")
    assert_refused(load, saved, "unusable config.json", "no-such-model")


def test_a_directory_without_config_or_weights_is_refused(tmp_path: Path, load: Make) -> None:
    assert_refused(load, tmp_path, "no readable config.json")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 61, "hidden_size": 32}))
    assert_refused(load, tmp_path, "neither model.safetensors nor pytorch_model.bin")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_target_in_the_place_of_a_head_is_refused(
    kind: str, load: Make, model: Make, tmp_path: Path
) -> None:
    model(kind).save_pretrained(tmp_path)
    assert_refused(load, tmp_path, "lacks fc.bias, fc.weight")


def test_a_public_head_of_torch_format_loads(saved: Path, load: Make) -> None:
    expected = load(saved).state_dict()
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(tensors | {"embed_tokens.weight": torch.zeros(61, 32)}, saved / "pytorch_model.bin")
    loaded = load(saved).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_a_new_head_for_any_target_has_its_sizes_and_starts_from_its_features(
    kinds: dict[str, Any], model: Make, entries: Make
) -> None:
    for kind in kinds:
        config = head_config(model(kind).config)
        embedding = torch.zeros(61, 32)
        new = EagleHead(config, embedding, embedding, attention="sdpa").requires_grad_(False)
        new.start_from_features()
        features, tokens = entries(6)
        both = torch.cat([torch.zeros(6, 32), features.float()], -1)
        assert torch.equal(new.fc(both), features.float())
        assert one_pass(new, features.float(), tokens).isfinite().all()
