"""Reading checkpoints: directories, converted from GGUF files where need be."""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from services.engine.names import converted, find
from services.engine.ranks import Ranks, refuse_size
from services.types.errors import WealdError, incompatible

_NOT_THE_MODEL = {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}
"""Keys of config.json that differ between copies of one model."""


def resolve(model: str) -> Path:
    """The local directory of a model: config.json, safetensors, tokenizer.

    Args:
        model: as `names.find` takes it; a GGUF file is converted once into the cache.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when nothing is found.
    """
    found = find(model)
    return found if found.is_dir() else convert_gguf(found)


def convert_gguf(file: Path) -> Path:
    """Dequantise a GGUF file into a directory of the cache, once; the float32 weights are exact."""
    directory = converted(file)
    if directory.is_dir():
        return directory
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    tied = config.get("tie_word_embeddings", False)
    weights = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        part = Path(work, "model")
        part.mkdir()
        save_file(
            {k: v.contiguous() for k, v in weights.items()}, part / "model.safetensors", {"format": "pt"}
        )
        Path(part, "config.json").write_text(json.dumps(config, indent=2))
        model.generation_config.save_pretrained(part)
        tokenizer.save_pretrained(part)
        try:
            part.rename(directory)
        except OSError:
            # Another process has converted the same file meanwhile; its result is the same.
            if not directory.is_dir():
                raise
    return directory


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    ranks: Ranks | None = None,
) -> PreTrainedModel:
    """A transformers causal LM from a directory of safetensors, sharded or not; among ranks, a share of it.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when it cannot be read; `INVALID_ARGUMENT`, before anything is
            loaded, when it cannot be split over so many ranks.
    """
    shares: dict[str, Any] = {}
    try:
        if ranks is not None:
            refuse_size(AutoConfig.from_pretrained(directory).get_text_config(), ranks.size)
            shares = {"distributed_config": DistributedConfig(tp_size=ranks.size)}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, output_loading_info=True, **shares
        )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise incompatible(f"the target at {directory} cannot be loaded: {error}") from error
    model, report = loaded
    # transformers itself only warns, and makes up what is missing.
    if missing := sorted(report["missing_keys"]):
        raise incompatible(f"the target at {directory} lacks {len(missing)} tensors, such as {missing[0]}")
    placed: PreTrainedModel = model.train(False).requires_grad_(False).to(device)
    return placed


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint."""
    try:
        config = json.loads(Path(directory, "config.json").read_text())
    except (OSError, ValueError) as error:
        raise incompatible(f"{directory} has no readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise incompatible(f"{directory}/config.json is not a JSON object")
    return config


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a small checkpoint: safetensors, or a `.bin` through torch's weights-only loader."""
    file = Path(directory, "model.safetensors")
    if file.is_file():
        with _readable(file):
            return load_file(file)
    binary = Path(directory, "pytorch_model.bin")
    if not binary.is_file():
        raise incompatible(f"{directory} has neither model.safetensors nor pytorch_model.bin")
    try:
        tensors = torch.load(binary, map_location="cpu", weights_only=True)
    except Exception as error:
        raise incompatible(f"{binary} is not a plain file of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise incompatible(f"{binary} is not a plain dictionary of tensors")
    return tensors


def read_embeddings(
    directory: Path, dtype: torch.dtype | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The target's embedding and LM head, `[vocab, hidden]` each, without loading anything else.

    The same tensor twice when the target ties them; in the checkpoint's own dtype for None.
    """
    embedding = _read_one(directory, ("embed_tokens.weight", "wte.weight", "embed_in.weight"))
    try:
        lm_head = _read_one(directory, ("lm_head.weight", "embed_out.weight"))
    except WealdError:
        if not read_config(directory).get("tie_word_embeddings", True):
            raise
        lm_head = embedding
    placed = embedding.to(device, dtype)
    return placed, placed if lm_head is embedding else lm_head.to(device, dtype)


def _read_one(directory: Path, endings: Sequence[str]) -> Tensor:
    for key, file in _files_of_tensors(directory).items():
        if any(key == e or key.endswith("." + e) for e in endings):
            with _readable(file), safe_open(file, "pt") as tensors:
                tensor: Tensor = tensors.get_tensor(key)
                return tensor
    raise incompatible(f"{directory} has no tensor named {' or '.join(endings)}")


def _files_of_tensors(directory: Path) -> dict[str, Path]:
    index, file = Path(directory, "model.safetensors.index.json"), Path(directory, "model.safetensors")
    if index.is_file():
        with _readable(index):
            files = json.loads(index.read_text())["weight_map"]
            return {key: Path(directory, name) for key, name in files.items()}
    if file.is_file():
        with _readable(file), safe_open(file, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), file)
    raise incompatible(f"{directory} has neither model.safetensors nor model.safetensors.index.json")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, OSError, SafetensorError, ValueError) as error:
        raise incompatible(f"{file} cannot be read: {error}") from error


def fingerprint(directory: Path) -> bytes:
    """16 bytes that tell targets apart: config, tokenizer, embedding, LM head, kind and width of features.

    Raises:
        WealdError: `INCOMPATIBLE_CHECKPOINT` when one of them cannot be read.
    """
    config = read_config(directory)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(config.keys() - _NOT_THE_MODEL):
        digest.update(f"{name}={config[name]!r};".encode())
    tokenizer = Path(directory, "tokenizer.json")
    with _readable(tokenizer):
        digest.update(tokenizer.read_bytes())
    embedding, lm_head = read_embeddings(directory, None, torch.device("cpu"))
    for tensor in (embedding,) if lm_head is embedding else (embedding, lm_head):
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    digest.update(f"final norm {embedding.shape[1]}".encode())
    return digest.digest()
