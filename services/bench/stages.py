"""The stages of a round as places to die: a replica ends or freezes exactly where it was ordered to.

The order lies in a file that the replica has mapped, so whoever gives it needs no hook in the services; they
are wrapped here, in the process that runs them.
"""

import functools
import inspect
import mmap
import os
import pkgutil
import signal
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from services.types.replica import ReplicaKind

STAGES: Mapping[ReplicaKind, Mapping[str, tuple[str, ...]]] = {
    ReplicaKind.DRAFT: {
        "extend": ("services.draft.drafter:Drafter._extend",),
        "grow": ("services.draft.drafter:grow",),
        "rerank": ("services.draft.drafter:_rerank", "services.draft.drafter:flatten"),
        "link": ("services.draft.link:VerifyLink.send",),
        "deliver": ("services.draft.service:DraftService.received",),
        "journal": ("services.sessions.redis:RedisStore.append",),
    },
    ReplicaKind.VERIFY: {
        "queue": ("services.verify.service:VerifyService._offer",),
        "forward": ("services.verify.verifier:Verifier._forward",),
        "accept": ("services.verify.verifier:walk",),
        "commit": (
            "services.verify.verifier:Verifier._compact",
            "services.verify.verifier:Verifier._register",
        ),
        "reply": ("services.verify.service:VerifyService._reply",),
    },
}
"""The functions that are a stage, by the replica's kind.

`queue` takes in a tree, `reply` says what was committed; `deliver` takes that in and hands it on, and
`journal` lasts until the store has it.
"""


class Moment(IntEnum):
    """When in a stage the order is carried out.

    Nothing is seen of a stage outside of its process but what stands before its start or behind its end, so
    the middle is no third case.
    """

    START = 0
    END = 1


class Orders:
    """The mapped file: which stage (0: none), which moment, which signal."""

    def __init__(self, file: Path) -> None:
        """Map a file, which is made when there is none."""
        with file.open("a+b") as opened:
            opened.truncate(3)
            self._bytes = mmap.mmap(opened.fileno(), 3)
        self._names = [name for stages in STAGES.values() for name in stages]

    def give(self, stage: str, moment: Moment, number: signal.Signals) -> None:
        """Order that the replica sends itself this signal at its next moment in that stage."""
        self._bytes[1], self._bytes[2] = moment, number
        # Last: from here on the order stands.
        self._bytes[0] = self._names.index(stage) + 1

    def withdraw(self) -> None:
        """Take back an order that has not been carried out."""
        self._bytes[0] = 0

    @property
    def standing(self) -> bool:
        """Whether an order waits to be carried out."""
        return self._bytes[0] != 0

    def close(self) -> None:
        """Let go of the file."""
        self._bytes.close()

    def at(self, stage: str, moment: Moment) -> None:
        """Called in the replica, at every moment of a stage: carry out an order that stands for it."""
        if self._bytes[0] == self._names.index(stage) + 1 and self._bytes[1] == moment:
            self._bytes[0] = 0
            os.kill(os.getpid(), self._bytes[2])


def obey(file: Path) -> None:
    """Carry out in this process what is ordered in the file; call it once, before any service is made."""
    orders = Orders(file)
    for stages in STAGES.values():
        for stage, functions in stages.items():
            for path in functions:
                owner_path, name = path.replace(":", ".").rsplit(".", 1)
                owner = pkgutil.resolve_name(owner_path)
                setattr(owner, name, _marked(orders, stage, getattr(owner, name)))


def _marked(orders: Orders, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its moments."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        orders.at(stage, Moment.START)
        result = function(*args, **kwargs)
        orders.at(stage, Moment.END)
        return result

    @functools.wraps(function)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        orders.at(stage, Moment.START)
        result = await function(*args, **kwargs)
        orders.at(stage, Moment.END)
        return result

    return run_async if inspect.iscoroutinefunction(function) else run
