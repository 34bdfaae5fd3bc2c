"""The settings of a runtime: one frozen tree of msgspec structs with defaults that work.

It holds values and their validation only; who reads files, environment and flags builds one of these.
"""

from __future__ import annotations

import math
from typing import cast

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
    device_staging: int = 256 * MiB
    """Pools on a GPU: how much memory of it is set aside as staging when the runtime starts, for peers on this host
    whose pools are on a GPU too: their bytes then never leave the devices. Each connection takes slots *
    device_slot_bytes of it, on its source and on its destination; who finds none left goes by way of the host. 0: none.
    """
    device_slot_bytes: int = 8 * MiB
    """The chunks of such a connection: each is a launch, a copy and a launch, whose fixed costs it has to outweigh."""
    device_lend_bytes: int = MiB
    """On such a connection blocks that lie in runs of at least this many bytes in memory are read where they are, each
    run by a copy of its own. Estimated, not measured: what a gather saves there is paid for in copies that begin."""
    staging_limit: int = 4096 * MiB
    """Cap on the staging memory of all connections of the process, quarantined memory included: slots * slot_bytes per
    connection on its source, and on its destination too for the lanes get and put. Pages are taken when first used."""

    # -- shares and order
    share_weights: dict[str, float] = {}
    """Weights of the classes that streams name as `share_class`; a class that is not named here weighs 1. While several
    have work, each gets bytes in proportion to its weight, on the source and on the destination."""
    short_bytes: int = 32 * MiB
    """Streams of up to this size, all layers counted, need not wait for longer ones of their class: while both have
    work, each kind gets every other turn (counted in bytes)."""
    patience: float = 10.0
    """Within a class and kind the earliest deadline goes first, but a stream counts as due after this time at the
    latest: beyond it the order is that of age, so that far deadlines do not starve."""
    priority_step: float = 0.01
    """A stream goes before others as if its deadline were this much earlier for each unit of its priority."""
    stream_share: float = 0.75
    """How much of a connection's slots one stream may hold (rounded up): the others stay open for its neighbours."""
    moves: int = 16
    """Destination: chunks that are being brought in at a time, over all connections. What is announced beyond that
    waits in its order, so that an urgent one never has more than this before it."""
    peer_moves: int = 8
    """How many of those may be of one connection."""

    stall_warning: float = 1.0
    """A peer that owes confirmations, or bytes, for this long without progress is named in a log event "credit stall";
    and again whenever the time has doubled."""
    quarantine_limit: int = 256 * MiB
    """Staging memory that broken connections of one peer may keep because no fence was reached yet: beyond it there is
    no new connection with that peer."""

    # -- bounds on streams
    max_streams: int = 16384
    """Live streams per runtime and direction; beyond it `send` raises Refused and offers are refused."""
    max_receiving: int = 256
    """Accepted streams at a time, and offers that an on_offer handler is working at: while there are so many, further
    offers are not handed to the handler but wait. What a receive() waits for is taken at once."""
    max_pending_offers: int = 1024
    """Offers that wait for a receive() or an on_offer handler's answer; beyond it they are refused. While several
    classes have offers waiting, each may fill its share only."""
    max_pending_tokens: int = 1 << 24
    """The same, in tokens of all offers that wait. A single offer may be larger."""
    max_holds: int = 65536
    """Streams that are held for others at a time; beyond it `hold` raises Refused."""
    hold_ttl: float = 60.0
    """How long a stream is held for which no time was named."""
    max_reroutes: int = 8
    """How often a stream that was accepted goes on after a loss: elsewhere, or by a new connection. 0: never."""
    offer_wait: float = 10.0
    """How long an offer waits for an answer before it is refused."""
    reservation_timeout: float = 60.0
    """A receive() or an accepted offer of which not one chunk has come after this time ends, and gives its blocks back,
    although its deadline may be later."""

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
    reroute_timeout: float = 1.0
    """A destination that was silent for this long loses its streams to others, where there are any. The connection, and
    streams that can go nowhere else, are given up only after stall_timeout."""
    resume_timeout: float = 1.0
    """After the loss of a connection: how long a destination keeps what it has of a stream for its source to come back
    and go on, and how long a source tries that while nobody answers."""
    idle_timeout: float = 120.0
    """A connection without streams is closed by its source after this time."""

    # -- registry
    lease_ttl: float = 3.0
    """Time to live of the registration (whole seconds); it is renewed three times as often."""
    broker_timeout: float = 2.0

    # -- control
    control: bool = True
    """Whether the worker serves control requests and publishes events on the broker."""
    event_rate: float = 100.0
    """Events published per second, on average and at once; those beyond are dropped and counted."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                if not isinstance(value, bool):
                    raise ConfigError(field.name, f"must be true or false, is {value!r}")
                continue
            if field.name == "share_weights":
                _check_weights(value)
                continue
            if isinstance(value, bool) or not isinstance(value, int if field.type is int else int | float):
                kind = "an integer" if field.type is int else "a number"
                raise ConfigError(field.name, f"must be {kind}, is {value!r}")
            if field.name in ("device_staging", "max_reroutes") and value == 0:
                continue
            if not 0 < value < math.inf:
                raise ConfigError(field.name, f"must be finite and greater than zero, is {value}")
        for field, limit in (
            ("slots", 4096),
            ("slot_bytes", 1 << 30),
            ("device_slot_bytes", 1 << 30),
            ("lend_chunk", 1 << 30),
            ("put_window", 1 << 40),
            ("max_streams", 1 << 24),
        ):
            if getattr(self, field) > limit:
                raise ConfigError(field, f"must be at most {limit}, is {getattr(self, field)}")
        for field in ("lend_bytes", "get_lend_bytes", "device_lend_bytes"):
            if getattr(self, field) < 64:
                raise ConfigError(field, f"must be at least 64, is {getattr(self, field)}")
        if self.put_window < 64 << 10:
            raise ConfigError("put_window", f"must be at least {64 << 10}, is {self.put_window}")
        if self.stream_share > 1:
            raise ConfigError("stream_share", f"must be at most 1, is {self.stream_share}")
        if self.stall_timeout < 2 * self.beat_interval:
            raise ConfigError(
                "stall_timeout",
                f"must be at least two beat intervals ({2 * self.beat_interval} s), is {self.stall_timeout} s",
            )
        if self.lease_ttl < 1 or self.lease_ttl != int(self.lease_ttl):
            raise ConfigError("lease_ttl", f"must be whole seconds, at least 1 (NATS), is {self.lease_ttl}")


def _check_weights(weights: object) -> None:
    if not isinstance(weights, dict):
        raise ConfigError("share_weights", f"must be a dict of class names to weights, is {weights!r}")
    for name, weight in cast("dict[object, object]", weights).items():
        if not isinstance(name, str):
            raise ConfigError("share_weights", f"a class is named by a string, not by {name!r}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-6 <= weight <= 1e6:
            raise ConfigError("share_weights", f"the weight of {name!r} must be from 1e-6 to 1e6, is {weight!r}")
