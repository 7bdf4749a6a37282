"""The EAGLE head: one decoder layer that predicts the target's next feature (arXiv 2401.15077, section 3).

Its public checkpoint layout: `fc` `[H, 2H]` over (embedding, feature), `layers.0.*` without an input norm, no
final norm; the target's embedding and LM head are reused. `d2t` holds, for each token of an optional draft
vocabulary, the target's id minus the draft id (the layout of EAGLE-3).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from services.engine.attention import ATTENTION, Batch
from services.engine.cache import PagedCache
from services.engine.checkpoints import read_config, read_tensors
from services.types.errors import incompatible


class EagleHead(nn.Module):
    """The draft head over a target's embedding and LM head, with its own keys and values."""

    embedding: Tensor
    lm_head: Tensor
    vocabulary: Tensor
    """Target id of each draft token, int64 `[draft vocab]`."""

    def __init__(
        self,
        config: PretrainedConfig,
        embedding: Tensor,
        lm_head: Tensor,
        vocabulary: Tensor | None = None,
        attention: str = ATTENTION,
    ) -> None:
        """Build a head with fresh weights.

        Args:
            config: the head's own config: sizes, RoPE, `bias` of `fc` (absent means true).
            embedding: the target's embedding, `[V, H]`.
            lm_head: the target's LM head, `[V, H]`.
            vocabulary: target ids of the draft vocabulary, int64 `[draft vocab]`; None for all tokens.
            attention: the attention function of transformers to use; another one than ours for training.
        """
        super().__init__()
        _check_fit(config, embedding)
        config.num_hidden_layers = 1
        config.tie_word_embeddings = False
        config._attn_implementation = attention
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
        body = model.get_decoder()
        self.config = config
        heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=getattr(config, "bias", True))
        self.layer = body.layers[0].to_empty(device="cpu").to(torch.get_default_dtype())
        self.layer.input_layernorm = nn.Identity()
        self.rotary = type(body.rotary_emb)(config=config)
        for module in self.layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.ones_(self.layer.post_attention_layernorm.weight)
        ids = torch.arange(lm_head.shape[0]) if vocabulary is None else vocabulary
        self.register_buffer("vocabulary", ids.to(lm_head.device), persistent=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        rows = lm_head.detach() if vocabulary is None else lm_head.detach()[self.vocabulary].contiguous()
        self.register_buffer("lm_head", rows, persistent=False)

    @classmethod
    def load(
        cls, directory: Path, embedding: Tensor, lm_head: Tensor, attention: str = ATTENTION
    ) -> "EagleHead":
        """Load a head and place it with the target's tensors, in their dtype.

        Raises:
            WealdError: `INCOMPATIBLE_CHECKPOINT` naming both sides when the head does not fit the target.
        """
        raw = read_config(directory)
        try:
            config = AutoConfig.for_model(raw.pop("model_type", "llama"), **raw)
        except ValueError as error:
            raise incompatible(f"the head at {directory} has an unusable config.json: {error}") from error
        tensors = read_tensors(directory)
        offsets = tensors.pop("d2t", None)
        declared = getattr(config, "draft_vocab_size", None) or config.vocab_size
        if (offsets.numel() if offsets is not None else config.vocab_size) != declared:
            found = "no d2t" if offsets is None else f"a d2t of {offsets.numel()} tokens"
            raise incompatible(
                f"the head's config says draft_vocab_size {declared}, its weights at {directory} have {found}"
            )
        vocabulary = None if offsets is None else offsets.long() + torch.arange(offsets.numel())
        if vocabulary is not None and not 0 <= int(vocabulary.min()) <= int(vocabulary.max()) < len(lm_head):
            raise incompatible(
                f"the head's d2t names tokens up to {int(vocabulary.max())}, the target has {len(lm_head)}"
            )
        head = cls(config, embedding, lm_head, vocabulary, attention)
        for key in ("t2d", "embed_tokens.weight", "lm_head.weight"):
            tensors.pop(key, None)
        head._load(tensors, directory)
        # Rotary frequencies keep their precision: in half of it, far positions would be off by radians.
        head.fc.to(lm_head.dtype)
        head.layer.to(lm_head.dtype)
        return head.to(lm_head.device).requires_grad_(False).eval()

    def start_from_features(self) -> None:
        """Let `fc` pass features unchanged, a better start for training a fresh head."""
        hidden = self.config.hidden_size
        with torch.no_grad():
            self.fc.weight[:, hidden:] = torch.eye(hidden)

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors in the public layout."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {_public(k): v.detach().to("cpu", dtype).contiguous() for k, v in self.state_dict().items()}
        extra: dict[str, Any] = {"bias": self.fc.bias is not None, "architectures": ["EagleHead"]}
        ids = self.vocabulary.cpu()
        if not torch.equal(ids, torch.arange(self.config.vocab_size)):
            tensors["d2t"] = ids - torch.arange(len(ids))
            extra["draft_vocab_size"] = len(ids)
        config = self.config.to_dict() | extra | {"dtype": str(dtype).removeprefix("torch.")}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, batch: Batch | None = None
    ) -> Tensor:
        """Predict the next feature of every entry.

        Entry i pairs `feature[i]` with token `x[i+1]` at RoPE position i; its output predicts `feature[i+1]`.

        Args:
            features: `[B, N, H]`.
            tokens: int64 `[B, N]`.
            positions: int64 `[B, N]`.
            batch: what each row sees, for paged tree attention (B = 1); None for plain causal attention.

        Returns:
            Predicted features `[B, N, H]`.
        """
        embedded = nn.functional.embedding(tokens, self.embedding)
        hidden = self.fc(torch.cat([embedded.to(features.dtype), features], -1))
        cos_sin = self.rotary(hidden, position_ids=positions)
        kwargs = {} if batch is None else {"batch": batch}
        output = self.layer(
            hidden, attention_mask=None, position_embeddings=cos_sin, position_ids=positions, **kwargs
        )
        predicted: Tensor = output[0] if isinstance(output, tuple) else output
        return predicted

    def logits(self, features: Tensor) -> Tensor:
        """Logits over the draft vocabulary after features `[..., H]`, float32 or better."""
        logits = nn.functional.linear(features, self.lm_head)
        return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)

    @property
    def token_bytes(self) -> int:
        """Bytes that one entry takes in the head's cache."""
        return 2 * self._kv_heads * self._head_dim * self.fc.weight.dtype.itemsize

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """An empty cache for this head's one layer."""
        return PagedCache(
            layers=1,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            feature_size=0,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.fc.weight.dtype,
            device=self.fc.weight.device,
        )

    def _load(self, tensors: dict[str, Tensor], directory: Path) -> None:
        own = {_public(k): (k, v) for k, v in self.state_dict().items()}
        if missing := sorted(own.keys() - tensors.keys()):
            hint = "; set bias to false in its config.json if its fc has none" if "fc.bias" in missing else ""
            raise incompatible(f"the head at {directory} lacks {', '.join(missing)}{hint}")
        if surplus := sorted(tensors.keys() - own.keys()):
            raise incompatible(f"the head at {directory} has unknown tensors: {', '.join(surplus)}")
        for key, (_, parameter) in own.items():
            if tensors[key].shape != parameter.shape:
                raise incompatible(
                    f"the head's {key} has shape {list(tensors[key].shape)}, "
                    f"its config.json asks for {list(parameter.shape)}"
                )
        self.load_state_dict({k: tensors[key] for key, (k, _) in own.items()})


def head_config(target: PretrainedConfig) -> LlamaConfig:
    """The config of a new head for a target: a Llama layer of the target's sizes, `fc` without bias."""
    text = target.get_text_config()
    copied = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(text, name) for name in copied if getattr(text, name, None) is not None}
    config = LlamaConfig(
        **sizes,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(text)},
        num_hidden_layers=1,
    )
    config.bias = False
    return config


def _rope_theta(config: PretrainedConfig) -> float:
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(r for r in ropes.values() if isinstance(r, dict))):
        if "rope_theta" in rope:
            return float(rope["rope_theta"])
    return 10_000.0


def _public(key: str) -> str:
    return key.replace("layer.", "layers.0.", 1) if key.startswith("layer.") else key


def _check_fit(config: PretrainedConfig, embedding: Tensor) -> None:
    vocab, hidden = embedding.shape
    if config.hidden_size != hidden:
        raise incompatible(
            f"the head's hidden size is {config.hidden_size}, the target's is {hidden}; "
            "use a head trained for this target"
        )
    if config.vocab_size != vocab:
        raise incompatible(
            f"the head's vocabulary has {config.vocab_size} tokens, the target's has {vocab}; "
            "use a head trained for this target"
        )
