"""kvstream's logger: structlog events handed to the standard `logging` tree under "kvstream".

The library configures nothing and prints nothing of its own: as with any library, levels and handlers are the
application's. A record's message is the event as key=value text; its attribute `kvstream` holds the event's fields, for
an application that logs JSON.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

__all__ = ["get_logger"]

_render = structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True)


def _to_logging(logger: Any, method: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The last processor: the arguments of the standard logger's method."""
    exc_info = event.pop("exc_info", None)
    return (_render(logger, method, dict(event)),), {"exc_info": exc_info, "extra": {"kvstream": dict(event)}}


def get_logger(name: str, **context: Any) -> structlog.stdlib.BoundLogger:
    """A bound logger named `kvstream.<name>` with these fields on each event."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"kvstream.{name}"),
        processors=[structlog.stdlib.filter_by_level, _to_logging],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger.bind(**context)
