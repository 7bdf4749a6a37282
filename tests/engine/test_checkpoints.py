"""Checkpoints are found, and read without loading more than is asked for or running what is in them."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine.checkpoints import read_config, read_embeddings, read_tensors, resolve
from services.engine.names import cache_directory
from services.engine.target import Target
from services.local.decoder import decode
from services.types.errors import ErrorCode, WealdError
from services.types.sampling import SamplingParams
from services.types.session import Session
from services.verify.verifier import Verifier, pages_for

Make = Callable[..., Any]
CPU = torch.device("cpu")


def assert_refused(function: Make, *arguments: Any, says: str) -> None:
    with pytest.raises(WealdError, match=says) as refused:
        function(*arguments)
    assert refused.value.code is ErrorCode.INCOMPATIBLE_CHECKPOINT


def test_a_directory_is_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize(
    "name", ["nothing", "./no/where", "/no/where", "some/model.gguf", "a/b/c", "../up/there"]
)
def test_a_model_that_is_nowhere_is_refused_with_all_that_could_be_named(name: str) -> None:
    assert_refused(resolve, name, says=f"no model at '{name}': name a directory .* hub name .* smollm2-135m")


def test_a_hub_name_that_cannot_be_downloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_refused(
        resolve, "no-such-owner/no-such-model", says="is no local path and could not be downloaded"
    )


def test_the_cache_is_where_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEALD_CACHE", "/some/where")
    assert cache_directory() == Path("/some/where")
    monkeypatch.setenv("WEALD_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/weald")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "weald"


@pytest.mark.parametrize("content", [None, "{", "[1]", "\udcff"])
def test_an_unreadable_config_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert_refused(read_config, tmp_path, says=f"{tmp_path}.*config.json|config.json is not a JSON object")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["one file", "several files"])
def test_embeddings_are_read_from_one_file_or_several_tied_or_not(
    tied: bool, shards: str, model: Make, tmp_path: Path
) -> None:
    built = model("llama", tie_word_embeddings=tied)
    built.save_pretrained(tmp_path, max_shard_size="5KB" if shards == "several files" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "several files")
    embedding, lm_head = read_embeddings(tmp_path, torch.float64, CPU)
    assert torch.equal(embedding, built.get_input_embeddings().weight)
    assert torch.equal(lm_head, built.get_output_embeddings().weight)
    assert (embedding is lm_head) == tied
    assert read_embeddings(tmp_path, torch.bfloat16, CPU)[1].dtype == torch.bfloat16


def test_embeddings_come_without_the_files_that_hold_other_tensors(model: Make, tmp_path: Path) -> None:
    built = model("llama")
    built.save_pretrained(tmp_path, max_shard_size="5KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {files["model.embed_tokens.weight"], files["lm_head.weight"]}
    others = set(files.values()) - needed
    assert len(others) > 2
    for file in others:
        (tmp_path / file).unlink()
    embedding, lm_head = read_embeddings(tmp_path, torch.float64, CPU)
    assert torch.equal(embedding, built.get_input_embeddings().weight)
    assert torch.equal(lm_head, built.get_output_embeddings().weight)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_models_with_other_names_are_found(tied: bool, tmp_path: Path) -> None:
    names = (
        ("transformer.wte.weight", "lm_head.weight") if tied else ("gpt.embed_in.weight", "embed_out.weight")
    )
    first, second = torch.rand(9, 4), torch.rand(9, 4)
    tensors = {names[0]: first, "not_embed_tokens.weight": torch.rand(2)}
    save_file(tensors if tied else tensors | {names[1]: second}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    embedding, lm_head = read_embeddings(tmp_path, torch.float32, CPU)
    assert torch.equal(embedding, first)
    assert torch.equal(lm_head, first if tied else second)


def test_embeddings_that_are_not_there_are_named(model: Make, tmp_path: Path) -> None:
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says="neither model.safetensors nor")
    model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lm_head = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says="no tensor named lm_head.weight")
    save_file({"lm_head.weight": lm_head}, tmp_path / "model.safetensors")
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says="no tensor named embed_tokens.weight")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def test_a_damaged_file_is_refused(model: Make, tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path)
    cut_short(tmp_path / "model.safetensors")
    assert_refused(read_tensors, tmp_path, says="model.safetensors")
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says="model.safetensors")
    assert_refused(Target.load, tmp_path, torch.float32, CPU, says="cannot be loaded")


def test_a_missing_or_damaged_shard_is_refused(model: Make, tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path, max_shard_size="5KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = json.loads(index.read_text())["weight_map"]["model.embed_tokens.weight"]
    cut_short(tmp_path / shard)
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says=shard)
    (tmp_path / shard).unlink()
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says=shard)
    assert_refused(Target.load, tmp_path, torch.float32, CPU, says="cannot be loaded")
    index.write_text("{}")
    assert_refused(read_embeddings, tmp_path, torch.float32, CPU, says="index.json")


class Trap:
    """Makes a directory when it is unpickled by a loader that runs code."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def test_torch_files_are_read_as_tensors_alone_and_code_in_them_does_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    binary = tmp_path / "pytorch_model.bin"
    torch.save({"fc.weight": Trap(trap)}, binary)
    assert_refused(read_tensors, tmp_path, says="pytorch_model.bin is not a plain file of tensors")
    binary.write_bytes(pickle.dumps({"fc.weight": Trap(trap)}))
    assert_refused(read_tensors, tmp_path, says="pytorch_model.bin is not a plain file of tensors")
    assert not trap.exists()
    pickle.loads(binary.read_bytes())
    assert trap.exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"fc.weight": 3}, torch.zeros(2)])
def test_torch_files_of_anything_but_named_tensors_are_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert_refused(read_tensors, tmp_path, says="is not a plain dictionary of tensors")


def test_torch_files_of_tensors_are_read_and_safetensors_come_first(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2, dtype=torch.bfloat16)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) for key in tensors)
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path).keys() == {"c"}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged SmolLM2, converted into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEALD_CACHE", str(tmp_path_factory.mktemp("cache")))
        directory = resolve("smollm2-135m")
        before = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
        assert resolve("smollm2-135m") == directory
        assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == before
        assert [directory] == list(directory.parent.iterdir())
    return directory


@pytest.mark.slow
def test_the_packaged_model_answers_as_transformers_own_generation(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    target = Target.load(smollm2, torch.float32, CPU)
    assert target.eos_token_ids == {2}
    verifier = Verifier(target, num_pages=pages_for(len(prompt) + 16))
    session = Session("a", tuple(prompt), SamplingParams(max_tokens=16, temperature=0), 0)
    text = [token for step in decode(verifier, None, [session]) for token in step.outcome.tokens]
    assert text == generated.tolist()
    assert "Paris" in tokenizer.decode(text)


@pytest.mark.slow
def test_the_packaged_model_ties_its_embeddings(smollm2: Path) -> None:
    embedding, lm_head = read_embeddings(smollm2, torch.float32, CPU)
    assert embedding is lm_head
    assert embedding.shape == (49152, 576)
