"""Ranks that share a target compute what one alone computes, and none waits for a dead one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from services.engine.attention import Batch, Segment, causal_segment, tree_segment
from services.engine.cache import PagedCache
from services.engine.checkpoints import resolve
from services.engine.ranks import Ranks, free_port, pack, refuse_size, tensor_parallel_sizes, unpack
from services.engine.target import Target
from services.types.errors import ErrorCode, WealdError
from services.types.tree import DraftTree

Make = Callable[..., Any]
CPU = torch.device("cpu")
FOUR_WAYS = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 50}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "vocab_size": 64},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2"},
}
"""Tied and not, with biases, with norms of each head and of all heads; 61 tokens do not divide."""

WORKER = """
import json, sys
from pathlib import Path
import torch
from services.engine.attention import Batch, causal_segment
from services.engine.ranks import Ranks, follow
from services.engine.target import Target
from services.types.errors import WealdError

torch.set_num_threads(1)
cpu, zero = torch.device("cpu"), torch.tensor([0])
for line in sys.stdin:
    job = json.loads(line)
    try:
        ranks = Ranks.join(job["rank"], job["size"], "127.0.0.1", job["port"], cpu, job["timeout_s"])
        target = Target.load(Path(job["directory"]), getattr(torch, job["dtype"]), cpu, ranks)
        print("ready", flush=True)
        while ranks.rank == 0:
            target.beat()
            if job["steps"]:
                target.forward(zero, Batch([causal_segment(zero, 1)], ranks.cache), zero)
        follow(target)
        torch.save(ranks.cache._kv, job["kept"])
        print("stopped", flush=True)
    except WealdError as error:
        print(f"{error.code}: {error.message}", flush=True)
        if error.code == "unavailable":
            break
        ranks.stop()
"""


@dataclass
class Workers:
    """Processes that take one job after another; for one that has ended there is another."""

    directory: Path
    processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def take(
        self,
        directory: Path,
        ranks: Iterable[int],
        size: int,
        *,
        dtype: str = "float64",
        timeout_s: float = 3600.0,
        steps: bool = False,
    ) -> int:
        """Let these ranks of a new group load a target and then do their part; gives the group's port."""
        port = free_port()
        for rank in ranks:
            job = {
                "rank": rank,
                "size": size,
                "port": port,
                "directory": str(directory),
                "dtype": dtype,
                "timeout_s": timeout_s,
                "steps": steps,
                "kept": str(self.kept(rank)),
            }
            stdin = self._process(rank).stdin
            assert stdin
            stdin.write(json.dumps(job) + "\n")
            stdin.flush()
        return port

    def said(self, rank: int) -> str:
        """The next line of a process; one that misses a rank has ended then."""
        stdout = self.processes[rank].stdout
        assert stdout
        line = stdout.readline().strip()
        if line.startswith("unavailable"):
            self.processes.pop(rank).communicate()
        return line

    def kept(self, rank: int) -> Path:
        """Where a follower leaves the keys and values of its cache, `[layers, 2, slots, heads, head_dim]`."""
        return self.directory / f"kept-{rank}.pt"

    def end(self, rank: int) -> None:
        """End a process as the kernel would."""
        process = self.processes.pop(rank)
        process.kill()
        process.communicate()

    @contextmanager
    def leading(
        self, directory: Path, size: int, dtype: str = "float64", timeout_s: float = 3600.0
    ) -> Iterator[Target]:
        """The target of rank 0, which is this process, with all others following."""
        port = self.take(directory, range(1, size), size, dtype=dtype, timeout_s=timeout_s)
        ranks = Ranks.join(0, size, "127.0.0.1", port, CPU, timeout_s)
        try:
            target = Target.load(directory, getattr(torch, dtype), CPU, ranks)
            assert [self.said(rank) for rank in range(1, size)] == ["ready"] * (size - 1)
            yield target
        finally:
            ranks.stop()

    def _process(self, rank: int) -> subprocess.Popen[str]:
        if rank not in self.processes:
            paths = os.pathsep.join(path for path in sys.path if path)
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        return self.processes[rank]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Up to four processes beside this one."""
    if torch.accelerator.is_available():
        pytest.skip("ranks run on the CPU only where no accelerator is in sight")
    workers = Workers(tmp_path_factory.mktemp("workers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.engine.ranks._START", timedelta(seconds=500))
        patch.setattr(sys, "excepthook", sys.excepthook)  # To join a group is to prefix what it prints.
        yield workers
    for rank in [*workers.processes]:
        workers.end(rank)


@pytest.fixture(scope="module")
def saved(model: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(kind)` is the checkpoint of a tiny model with four key-value heads."""

    def saved(kind: str) -> Path:
        directory = tmp_path_factory.mktemp(kind)
        model("llama", **(FOUR_WAYS | KINDS[kind])).save_pretrained(directory)
        return directory

    return saved


def tree(*parents: int) -> DraftTree:
    tokens = [(7 * i + 3) % 59 for i in range(len(parents))]
    return DraftTree(tuple(tokens), parents, (1.0,) * len(parents))


def words(*numbers: int) -> Tensor:
    return torch.tensor([(11 * n + 5) % 59 for n in numbers])


def decode(target: Target, long: Sequence[int], short: Sequence[int]) -> list[Tensor]:
    """Logits and features of two sessions on these pages of 16 slots: chunks, trees, moves, and mixtures."""
    cache = target.new_cache(9, 16)
    chunk = causal_segment(cache.slots([*short], 0, 6), 6)
    empty = target.forward(words(*range(6)), Batch([chunk], cache), torch.tensor([], dtype=torch.long))
    assert empty.shape == (0, target.vocab_size)
    first, second = tree(-1, 0, 0, 2, 2), tree(-1, 0, 1, 1, 3)
    chunk = causal_segment(cache.slots([*long], 0, 70), 70)
    draft = tree_segment(cache.slots([*short], 0, 11), first)
    tokens = torch.cat([words(*range(70)), torch.tensor(first.tokens)])
    said = [target.forward(tokens, Batch([chunk, draft], cache), torch.tensor([69, 70, 71, 72, 73, 74]))]
    slots = cache.slots([*short], 0, 11)
    cache.move(slots[[8, 10]], slots[[7, 8]])
    said.append(cache.features(slots[:9]))
    drafts = [
        tree_segment(cache.slots([*long], 0, 75), second),
        tree_segment(cache.slots([*short], 0, 14), first),
    ]
    tokens = torch.tensor([*second.tokens, *first.tokens])
    said.append(target.forward(tokens, Batch(drafts, cache), torch.arange(10)))
    said.append(cache.features(cache.slots([*long], 0, 75)))
    said.append(cache.features(slots[:0]))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_one_alone_computes(
    kind: str, size: int, workers: Workers, saved: Make, model: Make
) -> None:
    directory = saved(kind)
    alone = Target.load(directory, torch.float64, CPU)
    expected = decode(alone, [0, 1, 2, 3, 4], [5, 6])
    with workers.leading(directory, size) as target:
        in_order, permuted = (
            decode(target, *pages) for pages in (([0, 1, 2, 3, 4], [5, 6]), ([7, 2, 5, 0, 8], [3, 1]))
        )
        assert [t.shape for t in in_order] == [t.shape for t in expected]
        for ours, others, theirs in zip(in_order, permuted, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
            torch.testing.assert_close(others, theirs, rtol=0, atol=1e-10)
        target.beat()
        embedding, lm_head = target.embeddings()
        assert (embedding is lm_head) == (alone.embeddings()[0] is alone.embeddings()[1])
        assert torch.equal(embedding, alone.embeddings()[0])
        assert torch.equal(lm_head, alone.embeddings()[1])
        shared = 2 * 2 * alone._head_dim * 8 * (4 if kind == "olmo2" else 4 // size) + 8 * 32 // size
        assert target.token_bytes == shared
    assert [workers.said(rank) for rank in range(1, size)] == ["stopped"] * (size - 1)


@pytest.mark.slow
def test_where_tokens_tie_the_followers_hold_what_rank_0_has_drawn(
    workers: Workers, model: Make, tmp_path: Path
) -> None:
    built = model("llama", **FOUR_WAYS)
    lm_head = built.get_output_embeddings().weight
    lm_head[30:60] = lm_head[:30].clone()
    built.save_pretrained(tmp_path)
    alone = Target.load(tmp_path, torch.float64, CPU)
    text = [5, 17, 3]
    with workers.leading(tmp_path, 4) as target:
        cache = target.new_cache(3, 8)
        slots = cache.slots([2, 0, 1], 0, 24)
        computed = 0
        while len(text) < 24:
            rows = len(text) - computed
            batch = Batch([causal_segment(slots[: len(text)], rows)], cache)
            logits = target.forward(torch.tensor(text[computed:]), batch, torch.tensor([rows - 1]))
            tied = (logits[0] == logits[0].max()).nonzero().flatten().tolist()
            computed = len(text)
            text.append(tied[-1])
    assert len({token for token in text if token >= 30}) > 3
    whole = alone.new_cache(3, 8)
    batch = Batch([causal_segment(slots[:23], 23)], whole)
    alone.forward(torch.tensor(text[:23]), batch, torch.tensor([22]))
    for rank in (1, 2, 3):
        assert workers.said(rank) == "stopped"
        kept = torch.load(workers.kept(rank))
        expected = whole._kv[:, :, :, rank : rank + 1]
        torch.testing.assert_close(kept[:, :, slots[:23]], expected[:, :, slots[:23]], rtol=0, atol=1e-10)
        assert not kept[:, :, slots[23]].any()


GONE = ("a tensor-parallel rank is gone or out of step: ", "; restart the service")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "killed", "steps"),
    [(4, 2, True), (2, 1, False), (2, 0, False)],
    ids=["a follower in a step", "a follower while nothing runs", "rank 0"],
)
def test_when_a_rank_is_killed_all_others_end(
    size: int, killed: int, steps: bool, workers: Workers, saved: Make
) -> None:
    workers.take(saved("llama"), range(size), size, steps=steps)
    assert [workers.said(rank) for rank in range(size)] == ["ready"] * size
    time.sleep(0.2)
    workers.end(killed)
    for rank in {*range(size)} - {killed}:
        said = workers.said(rank)
        assert said.startswith("unavailable: " + GONE[0])
        assert said.endswith(GONE[1])


def step(target: Target) -> None:
    """One token through the target."""
    assert target.ranks
    zero = torch.tensor([0])
    target.forward(zero, Batch([causal_segment(zero, 1)], target.ranks.cache), zero)


@pytest.mark.slow
@pytest.mark.parametrize("does", [step, Target.embeddings], ids=["telling it", "computing with it"])
def test_a_rank_that_stands_still_is_missed_and_no_rank_is_asked_again(
    does: Callable[[Target], None], workers: Workers, saved: Make
) -> None:
    with workers.leading(saved("llama"), 2, timeout_s=15.0) as target:
        workers.processes[1].send_signal(signal.SIGSTOP)
        for again in (does, step):
            with pytest.raises(
                WealdError, match=r"Timed out waiting 15000ms .*; restart the service"
            ) as missed:
                again(target)
            assert missed.value.code is ErrorCode.UNAVAILABLE
        workers.processes[1].send_signal(signal.SIGCONT)
    assert workers.said(1).startswith("unavailable: " + GONE[0])


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_refused_on_all_ranks_before_anything_is_loaded(
    workers: Workers, saved: Make
) -> None:
    directory = saved("llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(WealdError) as refused, workers.leading(directory, 3):
        pass
    says = "the target's 4 key-value heads cannot be split over 3 ranks; sizes that work: 1, 2, 4"
    assert (refused.value.code, refused.value.message) == (ErrorCode.INVALID_ARGUMENT, says)
    assert [workers.said(1), workers.said(2)] == [f"invalid_argument: {says}"] * 2


@pytest.mark.slow
def test_the_packaged_model_says_the_same_over_three_ranks(workers: Workers) -> None:
    directory = resolve("smollm2-135m")
    prompt = AutoTokenizer.from_pretrained(directory)("The capital of France is")["input_ids"]

    def answer(target: Target) -> list[int]:
        cache, text = target.new_cache(2, 16), list(prompt)
        slots = cache.slots([1, 0], 0, 32)
        for computed in (0, *range(len(prompt), len(prompt) + 7)):
            rows = len(text) - computed
            batch = Batch([causal_segment(slots[: len(text)], rows)], cache)
            logits = target.forward(torch.tensor(text[computed:]), batch, torch.tensor([rows - 1]))
            text.append(int(logits[0].argmax()))
        return text[len(prompt) :]

    with workers.leading(directory, 3, "float32") as target:
        shared = answer(target)
    assert shared == answer(Target.load(directory, torch.float32, CPU))
    assert [workers.said(1), workers.said(2)] == ["stopped"] * 2


def test_a_port_that_is_taken_is_told(workers: Workers) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    with pytest.raises(
        WealdError, match=f"rank 0 of 2 did not meet the others at 127.0.0.1, port {store.port}"
    ):
        Ranks.join(0, 2, "127.0.0.1", store.port, CPU)


@pytest.mark.parametrize(
    ("kind", "options", "sizes"),
    [
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, (1, 3)),
        ("llama", {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}, (1, 2, 4, 8)),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 32}, (1, 2, 4)),
        ("gpt_neox", {"num_attention_heads": 6, "hidden_size": 96}, (1, 2, 3, 6)),
        ("gpt2", {}, (1,)),
        ("mamba", {}, (1,)),
    ],
)
def test_the_sizes_that_work_divide_heads_and_hidden_size(
    kind: str, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert tensor_parallel_sizes(AutoConfig.for_model(kind, **options)) == sizes


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("llama", 2, "the target's 3 key-value heads cannot be split over 2 ranks; sizes that work: 1, 3"),
        ("gpt2", 3, "gpt2, for which transformers has no sharding plan, cannot be split over 3 ranks"),
        ("mamba", 2, "mamba, for which transformers has no sharding plan, cannot be split over 2 ranks"),
    ],
)
def test_a_refused_size_is_told_with_what_cannot_be_split(kind: str, size: int, says: str) -> None:
    options = {"num_attention_heads": 9, "num_key_value_heads": 3} if kind == "llama" else {}
    config = AutoConfig.for_model(kind, hidden_size=576, **options)
    refuse_size(config, 1)
    with pytest.raises(WealdError) as refused:
        refuse_size(config, size)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert says in refused.value.message


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Any segment, on slots in any order."""
    window = draw(st.integers(1, 12) | st.integers(60, 70))
    rows = draw(st.integers(1, window))
    start = draw(st.integers(0, 40))
    first, spread = draw(st.integers(0, 9)), draw(st.sampled_from([1, 7]))
    slots = (first + spread * torch.arange(start + window)) % 128
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    visible = torch.rand(rows, window, generator=generator) < 0.5
    return Segment(slots, torch.randint(0, 99, (window,), generator=generator), visible)


@given(st.lists(segments(), min_size=1, max_size=6))
def test_a_step_arrives_as_it_was_told(told: list[Segment]) -> None:
    cache = PagedCache(
        layers=1,
        kv_heads=1,
        head_dim=1,
        feature_size=1,
        num_pages=8,
        page_size=16,
        dtype=torch.float32,
        device=CPU,
    )
    rows = sum(segment.rows for segment in told)
    tokens, logit_rows, batch = torch.arange(rows), torch.arange(rows)[::2], Batch(told, cache)
    columns = pack(tokens, batch, logit_rows)
    assert not any(column.is_floating_point() for column in columns)
    heard = unpack([column.flatten().long() for column in columns], cache, CPU)
    assert torch.equal(heard[0], tokens)
    assert torch.equal(heard[2], logit_rows)
    assert torch.equal(heard[1].slots, batch.slots)
    assert torch.equal(heard[1].positions, batch.positions)
    for ours, theirs in zip(heard[1].groups, batch.groups, strict=True):
        assert torch.equal(ours.scatter, theirs.scatter)
        for a, b in zip(ours.segments, theirs.segments, strict=True):
            assert torch.equal(a.slots, b.slots)
            assert torch.equal(a.positions, b.positions)
            assert torch.equal(a.visible, b.visible)


def test_a_long_context_on_pages_travels_as_one_run_a_page() -> None:
    cache = PagedCache(
        layers=1,
        kv_heads=1,
        head_dim=1,
        feature_size=1,
        num_pages=64,
        page_size=16,
        dtype=torch.float32,
        device=CPU,
    )
    slots = cache.slots([*range(63, -1, -1)], 0, 1024)
    batch = Batch([causal_segment(slots, 1)], cache)
    columns = pack(torch.tensor([1]), batch, torch.tensor([0]))
    assert sum(column.numel() for column in columns) < 64 * 2 + 16
