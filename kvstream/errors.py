"""The errors of kvstream: what happened to a stream or a runtime, never which library raised.

Every message names the field or peer at fault and what to do about it. Errors travel between workers as
a stable `code` plus text (`KVStreamError.code`, `from_code`); they never carry a pickled object.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BrokerUnavailable",
    "Cancelled",
    "ConfigError",
    "Corrupted",
    "DeadlineExceeded",
    "Fenced",
    "KVStreamError",
    "LayoutMismatch",
    "Missed",
    "PeerLost",
    "ProtocolError",
    "Recalled",
    "Refused",
    "UnknownStream",
    "UnknownWorker",
    "Unreachable",
    "from_code",
]


class KVStreamError(Exception):
    """Base of all errors of kvstream.

    `code` is the stable name that goes over the wire. Where the error ended a stream, `valid_layers` holds the
    indices of the layers whose bytes are complete and in place on this side (empty where none, or not known),
    and `in_doubt` names destinations that may have finished the stream although their answer was lost.
    """

    code = "failed"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.valid_layers: tuple[int, ...] = ()
        self.in_doubt: tuple[str, ...] = ()


class ConfigError(KVStreamError):
    """A value given by the caller is wrong. `field` names it; the message says what is allowed."""

    code = "config"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnknownWorker(ConfigError):
    """The named worker is not registered, so there is nobody to send to."""

    code = "unknown_worker"


class UnknownStream(ConfigError):
    """No live stream, and nothing that is held, goes by this id where it was looked for."""

    code = "unknown_stream"


class LayoutMismatch(KVStreamError):
    """Two workers, or a pool and its arrays, disagree about the layout of KV memory. Nothing was moved."""

    code = "layout"


class PeerLost(KVStreamError):
    """The other worker died, closed, froze beyond the stall time-out, or can't be reached."""

    code = "peer_lost"


class Unreachable(PeerLost):
    """There is no way to the other worker at present, over the network: it may well live."""

    code = "unreachable"


class Refused(KVStreamError):
    """The destination did not take the stream. `retry_after` (seconds) is set where trying again may help."""

    code = "refused"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Missed(KVStreamError):
    """The worker does not hold the KV that was asked for: never did, or has let go of it, or holds fewer tokens; the
    message says which. Another holder may have it; else it has to be computed again."""

    code = "missed"


class Cancelled(KVStreamError):
    """The stream was cancelled, by this side or by the other. (Not asyncio's CancelledError.)"""

    code = "cancelled"


class DeadlineExceeded(KVStreamError):
    """The stream's deadline passed before its last byte was in place and confirmed."""

    code = "deadline"


class Corrupted(KVStreamError):
    """Bytes did not survive: a checksum, a slot generation or a bounds check failed. They were not announced."""

    code = "corrupted"


class Recalled(Corrupted):
    """What a source had announced was taken back before it counted: its stream, or the connection, has ended there, and
    its word on why is on the way. Never the end of a stream by itself, unless that word does not come."""


class Fenced(KVStreamError):
    """This incarnation or epoch has been replaced by a newer one and must not act any more."""

    code = "fenced"


class ProtocolError(KVStreamError):
    """A peer broke the protocol or speaks no version that we speak. The connection is closed."""

    code = "protocol"


class BrokerUnavailable(KVStreamError):
    """NATS can't be reached, and the operation needs it."""

    code = "broker"


_BY_CODE: dict[str, type[KVStreamError]] = {
    kind.code: kind
    for kind in (
        LayoutMismatch,
        PeerLost,
        Missed,
        Unreachable,
        Cancelled,
        DeadlineExceeded,
        Corrupted,
        Fenced,
        ProtocolError,
        BrokerUnavailable,
    )
}

_OF_FIELDS: dict[str, type[ConfigError]] = {kind.code: kind for kind in (ConfigError, UnknownStream, UnknownWorker)}


def from_code(
    code: str,
    message: str,
    *,
    retry_after: float | None = None,
    in_doubt: Sequence[str] = (),
) -> KVStreamError:
    """Rebuild an error that a peer sent as code and text. An unknown code becomes a plain KVStreamError."""
    if code == Refused.code:
        error: KVStreamError = Refused(message, retry_after)
    elif code in _OF_FIELDS:
        field, _, rest = message.partition(": ")
        kind = _OF_FIELDS[code]
        error = kind(field, rest) if rest else kind("peer", message)
    else:
        error = _BY_CODE.get(code, KVStreamError)(message)
    error.in_doubt = tuple(in_doubt)
    return error
