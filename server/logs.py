"""How the frontend and the worker log: lines of text, or JSON objects one a line, each with the request that it is about."""

from __future__ import annotations

import logging
import os
import re
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import msgspec

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE = "RADIXKV_LOG_FORMAT"
"""Environment variable by which the worker gets its format from the launcher."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._:@=+/-]{1,64}")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is being served; empty outside of any."""


def choose_request_id(proposed: str) -> str:
    """The client's own where it is 1 to 64 characters out of letters, digits and ``._:@=+/-``, else a new one."""
    return proposed if _SAFE_ID.fullmatch(proposed) else uuid.uuid4().hex


def set_up(format: LogFormat | None = None) -> None:
    """Send this process's log to standard error in this format; without one, as the process that started this one does."""
    if format is None:
        given = os.environ.get(FORMAT_VARIABLE)
        format = "json" if given == "json" else "text"
    elif format not in get_args(LogFormat):
        raise ValueError(f"log-format must be text or json, got {format!r}")
    os.environ[FORMAT_VARIABLE] = format
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as it is imported it would tell of a missing torch, its way
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("radixkv").setLevel(logging.INFO)


def take_over(library: str) -> None:
    """Have a library that has set up handlers of its own, as transformers does when it is imported, log as all others do."""
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True


class TextFormatter(logging.Formatter):
    """Time, logger, level and message, then the fields as ``name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in _fields(record).items())])


class JsonFormatter(logging.Formatter):
    """``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, the fields, and ``exception`` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as ``extra={"fields": {...}}``, and the request that is being served."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    serving = request_id.get()
    return {"request_id": serving, **fields} if serving else fields
