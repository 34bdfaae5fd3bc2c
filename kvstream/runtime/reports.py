"""What a stream's end tells the user: plain data, the same on both sides."""

from __future__ import annotations

import msgspec

__all__ = ["StreamReport"]


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that is done. Times are seconds on the monotonic clock, comparable between processes of one host.

    `layer_times[l]` is, on the source, when layer l was reported ready to its last token, and on the destination when
    its last byte was in place. `bytes` counts what moved (a prefix that the destination held already does not).
    `provisional` (destination only): everything is in place, but the source's last word was not heard.
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
