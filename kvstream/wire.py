"""The frames that workers exchange on a connection, their codec, and the choice of a protocol version.

Frames are positional msgpack arrays (unknown trailing fields are ignored, so a version may append fields), carried
in messages `[sequence, [frame, ...]]` of at most MAX_MESSAGE bytes. Everything from a peer is validated here and
nowhere else: what does not decode is a ProtocolError, never a surprise further in. Nothing is ever unpickled.

A stream is referred to by `num`, which its source chooses per connection, and by its `epoch`; chunks are numbered from
0 within an epoch. Counts are totals, never deltas, so a repeated frame changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec

from kvstream.errors import ConfigError, ProtocolError

__all__ = [
    "MAX_COUNT",
    "MAX_MESSAGE",
    "MAX_METADATA",
    "MAX_PAYLOAD",
    "MAX_PRIORITY",
    "MAX_RESUMED",
    "MAX_SECONDS",
    "MAX_SHARE",
    "MAX_STREAM_ID",
    "MIN_VERSION",
    "RESUMES",
    "TOKEN_BYTES",
    "VERSION",
    "Accept",
    "Beat",
    "Challenge",
    "Confirm",
    "End",
    "Fetch",
    "Frame",
    "Hello",
    "Offer",
    "Ready",
    "Refuse",
    "Reject",
    "Welcome",
    "decode",
    "decode_payload",
    "encode",
    "encode_metadata",
    "encode_payload",
    "negotiate",
    "proof",
]

VERSION = 2
"""The newest protocol version this code speaks. It also speaks the one before, where there is one. 2: Fetch, and that
streams resume."""
MIN_VERSION = max(1, VERSION - 1)
RESUMES = 2
"""The version that brought offers that resume."""

MAX_MESSAGE = 8192
MAX_NAMED = 256
MAX_NAMED_BYTES = 2048
"""Most streams that a Hello names, and the bytes that their names may take."""
MAX_PAYLOAD = 4096
"""Largest encoded payload of `done`, in bytes: it rides in one End frame."""
MAX_METADATA = 2048
"""Largest encoded metadata of an offer, in bytes."""
MAX_STREAM_ID = 256
"""Longest stream id, in characters."""
MAX_COUNT = 2**32 - 1
"""Largest number of tokens of a stream; chunks, blocks, layers and slots are bounded alike."""
MAX_RESUMED = 1024
"""Most layers of a stream that can be resumed: each is told of in one Accept frame."""
MAX_PRIORITY = 1000
MAX_SHARE = 64
"""Longest name of a share class, in characters."""
MAX_SECONDS = 1e9
"""Longest time that a frame can name."""
TOKEN_BYTES = 16
"""Size of the token that ties the offer of a holder to the fetch that it answers."""

U32 = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=160)]
StreamId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STREAM_ID)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Short = Annotated[str, msgspec.Meta(max_length=64)]
Blob = Annotated[bytes, msgspec.Meta(max_length=4096)]
Token = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Common settings of the frames."""


class Challenge(_Frame, tag=1, frozen=True):
    """Destination, first on every connection: the versions it speaks and the nonce that a Hello has to answer."""

    version: U32
    min_version: U32
    nonce: Blob


class Hello(_Frame, tag=2, frozen=True):
    """Source: who it is, whom it means, and what it can do.

    `proof` is keyed by the secret that the source put in its registry record, so only the incarnation that registered
    can make it; `target_incarnation` tells a restarted destination that it is not the one that was meant. `streams` are
    some that wait for the connection: whoever waits for them over there is told when there can't be one.
    """

    version: U32
    min_version: U32
    worker: Name
    incarnation: Short
    target: Name
    target_incarnation: Short
    nonce: Blob
    proof: Blob
    fingerprint: Short
    layout: Text
    shard: tuple[U32, U32, U32, U32]
    lanes: Annotated[list[Short], msgspec.Meta(max_length=8)]
    lane_offer: Blob
    streams: Annotated[list[StreamId], msgspec.Meta(max_length=MAX_NAMED)] = []


class Welcome(_Frame, tag=3, frozen=True):
    """Destination: the connection is good. Its own proof over the Hello's nonce, and the lane."""

    version: U32
    worker: Name
    incarnation: Short
    proof: Blob
    lane: Short
    lane_answer: Blob


class Reject(_Frame, tag=4, frozen=True):
    """Destination: no connection, and why (an error code of kvstream.errors)."""

    code: Short
    message: Text
    retry_after: Seconds | None = None


class Offer(_Frame, tag=5, frozen=True):
    """Source: take this stream. `deadline` is what is left of it, in seconds, at the time of sending; `share` the class
    that its work is counted to; `fetch` the token of the Fetch that it answers, empty where nobody asked for it. With
    `resumes` it is not new: the destination had it under that epoch, on a connection that was lost, and is to go on
    with it (version 2 on). `copy` is 0 for a stream, and else tells copies of what is held apart, of which several may
    go out under one name."""

    num: U32
    epoch: U32
    stream: StreamId
    tokens: U32
    deadline: Seconds | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    metadata: Blob = b""
    share: Short = ""
    fetch: Token = b""
    resumes: U32 = 0
    copy: U63 = 0


class Accept(_Frame, tag=6, frozen=True):
    """Destination: send it, from the block of token `first_token` on. Of a stream that is resumed: layer l from block
    `have[l]` on; all before is in place."""

    num: U32
    epoch: U32
    first_token: U32 = 0
    have: Annotated[list[U32], msgspec.Meta(max_length=MAX_RESUMED)] = []


class Refuse(_Frame, tag=7, frozen=True):
    """Destination: no, with an error code; `retry_after` in seconds where later may be better. Also the answer to a
    Fetch, by a holder that won't serve it (epoch 0)."""

    num: U32
    epoch: U32
    code: Short
    message: Text
    retry_after: Seconds | None = None


class Ready(_Frame, tag=8, frozen=True):
    """Source: chunk `chunk`, which is blocks [first, first+count) of the stream's table in each of `layers` layers from
    `layer` on, can be read in `slot` under `generation` (for the put lane: has been written and flushed there).
    `checksum` is the low 63 bits of the chunk's XXH3 (64 bits), where the source computes it; 0: none."""

    num: U32
    epoch: U32
    chunk: U32
    layer: U32
    first: U32
    count: U32
    slot: U32
    generation: U63
    checksum: U63 = 0
    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] = 1


class Confirm(_Frame, tag=9, frozen=True):
    """Destination: the first `chunks` chunks are in place and valid; their slots may be reused. A total."""

    num: U32
    epoch: U32
    chunks: U32


class End(_Frame, tag=10, frozen=True):
    """Either side: this stream has ended here. `code` is "done" or an error code; every End is answered by an End.

    From the source, "done" says that `chunks` chunks were all there were and hands over the payload; the *decision*
    is the destination's End "done". The answer to an End never needs an answer.
    """

    num: U32
    epoch: U32
    code: Short
    message: Text = ""
    chunks: U32 = 0
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)] = b""
    answer: bool = False


class Beat(_Frame, tag=11, frozen=True):
    """Alive, with the number of live streams. `reply` asks an otherwise silent peer to answer with a beat."""

    streams: U32
    reply: bool = False


class Fetch(_Frame, tag=12, frozen=True):
    """Who wants what the peer holds of a stream, on the connection that it has dialed for that (version 2 on).

    The holder answers by an Offer of that stream, on a connection of its own, that repeats `token`; or by a Refuse of
    `num`, which is a number among those of the offers on this connection. `tokens`: how many, from the first on; 0: as
    many as are held. `deadline` is what is left, in seconds, at the time of sending.
    """

    num: U32
    stream: StreamId
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    tokens: U32 = 0
    deadline: Seconds | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    share: Short = ""


Frame = Challenge | Hello | Welcome | Reject | Offer | Accept | Refuse | Ready | Confirm | End | Beat | Fetch

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[int, list[Frame]]] = msgspec.msgpack.Decoder(tuple[U63, list[Frame]])
_plain = msgspec.msgpack.Decoder()
_SENDABLE = "None, bool, int, float, str, bytes, list, dict"


def encode(sequence: int, frames: Sequence[Frame]) -> list[bytes]:
    """Encode frames into as few messages as MAX_MESSAGE allows, numbered from `sequence` on."""
    message = _encoder.encode((sequence, frames))
    if len(message) <= MAX_MESSAGE:
        return [message]
    if len(frames) == 1:
        raise ProtocolError(f"a {type(frames[0]).__name__} frame of {len(message)} bytes is over {MAX_MESSAGE}")
    half = len(frames) // 2
    head = encode(sequence, frames[:half])
    return head + encode(sequence + len(head), frames[half:])


def decode(message: bytes) -> tuple[int, list[Frame]]:
    """Decode one message into its sequence number and frames. Raises ProtocolError."""
    if len(message) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(message)} bytes is over {MAX_MESSAGE}")
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"undecodable message: {error}") from error


def negotiate(version: int, min_version: int, *, ours: int = VERSION, our_min: int = MIN_VERSION) -> int:
    """The newest version that both sides speak. Raises ProtocolError naming both ranges when there is none."""
    chosen = min(version, ours)
    if min_version > version or chosen < max(min_version, our_min):
        raise ProtocolError(
            f"no common protocol version: the peer speaks {min_version} to {version}, this side {our_min} to {ours};"
            " upgrade the older of the two"
        )
    return chosen


def proof(key: str, role: str, nonce: bytes, *parties: str) -> bytes:
    """The keyed hash (HMAC-SHA256) by which a worker proves its registered incarnation. `key` is hex.

    What is hashed is encoded, so that no other nonce, role or parties give the same bytes: the nonce is the peer's.
    """
    return hmac.digest(bytes.fromhex(key), _encoder.encode((nonce, role, parties)), hashlib.sha256)


def encode_payload(payload: Any) -> bytes:
    """Encode what `done(payload)` hands over: anything of None, bool, int, float, str, bytes, list and dict."""
    return _encode_bounded("payload", payload, MAX_PAYLOAD)


def encode_metadata(metadata: Any) -> bytes:
    """Encode an offer's metadata; the same types as a payload."""
    return _encode_bounded("metadata", metadata, MAX_METADATA)


def decode_payload(data: bytes) -> Any:
    """Decode a payload or metadata into plain Python objects. Raises ProtocolError."""
    if not data:
        return None
    try:
        value = _plain.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"undecodable payload: {error}") from error
    strange = _strange(value)
    if strange is not None:
        raise ProtocolError(f"undecodable payload: it holds a {strange.__name__}")
    return value


def _encode_bounded(field: str, value: Any, limit: int) -> bytes:
    if value is None:
        return b""
    try:
        data = _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(field, f"can't be sent ({error}); use {_SENDABLE}") from error
    if len(data) > limit:
        raise ConfigError(
            field, f"takes {len(data)} bytes encoded, the limit is {limit}; send what is larger another way"
        )
    strange = _strange(value)
    if strange is not None:
        # The codec would take it, but it would come back as something else.
        raise ConfigError(field, f"can't be sent (a {strange.__name__}); use {_SENDABLE}")
    return data


def _strange(value: Any) -> type[Any] | None:
    """The type of the first thing in a value, known to be encodable, that a payload must not hold; None if all is well.

    A tuple may be sent and comes back as a list.
    """
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, list | tuple):
            todo.extend(cast("Sequence[Any]", item))
        elif isinstance(item, dict):
            for pair in cast("dict[Any, Any]", item).items():
                todo.extend(pair)
        elif item is not None and not isinstance(item, bool | int | float | str | bytes):
            return cast("type[Any]", type(item))
    return None
