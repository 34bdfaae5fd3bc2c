"""What the coordinator of the demo and its worker processes say to each other: one JSON object a line, over pipes.

Owns the messages and their framing. All times are seconds on CLOCK_MONOTONIC, which the processes of a host share.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvstream.cli.demo.engine import ModelName

__all__ = [
    "MAX_LINE",
    "Arrived",
    "Baseline",
    "Baselined",
    "Command",
    "Decoded",
    "Failed",
    "FirstToken",
    "LaneChoice",
    "Prefill",
    "Prefilled",
    "Ready",
    "Setup",
    "WorkerMessage",
    "decode_command",
    "decode_message",
    "encode",
]

MAX_LINE: Final = 1 << 20
"""Longest line in bytes; a peer that sends a longer one is broken."""

LaneChoice = Literal["auto", "shared", "get", "put"]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """To a worker, first and once: who it is and what it runs."""

    name: str
    role: Literal["prefill", "decode"]
    model: ModelName
    dtype: str
    lane: LaneChoice
    new_tokens: int


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """To the prefill worker: compute the KV cache of `text` and stream it to `to` (None: the default policy)."""

    stream: str
    text: str
    to: str | None
    deadline: float


class Baseline(msgspec.Struct, frozen=True, tag=True):
    """To the prefill worker: the same prompt in this one process, from its own pool, without a stream."""

    stream: str
    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker is registered and can be used."""

    layers: int


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """For the display: so many layers of the stream are whole on the decode side. Rate-limited."""

    stream: str
    worker: str
    layers: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """For the display: the decode worker holds everything and begins to generate."""

    stream: str


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """The prefill worker's side of a finished stream.

    `ready[l]` is when layer l was reported ready, `checksums[l]` is over its bytes in the pool, in table order.
    """

    stream: str
    tokens: int
    destination: str
    lane: str
    bytes: int
    began: float
    ended: float
    ready: tuple[float, ...]
    checksums: tuple[str, ...]


class Baselined(msgspec.Struct, frozen=True, tag=True):
    """The single-process run of a prompt: when its first token was there, and its answer."""

    stream: str
    first_token: float
    answer: tuple[int, ...]


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The decode worker's side of a finished stream, and the answer generated from it.

    `arrived[l]` is when the last byte of layer l was in place, `first_token` when the first token was in hand with all
    of the KV cache that generating needs.
    """

    stream: str
    worker: str
    first_token: float
    arrived: tuple[float, ...]
    checksums: tuple[str, ...]
    answer: tuple[int, ...]
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker can't go on, and leaves."""

    error: str


Command = Prefill | Baseline
WorkerMessage = Ready | Arrived | FirstToken | Prefilled | Baselined | Decoded | Failed

_encoder = msgspec.json.Encoder()
_commands: msgspec.json.Decoder[Setup | Command] = msgspec.json.Decoder(Setup | Command)
_messages: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)


def encode(message: Setup | Command | WorkerMessage) -> bytes:
    """One line. JSON escapes line breaks, so none is inside."""
    return _encoder.encode(message) + b"\n"


def decode_command(line: bytes) -> Setup | Command:
    """What the coordinator sent. Raises msgspec.MsgspecError."""
    return _commands.decode(line)


def decode_message(line: bytes) -> WorkerMessage:
    """What a worker sent. Raises msgspec.MsgspecError."""
    return _messages.decode(line)
