"""Logs: a line for each thing that happens, for people or for machines, with the session that it is about."""

import logging
from enum import StrEnum


class LogFormat(StrEnum):
    """How a line looks."""

    PRETTY = "pretty"
    JSON = "json"


class LogLevel(StrEnum):
    """The least that is told."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ABOUT = ("request", "session", "trace")
"""What a line can be about; `extra` of a log call has them."""


def about(session: str, traceparent: str = "") -> dict[str, str]:
    """For `extra` of a log call: the session, and the trace that its spans are in."""
    trace = {"trace": traceparent.split("-")[1]} if traceparent.count("-") == 3 else {}
    return {"session": session, **trace}


def log_to_stderr(format: LogFormat, level: LogLevel) -> None:
    """Let this process log so; call it once."""
    handler = logging.StreamHandler()
    if format is LogFormat.JSON:
        from pythonjsonlogger.json import JsonFormatter

        fields = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(
            JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=fields)
        )
    else:
        handler.setFormatter(_Pretty("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _Pretty(logging.Formatter):
    """What a line is about stands at its end."""

    def format(self, record: logging.LogRecord) -> str:
        told = [f"{name}={getattr(record, name)}" for name in ABOUT if hasattr(record, name)]
        return " ".join([super().format(record), *told])
