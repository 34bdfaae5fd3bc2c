"""What the user is told: a stream's end, the same on both sides, and a runtime's state. Plain data, nothing else."""

from __future__ import annotations

import msgspec

from kvstream.scheduler.stats import PeerState, StreamState

__all__ = ["DevicePath", "HoldState", "Quarantine", "RuntimeStats", "StreamEpoch", "StreamReport"]


class StreamEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """A destination's time with a stream, as its source tells: `peer` had it under this epoch from `began` to `ended`.
    `why` is the code of what ended that ("done" for the last of a stream that is), `text` says more. Of `resent` layers
    it was sent something that had been announced to another before."""

    epoch: int
    peer: str
    began: float
    ended: float
    why: str
    text: str = ""
    resent: int = 0


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that is done. Times are seconds on the monotonic clock, comparable between processes of one host.

    `layer_times[l]` is, on the source, when layer l was reported ready to its last token, and on the destination when
    its last byte was in place. `bytes` counts what moved (a prefix that the destination held already does not).
    `provisional` (destination only): everything is in place, but the source's last word was not heard.

    `epochs` (source only) are all destinations that had the stream, the last one last; `in_doubt` names those of the
    earlier ones that may have finished it although it was taken away from them. Only `epoch`, the newest, counts.
    """

    stream: str
    peer: str
    epoch: int
    lane: str
    tokens: int
    layers: int
    bytes: int
    opened: float
    accepted: float
    ended: float
    layer_times: tuple[float, ...]
    provisional: bool = False
    epochs: tuple[StreamEpoch, ...] = ()
    in_doubt: tuple[str, ...] = ()


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """A peer whose broken connections keep staging memory, in bytes, because their fence is not reached yet."""

    peer: str
    bytes: int


class DevicePath(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the bytes of one connection go from GPU to GPU, without the host. `outgoing`: its source is here. `why`
    says why not, and is empty where they do."""

    peer: str
    outgoing: bool
    used: bool
    why: str


class HoldState(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that is held here: `bytes` of KV in whole blocks, lendable for `expires_in` seconds more (while it is
    pinned, until the last pin is gone as well). `reads` copies of it are on their way at present, `served` have been
    sent whole. With `leaving` it is lent to nobody any more, and its blocks are free when `reads` is 0."""

    stream: str
    tokens: int
    bytes: int
    expires_in: float
    pins: int
    reads: int
    served: int
    leaving: bool


class RuntimeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime at one moment. Counts are totals since its start, sizes bytes.

    `streams` are the live ones: what each waits for, and how long. `offers_waiting` and `tokens_waiting` are offers
    that nobody has answered yet, and their tokens in all. `staging_used` includes `staging_quarantined`, which
    `quarantined` breaks down by peer. `reroutes` counts how often a stream was taken away from a destination that had
    accepted it, `resumes` how often one went on with the destination that it had, by a new connection, and `ended`
    streams by the code of their end ("done" or an error's), both directions. `holds` are the streams held for others,
    least recently used first. `device_staging_used` of `device_staging_limit` bytes of a GPU are taken by connections
    whose bytes stay on GPUs; `devices` says of each connection, where both ends have their pools on a GPU, whether it
    is one.
    """

    streams: tuple[StreamState, ...]
    peers: tuple[PeerState, ...]
    offers_waiting: int
    tokens_waiting: int
    staging_used: int
    staging_limit: int
    staging_quarantined: int
    quarantined: tuple[Quarantine, ...]
    offers_refused: int
    reroutes: int
    resumes: int
    stalls: int
    stale_frames: int
    protocol_errors: int
    ended: tuple[tuple[str, int], ...]
    holds: tuple[HoldState, ...] = ()
    device_staging_used: int = 0
    device_staging_limit: int = 0
    devices: tuple[DevicePath, ...] = ()
