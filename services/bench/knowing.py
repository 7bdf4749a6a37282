"""A draft service that knows what the target will say, for the most part: trees that are worth their time.

Only its head is played. What it proposes next is the text's next token with the probability that it gives
it, so its confidences are what they claim to be; extending, growing, reranking and the service are the
product's own.
"""

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.cli.process import announce, stopped_by_signal
from services.draft.drafter import Drafter
from services.draft.service import DraftService
from services.draft.serving import run
from services.engine.attention import Batch
from services.engine.cache import PagedCache
from services.engine.checkpoints import fingerprint, read_embeddings, resolve
from services.sessions.memory import MemoryStore
from services.speculation.coupling import LIKELIEST, Drawing
from services.types.configuration import DraftConfig, Place, TreeShape, sized
from services.types.messages import DraftStatus

PROGRAM = "import sys; from services.bench.knowing import serve; serve(*sys.argv[1:])"
"""Of a replica: the model, the address of its verify replica, a file of texts, how sure its head is."""
TREES = sized(TreeShape.DYNAMIC, "auto", 10, "auto")
SIBLINGS = 10
"""Children of a node that are likely, each half as much as the one before, the first apart."""
PAGES = 1 << 14
MOST_SESSIONS = 256
LOST = -1
"""In the place of a text: the session says something else."""


class KnowingHead:
    """Plays a head: its features say which position of which text they are of, `[…, 3]`.

    The columns are the text's number or `LOST`, the position, and whether all tokens up to there are the
    text's. In a tree, where they are not, what follows looks like everywhere else; it is never accepted.
    """

    token_bytes = 2 * torch.float32.itemsize

    def __init__(self, texts: Sequence[Sequence[int]], sure: float, vocab_size: int) -> None:
        """Know the texts of a target with so many tokens.

        Args:
            texts: token ids, the prompt's first.
            sure: probability that the first child of a node is right.
            vocab_size: of the target.
        """
        self.embedding = torch.zeros(1, 3).expand(vocab_size, 3)
        self.vocabulary = torch.tensor(sorted({token for text in texts for token in text}))
        count = min(SIBLINGS, len(self.vocabulary) - 1)
        likely = [sure, *((1 - sure) / 2**rank for rank in range(1, count))]
        rest = max(0.0, 1 - sum(likely)) / (len(self.vocabulary) - count)
        self._likely = torch.tensor(likely).log()
        self._unlikely = torch.tensor(rest).log()
        self._texts = torch.full((len(texts), max(map(len, texts), default=0) + 1), LOST)
        self._children = self._texts[..., None].repeat(1, 1, count)
        numbers = {token: number for number, token in enumerate(self.vocabulary.tolist())}
        for number, text in enumerate(texts):
            self._texts[number, : len(text)] = torch.tensor(text)
            for position, token in enumerate(text):
                drawn = random.Random(f"{number} {position}")
                children = _children(numbers[token], len(numbers), likely, drawn)
                self._children[number, position] = torch.tensor(children)

    def __call__(self, features: Tensor, tokens: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """The features behind these and their next tokens, `[1, N, 3]`, as a head would predict them."""
        text, position, right = features.long().unbind(-1)
        position = (position + 1).clamp(max=self._texts.shape[1] - 1)
        right = right * (self._texts[text, position] == tokens)
        return torch.stack([text, position, right], -1).to(features)

    def logits(self, features: Tensor) -> Tensor:
        """Log-probabilities of the next token, float32 `[…, V]`; of a lost text all are alike."""
        text, position, _ = features.long().unbind(-1)
        children = self._children[text, (position + 1).clamp(max=self._texts.shape[1] - 1)]
        size = len(self.vocabulary)
        known = self._unlikely.expand(*children.shape[:-1], size).scatter(
            -1, children.clamp(min=0), self._likely.expand(children.shape)
        )
        lost = (text == LOST) | (children[..., 0] == LOST)
        return torch.where(lost[..., None], -math.log(size), known)

    def new_cache(self, num_pages: int, page_size: int) -> PagedCache:
        """A cache that nothing is written to."""
        return PagedCache(
            layers=1,
            kv_heads=1,
            head_dim=1,
            feature_size=0,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.embedding.dtype,
            device=self.embedding.device,
        )


def _children(right: int, vocabulary: int, likely: Sequence[float], drawn: random.Random) -> list[int]:
    """Children of a position, likeliest first: each is the right one as often as its probability says."""
    at = drawn.random()
    others = drawn.sample(range(vocabulary - 1), len(likely))
    children = [other + (other >= right) for other in others]
    for rank, probability in enumerate(likely):
        if at < probability:
            children[rank] = right
            break
        at -= probability
    return children


@dataclass(slots=True)
class _Heard:
    """What a session has said."""

    text: int
    """Which of the known ones it is, or `LOST`."""
    tokens: list[int]
    features: int
    """Positions whose features came."""


class KnowingDrafter(Drafter):
    """Drafts by a `KnowingHead`: instead of the target's features it takes in which position they are of."""

    def __init__(
        self, texts: Sequence[Sequence[int]], sure: float, vocab_size: int, config: DraftConfig
    ) -> None:
        """Know texts as a `KnowingHead` does; `config` is of the trees of calls that ask for none."""
        head: Any = KnowingHead(texts, sure, vocab_size)
        super().__init__(head, config, num_pages=PAGES)
        self._texts = [list(text) for text in texts]
        self._heard: dict[str, _Heard] = {}

    def open(
        self, id: str, tokens: Sequence[int], config: DraftConfig | None = None, drawing: Drawing = LIKELIEST
    ) -> int:
        """As the drafter does; a prompt that is not known is lost."""
        first = super().open(id, tokens, config)
        self._heard[id] = _Heard(self._find(tokens), list(tokens), first)
        return first

    def advance(self, id: str, tokens: Sequence[int], features: Tensor) -> None:
        """As the drafter does; of the features only their number is looked at."""
        heard = self._heard[id]
        heard.tokens += tokens
        if heard.text != LOST and self._texts[heard.text][: len(heard.tokens)] != heard.tokens:
            heard.text = self._find(heard.tokens)
        known = self.head.embedding.new_tensor(
            [(heard.text, heard.features + i, heard.text != LOST) for i in range(len(features))]
        ).view(-1, 3)
        heard.features += len(features)
        super().advance(id, tokens, known)

    def close(self, id: str) -> None:
        """As the drafter does."""
        self._heard.pop(id, None)
        super().close(id)

    def _find(self, said: Sequence[int]) -> int:
        """A text that begins so, or `LOST`."""
        begun = list(said)
        return next((i for i, text in enumerate(self._texts) if text[: len(begun)] == begun), LOST)


def serve(model: str, verifier: str, file: str, sure: str) -> None:
    """Be a draft replica that knows the texts in a file, until it is told to end; its line has its address.

    Args:
        model: the target.
        verifier: address of its verify replica.
        file: JSON, a list of texts: token ids, the prompt's first.
        sure: probability that the first child of a node is right.
    """
    directory = resolve(model)
    mark = fingerprint(directory)
    embedding, _ = read_embeddings(directory, torch.float32, torch.device("cpu"))
    drafter = KnowingDrafter(json.loads(Path(file).read_text()), float(sure), len(embedding), TREES)
    service = DraftService(drafter, mark, max_num_seqs=MOST_SESSIONS)
    status = DraftStatus(
        model=model,
        fingerprint=mark,
        dtype="float32",
        device="cpu",
        running=0,
        num_pages=PAGES,
        free_pages=PAGES,
        verifiers={},
        counters={},
    )
    ready = announce("a draft replica that knows, at 127.0.0.1")

    async def serving() -> None:
        stopping = stopped_by_signal()
        await run(service, status, Place(), MemoryStore(), [verifier], None, ready, stopping)

    asyncio.run(serving())
