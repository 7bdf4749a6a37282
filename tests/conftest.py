"""Tiny random models, and a tree source that knows the text: what tests of the decoding loop share."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from services.bench.tiny import write_tiny
from services.draft.drafter import Drafter
from services.engine.attention import Batch
from services.engine.cache import PagedCache
from services.engine.head import EagleHead
from services.engine.target import Target
from services.gateway.tokenizer import Tokenizer
from services.local.decoder import Step, TreeSource, decode
from services.speculation.sampling import Context, draw
from services.types.session import FinishReason, Session
from services.types.tree import MAX_NODES, DraftTree
from services.verify.grammar import Grammars
from services.verify.verifier import Verifier

torch.set_num_threads(1)
logging.disable_progress_bar()

EOS = (2, 7, 11)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": list(EOS),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", **GEMMA},
}
"""Grouped-query attention throughout; sliding windows, soft-caps, and RoPE of several types among them."""


def tiny_model(kind: str, **overrides: Any) -> PreTrainedModel:
    """A new random float64 model of a kind; the same arguments give the same weights."""
    options = SIZES | KINDS[kind] | overrides
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model.train(False).requires_grad_(False)


class Watched(Target):
    """A target that remembers the caches it made and what ran through it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.cache: PagedCache
        self.batches: list[Batch] = []

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """As the target does."""
        self.cache = super().new_cache(num_pages, page_size)
        return self.cache

    def forward(self, tokens: Tensor, batch: Batch, logit_rows: Tensor) -> Tensor:
        """As the target does."""
        self.batches.append(batch)
        return super().forward(tokens, batch, logit_rows)


@dataclass(frozen=True)
class Plain:
    """What transformers makes of whole token sequences, with nothing of the engine."""

    model: PreTrainedModel

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features `[n, H]` and logits `[n, V]` of one sequence."""
        ids = torch.tensor([tuple(tokens)])
        features = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return features[0], self.model(input_ids=ids, use_cache=False).logits[0]

    @torch.inference_mode()
    def stream(self, session: Session, count: int) -> tuple[int, ...]:
        """What the target says, a fresh pass over everything for each token, as if nothing ended it."""
        ends = self.ends(session)
        output: list[int] = []
        for _ in range(count):
            ids = torch.tensor([(*session.prompt, *output)])
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0]
            output += draw(logits, [Context(session.params, session.seed, session.prompt, output, ends)])
        return tuple(output)

    def text(self, session: Session, stream: Sequence[int] | None = None) -> tuple[int, ...]:
        """The text of a session: its stream up to the first end or the last allowed token."""
        room = min(session.params.max_tokens, self.model.config.max_position_embeddings - len(session.prompt))
        stream = (self.stream(session, room) if stream is None else tuple(stream))[:room]
        stops = [i for i, token in enumerate(stream, 1) if token in self.ends(session)]
        return stream[: stops[0]] if stops else stream

    def ends(self, session: Session) -> frozenset[int]:
        """Tokens that end the session's text."""
        return frozenset(session.params.stop_token_ids) | (set() if session.params.ignore_eos else {*EOS})


class Decoded(dict[str, tuple[int, ...]]):
    """The texts of a run by session id, and the steps that made them."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps
        for step in steps:
            self[step.session] = self.get(step.session, ()) + step.outcome.tokens

    def finish(self, id: str) -> FinishReason:
        """Why a session ended; it must have ended with its last step and with no other."""
        *before, last = [step.outcome.finish for step in self.steps if step.session == id]
        assert not any(before)
        assert last is not None
        return last


def run_sessions(
    target: Target,
    sessions: Sequence[Session],
    drafter: TreeSource | None = None,
    num_pages: int = 400,
    grammars: Grammars | None = None,
) -> Decoded:
    """Decode in one batch on a fresh verifier; afterwards every page must be accounted for and free."""
    verifier = Verifier(target, num_pages=num_pages, page_size=4, grammars=grammars)
    decoded = Decoded(list(decode(verifier, drafter, sessions)))
    assert_idle(verifier)
    if drafter is not None:
        assert_idle(drafter)
    return decoded


def assert_idle(service: Any) -> None:
    """Pages of a verifier or drafter are in order and nobody owns any; a stand-in knows no session."""
    if isinstance(service, Verifier | Drafter):
        service.check()
        assert service.pool.free_pages == service.pool.num_pages
    else:
        assert not service.known


def hide(
    root: int, text: Sequence[int], vocab_size: int, nodes: int, rng: random.Random
) -> tuple[DraftTree, tuple[int, ...]]:
    """A random tree that holds `text` as a path at random sibling positions, and the nodes of that path.

    Distractors have children of their own, often the very tokens of the text.
    """
    tokens, parents, level, path = [root], [-1], [0], [0]
    for depth, true in enumerate(text):
        spare = nodes - len(tokens) - (len(text) - depth)
        below = []
        for node in rng.sample(level, len(level)):
            siblings = rng.sample(range(vocab_size), rng.randint(0, min(spare, 4)))
            spare -= len(siblings)
            if node == path[-1]:
                siblings = [token for token in siblings if token != true]
                siblings.insert(rng.randint(0, len(siblings)), true)
            elif siblings and true not in siblings and rng.random() < 0.5:
                siblings[rng.randrange(len(siblings))] = true
            for token in siblings:
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        level = below
        path.append(next(n for n in below if parents[n] == path[-1] and tokens[n] == true))
    confidences = (1.0, *(rng.random() for _ in tokens[1:]))
    return DraftTree(tuple(tokens), tuple(parents), confidences), tuple(path[1:])


@dataclass
class Oracle:
    """A tree source that knows the texts: each tree hides some of what comes next among distractors.

    Some trees are a root alone, some turn away from the text.
    """

    texts: Mapping[str, Sequence[int]]
    """Prompt and what the target says after it, by session id."""
    seed: int = 0
    levels: int = 8
    nodes: int = MAX_NODES
    vocab_size: int = SIZES["vocab_size"]
    known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._told: dict[str, int] = {}

    def open(self, id: str, tokens: Sequence[int], config: Any = None, drawing: Any = None) -> int:
        """Begin a session; it needs all features."""
        assert id not in self.known
        self.known[id] = len(tokens)
        self._told[id] = 0
        return 0

    def propose(self, ids: Sequence[str], terms: Any = None) -> list[DraftTree]:
        """A random tree for each session; all features below the pending token must have come."""
        assert all(self._told[id] == self.known[id] - 1 for id in ids)
        return [self._tree(id) for id in ids]

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """Go on behind what was committed."""
        self.known[id] += len(tokens)
        self._told[id] += len(features)

    def learn(self, id: str, nodes: int, accepted: Sequence[int]) -> int:
        """Nothing."""
        return 0

    def close(self, id: str) -> None:
        """Forget a session."""
        self.known.pop(id, None)

    def _tree(self, id: str) -> DraftTree:
        rng, at = self._rng, self.known[id]
        nodes = rng.choice([self.nodes, rng.randint(1, self.nodes)])
        text = list(self.texts[id][at : at + min(rng.randint(0, self.levels), nodes - 1)])
        if text and rng.random() < 0.2:
            turn = rng.randrange(len(text))
            text[turn] = rng.choice([t for t in range(self.vocab_size) if t != text[turn]])
        return hide(self.texts[id][at - 1], text, self.vocab_size, nodes, rng)[0]


def count_events(steps: Iterable[Step]) -> Counter[str]:
    """What happened in the trees of a run; `depth n` counts the rounds that accepted n draft tokens."""
    seen: Counter[str] = Counter()
    for step in steps:
        tree, outcome = step.tree, step.outcome
        if tree is None:
            continue
        seen[f"nodes {len(tree)}"] += 1
        seen[f"depth {len(outcome.accepted)}"] += 1
        for node in outcome.accepted:
            first = next(iter(tree.children[tree.parents[node]].values()))
            seen["first sibling" if node == first else "later sibling"] += 1
        drafted_last = len(outcome.accepted) == len(outcome.tokens)
        if outcome.finish is FinishReason.STOP and drafted_last:
            seen["end inside a path"] += bool(tree.children[outcome.accepted[-1]])
        if outcome.finish is None:
            refused = tree.children[outcome.accepted[-1] if outcome.accepted else 0]
            seen["refused end"] += not {*EOS}.isdisjoint(refused)
    return seen


def tiny_head(
    target: Target, vocabulary: Tensor | None = None, attention: str = "weald", **overrides: Any
) -> EagleHead:
    """A random float64 head for a target; the same arguments give the same weights."""
    options = SIZES | {"num_hidden_layers": 1, "head_dim": 8} | overrides
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = EagleHead(LlamaConfig(**options), *target.embeddings(), vocabulary, attention)
        head.requires_grad_(False).eval()
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    # Attention, feed-forward and residual stream weigh alike, and no distribution is a single peak.
    head.fc.weight *= 0.3
    head.layer.self_attn.o_proj.weight *= 0.3
    head.layer.mlp.down_proj.weight *= 0.1
    return head.to(torch.float64)


@pytest.fixture(scope="session")
def kinds() -> dict[str, dict[str, Any]]:
    """Options of the tiny models by kind."""
    return KINDS


@pytest.fixture(scope="session")
def model() -> Callable[..., PreTrainedModel]:
    """`model(kind, **overrides)` builds a tiny model."""
    return tiny_model


@pytest.fixture(scope="session")
def plain() -> Callable[..., Plain]:
    """`plain(kind, **overrides)` runs a tiny model by transformers alone."""
    return cache(lambda kind, **overrides: Plain(tiny_model(kind, **overrides)))


@pytest.fixture(scope="session")
def target() -> Callable[..., Target]:
    """`target(kind, **overrides)` is a target of the same weights as `plain` of the same arguments."""
    return cache(lambda kind, **overrides: Target(tiny_model(kind, **overrides)))


@pytest.fixture(scope="session")
def watched() -> Callable[..., Watched]:
    """`watched(kind, **overrides)` is a new target that remembers what ran through it."""
    return lambda kind, **overrides: Watched(tiny_model(kind, **overrides))


@pytest.fixture(scope="session")
def head() -> Callable[..., EagleHead]:
    """`head(target, vocabulary, attention, **config)` builds a random head."""
    return tiny_head


@pytest.fixture(scope="session")
def run() -> Callable[..., Decoded]:
    """`run(target, sessions, drafter)` decodes in one batch and looks after the pages."""
    return run_sessions


@pytest.fixture(scope="session")
def idle() -> Callable[[Any], None]:
    """`idle(service)` asserts that no page is owned or lost."""
    return assert_idle


@pytest.fixture(scope="session")
def hidden() -> Callable[..., tuple[DraftTree, tuple[int, ...]]]:
    """`hidden(root, text, vocab_size, nodes, rng)` hides a text in a random tree."""
    return hide


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    """A tree source that knows the texts."""
    return Oracle


@pytest.fixture(scope="session")
def events() -> Callable[[Iterable[Step]], Counter[str]]:
    """`events(steps)` counts what happened in the trees of a run."""
    return count_events


@dataclass(frozen=True)
class Checkpoints:
    """Where the tiny model lies."""

    target: Path
    head: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.load(self.target)

    def options(self, *more: object) -> list[str]:
        """Options that name model and head, in float64: near-ties must not tell modes apart."""
        named = ("--model", self.target, "--speculative-model", self.head, "--dtype", "float64")
        return [str(option) for option in (*named, *more)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A Llama of 15 tokens and an undecided head, so that its wide trees often hold what comes next."""
    target, head = write_tiny(tmp_path_factory.mktemp("checkpoints"))
    return Checkpoints(target, head)


WORDS = ('{"', '":', '",', '"}', "},", "true", "false", "null", ' "', ", ", "é", "12")


@dataclass(frozen=True)
class Writer:
    """A tiny random float64 model of bytes and some words, which can write any text; 0 and 1 end it."""

    directory: Path
    target: Target
    plain: Plain
    grammars: Grammars
    tokenizer: Tokenizer
    ids: Mapping[str, int]
    """Of the bytes and words that are text by themselves."""

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, those that end the text left out."""
        return self.tokenizer.decode(tokens)


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """A Llama whose tokens are all bytes and some words; its logits are padded to three tokens more."""
    directory = tmp_path_factory.mktemp("writer")
    coder = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["".join(piece for piece, _ in coder.pre_tokenize_str(word)) for word in WORDS]
    names = ["<|end|>", "<|stop|>", *alphabet, *words]
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer, core.decoder = coder, decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    core.save(str(directory / "tokenizer.json"))
    sizes = {"vocab_size": len(names) + 3, "eos_token_id": [0, 1], "max_position_embeddings": 512}
    model = tiny_model("llama", **sizes)
    model.config.save_pretrained(directory)
    tokenizer = Tokenizer.load(directory)
    said = {tokenizer.text_of(i): i for i in range(2, len(names))}
    return Writer(
        directory,
        Target(model),
        Plain(tiny_model("llama", **sizes)),
        Grammars(directory, len(names) + 3, frozenset({0, 1})),
        tokenizer,
        {text: i for text, i in said.items() if "\ufffd" not in text},
    )
