"""Logging of the command line: every event, structlog's and the standard library's, as one line on stderr.

A library leaves levels and handlers to the application; here the application is the `kvstream` command. Nothing is
ever logged to stdout, which belongs to the command's output.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog

__all__ = ["configure_logging"]


def configure_logging(level: str, style: str) -> None:
    """Send events of `level` ("debug", "info", "warning", "error") or above to stderr as "console" or "json"."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[structlog.typing.Processor]
    if style == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        render = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # Events that did not begin in structlog; their extra attributes become fields.
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _unfold],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _unfold(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """kvstream's own events come with their fields under one name, and with a text made of them as their message."""
    fields = event.pop("kvstream", None)
    if isinstance(fields, dict):
        event.update(cast("dict[str, Any]", fields))
    return event
