"""The scheduler: every decision about streams, and nothing else. It is sans-IO: events come in as method calls with the
present time, commands go out through `take`; it awaits nothing, reads no clock, draws no random number.

It owns the life of streams on both sides (offer, slots, order, confirmation, deadlines, the one end) and the liveness
of links. It must never touch memory or a connection: that is what commands are for. The same object runs in production
and in simulation.

All ids are integers or strings chosen by the caller or counted here, and no decision depends on set order or hashes, so
that the same events give the same commands.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import (
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    KVStreamError,
    PeerLost,
    ProtocolError,
    Refused,
    from_code,
)
from kvstream.scheduler import inbound, outbound
from kvstream.scheduler.commands import (
    Accepted,
    Arrived,
    Command,
    Dial,
    Drop,
    Ended,
    Move,
    Offered,
    Stage,
    Transmit,
    Withdrawn,
)
from kvstream.scheduler.inbound import Inbound
from kvstream.scheduler.links import Ending, Link
from kvstream.scheduler.outbound import Outbound, first_block

__all__ = ["Counters", "Scheduler"]

_MESSAGE_LIMIT = 1000


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    stale_frames: int = 0
    """Frames of streams or epochs that had already ended here; they are ignored."""
    protocol_errors: int = 0
    offers_refused: int = 0
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """Streams by the code of their end, both directions."""


@dataclass(slots=True)
class _PendingOffer:
    id: int
    link: Link
    frame: wire.Offer
    expires: float
    stream_expires: float
    asked: bool


class Scheduler:
    """One runtime's streams. `layers` and `block_tokens` are those of its layout; all peers on links share them."""

    def __init__(self, config: RuntimeConfig, *, layers: int, block_tokens: int) -> None:
        self._config = config
        self._layers = layers
        self._block_tokens = block_tokens
        self._commands: deque[Command] = deque()
        self._timers: list[tuple[float, int, str, int]] = []
        self._count = 0
        self._links: dict[int, Link] = {}
        self._outgoing: dict[str, Link] = {}
        self._connecting: dict[str, list[int]] = {}
        self._outbound: dict[int, Outbound] = {}
        self._outbound_names: dict[str, int] = {}
        self._inbound: dict[int, Inbound] = {}
        self._inbound_names: dict[str, int] = {}
        self._offers: dict[int, _PendingOffer] = {}
        self._offer_names: dict[str, int] = {}
        self._handler = False
        self._closed: str | None = None
        self.counters = Counters()

    # ------------------------------------------------------------------ output

    def take(self) -> deque[Command]:
        """The commands since the last call, in the order in which they have to be performed."""
        commands, self._commands = self._commands, deque()
        return commands

    def next_timer(self) -> float | None:
        """When `tick` is due, or None."""
        return self._timers[0][0] if self._timers else None

    @property
    def streams(self) -> int:
        """Live streams, both directions."""
        return len(self._outbound) + len(self._inbound)

    @property
    def slots_in_use(self) -> int:
        """Source slots that are not free, over all links."""
        return sum(link.slots - len(link.free) for link in self._links.values() if link.outgoing)

    @property
    def idle(self) -> bool:
        """No live stream and nothing that waits for a peer's answer."""
        return not (self._outbound or self._inbound or self._offers) and not any(
            link.live for link in self._links.values()
        )

    # ------------------------------------------------------------------ the user's events, source side

    def send(
        self,
        now: float,
        name: str,
        *,
        tokens: int,
        held: int,
        candidates: Sequence[str],
        deadline: float,
        priority: int = 0,
        metadata: bytes = b"",
    ) -> int:
        """A new stream to the first of `candidates` that takes it. `held` block ids are known so far. Returns a key."""
        self._check_open()
        if name in self._outbound_names:
            raise ConfigError("stream", f"{name!r} is already being sent; a stream id is unique while it lives")
        if len(self._outbound) >= self._config.max_streams:
            raise Refused(f"{len(self._outbound)} streams are being sent already (max_streams)", retry_after=0.1)
        stream = Outbound(
            key=self._next(),
            name=name,
            tokens=tokens,
            blocks=math.ceil(tokens / self._block_tokens),
            held=held,
            layers=self._layers,
            block_tokens=self._block_tokens,
            candidates=list(candidates),
            expires=now + deadline,
            priority=priority,
            metadata=metadata,
            age=self._next(),
        )
        self._outbound[stream.key] = stream
        self._outbound_names[name] = stream.key
        self._arm(stream.expires, "outbound", stream.key)
        self._try_next(now, stream)
        return stream.key

    def layer_ready(self, now: float, key: int, layer: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a layer are in the source's memory. ConfigError when that can't be."""
        stream = self._outbound.get(key)
        if stream is None:
            return
        stream.advance(layer, start, stop)
        self._continue(now, stream)

    def extend(self, key: int, blocks: int) -> None:
        """The caller gave `blocks` more block ids."""
        stream = self._outbound.get(key)
        if stream is not None:
            stream.held += blocks

    def finish(self, now: float, key: int, payload: bytes) -> None:
        """The caller is done: end the stream once everything is across. ConfigError when layers are missing."""
        stream = self._outbound.get(key)
        if stream is None:
            return
        if not stream.all_ready:
            missing = stream.missing_layers
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ConfigError("done", f"layer_ready has not covered all {stream.tokens} tokens of layers {shown}")
        stream.payload = payload
        self._continue(now, stream)

    def cancel(self, now: float, key: int, reason: str) -> None:
        """End a stream of either direction as cancelled. One that has ended, or is decided, stays as it is."""
        if (source := self._outbound.get(key)) is not None:
            self._end_outbound(now, source, Cancelled(f"stream {source.name}: {reason}"), tell=True)
        elif (stream := self._inbound.get(key)) is not None:
            if stream.phase is inbound.Phase.DECIDED:
                self._finish_inbound(now, stream, None, provisional=True)
            else:
                self._end_inbound(now, stream, Cancelled(f"stream {stream.name}: {reason}"), tell=True)

    def fail(self, now: float, key: int, error: KVStreamError) -> None:
        """End a stream of either direction because of something this side can't mend."""
        if (source := self._outbound.get(key)) is not None:
            self._end_outbound(now, source, error, tell=True)
        elif (stream := self._inbound.get(key)) is not None:
            self._end_inbound(now, stream, error, tell=True)

    # ------------------------------------------------------------------ the user's events, destination side

    def set_handler(self, present: bool) -> None:
        """Whether offers that nobody waits for are handed out as Offered. Those pending are handed out now."""
        self._handler = present
        if present:
            for offer in list(self._offers.values()):
                self._ask(offer)

    def receive(self, now: float, name: str, *, tokens: int, deadline: float, first_token: int = 0) -> int:
        """Wait for a stream of that name. Returns its key."""
        self._check_open()
        if name in self._inbound_names:
            raise ConfigError("stream", f"{name!r} is already being received; a stream id is unique while it lives")
        self._check_inbound_room()
        offer = self._offers.get(self._offer_names.get(name, 0))
        if offer is not None and offer.frame.tokens != tokens:
            error = _tokens_differ(name, offer.frame.tokens, tokens)
            self._refuse_offer(offer, error)
            raise error
        stream = self._new_inbound(name, tokens, first_token, now + deadline)
        if offer is not None:
            self._bind(now, stream, offer)
        return stream.key

    def accept(self, now: float, offer_id: int, *, first_token: int = 0) -> int:
        """Take an offer handed out by Offered. Returns the stream's key. Raises Refused when it is gone."""
        self._check_open()
        offer = self._offers.get(offer_id)
        if offer is None:
            raise Refused("the offer can't be accepted any more: it was answered, withdrawn, or its time is over")
        if offer.frame.stream in self._inbound_names:
            raise ConfigError("stream", f"{offer.frame.stream!r} is already being received")
        self._check_inbound_room()
        stream = self._new_inbound(offer.frame.stream, offer.frame.tokens, first_token, offer.stream_expires)
        self._bind(now, stream, offer)
        return stream.key

    def refuse(self, offer_id: int, error: KVStreamError) -> None:
        """Decline an offer handed out by Offered; nothing happens when it is gone."""
        offer = self._offers.get(offer_id)
        if offer is not None:
            self._refuse_offer(offer, error)

    # ------------------------------------------------------------------ events of links

    def link_up(self, now: float, link_id: int, peer: str, *, outgoing: bool, slots: int, slot_blocks: int) -> None:
        """A connection is established. `slot_blocks`: how many blocks of one layer fit into a slot."""
        link = Link(link_id, peer, outgoing, slots, slot_blocks, now)
        self._links[link_id] = link
        if not outgoing:
            return
        self._outgoing[peer] = link
        for key in self._connecting.pop(peer, []):
            stream = self._outbound.get(key)
            if stream is not None and stream.peer == peer and stream.link is None:
                self._offer(now, stream, link)
        if not link.live:
            self._idle(now, link)

    def link_failed(self, now: float, peer: str, error: KVStreamError) -> None:
        """A Dial came to nothing."""
        for key in self._connecting.pop(peer, []):
            stream = self._outbound.get(key)
            if stream is not None and stream.peer == peer and stream.link is None:
                self._next_or_end(now, stream, error)

    def link_lost(self, now: float, link_id: int, error: KVStreamError) -> None:
        """A connection is gone, whoever closed it. Its slots are gone with it."""
        link = self._links.pop(link_id, None)
        if link is None:
            return
        if self._outgoing.get(link.peer) is link:
            del self._outgoing[link.peer]
        for offer in [offer for offer in self._offers.values() if offer.link is link]:
            self._forget_offer(offer, error)
        for source in list(link.outbound.values()):
            if source.phase is outbound.Phase.FINISHING:
                self._end_outbound(now, source, _in_doubt(error, source), tell=False)
            else:
                self._next_or_end(now, source, error)
        for stream in list(link.inbound.values()):
            if stream.phase is inbound.Phase.DECIDED:
                self._finish_inbound(now, stream, None, provisional=True)
            else:
                self._end_inbound(now, stream, _about(error, stream.name), tell=False)
        link.outbound.clear()
        link.inbound.clear()
        link.ending.clear()

    def frame(self, now: float, link_id: int, frame: wire.Frame) -> None:
        """A frame of a stream came in. A frame that breaks the protocol drops the link."""
        link = self._links.get(link_id)
        if link is None or link.dropping:
            return
        link.heard = now
        try:
            self._dispatch(now, link, frame)
        except ProtocolError as error:
            self.counters.protocol_errors += 1
            self._drop(link, error)

    # ------------------------------------------------------------------ reports on commands

    def staged(self, now: float, command: Stage, generation: int) -> None:
        """A Stage was performed; the chunk can be announced under this generation."""
        link = self._links.get(command.link)
        if link is None:
            return
        stream = self._outbound.get(command.stream)
        if stream is None or stream.epoch != command.epoch:
            self._release(now, link, [command.slot])
            return
        stream.staging.pop(command.chunk, None)
        stream.staged[command.chunk] = wire.Ready(
            stream.num,
            stream.epoch,
            command.chunk,
            command.layer,
            command.first,
            command.count,
            command.slot,
            generation,
        )
        for ready in stream.announce():
            self._transmit(now, link, ready)
        self._continue(now, stream)

    def stage_failed(self, now: float, command: Stage, error: KVStreamError) -> None:
        """A Stage could not be performed; its stream ends."""
        link = self._links.get(command.link)
        if link is None or isinstance(error, PeerLost):
            return  # the loss of the link is on its way here, or has been, and takes the slot with it
        stream = self._outbound.get(command.stream)
        if stream is not None and stream.epoch == command.epoch:
            stream.staging.pop(command.chunk, None)
            self._end_outbound(now, stream, _about(error, stream.name), tell=True)
        self._release(now, link, [command.slot])

    def moved(self, now: float, command: Move) -> None:
        """A Move was performed and its bytes are valid, or its stream has ended and nothing was touched."""
        self._move_over(command)
        stream = self._inbound.get(command.stream)
        if stream is None or stream.epoch != command.epoch or stream.link is None:
            self._late_move(now, command)
            return
        layer = stream.moved(command.chunk)
        if layer is not None:
            self._commands.append(Arrived(stream.key, layer))
        self._transmit(now, stream.link, wire.Confirm(stream.num, stream.epoch, stream.confirmed))
        self._decide(now, stream)

    def move_failed(self, now: float, command: Move, error: KVStreamError) -> None:
        """The chunk's bytes could not be had or are not to be believed."""
        if isinstance(error, PeerLost):
            return  # the loss of the link is on its way here and says more
        self._move_over(command)
        stream = self._inbound.get(command.stream)
        if stream is None or stream.epoch != command.epoch or stream.link is None:
            self._late_move(now, command)
            return
        stream.moving.pop(command.chunk, None)
        self._end_inbound(now, stream, _about(error, stream.name), tell=True)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Fire every timer that is due."""
        while self._timers and self._timers[0][0] <= now:
            due, _, kind, ref = heapq.heappop(self._timers)
            if kind == "outbound":
                self._outbound_expired(now, ref)
            elif kind == "inbound":
                self._inbound_expired(now, ref)
            elif kind == "decided":
                stream = self._inbound.get(ref)
                if stream is not None:
                    self._finish_inbound(now, stream, None, provisional=True)
            elif kind == "offer":
                offer = self._offers.get(ref)
                if offer is not None:
                    waited = self._config.offer_wait
                    error = Refused(f"nobody at the destination answered the offer within {waited} s", retry_after=1.0)
                    self._refuse_offer(offer, error)
            elif kind == "beat":
                self._beat(now, due, ref)
            elif kind == "idle":
                link = self._links.get(ref)
                if link is not None and not link.live and now - link.idle_since >= self._config.idle_timeout:
                    self._drop(link, PeerLost(f"idle for {self._config.idle_timeout} s"))

    def shut(self, now: float, error: KVStreamError) -> None:
        """End everything: no new streams, offers refused, live streams ended with `error`, the peers told."""
        self._closed = str(error)
        for offer in list(self._offers.values()):
            self._refuse_offer(offer, Refused(self._closed))
        for source in list(self._outbound.values()):
            self._end_outbound(now, source, _about(error, source.name), tell=True)
        for stream in list(self._inbound.values()):
            self._end_inbound(now, stream, _about(error, stream.name), tell=True)

    def drop_all(self, error: KVStreamError) -> None:
        """Close every link."""
        for link in list(self._links.values()):
            self._drop(link, error)

    # ------------------------------------------------------------------ frames

    def _dispatch(self, now: float, link: Link, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Ready):
            stream = self._inbound_of(link, frame.num, frame.epoch)
            if stream is not None:
                self._on_ready(link, stream, frame)
        elif isinstance(frame, wire.Confirm):
            source = self._outbound_of(link, frame.num, frame.epoch)
            if source is not None:
                self._on_confirm(now, link, source, frame)
        elif isinstance(frame, wire.End):
            self._on_end(now, link, frame)
        elif isinstance(frame, wire.Offer):
            self._on_offer(now, link, frame)
        elif isinstance(frame, wire.Accept):
            source = self._outbound_of(link, frame.num, frame.epoch)
            if source is not None:
                self._on_accept(now, link, source, frame)
        elif isinstance(frame, wire.Refuse):
            source = self._outbound_of(link, frame.num, frame.epoch)
            if source is not None:
                self._on_refuse(now, link, source, frame)
        elif isinstance(frame, wire.Beat):
            if frame.reply and not link.live:
                self._transmit(now, link, wire.Beat(0))
        else:
            raise ProtocolError(f"a {type(frame).__name__} frame after the handshake")

    def _outbound_of(self, link: Link, num: int, epoch: int) -> Outbound | None:
        stream = link.outbound.get(num)
        if stream is not None and stream.epoch == epoch:
            return stream
        self._stale(link, num, outgoing=True)
        return None

    def _inbound_of(self, link: Link, num: int, epoch: int) -> Inbound | None:
        stream = link.inbound.get(num)
        if stream is not None and stream.epoch == epoch:
            return stream
        self._stale(link, num, outgoing=False)
        return None

    def _stale(self, link: Link, num: int, *, outgoing: bool) -> None:
        """A frame for a stream that is not live here: late if the number has been used, else nonsense."""
        if link.outgoing != outgoing or num > link.last_num:
            raise ProtocolError(f"a frame of stream number {num}, which was never offered on this connection")
        self.counters.stale_frames += 1

    def _on_offer(self, now: float, link: Link, frame: wire.Offer) -> None:
        if link.outgoing:
            raise ProtocolError("an offer against the direction of the connection")
        if frame.num <= link.last_num:
            self.counters.stale_frames += 1
            return
        link.last_num = frame.num
        remaining = self._config.deadline if frame.deadline is None else frame.deadline
        offer = _PendingOffer(
            id=self._next(),
            link=link,
            frame=frame,
            expires=now + min(self._config.offer_wait, remaining),
            stream_expires=now + remaining,
            asked=False,
        )
        error = self._judge(frame)
        if error is not None:
            self._refuse_offer(offer, error)
            return
        waiting = self._inbound.get(self._inbound_names.get(frame.stream, 0))
        if waiting is None:
            self._offers[offer.id] = offer
            self._offer_names[frame.stream] = offer.id
            self._arm(offer.expires, "offer", offer.id)
            self._live(now, link)
            if self._handler:
                self._ask(offer)
        elif waiting.tokens != frame.tokens:
            error = _tokens_differ(frame.stream, frame.tokens, waiting.tokens)
            self._refuse_offer(offer, error)
            self._end_inbound(now, waiting, error, tell=False)
        else:
            self._bind(now, waiting, offer)

    def _judge(self, frame: wire.Offer) -> KVStreamError | None:
        """Why an offer has to be refused at once, if it has."""
        if self._closed is not None:
            return Refused(self._closed)
        if frame.tokens < 1:
            return ConfigError("tokens", f"must be at least 1, is {frame.tokens}")
        stream = self._inbound.get(self._inbound_names.get(frame.stream, 0))
        if stream is not None and stream.phase is not inbound.Phase.WAITING:
            return ConfigError("stream", f"{frame.stream!r} is already being received from {stream.peer}")
        pending = self._offers.get(self._offer_names.get(frame.stream, 0))
        if pending is not None:
            return ConfigError("stream", f"{frame.stream!r} is already offered by {pending.link.peer}")
        if len(self._offers) >= self._config.max_pending_offers:
            return Refused(f"{len(self._offers)} offers are waiting already (max_pending_offers)", retry_after=0.2)
        if stream is None and len(self._inbound) >= self._config.max_streams:
            return Refused(f"{len(self._inbound)} streams are being received already (max_streams)", retry_after=0.2)
        return None

    def _on_accept(self, now: float, link: Link, source: Outbound, frame: wire.Accept) -> None:
        if source.phase is not outbound.Phase.OFFERED:
            raise ProtocolError(f"stream {source.name} was accepted twice")
        if frame.first_token > source.tokens:
            raise ProtocolError(f"stream {source.name}: accepted from token {frame.first_token} of {source.tokens}")
        source.accepted(frame.first_token)
        self._commands.append(Accepted(source.key, link.peer, link.id, source.epoch))
        self._continue(now, source)

    def _on_refuse(self, now: float, link: Link, source: Outbound, frame: wire.Refuse) -> None:
        if source.phase is not outbound.Phase.OFFERED:
            raise ProtocolError(f"stream {source.name} was refused after it had been accepted")
        del link.outbound[source.num]
        error = from_code(frame.code, frame.message, retry_after=frame.retry_after)
        self._next_or_end(now, source, error)
        self._settle(now, link)

    def _on_ready(self, link: Link, stream: Inbound, frame: wire.Ready) -> None:
        if stream.phase is not inbound.Phase.STREAMING:
            raise ProtocolError(f"stream {stream.name}: a chunk after the end")
        stream.ready(frame)
        link.moving += 1
        if link.moving > link.slots:
            raise ProtocolError(f"{link.moving} chunks announced and not confirmed, with {link.slots} slots")
        self._commands.append(
            Move(
                link.id,
                stream.key,
                stream.epoch,
                frame.chunk,
                frame.layer,
                frame.first,
                frame.count,
                frame.slot,
                frame.generation,
                (stream.expires, stream.age, frame.chunk),
            )
        )

    def _on_confirm(self, now: float, link: Link, source: Outbound, frame: wire.Confirm) -> None:
        if frame.chunks > source.announced:
            raise ProtocolError(
                f"stream {source.name}: {frame.chunks} chunks confirmed of {source.announced} announced"
            )
        self._release(now, link, source.confirm(frame.chunks))

    def _on_end(self, now: float, link: Link, frame: wire.End) -> None:
        if (ending := link.ending.get(frame.num)) is not None and ending.epoch == frame.epoch:
            if ending.moving and ending.last_word is not None:
                # Our End waits for the last read; the source has spoken first, so ours will be the answer to it.
                ending.last_word = msgspec.structs.replace(ending.last_word, answer=True)
                return
            del link.ending[frame.num]
            self._release(now, link, ending.slots)
        elif (source := link.outbound.get(frame.num)) is not None and source.epoch == frame.epoch:
            self._source_told(now, link, source, frame)
        elif (stream := link.inbound.get(frame.num)) is not None and stream.epoch == frame.epoch:
            self._destination_told(now, link, stream, frame)
        elif (offer := self._offer_of(link, frame.num)) is not None:
            error = from_code(frame.code, frame.message)
            self._forget_offer(offer, error)
            self._answer(now, link, frame)
        elif not frame.answer:
            self._stale(link, frame.num, outgoing=link.outgoing)
            self._answer(now, link, frame)
        self._settle(now, link)

    def _source_told(self, now: float, link: Link, source: Outbound, frame: wire.End) -> None:
        """The destination ended the stream; it reads no more from our slots."""
        if frame.code == "done" and source.phase is not outbound.Phase.FINISHING:
            raise ProtocolError(f"stream {source.name}: done before the source was")
        self._answer(now, link, frame)
        slots = [slot for _, slot in source.in_flight]
        source.in_flight.clear()
        if frame.code == "done":
            self._end_outbound(now, source, None, tell=False)
        else:
            self._end_outbound(now, source, from_code(frame.code, frame.message), tell=False)
        self._release(now, link, slots)

    def _destination_told(self, now: float, link: Link, stream: Inbound, frame: wire.End) -> None:
        """The source ended the stream, or said that it has announced everything, or heard our decision."""
        if stream.phase is inbound.Phase.DECIDED:
            self._finish_inbound(now, stream, None, provisional=frame.code != "done")
        elif frame.code == "done":
            if frame.chunks != stream.chunks:
                raise ProtocolError(
                    f"stream {stream.name}: {frame.chunks} chunks at the end, {stream.chunks} announced"
                )
            stream.source_end = frame
            self._decide(now, stream)
        else:
            self._end_inbound(now, stream, from_code(frame.code, frame.message), tell=True, answer=True)

    def _decide(self, now: float, stream: Inbound) -> None:
        """The destination decides: done when the source said that this was all, and all is in place."""
        if stream.source_end is None or stream.confirmed < stream.chunks or stream.link is None:
            return
        if not stream.whole:
            lacking = [layer for layer, missing in enumerate(stream.missing) if missing]
            error = Corrupted(f"stream {stream.name}: the source is done, but layers {lacking[:8]} are not whole")
            self._end_inbound(now, stream, error, tell=True)
            return
        stream.phase = inbound.Phase.DECIDED
        self._transmit(now, stream.link, wire.End(stream.num, stream.epoch, "done", chunks=stream.chunks))
        self._arm(now + self._config.end_wait, "decided", stream.key)

    # ------------------------------------------------------------------ source

    def _try_next(self, now: float, stream: Outbound) -> None:
        peer = stream.candidates.pop(0)
        stream.offer_to(peer)
        link = self._outgoing.get(peer)
        if link is not None and not link.dropping:
            self._offer(now, stream, link)
        elif peer in self._connecting:
            self._connecting[peer].append(stream.key)
        else:
            self._connecting[peer] = [stream.key]
            self._commands.append(Dial(peer))

    def _next_or_end(self, now: float, stream: Outbound, error: KVStreamError) -> None:
        """This destination is out: on to the next candidate, or the end."""
        if stream.candidates and self._closed is None:
            self._try_next(now, stream)
        else:
            self._end_outbound(now, stream, _about(error, stream.name), tell=False)

    def _offer(self, now: float, stream: Outbound, link: Link) -> None:
        link.last_num += 1
        stream.num = link.last_num
        stream.link = link
        stream.phase = outbound.Phase.OFFERED
        link.outbound[stream.num] = stream
        self._live(now, link)
        frame = wire.Offer(
            stream.num,
            stream.epoch,
            stream.name,
            stream.tokens,
            max(0.0, stream.expires - now),
            stream.priority,
            stream.metadata,
        )
        self._transmit(now, link, frame)

    def _continue(self, now: float, stream: Outbound) -> None:
        """Do what the stream's state allows now: stage what is ready, finish when all is announced."""
        link = stream.link
        if link is None or stream.phase is not outbound.Phase.STREAMING:
            return
        if stream.pending:
            link.enqueue(stream)
            self._stage(link)
        if stream.payload is not None and stream.drained:
            stream.phase = outbound.Phase.FINISHING
            end = wire.End(stream.num, stream.epoch, "done", chunks=stream.chunks, payload=stream.payload)
            self._transmit(now, link, end)

    def _stage(self, link: Link) -> None:
        """Give free slots to ready chunks, the most urgent stream first."""
        while link.free and not link.dropping and (stream := link.next_waiting()) is not None:
            slot = link.free.pop()
            chunk, piece = stream.cut(link.slot_blocks)
            stream.staging[chunk] = slot
            self._commands.append(
                Stage(
                    link.id,
                    stream.key,
                    stream.epoch,
                    chunk,
                    piece.layer,
                    piece.first,
                    piece.stop - piece.first,
                    slot,
                    (stream.urgency, stream.age, chunk),
                )
            )
            link.enqueue(stream)

    def _release(self, now: float, link: Link, slots: list[int]) -> None:
        if slots:
            link.free.extend(slots)
            self._stage(link)
        self._settle(now, link)

    def _end_outbound(self, now: float, stream: Outbound, error: KVStreamError | None, *, tell: bool) -> None:
        """The one place where a source's stream ends. Slots that the peer may read stay taken until it answers."""
        del self._outbound[stream.key]
        del self._outbound_names[stream.name]
        link, phase = stream.link, stream.phase
        stream.phase = outbound.Phase.ENDED
        self._ended(Ended(stream.key, error, b"", stream.epoch, stream.peer, provisional=False))
        if link is None:
            return
        link.outbound.pop(stream.num, None)
        unannounced = [frame.slot for frame in stream.staged.values()]
        if tell and error is not None and link.id in self._links:
            if phase is outbound.Phase.FINISHING and stream.peer is not None:
                error.in_doubt = (stream.peer,)
            slots = [slot for _, slot in stream.in_flight]
            link.ending[stream.num] = Ending(stream.key, stream.epoch, slots)
            self._transmit(now, link, wire.End(stream.num, stream.epoch, error.code, _text(error)))
        self._release(now, link, unannounced)

    def _outbound_expired(self, now: float, key: int) -> None:
        stream = self._outbound.get(key)
        if stream is None:
            return
        peer, announced = stream.peer, stream.announced
        state = f"{stream.phase.value} to {peer}, {stream.confirmed} of {announced} announced chunks confirmed"
        missing = len(stream.missing_layers)
        hint = f", {missing} layers not ready" if missing else ""
        error = DeadlineExceeded(f"stream {stream.name}: the deadline passed ({state}{hint})")
        self._end_outbound(now, stream, error, tell=True)

    # ------------------------------------------------------------------ destination

    def _new_inbound(self, name: str, tokens: int, first_token: int, expires: float) -> Inbound:
        stream = Inbound(
            key=self._next(),
            name=name,
            tokens=tokens,
            blocks=math.ceil(tokens / self._block_tokens),
            first_block=first_block(first_token, tokens, self._block_tokens),
            layers=self._layers,
            expires=expires,
            age=self._next(),
        )
        self._inbound[stream.key] = stream
        self._inbound_names[name] = stream.key
        self._arm(expires, "inbound", stream.key)
        return stream

    def _bind(self, now: float, stream: Inbound, offer: _PendingOffer) -> None:
        """Join a waiting stream and an offer."""
        self._pop_offer(offer)
        link = offer.link
        stream.link = link
        stream.peer = link.peer
        stream.num = offer.frame.num
        stream.epoch = offer.frame.epoch
        stream.phase = inbound.Phase.STREAMING
        if offer.stream_expires < stream.expires:
            stream.expires = offer.stream_expires
            self._arm(stream.expires, "inbound", stream.key)
        link.inbound[stream.num] = stream
        self._live(now, link)
        self._commands.append(Accepted(stream.key, link.peer, link.id, stream.epoch))
        first_token = min(stream.tokens, stream.first_block * self._block_tokens)
        self._transmit(now, link, wire.Accept(stream.num, stream.epoch, first_token))
        if stream.first_block == stream.blocks:
            stream.arrived = stream.layers
            self._commands.extend(Arrived(stream.key, layer) for layer in range(stream.layers))

    def _end_inbound(
        self, now: float, stream: Inbound, error: KVStreamError, *, tell: bool, answer: bool = False
    ) -> None:
        """End a destination's stream with an error. The source hears of it when no read of its slots is under way."""
        error.valid_layers = stream.valid_layers if stream.link is not None else ()
        link, num = stream.link, stream.num
        if tell and link is not None and link.id in self._links:
            link.inbound.pop(num, None)
            ending = Ending(stream.key, stream.epoch, moving=len(stream.moving))
            last = wire.End(num, stream.epoch, error.code, _text(error), answer=answer)
            if ending.moving or not answer:
                link.ending[num] = ending
            if ending.moving:
                ending.last_word = last
            else:
                self._transmit(now, link, last)
        self._finish_inbound(now, stream, error, provisional=False)

    def _finish_inbound(self, now: float, stream: Inbound, error: KVStreamError | None, *, provisional: bool) -> None:
        """The one place where a destination's stream ends."""
        if stream.phase is inbound.Phase.ENDED:
            return
        stream.phase = inbound.Phase.ENDED
        del self._inbound[stream.key]
        del self._inbound_names[stream.name]
        payload = stream.source_end.payload if stream.source_end is not None and error is None else b""
        self._ended(Ended(stream.key, error, payload, stream.epoch, stream.peer, provisional))
        if stream.link is not None:
            stream.link.inbound.pop(stream.num, None)
            self._settle(now, stream.link)

    def _inbound_expired(self, now: float, key: int) -> None:
        stream = self._inbound.get(key)
        if stream is None or now < stream.expires or stream.phase is inbound.Phase.DECIDED:
            return
        if stream.phase is inbound.Phase.WAITING:
            state = "no source has offered it"
        else:
            state = f"{stream.arrived} of {stream.layers} layers had arrived from {stream.peer}"
        error = DeadlineExceeded(f"stream {stream.name}: the deadline passed ({state})")
        self._end_inbound(now, stream, error, tell=True)

    def _move_over(self, command: Move) -> None:
        link = self._links.get(command.link)
        if link is not None:
            link.moving -= 1

    def _late_move(self, now: float, command: Move) -> None:
        """A read for a stream that ended meanwhile: after the last one the source may hear the end."""
        link = self._links.get(command.link)
        if link is None:
            return
        for num, ending in link.ending.items():
            if ending.stream == command.stream and ending.moving:
                ending.moving -= 1
                if ending.moving == 0 and ending.last_word is not None:
                    self._transmit(now, link, ending.last_word)
                    if ending.last_word.answer:
                        del link.ending[num]
                        self._settle(now, link)
                return

    def _check_inbound_room(self) -> None:
        if len(self._inbound) >= self._config.max_streams:
            raise Refused(f"{len(self._inbound)} streams are being received already (max_streams)", retry_after=0.1)

    # ------------------------------------------------------------------ offers

    def _ask(self, offer: _PendingOffer) -> None:
        if offer.asked:
            return
        offer.asked = True
        frame = offer.frame
        self._commands.append(
            Offered(
                offer.id,
                offer.link.peer,
                frame.stream,
                frame.epoch,
                frame.tokens,
                frame.priority,
                frame.deadline,
                frame.metadata,
            )
        )

    def _offer_of(self, link: Link, num: int) -> _PendingOffer | None:
        return next((o for o in self._offers.values() if o.link is link and o.frame.num == num), None)

    def _pop_offer(self, offer: _PendingOffer) -> None:
        if self._offers.pop(offer.id, None) is not None:
            del self._offer_names[offer.frame.stream]

    def _forget_offer(self, offer: _PendingOffer, error: KVStreamError) -> None:
        self._pop_offer(offer)
        if offer.asked:
            self._commands.append(Withdrawn(offer.id, error))

    def _refuse_offer(self, offer: _PendingOffer, error: KVStreamError) -> None:
        self.counters.offers_refused += 1
        self._forget_offer(offer, error)
        retry_after = error.retry_after if isinstance(error, Refused) else None
        frame = wire.Refuse(offer.frame.num, offer.frame.epoch, error.code, _text(error), retry_after)
        self._commands.append(Transmit(offer.link.id, frame))

    # ------------------------------------------------------------------ links

    def _transmit(self, now: float, link: Link, frame: wire.Frame) -> None:
        link.spoke = now
        self._commands.append(Transmit(link.id, frame))

    def _answer(self, now: float, link: Link, frame: wire.End) -> None:
        if not frame.answer:
            self._transmit(now, link, wire.End(frame.num, frame.epoch, frame.code, answer=True))

    def _drop(self, link: Link, error: KVStreamError) -> None:
        if not link.dropping:
            link.dropping = True
            self._commands.append(Drop(link.id, error))

    def _live(self, now: float, link: Link) -> None:
        """Something on the link waits for the peer from now on: start to listen to its silence."""
        if not link.beating:
            link.beating = True
            link.heard = now
            self._arm(now + self._config.beat_interval, "beat", link.id)

    def _settle(self, now: float, link: Link) -> None:
        if not link.live:
            link.idle_since = now

    def _idle(self, now: float, link: Link) -> None:
        link.idle_since = now
        self._arm(now + self._config.idle_timeout, "idle", link.id)

    def _beat(self, now: float, due: float, link_id: int) -> None:
        link = self._links.get(link_id)
        if link is None:
            return
        pending = any(offer.link is link for offer in self._offers.values())
        if not link.live and not pending:
            link.beating = False
            if link.outgoing:
                self._idle(now, link)
            return
        interval, stall = self._config.beat_interval, self._config.stall_timeout
        if now - due > interval:
            # We were late ourselves (a blocked loop, a stopped process): what the peer sent meanwhile is still unread,
            # so its silence proves nothing yet. Grant it two more beats.
            link.heard = max(link.heard, now - stall + 2 * interval)
        if now - link.heard > stall:
            self._drop(link, PeerLost(f"{link.peer} was silent for {now - link.heard:.1f} s (stall_timeout {stall} s)"))
            return
        if now - link.spoke >= 0.9 * interval:
            self._transmit(now, link, wire.Beat(self.streams, reply=True))
        self._arm(now + interval, "beat", link_id)

    # ------------------------------------------------------------------ helpers

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Cancelled(self._closed)

    def _ended(self, command: Ended) -> None:
        code = command.error.code if command.error is not None else "done"
        self.counters.ended[code] = self.counters.ended.get(code, 0) + 1
        self._commands.append(command)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _arm(self, when: float, kind: str, ref: int) -> None:
        if when < math.inf:
            heapq.heappush(self._timers, (when, self._next(), kind, ref))


def _text(error: KVStreamError) -> str:
    return str(error)[:_MESSAGE_LIMIT]


def _about(error: KVStreamError, name: str) -> KVStreamError:
    """The same error as one stream's own: errors carry per-stream fields, so streams must not share an object."""
    text = str(error)
    if isinstance(error, ConfigError):
        mine: KVStreamError = type(error)(error.field, text.removeprefix(f"{error.field}: "))
    elif isinstance(error, Refused):
        mine = Refused(text, error.retry_after)
    else:
        mine = type(error)(text if name in text else f"stream {name}: {text}")
    mine.__cause__ = error.__cause__
    return mine


def _in_doubt(error: KVStreamError, stream: Outbound) -> KVStreamError:
    mine = PeerLost(
        f"stream {stream.name}: everything was sent, but {stream.peer}'s decision did not come back: {error}"
    )
    mine.in_doubt = (stream.peer,) if stream.peer is not None else ()
    return mine


def _tokens_differ(name: str, offered: int, expected: int) -> ConfigError:
    return ConfigError("tokens", f"stream {name!r} is offered with {offered} tokens but received with {expected}")
