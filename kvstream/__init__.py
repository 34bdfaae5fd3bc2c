"""kvstream: stream KV cache between LLM inference workers, layer by layer, while prefill is still computing.

What this module exports is the public interface; nothing else is.
"""

from kvstream._version import __version__
from kvstream.config import RuntimeConfig
from kvstream.discovery.client import ControlClient
from kvstream.discovery.control import DrainReport
from kvstream.errors import (
    BrokerUnavailable,
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    Fenced,
    KVStreamError,
    LayoutMismatch,
    Missed,
    PeerLost,
    ProtocolError,
    Refused,
    UnknownStream,
    UnknownWorker,
    Unreachable,
)
from kvstream.layout import KVLayout, Shard
from kvstream.memory import KVPool
from kvstream.runtime.fetches import FetchStream
from kvstream.runtime.holds import Hold
from kvstream.runtime.reports import HoldState, RuntimeStats, StreamEpoch, StreamReport
from kvstream.runtime.routing import Candidate, LeastLoaded, RouteRequest, RoutingPolicy
from kvstream.runtime.runtime import Runtime
from kvstream.runtime.sessions import Offer, ReceiveStream, SendStream

__all__ = [
    "BrokerUnavailable",
    "Cancelled",
    "Candidate",
    "ConfigError",
    "ControlClient",
    "Corrupted",
    "DeadlineExceeded",
    "DrainReport",
    "Fenced",
    "FetchStream",
    "Hold",
    "HoldState",
    "KVLayout",
    "KVPool",
    "KVStreamError",
    "LayoutMismatch",
    "LeastLoaded",
    "Missed",
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
    "UnknownStream",
    "UnknownWorker",
    "Unreachable",
    "__version__",
]
