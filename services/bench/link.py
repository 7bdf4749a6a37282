"""`weald bench link`: what the wire between draft and verify service costs a round."""

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from tqdm import tqdm

from services.bench.replicas import replica
from services.bench.report import figures_table, write_json
from services.draft.link import Links, VerifyLink
from services.draft.service import RoundTimes
from services.draft.serving import load
from services.engine.checkpoints import resolve
from services.engine.transfer import dtype_name, to_block
from services.gateway.tokenizer import Tokenizer
from services.sessions.memory import MemoryStore
from services.types.configuration import DraftConfig
from services.types.errors import WealdError
from services.types.messages import (
    Call,
    FeatureBlock,
    Load,
    Proposal,
    Proposals,
    Replies,
    Reply,
    Request,
    Response,
    StepTimings,
    VerifyStatus,
)
from services.types.outcome import Outcome
from services.types.sampling import SamplingParams
from services.types.tree import DraftTree
from services.verify.scheduler import Link
from services.verify.servicer import VerifyServicer
from services.wire import convert
from services.wire.channel import connect
from services.wire.server import serve
from services.wire.transport import OPTIONS

WIDTHS = {"SmolLM2-135M": (576, torch.float32), "8B": (4096, torch.bfloat16), "70B": (8192, torch.bfloat16)}
"""Hidden sizes and dtypes of the features that travel."""
ACCEPTED = 3
"""Draft tokens accepted in each round of the payload rows, so features of 4 positions travel."""
WARM_UP = 30
ECHO = "/weald.bench.Echo/Echo"
INSTANT = "import asyncio; from services.bench.link import serve_instantly; asyncio.run(serve_instantly())"


def bench_link(
    model: str,
    head: str,
    dtype: torch.dtype,
    device: torch.device,
    prompts: Sequence[str],
    max_tokens: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Measure real rounds over the wire, then the wire alone at several payloads beside a raw gRPC echo."""
    rows = asyncio.run(_measure(model, head, dtype, device, prompts, max_tokens, rounds))
    if json_file:
        settings = {"model": model, "dtype": dtype_name(dtype), "max_tokens": max_tokens, "rounds": rounds}
        write_json(json_file, "link", settings, rows)
    console = Console()
    console.print(figures_table("one round, ms", rows["rounds"]))
    console.print(
        figures_table(
            f"the wire alone, ms, {ACCEPTED + 1} features and a tree of 60 nodes a round", rows["wire"]
        )
    )


async def _measure(
    model: str,
    head: str,
    dtype: torch.dtype,
    device: torch.device,
    prompts: Sequence[str],
    max_tokens: int,
    rounds: int,
) -> dict[str, list[dict[str, Any]]]:
    with replica(program=INSTANT) as far:
        instant, raw = far.address.split(",")
        wire = [await _wire(name, instant, raw, rounds) for name in WIDTHS]
        with replica("verify", "--model", model, "--dtype", dtype_name(dtype), "--port", 0) as verifier:
            times = await _real(model, head, dtype, device, verifier.address, prompts, max_tokens)
    return {"rounds": _parts(times, wire[0]), "wire": wire}


async def _real(
    model: str,
    head: str,
    dtype: torch.dtype,
    device: torch.device,
    verifier: str,
    prompts: Sequence[str],
    max_tokens: int,
) -> list[RoundTimes]:
    """Rounds of one session after the other, drafted in this process."""
    times: list[RoundTimes] = []
    tokenizer = Tokenizer.load(resolve(model))
    service, _ = load(
        model, head, dtype, device, DraftConfig(), memory=2**28, max_num_seqs=1, observe=times.append
    )
    async with Links([verifier], None, service) as links:
        service.links = links
        service.start(MemoryStore())
        while not links[verifier].connected:
            await asyncio.sleep(0.01)
        for i, prompt in enumerate(tqdm(prompts, desc="bench link, rounds", unit="answer")):
            tokens = tuple(tokenizer.chat([{"role": "user", "content": prompt}]))
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            async for _event in service.generate(Call(f"link-{i}", tokens, (), params)):
                pass
        await service.stop()
    return times


class _Heard(asyncio.Queue[Response]):
    """What comes over a link."""

    def linked(self, link: VerifyLink) -> None:
        """As `Listener` says."""

    def received(self, link: VerifyLink, response: Response) -> None:
        """As `Listener` says."""
        self.put_nowait(response)

    def broken(self, link: VerifyLink, error: WealdError) -> None:
        """As `Listener` says."""
        raise error


def _parts(times: Sequence[RoundTimes], wire: dict[str, Any]) -> list[dict[str, Any]]:
    """Percentiles of each part of a round; the echo beside the link is the one of the same sizes."""
    target = [t.step.forward + t.step.accept + t.step.commit for t in times]
    parts = {
        "wall": [t.wall for t in times],
        "draft": [t.draft for t in times],
        "target": target,
        "link": [t.flight - t.turnaround for t in times],
        "at the verifier besides": [t.turnaround - s for t, s in zip(times, target, strict=True)],
        "left": [t.wall - t.draft - t.flight for t in times],
    }
    rows = [{"part": name, "count": len(times)} | _percentiles(values) for name, values in parts.items()]
    return [*rows, {"part": "echo", "count": wire["count"], "p50": wire["echo_p50"], "p99": wire["echo_p99"]}]


def _percentiles(nanoseconds: Sequence[int]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(nanoseconds)
    return {
        "p50": statistics.median(ordered) / 1e6,
        "p99": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))] / 1e6,
    }


async def _wire(name: str, address: str, echo_address: str, rounds: int) -> dict[str, Any]:
    """The link to a target that takes no time, and an echo of the same sizes, in turn."""
    width, dtype = WIDTHS[name]
    tree = DraftTree(tuple(range(60)), (-1, *(i // 10 for i in range(59))), (1.0,) * 60)
    proposals = Proposals((Proposal(name, 1, 0, 0, tree),))
    up = convert.request_to_proto(proposals).ByteSize()
    down = convert.response_to_proto(_answer(proposals.proposals[0], _block(width, dtype), 0)).ByteSize()
    arrived = _Heard()
    flights: list[int] = []
    echoes: list[int] = []
    async with (
        Links([address], None, arrived) as links,
        connect(echo_address) as raw_channel,
    ):
        link = links[address]
        while not link.connected:
            await asyncio.sleep(0.01)
        echo: Any = raw_channel.stream_stream(ECHO)()
        for i in tqdm(range(WARM_UP + rounds), desc=f"bench link, {name}", unit="round"):
            sent = time.perf_counter_ns()
            link.send(proposals)
            response = await arrived.get()
            flight = time.perf_counter_ns() - sent
            assert isinstance(response, Replies)
            sent = time.perf_counter_ns()
            await echo.write(down.to_bytes(4, "little") + bytes(up - 4))
            await echo.read()
            if i >= WARM_UP:
                flights.append(flight - response.replies[0].turnaround_ns)
                echoes.append(time.perf_counter_ns() - sent)
        echo.cancel()
    ours, raw = _percentiles(flights), _percentiles(echoes)
    return {
        "payload": name,
        "width": width,
        "count": rounds,
        "bytes_up": up,
        "bytes_down": down,
        "link_p50": ours["p50"],
        "link_p99": ours["p99"],
        "echo_p50": raw["p50"],
        "echo_p99": raw["p99"],
        "ratio_p50": ours["p50"] / raw["p50"],
    }


def _block(width: int, dtype: torch.dtype) -> FeatureBlock:
    return to_block(0, torch.zeros(ACCEPTED + 1, width, dtype=dtype))


def _answer(proposal: Proposal, block: FeatureBlock, turnaround_ns: int) -> Replies:
    path = tuple(range(1, ACCEPTED + 1))
    outcome = Outcome((*path, 0), path, len(proposal.tree), None)
    reply = Reply(
        proposal.session,
        proposal.epoch,
        proposal.round,
        0,
        outcome,
        (1 << 60) - 1,
        True,
        block,
        turnaround_ns,
    )
    return Replies((reply,), StepTimings(), Load())


class _Instant:
    """In the place of a verify service: a thread that answers every tree at once, as a target of no time."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Link, Request | None, int]] = queue.SimpleQueue()
        self._blocks = {name: _block(*sizes) for name, sizes in WIDTHS.items()}
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, link: Link, request: Request | None) -> None:
        self._inbox.put((link, request, time.perf_counter_ns()))

    def load(self) -> Load:
        return Load()

    def cost(self) -> dict[int, float]:
        return {}

    def counters(self) -> dict[str, int]:
        return {}

    def _run(self) -> None:
        while True:
            link, request, arrived = self._inbox.get()
            if isinstance(request, Proposals):
                for proposal in request.proposals:
                    block = self._blocks[proposal.session]
                    link.post([_answer(proposal, block, time.perf_counter_ns() - arrived)])


async def serve_instantly() -> None:
    """A verify replica whose target takes no time, and behind its address the one of a raw echo."""

    async def echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield bytes(int.from_bytes(request[:4], "little"))

    status = VerifyStatus("instant", b"", "", "", 1, 1, 1, 1, 1, 1, Load(), {})
    replies = await serve(VerifyServicer(_Instant(), status), "127.0.0.1:0")
    raw = grpc.aio.server(options=OPTIONS)
    service, method = ECHO.strip("/").split("/")
    handler: Any = grpc.stream_stream_rpc_method_handler(echo)
    raw.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = raw.add_insecure_port("127.0.0.1:0")
    await raw.start()
    print(f"127.0.0.1:{replies.port},127.0.0.1:{port}", flush=True)
    await replies.wait()
