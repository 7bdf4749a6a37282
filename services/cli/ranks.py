"""The tensor-parallel ranks of one host, started with the first of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.engine.ranks import Ranks, free_port


@contextmanager
def joined(
    size: int, rank: int | None, address: str, port: int | None, device: torch.device
) -> Iterator[Ranks | None]:
    """This process among its ranks; None when it is alone.

    Without a rank of its own it is rank 0, and starts the others on this host with its own command line.

    Args:
        size: number of ranks.
        rank: of this process, when the ranks are started one by one.
        address: host of rank 0.
        port: where rank 0 listens; None for a free one.
        device: CUDA ranks that are started together take one GPU each.

    Raises:
        WealdError: as `Ranks.join` does.
    """
    if size == 1:
        yield None
        return
    meeting = port or free_port()
    own = torch.device("cuda", 0) if rank is None and device.type == "cuda" else device
    others = [_start(i, size, meeting, device) for i in range(1, size)] if rank is None else []
    try:
        if others:
            torch.set_num_threads(_threads(size))
        ranks = Ranks.join(rank or 0, size, address, meeting, own)
        try:
            yield ranks
        finally:
            if ranks.rank == 0:
                ranks.stop()
    finally:
        for process in others:
            process.terminate()
        for process in others:
            process.wait()


def _start(rank: int, size: int, port: int, device: torch.device) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", "from services.cli.app import app; app()", *sys.argv[1:]]
    command += ["--rank", str(rank), "--master-port", str(port)]
    if device.type == "cuda":
        command += ["--device", f"cuda:{rank}"]
    threads = {"OMP_NUM_THREADS": str(_threads(size))}
    # Ctrl-C is for rank 0, which lets sessions finish before it ends the others.
    return subprocess.Popen(
        command, env=os.environ | threads, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _threads(ranks: int) -> int:
    """Ranks of one host share its cores."""
    return max(1, (os.cpu_count() or 1) // ranks)
