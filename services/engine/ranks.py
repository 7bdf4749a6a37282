"""Tensor-parallel ranks: rank 0 decides and tells each step as integers, the others do as told.

Each rank holds a shard of the target, made by transformers' own sharding plan, its share of the key-value
heads and its columns of the feature plane. All run the same methods of `Target` and `PagedCache`. On rank 0
these first tell what is about to be done; on the others, which `follow`, telling is silent.

What is told, and its columns of int64:

    forward      tokens, rows whose logits are needed, and the batch as `pack` writes it
    move         slots to read, slots to write
    features     slots whose features rank 0 gathers
    cache        number of pages, page size: a new cache, in place of the last
    embeddings   nothing: rank 0 gathers the embedding and the LM head
    beat, stop   nothing

Two groups connect the ranks: one of the device for the model's own collectives, and one over TCP for what is
told. A process that dies closes its connections, so the others notice at once; timeouts bound other silence.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

from services.engine.attention import Batch, Segment
from services.types.errors import ErrorCode, WealdError, invalid

if TYPE_CHECKING:
    from services.engine.cache import PagedCache
    from services.engine.target import Target

Op = Literal["forward", "move", "features", "cache", "embeddings", "beat", "stop"]
_OPS: tuple[Op, ...] = get_args(Op)
_MOST_COLUMNS = 7
_HEADER = 2 + _MOST_COLUMNS
"""Of everything told: what, how many columns, and the length of each."""
_START = timedelta(minutes=30)
"""How long ranks wait for each other to join and to load; hosts start and read at their own pace."""


class Ranks:
    """One process's place among the ranks that share a target."""

    cache: "PagedCache"
    """The shared cache, the last one made: what is told of a cache means this one."""

    def __init__(
        self, rank: int, size: int, device: torch.device, control: dist.ProcessGroup, timeout: timedelta
    ) -> None:
        """As `join` does."""
        self.rank = rank
        self.size = size
        self.device = device
        self._control = control
        self._timeout = timeout
        self._met = False
        self._failure: str | None = None

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        address: str,
        port: int,
        device: torch.device,
        timeout_s: float = 60.0,
    ) -> "Ranks":
        """Meet the other ranks; returns when all are there. A process can be in one such group at a time.

        The ranks trust each other and are not encrypted: keep them in a network of their own. Gloo takes the
        network interface of the host's name, or the one that `GLOO_SOCKET_IFNAME` names.

        Args:
            rank: 0, which decides and listens at the address, or one of the others, below `size`.
            size: number of ranks.
            address: host of rank 0, as the others reach it.
            port: TCP port where rank 0 listens for the others.
            device: of this rank's shard. The group is NCCL's on CUDA, else Gloo's.
            timeout_s: seconds a rank may be silent in a step or between two; rank 0 must `beat` more often.

        Raises:
            WealdError: `INVALID_ARGUMENT` for the CPU where an accelerator is in sight; `UNAVAILABLE` when
                others do not come, or rank 0 cannot listen or be reached.
        """
        if device.type == "cpu" and torch.accelerator.is_available():
            raise invalid(
                "transformers shards a model over the accelerators it sees; hide them, for CUDA with "
                "CUDA_VISIBLE_DEVICES=, to run the ranks on the CPU"
            )
        timeout = timedelta(seconds=timeout_s)
        accelerated = device.type != "cpu"
        if accelerated:
            # transformers places a shard on the device of this index.
            os.environ["LOCAL_RANK"] = str(device.index or 0)
            torch.accelerator.set_device_index(device.index or 0)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, size, is_master=rank == 0, timeout=_START
            )
            dist.init_process_group(
                "nccl" if accelerated else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=_START,
                device_id=torch.device(device.type, device.index or 0) if accelerated else None,
            )
            control = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise WealdError(
                ErrorCode.UNAVAILABLE,
                f"rank {rank} of {size} did not meet the others at {address}, port {port}: "
                f"{_first_line(error)}; give all the same address, port and size, and see that rank 0 can "
                "listen there and be reached",
            ) from error
        assert isinstance(control, dist.ProcessGroup)
        return cls(rank, size, device, control, timeout)

    def meet(self) -> None:
        """Wait until every rank has loaded its shard; from here on a silent rank is a dead one.

        Raises `WealdError(UNAVAILABLE)` when one is gone.
        """
        with self.together():
            dist.monitored_barrier(self._control, _START)
            assert dist.group.WORLD is not None
            # NCCL ends the process when time is up: the control group must notice first, and say why.
            dist.group.WORLD.set_timeout(self._timeout * (1 if self.device.type == "cpu" else 2))
        self._met = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around all that ranks do in step. Whatever fails within, they are out of step for good.

        Raises:
            WealdError: `UNAVAILABLE` in place of a `RuntimeError`, and whenever something failed before.
        """
        if self._failure is not None:
            raise self._gone()
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or _first_line(error)
            if isinstance(error, RuntimeError):
                raise self._gone() from error
            raise

    def tell(self, op: Op, *columns: Tensor) -> None:
        """Rank 0: tell the others what all are about to do. On the others: nothing.

        Args:
            op: what.
            columns: integers of any shape on any device; they arrive flat.

        Raises:
            WealdError: `UNAVAILABLE` when a rank is gone.
        """
        if self.rank != 0:
            return
        sizes = [column.numel() for column in columns]
        header = torch.tensor([_OPS.index(op), len(sizes), *sizes, *[0] * (_MOST_COLUMNS - len(sizes))])
        with self.together():
            dist.broadcast(header, 0, self._control)
            if sum(sizes):
                payload = torch.cat([column.flatten().long().cpu() for column in columns])
                dist.broadcast(payload, 0, self._control)

    def hear(self) -> tuple[Op, list[Tensor]]:
        """What rank 0 tells next, and its columns, int64 on the CPU.

        Raises:
            WealdError: `UNAVAILABLE` when rank 0 is gone, or silent for longer than the timeout.
        """
        header = torch.empty(_HEADER, dtype=torch.long)
        with self.together():
            dist.broadcast(header, 0, self._control)
            op, count, *sizes = header.tolist()
            payload = torch.empty(sum(sizes), dtype=torch.long)
            if sum(sizes):
                dist.broadcast(payload, 0, self._control)
        return _OPS[op], list(torch.split(payload, sizes[:count]))

    def share(self, width: int) -> slice:
        """This rank's columns of a plane of `width`."""
        columns = width // self.size
        return slice(self.rank * columns, (self.rank + 1) * columns)

    def gather(self, rows: Tensor) -> Tensor:
        """Rank 0: the columns of all ranks side by side, `[n, width]`. On the others: their own `rows`.

        Args:
            rows: this rank's columns, `[n, width / size]`.

        Raises:
            WealdError: `UNAVAILABLE` when a rank is gone.
        """
        shares = [torch.empty_like(rows) for _ in range(self.size)] if self.rank == 0 else None
        with self.together():
            dist.gather(rows, shares, dst=0)
            self.settle()
        return rows if shares is None else torch.cat(shares, 1)

    def settle(self) -> None:
        """Wait until all ranks have computed what was told.

        Collectives on the CPU wait by themselves. On CUDA they are queued, and end never once a rank is gone.
        """
        if self.device.type != "cpu":
            if self.rank != 0:
                torch.accelerator.synchronize(self.device)
            self.answer()

    def beat(self) -> None:
        """Hear from every rank. Rank 0 has to do so more often than the timeout while it tells nothing else.

        Raises `WealdError(UNAVAILABLE)` when one is gone.
        """
        with self.together():
            self.tell("beat")
            self.answer()

    def stop(self) -> None:
        """Leave the group; rank 0 first ends the others' `follow`. No error when ranks are gone already."""
        if self.rank == 0 and self._met:
            with suppress(WealdError), self.together():
                self.tell("stop")
                self.answer()
        if self._failure is not None and self.device.type != "cpu":
            assert dist.group.WORLD is not None
            dist.group.WORLD.abort()  # To destroy the group is to wait for the ranks that are gone.
        elif dist.is_initialized():
            dist.destroy_process_group()
            del self._control  # Its connections close with the last reference.
        self._failure = "this one has stopped"

    def answer(self) -> None:
        """Wait until every rank has come here."""
        dist.all_reduce(torch.zeros(1), group=self._control)

    def _gone(self) -> WealdError:
        return WealdError(
            ErrorCode.UNAVAILABLE,
            f"a tensor-parallel rank is gone or out of step: {self._failure}; restart the service",
        )


def follow(target: "Target") -> None:
    """Do what rank 0 tells until it stops; returns then.

    Raises:
        WealdError: `UNAVAILABLE` when rank 0 or another rank is gone.
    """
    ranks = target.ranks
    assert ranks is not None
    while True:
        op, columns = ranks.hear()
        match op:
            case "forward":
                target.forward(*unpack(columns, ranks.cache, ranks.device))
            case "move":
                ranks.cache.move(*(column.to(ranks.device) for column in columns))
            case "features":
                ranks.cache.features(*(column.to(ranks.device) for column in columns))
            case "cache":
                num_pages, page_size = columns[0].tolist()
                target.new_cache(num_pages, page_size)
            case "embeddings":
                target.embeddings()
            case "beat":
                ranks.beat()
            case "stop":
                ranks.answer()
                ranks.stop()
                return


def pack(tokens: Tensor, batch: Batch, logit_rows: Tensor) -> tuple[Tensor, ...]:
    """The arguments of a target step as columns of integers, on the CPU.

    Slots run on within a page, and from page to page more often than not: they travel as runs.
    """
    segments = _segments(batch)
    sizes = torch.tensor([(s.slots.numel(), s.positions.numel(), s.rows) for s in segments])
    firsts, lengths = _to_runs(torch.cat([s.slots for s in segments]).cpu())
    positions = torch.cat([s.positions for s in segments])
    visible = _to_words(torch.cat([s.visible.flatten() for s in segments]).cpu())
    return tokens, logit_rows, sizes, firsts, lengths, positions, visible


def unpack(columns: list[Tensor], cache: "PagedCache", device: torch.device) -> tuple[Tensor, Batch, Tensor]:
    """What `pack` packed, on `device`: tokens, batch, rows whose logits are needed."""
    tokens, logit_rows, sizes, firsts, lengths, positions, visible = columns
    slots, windows, rows = sizes.view(-1, 3).unbind(1)
    bits = (rows * windows).tolist()
    segments = [
        Segment(s, p, v.view(-1, p.numel()))
        for s, p, v in zip(
            torch.split(_from_runs(firsts, lengths).to(device), slots.tolist()),
            torch.split(positions.to(device), windows.tolist()),
            torch.split(_from_words(visible, sum(bits)).to(device), bits),
            strict=True,
        )
    ]
    return tokens.to(device), Batch(segments, cache), logit_rows.to(device)


def tensor_parallel_sizes(config: PretrainedConfig) -> tuple[int, ...]:
    """Over how many ranks a model can be split, ascending; 1 always works.

    Args:
        config: of the text model, with transformers' sharding plan for it.
    """
    if not _is_planned(config):
        return (1,)
    return tuple(n for n in range(1, config.num_attention_heads + 1) if _undivided(config, n) is None)


def refuse_size(config: PretrainedConfig, size: int) -> None:
    """Name what keeps a model from being split over `size` ranks.

    Raises:
        WealdError: `INVALID_ARGUMENT`, with the sizes that work.
    """
    sizes = tensor_parallel_sizes(config)
    if size in sizes:
        return
    what = f"{config.model_type}, for which transformers has no sharding plan,"
    if _is_planned(config):
        what = f"the target's {_undivided(config, size)}"
    work = ", ".join(str(n) for n in sizes)
    raise invalid(f"{what} cannot be split over {size} ranks; sizes that work: {work}")


def free_port() -> int:
    """A TCP port of this host that nobody listens at; another process may be faster to take it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _is_planned(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "base_model_tp_plan", None))


def _undivided(config: PretrainedConfig, size: int) -> str | None:
    """What does not divide into so many equal shares."""
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    hidden: int = config.hidden_size
    counts = {
        f"{kv_heads} key-value heads": kv_heads,
        f"{heads} attention heads": heads,
        f"hidden size of {hidden}": hidden,
    }
    return next((what for what, count in counts.items() if count % size), None)


def _segments(batch: Batch) -> list[Segment]:
    """The segments of a batch in the order of their rows."""
    segments = [segment for group in batch.groups for segment in group.segments]
    rows = torch.cat([group.scatter for group in batch.groups]).cpu()
    first = torch.split(rows, [s.rows for s in segments])
    return [segments[i] for i in sorted(range(len(segments)), key=lambda i: int(first[i][0]))]


def _to_runs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of consecutive numbers: the first of each and its length."""
    breaks = (numbers[1:] != numbers[:-1] + 1).nonzero().flatten() + 1
    starts = torch.cat([breaks.new_zeros(1), breaks])
    return numbers[starts], torch.diff(starts, append=breaks.new_tensor([numbers.numel()]))


def _from_runs(firsts: Tensor, lengths: Tensor) -> Tensor:
    before = lengths.cumsum(0) - lengths
    return (firsts - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _to_words(bits: Tensor) -> Tensor:
    """Bools `[n]` as int64 `[ceil(n / 64)]`."""
    octets = torch.zeros(-(-bits.numel() // 64) * 8, 8, dtype=torch.uint8)
    octets.view(-1)[: bits.numel()] = bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return (octets * weights).sum(1, dtype=torch.uint8).view(torch.int64)


def _from_words(words: Tensor, count: int) -> Tensor:
    octets = words.view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return octets.flatten()[:count].bool()


def _first_line(error: BaseException) -> str:
    """What an error says, without the place in Gloo's source that it begins with."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition("] ")[2].partition(". ")[0] if line.startswith("[/") else line
