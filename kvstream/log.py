"""kvstream's logger: structlog events handed to the standard `logging` tree under "kvstream".

The library configures nothing and prints nothing of its own: as with any library, levels and handlers are the
application's. Events are key=value text by default; one that wants JSON installs structlog's ProcessorFormatter.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

__all__ = ["get_logger"]

_PROCESSORS = [
    structlog.stdlib.filter_by_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.processors.format_exc_info,
    structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
]


def get_logger(name: str, **context: Any) -> structlog.stdlib.BoundLogger:
    """A bound logger named `kvstream.<name>` with these fields on each event."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"kvstream.{name}"),
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger.bind(**context)
