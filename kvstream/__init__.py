"""kvstream: stream KV cache between LLM inference workers, layer by layer, while prefill is still computing.

What this module exports is the public interface; nothing else is.
"""

from kvstream._version import __version__
from kvstream.config import RuntimeConfig
from kvstream.errors import (
    BrokerUnavailable,
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    Fenced,
    KVStreamError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    Refused,
    UnknownWorker,
    Unreachable,
)
from kvstream.layout import KVLayout, Shard
from kvstream.memory import KVPool
from kvstream.runtime.reports import RuntimeStats, StreamEpoch, StreamReport
from kvstream.runtime.routing import Candidate, LeastLoaded, RouteRequest, RoutingPolicy
from kvstream.runtime.runtime import Runtime
from kvstream.runtime.sessions import Offer, ReceiveStream, SendStream

__all__ = [
    "BrokerUnavailable",
    "Cancelled",
    "Candidate",
    "ConfigError",
    "Corrupted",
    "DeadlineExceeded",
    "Fenced",
    "KVLayout",
    "KVPool",
    "KVStreamError",
    "LayoutMismatch",
    "LeastLoaded",
    "Offer",
    "PeerLost",
    "ProtocolError",
    "ReceiveStream",
    "Refused",
    "RouteRequest",
    "RoutingPolicy",
    "Runtime",
    "RuntimeConfig",
    "RuntimeStats",
    "SendStream",
    "Shard",
    "StreamEpoch",
    "StreamReport",
    "UnknownWorker",
    "Unreachable",
    "__version__",
]
