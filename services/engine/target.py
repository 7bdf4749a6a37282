"""The target: a transformers causal LM of softmax attention layers, run over flat batches of tree rows."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from services.engine.attention import ATTENTION, Batch, causal_segment
from services.engine.cache import PagedCache
from services.engine.checkpoints import load_model
from services.engine.ranks import Ranks, pack
from services.types.errors import ErrorCode, WealdError

_LAYERS = {"full_attention", "sliding_attention", "attention"}
_ROPES = {"default", "linear", "llama3", "yarn"}


class Target:
    """The model whose distribution is served, and the shapes its cache needs.

    Of tensor-parallel ranks each has a target. Rank 0 uses its own as if it were alone; the others `follow`.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks | None = None) -> None:
        """Wrap a loaded model, or this rank's shard of one.

        Raises:
            WealdError: `UNSUPPORTED_MODEL` for layers that are not softmax attention through our function,
                and for RoPE that depends on the batch's longest position; `UNAVAILABLE` when a rank is gone.
        """
        config = model.config.get_text_config()
        refuse_unsupported(model, config)
        model.set_attn_implementation(ATTENTION)
        self.model = model.train(False).requires_grad_(False)
        self.ranks = ranks
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.eos_token_ids = frozenset(t for t in eos_token_ids(model) if t < self.vocab_size)
        self._layers: int = config.num_hidden_layers
        heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        if ranks is not None and _splits_heads(model):
            self._kv_heads //= ranks.size
        self._head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // heads
        self._hidden = torch.empty(0)
        decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        decoder.register_forward_hook(self._keep_hidden)
        if ranks is not None:
            ranks.meet()
        self._probe()

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks | None = None
    ) -> "Target":
        """Load a checkpoint directory of safetensors, sharded or not; among ranks, this rank's share of it.

        Raises:
            WealdError: `INCOMPATIBLE_CHECKPOINT` when it cannot be read; `INVALID_ARGUMENT` when it cannot be
                split over so many ranks; `UNAVAILABLE` when a rank is gone.
        """
        return cls(load_model(directory, dtype, device, ATTENTION, ranks), ranks)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in this rank's cache."""
        share = self.ranks.share(self.hidden_size) if self.ranks else slice(0, self.hidden_size)
        values = self._layers * 2 * self._kv_heads * self._head_dim + share.stop - share.start
        return values * self.dtype.itemsize

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """An empty cache for this model: keys and values of every layer, and the feature plane.

        Ranks share one cache at a time: a new one takes the place of the last.
        """
        if self.ranks is not None:
            self.ranks.tell("cache", torch.tensor([num_pages, page_size]))
        return self._new_cache(num_pages, page_size)

    def _new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        return PagedCache(
            layers=self._layers,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            feature_size=self.hidden_size,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
            ranks=self.ranks,
        )

    def embeddings(self) -> tuple[Tensor, Tensor]:
        """The embedding and LM head `[vocab, hidden]`, which the draft head reuses; whole on every rank.

        Raises:
            WealdError: `UNAVAILABLE` when a rank is gone.
        """
        if self.ranks is None:
            return embeddings(self.model)
        with self.ranks.together():
            self.ranks.tell("embeddings")
            whole = embeddings(self.model)
            self.ranks.settle()
        return whole

    def beat(self) -> None:
        """Hear from the other ranks, if any; has to happen more often than their timeout.

        Raises:
            WealdError: `UNAVAILABLE` when one is gone.
        """
        if self.ranks is not None:
            self.ranks.beat()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: Batch, logit_rows: Tensor) -> Tensor:
        """One step over flat rows; keys, values and features are written to the batch's slots.

        Args:
            tokens: int64 `[N]`.
            batch: slots, positions and visibility of the N rows.
            logit_rows: rows whose logits are needed, int64 `[R]`.

        Returns:
            Raw logits `[R, V]` in the model's dtype.

        Raises:
            WealdError: `UNAVAILABLE` when a tensor-parallel rank is gone.
        """
        if self.ranks is None:
            return self._run(tokens, batch, logit_rows)
        told = pack(tokens, batch, logit_rows) if self.ranks.rank == 0 else ()
        batch.cache.tell("forward", *told)
        with self.ranks.together():
            logits = self._run(tokens, batch, logit_rows)
            self.ranks.settle()
        return logits

    @torch.inference_mode()
    def _run(self, tokens: Tensor, batch: Batch, logit_rows: Tensor) -> Tensor:
        output = self.model(
            input_ids=tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            batch=batch,
        )
        batch.cache.write_features(batch.slots, self._hidden)
        logits: Tensor = output.logits[0]
        return logits

    def _probe(self) -> None:
        """Run one token and see that every layer attends through our function, once."""
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        batch = Batch([causal_segment(zero, 1)], self._new_cache(1, 1))
        try:
            self._run(zero, batch, zero)
        except (TypeError, RuntimeError, AttributeError, WealdError) as error:
            if self.ranks is not None:
                self.ranks.meet()  # A model that does not fit fails on all ranks; else one of them is gone.
            raise unsupported(self.model, f"its forward does not take our batch ({error})") from error
        if len(batch.written) != self._layers:
            raise unsupported(self.model, "some of its layers have an attention of their own")

    def _keep_hidden(self, module: nn.Module, args: object, output: object) -> None:
        # The features stand between the decoder and the LM head, inside one call of the model, which alone
        # knows how its logits are scaled or capped.
        self._hidden = output[0][0]  # type: ignore[index]


def embeddings(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The weights of a model's embedding and LM head, `[vocab, hidden]` each.

    Of a sharded model, all ranks have to ask together.
    """
    embedding: nn.Module = model.get_input_embeddings()
    lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    first, last = embedding.get_parameter("weight"), lm_head.get_parameter("weight")
    whole = _whole(first)
    return whole, whole if last is first else _whole(last)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _splits_heads(model: PreTrainedModel) -> bool:
    """Whether a rank computes only its key-value heads; for norms across heads, some plans gather them."""
    keys = ("k_proj", "qkv_proj", "query_key_value")
    return any(name.endswith(keys) and style == "colwise" for name, style in model.tp_plan.items())


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a text, by the generation config, else by the model config."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def unsupported(model: PreTrainedModel, reason: str) -> WealdError:
    """An `UNSUPPORTED_MODEL` error that names the model and why."""
    return WealdError(
        ErrorCode.UNSUPPORTED_MODEL,
        f"{type(model).__name__} cannot be a target: {reason}; "
        "choose a model whose layers are all softmax attention, such as Llama, Qwen, Mistral or Gemma",
    )


def refuse_unsupported(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Name what keeps a model from running on paged tree attention.

    Raises:
        WealdError: `UNSUPPORTED_MODEL`.
    """
    if not model._supports_attention_backend:
        raise unsupported(model, "its attention cannot be replaced by a registered function")
    if config.is_encoder_decoder:
        raise unsupported(model, "it has an encoder")
    foreign = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if foreign:
        raise unsupported(model, f"it has layers of type {', '.join(sorted(foreign))}")
    for name in ("ssm_cfg", "mamba_d_state", "state_size", "kv_lora_rank"):
        if getattr(config, name, None):
            raise unsupported(model, f"its configuration has {name}")
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        raise unsupported(model, "it has attention sinks")
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in ropes.values() if isinstance(r, dict)]
    for rope in nested or [ropes]:
        kind = rope.get("rope_type", "default")
        if kind not in _ROPES:
            raise unsupported(model, f"its RoPE of type {kind} depends on the longest position in the batch")
