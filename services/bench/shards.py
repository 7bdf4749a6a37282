"""What one tensor-parallel rank holds and sends: its real shapes, on the meta device, without a checkpoint.

The model is built and sharded by transformers' own plan in a process group whose other ranks are not there
(PyTorch's `fake` backend), and steps run through the engine's attention over its pages. Nothing is computed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from services.bench.hardware import Collective, Kind
from services.engine.attention import Batch, Segment, tree_segment
from services.engine.head import head_config
from services.engine.pages import PAGE_SIZE
from services.engine.ranks import Ranks, pack
from services.engine.target import Target
from services.types.tree import DraftTree

DTYPE = torch.bfloat16
META = torch.device("meta")
CPU = torch.device("cpu")
_KINDS: dict[str, Kind] = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "gather_": "gather",
    "broadcast_": "broadcast",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds. Bytes, of bfloat16."""

    parameters: int
    """Of the whole model."""
    weights: int
    """Of this rank."""
    embedding: int
    """Of these, rows that are looked up and not read in every step."""
    kv_token: int
    """Keys and values of one token, all layers."""
    feature_token: int
    """Columns of one token's feature."""

    @property
    def page(self) -> int:
        """Bytes of one page."""
        return PAGE_SIZE * (self.kv_token + self.feature_token)


@dataclass(frozen=True, slots=True)
class Head:
    """What a draft head holds. Bytes, of bfloat16."""

    weights: int
    """Of one decoder layer without its input norm, and of `fc`."""
    row: int
    """Of one token in the embedding, and in the LM head over the draft vocabulary."""
    kv_token: int
    """Keys and values of one entry."""

    def memory(self, tokens: int, vocabulary: int) -> int:
        """With the whole embedding of a target of so many tokens, and an LM head of the draft vocabulary."""
        return self.weights + (tokens + vocabulary) * self.row


class Absent(Ranks):
    """A rank without others: the group's fake backend says at once that they have done their part."""

    def meet(self) -> None:
        """Nobody has to load."""


@contextmanager
def absent(size: int, rank: int = 0) -> Iterator[Absent]:
    """Be one of `size` ranks on the meta device. This process must be in no other group."""
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        control = dist.new_group(backend="fake")
        assert isinstance(control, dist.ProcessGroup)
        yield Absent(rank, size, META, control, timedelta(seconds=1))
    finally:
        dist.destroy_process_group()


def target_on_meta(config: PretrainedConfig, ranks: Ranks | None) -> Target:
    """The target of a configuration, or this rank's shard of it; no weights exist, so none can be tied."""
    shares = DistributedConfig(tp_size=ranks.size if ranks else 1)
    distributed, _, mesh = PreTrainedModel.prepare_distribute_model(shares)
    model = PreTrainedModel.maybe_distribute_model(_on_meta(config), distributed, mesh)
    assert isinstance(model, PreTrainedModel)
    return Target(model, ranks)


def shard(target: Target) -> Shard:
    """What a target with an LM head of its own holds on this rank, on whatever device."""
    parameters = list(target.model.parameters())
    embedding: nn.Module = target.model.get_input_embeddings()
    share = target.ranks.share(target.hidden_size) if target.ranks else slice(0, target.hidden_size)
    features = (share.stop - share.start) * target.dtype.itemsize
    return Shard(
        parameters=sum(parameter.numel() for parameter in parameters),
        weights=sum(_local(parameter).nbytes for parameter in parameters),
        embedding=_local(embedding.get_parameter("weight")).nbytes,
        kv_token=target.token_bytes - features,
        feature_token=features,
    )


def collectives(target: Target, nodes: int, accepted: int) -> list[Collective]:
    """What rank 0 and the others do together in a round over a tree of so many nodes.

    Args:
        target: on the meta device.
        nodes: of the tree, root included; 1 for a plain step.
        accepted: draft nodes whose features travel with the root's. They do not after a plain step.
    """
    ranks = target.ranks
    if ranks is None:
        return []
    cache = target.new_cache(-(-nodes // PAGE_SIZE), PAGE_SIZE)
    tree = DraftTree.chain(range(nodes))
    on_paper, told = (
        Batch([_placed(tree_segment(torch.arange(nodes), tree), device)], cache) for device in (META, CPU)
    )
    tokens = torch.arange(nodes)
    counted = Counted()
    with torch.inference_mode(), counted:
        # As `Target.forward` and the verifier do; integers are told from the CPU.
        cache.tell("forward", *pack(tokens, told, tokens))
        target.model(
            input_ids=tokens[None].to(META),
            position_ids=on_paper.positions[None],
            use_cache=False,
            logits_to_keep=tokens.to(META),
            batch=on_paper,
        )
        ranks.settle()
        if nodes > 1:
            cache.tell("move", tokens[:accepted], tokens[:accepted])
            cache.tell("features", tokens[: accepted + 1])
            share = ranks.share(target.hidden_size)
            ranks.gather(torch.empty(accepted + 1, share.stop - share.start, dtype=DTYPE, device=META))
    return counted.collectives()


def head_on_meta(config: PretrainedConfig) -> Head:
    """The draft head of a target of this configuration."""
    own = head_config(config)
    layer = _on_meta(own).get_decoder().layers[0]  # type: ignore[no-untyped-call]
    fc = nn.Linear(2 * own.hidden_size, own.hidden_size, bias=own.bias, dtype=DTYPE, device=META)
    layer.input_layernorm = nn.Identity()
    weights = sum(parameter.nbytes for module in (layer, fc) for parameter in module.parameters())
    values: int = 2 * layer.self_attn.config.num_key_value_heads * layer.self_attn.head_dim
    return Head(weights, own.hidden_size * DTYPE.itemsize, values * DTYPE.itemsize)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of torch.distributed that this process takes part in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: Counter[tuple[Kind, int]] = Counter()

    def collectives(self) -> list[Collective]:
        """Those seen so far, alike ones together."""
        return [Collective(kind, size, count) for (kind, size), count in self._seen.items()]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let every operation through."""
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in _KINDS:
            # A gather says first where its results go.
            brought = args[1] if name == "gather_" else args[0]
            tensor: Tensor = brought if isinstance(brought, Tensor) else brought[0]
            kind = _KINDS[name]
            # Ranks answer by an all-reduce of one number.
            self._seen["answer" if tensor.numel() == 1 else kind, tensor.nbytes] += 1
        return func(*args, **(kwargs or {}))


def _on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with META:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=DTYPE
        )
    return model


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _placed(segment: Segment, device: torch.device) -> Segment:
    return Segment(segment.slots.to(device), segment.positions.to(device), segment.visible.to(device))
