"""A target loads from any layout of files, and what it cannot run it refuses by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from services.engine.attention import Batch, causal_segment
from services.engine.target import Target
from services.types.errors import ErrorCode, WealdError

Make = Callable[..., Any]
CPU = torch.device("cpu")


@pytest.fixture
def logits() -> Callable[[Target], Tensor]:
    """A target's logits for some tokens."""

    def logits(target: Target) -> Tensor:
        cache = target.new_cache(4, 4)
        tokens = torch.tensor([5, 17, 3, 60, 8])
        batch = Batch([causal_segment(cache.slots([2, 0], 0, 5), 5)], cache)
        return target.forward(tokens, batch, torch.arange(5))

    return logits


def expected(model: Any) -> Tensor:
    with torch.inference_mode():
        scores: Tensor = model(input_ids=torch.tensor([[5, 17, 3, 60, 8]]), use_cache=False).logits[0]
    return scores


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["one file", "several files"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_target_loads_from_one_file_or_several_tied_or_not(
    kind: str, tied: bool, shards: str, model: Make, logits: Make, tmp_path: Path
) -> None:
    built = model(kind, tie_word_embeddings=tied)
    built.save_pretrained(tmp_path, max_shard_size="5KB" if shards == "several files" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "several files")
    target = Target.load(tmp_path, torch.float64, CPU)
    torch.testing.assert_close(logits(target), expected(built), rtol=0, atol=1e-5)
    embedding, lm_head = target.embeddings()
    assert torch.equal(embedding, built.get_input_embeddings().weight)
    assert torch.equal(lm_head, built.get_output_embeddings().weight)
    assert (embedding is lm_head) == tied


def test_a_target_knows_its_shapes_and_takes_the_dtype_asked_for(
    model: Make, logits: Make, tmp_path: Path
) -> None:
    model("qwen3").save_pretrained(tmp_path)
    target = Target.load(tmp_path, torch.bfloat16, CPU)
    assert (target.hidden_size, target.vocab_size, target.context_length) == (32, 61, 256)
    assert target.dtype == logits(target).dtype == torch.bfloat16
    assert target.device == CPU
    assert target.token_bytes == 2 * (2 * 2 * 2 * 16 + 32)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_a_target_alone_runs_in_inference_mode(model: Make, logits: Make) -> None:
    target = Target(model("llama"))
    assert logits(target).is_inference()
    target.beat()


def test_a_model_without_grouped_queries_and_rotary_positions_runs_too(logits: Make) -> None:
    config = GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    gpt2 = GPT2LMHeadModel(config).to(torch.float64).eval()
    wanted = expected(gpt2)
    torch.testing.assert_close(logits(Target(gpt2)), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (2, "as the config", {2}),
        ([2, 7], "as the config", {2, 7}),
        (2, [5, 9], {5, 9}),
        (2, 0, {0}),
        (2, None, {2}),
        (0, None, {0}),
        (None, None, set()),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_else_of_the_model_config(
    config: Any, generation: Any, ends: set[int], model: Make
) -> None:
    built = model("llama", eos_token_id=config)
    if generation != "as the config":
        built.generation_config.eos_token_id = generation
    assert Target(built).eos_token_ids == ends


def test_end_tokens_beyond_the_vocabulary_are_none(model: Make) -> None:
    assert Target(model("llama", eos_token_id=[2, 61, 99])).eos_token_ids == {2}


def assert_unsupported(model: Any, *says: str) -> None:
    with pytest.raises(WealdError) as refused:
        Target(model)
    assert refused.value.code is ErrorCode.UNSUPPORTED_MODEL
    for part in (type(model).__name__, "cannot be a target", *says, "such as Llama, Qwen, Mistral or Gemma"):
        assert part in refused.value.message


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_position_is_refused_by_name(rope: str, model: Make) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0} | (
        factors if rope == "longrope" else {}
    )
    assert_unsupported(model("llama", rope_parameters=parameters), f"RoPE of type {rope}")


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("mamba", {"state_size": 4}, "its attention cannot be replaced"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}, "layers of type linear_attention"),
        ("deepseek_v3", {}, "kv_lora_rank"),
        ("bloom", {}, "its attention cannot be replaced"),
        ("diffllama", {}, "layer 0 attends more than once"),
        ("nemotron", {}, "does not take our batch"),
        (
            "gpt_oss",
            {
                "head_dim": 8,
                "num_local_experts": 2,
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "attention sinks",
        ),
    ],
)
def test_models_that_are_not_all_softmax_attention_are_refused_by_name(
    kind: str, options: dict[str, Any], says: str
) -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(kind, **(sizes | options))
    assert_unsupported(AutoModelForCausalLM.from_config(config), says)


def test_an_unsupported_model_on_disk_is_refused_by_name_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", vocab_size=61, hidden_size=32, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(WealdError, match="MambaForCausalLM") as refused:
        Target.load(tmp_path, torch.float32, CPU)
    assert refused.value.code is ErrorCode.UNSUPPORTED_MODEL


@pytest.fixture
def saved(model: Make, tmp_path: Path) -> Path:
    """A saved target."""
    model("llama").save_pretrained(tmp_path)
    return tmp_path


def assert_incompatible(saved: Path, *says: str) -> None:
    with pytest.raises(WealdError) as refused:
        Target.load(saved, torch.float32, CPU)
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT
    for part in (str(saved), *says):
        assert part in refused.value.message


def test_a_target_that_lacks_tensors_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    assert_incompatible(saved, "lacks 2 tensors, such as model.layers.1.mlp.up_proj.weight")


def test_a_target_whose_tensors_do_not_fit_its_config_is_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text()) | {"intermediate_size": 50}
    (saved / "config.json").write_text(json.dumps(config))
    assert_incompatible(saved, "cannot be loaded")


def test_a_directory_without_a_target_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert_incompatible(saved, "cannot be loaded")
    (saved / "config.json").write_text("{}")
    assert_incompatible(saved, "cannot be loaded")
