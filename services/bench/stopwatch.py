"""Seconds spent inside chosen methods of an object or a class."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Accumulated seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are counted in."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return run


@contextmanager
def watched(owner: object, *methods: str) -> Iterator[Stopwatch]:
    """Time the named methods of an object, or of all objects of a class, until the block ends."""
    watch = Stopwatch()
    own = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name in methods:
        setattr(owner, name, watch.timed(getattr(owner, name)))
    try:
        yield watch
    finally:
        for name in methods:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
