"""The settings of a runtime: one frozen tree of msgspec structs with defaults that work.

It holds values and their validation only; who reads files, environment and flags builds one of these.
"""

from __future__ import annotations

import math

import msgspec

from kvstream.errors import ConfigError

__all__ = ["RuntimeConfig"]

MiB = 1 << 20


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds, sizes in bytes. Every limit that bounds memory or a wait has its name here."""

    # -- staging
    slots: int = 8
    """Staging slots per connection: how many chunks may be between gather and confirmation."""
    slot_bytes: int = 2 * MiB
    """Size of a slot; raised to one KV block where a block is larger. Gather and scatter of a slot run on the loop."""
    group_bytes: int = MiB
    """Layers that are ready together share a chunk of up to this size: short prompts take few chunks. Less than a slot,
    so that gather and scatter of a prompt overlap."""
    put_window: int = 4 * MiB
    """Lane put: how many bytes of a connection are handed to UCX at a time. Control messages share its socket, and wait
    behind these and what the kernel buffers, not behind all slots. Less costs throughput."""
    lend_bytes: int = 32 << 10
    """Where the peer can read this process's memory (shared lane, with ptrace rights), blocks whose runs of bytes are
    at least this long are not gathered into slots but read in place: one copy instead of two."""
    get_lend_bytes: int = 32 << 10
    """The same for the lane `get`, where each run is an operation of its own. Measured over CMA between two processes,
    lent and gathered: 1.6 and 1.8 GB/s with runs of 16 KiB, 2.4 and 1.6 with 32 KiB, 3.6 and 2.2 with 64 KiB (on two
    cores, busy with other things as well); the processor time is in the same ratios."""
    lend_chunk: int = 4 * MiB
    """How much is read in place at a time. The copy runs on the receiver's loop: 4 MiB take it about 0.4 ms."""
    checksums: bool = False
    """Send the XXH3 of every chunk, which the destination compares before the chunk counts. Turns lending off: what is
    read in place is not touched by the source. The peer needs no setting."""
    staging_limit: int = 4096 * MiB
    """Cap on the staging memory of all connections of the process, quarantined memory included: slots * slot_bytes per
    connection on its source, and on its destination too for the lanes get and put. Pages are taken when first used."""

    # -- bounds on streams
    max_streams: int = 16384
    """Live streams per runtime and direction; beyond it `send` raises Refused and offers are refused."""
    max_pending_offers: int = 1024
    """Offers that wait for a receive() or an on_offer handler's answer."""
    offer_wait: float = 10.0
    """How long an offer waits for an answer before it is refused."""

    # -- waits
    deadline: float = 60.0
    """Deadline of a stream that names none."""
    connect_timeout: float = 2.0
    """Dialing and handshake together."""
    end_wait: float = 0.5
    """How long a destination that has everything waits for the source's last word before `done` is provisional."""
    close_wait: float = 2.0
    """Bound on each step of closing a runtime."""

    # -- liveness
    beat_interval: float = 0.25
    """A side with live streams on a connection says something at least this often."""
    stall_timeout: float = 5.0
    """A connection that was silent for this long while it had live streams is given up as PeerLost."""
    idle_timeout: float = 120.0
    """A connection without streams is closed by its source after this time."""

    # -- registry
    lease_ttl: float = 3.0
    """Time to live of the registration (whole seconds); it is renewed three times as often."""
    broker_timeout: float = 2.0

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                if not isinstance(value, bool):
                    raise ConfigError(field.name, f"must be true or false, is {value!r}")
                continue
            if isinstance(value, bool) or not isinstance(value, int if field.type is int else int | float):
                kind = "an integer" if field.type is int else "a number"
                raise ConfigError(field.name, f"must be {kind}, is {value!r}")
            if not 0 < value < math.inf:
                raise ConfigError(field.name, f"must be finite and greater than zero, is {value}")
        for field, limit in (
            ("slots", 4096),
            ("slot_bytes", 1 << 30),
            ("lend_chunk", 1 << 30),
            ("put_window", 1 << 40),
            ("max_streams", 1 << 24),
        ):
            if getattr(self, field) > limit:
                raise ConfigError(field, f"must be at most {limit}, is {getattr(self, field)}")
        for field in ("lend_bytes", "get_lend_bytes"):
            if getattr(self, field) < 64:
                raise ConfigError(field, f"must be at least 64, is {getattr(self, field)}")
        if self.put_window < 64 << 10:
            raise ConfigError("put_window", f"must be at least {64 << 10}, is {self.put_window}")
        if self.stall_timeout < 2 * self.beat_interval:
            raise ConfigError(
                "stall_timeout",
                f"must be at least two beat intervals ({2 * self.beat_interval} s), is {self.stall_timeout} s",
            )
        if self.lease_ttl < 1 or self.lease_ttl != int(self.lease_ttl):
            raise ConfigError("lease_ttl", f"must be whole seconds, at least 1 (NATS), is {self.lease_ttl}")
