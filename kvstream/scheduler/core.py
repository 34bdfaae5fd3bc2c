"""The scheduler: every decision about streams, and nothing else. It is sans-IO: events come in as method calls with the
present time, commands go out through `take`; it awaits nothing, reads no clock, and draws no random number: it is given
the one that spreads retries.

This file is its face: the events, the direction of frames, and the liveness of links. Streams live in source.py and
destination.py. None of it touches memory or a connection: that is what commands are for. The same object runs in
production and in simulation.

All ids are integers or strings chosen by the caller or counted here, and no decision depends on set order or hashes, so
that the same events give the same commands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import Cancelled, Fenced, KVStreamError, PeerLost, ProtocolError, Refused
from kvstream.scheduler.commands import Command, Fetched, Move, Stage, Stalled
from kvstream.scheduler.destination import Destination
from kvstream.scheduler.fetches import Fetches
from kvstream.scheduler.links import Link
from kvstream.scheduler.shared import Counters, Shared, text_of
from kvstream.scheduler.source import Source
from kvstream.scheduler.stats import PeerState, StreamState
from kvstream.scheduler.timers import Timer

__all__ = ["Counters", "Scheduler"]

_SILENT_BEATS = 2


class Scheduler:
    """One runtime's streams. `layers`, `block_tokens` and `block_bytes` (of a block of one layer) are those of its
    layout; all peers on links share them. `jitter` gives numbers from 0 to 1, which spread what many streams would do
    at the same time."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        layers: int,
        block_tokens: int,
        block_bytes: int = 1,
        jitter: Callable[[], float] = lambda: 0.5,
    ) -> None:
        self._config = config
        self._shared = Shared(config, layers, block_tokens, block_bytes, jitter)
        self._source = Source(self._shared)
        self._destination = Destination(self._shared)
        self._fetches = Fetches(self._shared, self._source, self._destination)
        self._patience = math.ceil(config.stall_timeout / config.beat_interval)
        self._reroute_patience = math.ceil(config.reroute_timeout / config.beat_interval)

    # ------------------------------------------------------------------ output

    def take(self) -> deque[Command]:
        """The commands since the last call, in the order in which they have to be performed."""
        commands, self._shared.commands = self._shared.commands, deque()
        return commands

    def next_timer(self) -> float | None:
        """When `tick` is due, or None."""
        return self._shared.timers.next()

    @property
    def counters(self) -> Counters:
        return self._shared.counters

    @property
    def streams(self) -> int:
        """Live streams, both directions."""
        return len(self._source) + len(self._destination)

    @property
    def offers_waiting(self) -> tuple[int, int]:
        """Offers that nobody has answered, and the tokens that they are for."""
        return self._destination.offers_waiting

    @property
    def slots_in_use(self) -> int:
        """Source slots that are not free, over all links."""
        return sum(link.slots - len(link.free) for link in self._shared.links.values() if link.outgoing)

    def stream_states(self, now: float) -> list[StreamState]:
        """Every live stream, oldest first, those that are sent before those that are received."""
        return self._source.states(now) + self._destination.states(now)

    def peer_states(self) -> list[PeerState]:
        """Every connection."""
        return [self._peer_state(link) for link in self._shared.links.values()]

    def towards(self, peer: str) -> tuple[int, PeerState | None]:
        """How many live streams go to this peer or try it, and the connection by which they do, if there is one."""
        streams, link = self._source.towards(peer)
        return streams, self._peer_state(link) if link is not None else None

    def _peer_state(self, link: Link) -> PeerState:
        beat = self._config.beat_interval
        return PeerState(
            peer=link.peer,
            direction="send" if link.outgoing else "receive",
            streams=len(link.outbound) + len(link.inbound),
            slots=link.slots,
            slots_used=link.owed if link.outgoing else link.announced,
            moves=link.reading,
            offers=len(link.offers),
            waiting=self._source.waits_for_slot(link) if link.outgoing else self._destination.waits_for_room(link),
            stalled=(link.beats - link.progress) * beat if link.owed else 0.0,
            silent=max(0, link.silent - 1) * beat if link.live else 0.0,
        )

    @property
    def idle(self) -> bool:
        """No live stream and nothing that waits for a peer's answer."""
        return (
            self._source.idle
            and len(self._destination) == 0
            and not any(link.live for link in self._shared.links.values())
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
        share: str = "",
        metadata: bytes = b"",
        retry: bool = False,
        copy: bool = False,
        fetch: bytes = b"",
        routable: bool = False,
    ) -> int:
        """A new stream to the first of `candidates` that takes it. `held` block ids are known so far; `share` is the
        class whose share of the work it uses. With `retry` those that refuse for now are asked again, as long as the
        deadline allows it. A `copy` of what is held here may go out under a name that is being sent already, `fetch` is
        the token of the Fetch that it answers. If the one that took it is lost, the others are candidates again;
        `routable`: a Route may ask for more. Returns a key.

        Raises ConfigError, Refused when there are too many streams, Cancelled after `shut`.
        """
        return self._source.send(
            now,
            name,
            tokens=tokens,
            held=held,
            candidates=candidates,
            deadline=deadline,
            priority=priority,
            share=share,
            metadata=metadata,
            retry=retry,
            copy=copy,
            fetch=fetch,
            routable=routable,
        )

    def reroute(self, now: float, name: str, candidates: Sequence[str]) -> None:
        """An order: the stream goes to the first of these that takes it; empty: of the candidates that it has. Where it
        was, its epoch ends as Fenced. ConfigError when there is no such stream, or it is there already; Refused when
        there is nowhere to go, or it was rerouted too often."""
        self._source.reroute(now, name, candidates)

    def refuse_fetch(self, link_id: int, num: int, error: KVStreamError) -> None:
        """Say no to a Fetched; nothing happens when its link is gone."""
        link = self._shared.links.get(link_id)
        if link is not None:
            retry_after = error.retry_after if isinstance(error, Refused) else None
            if retry_after is not None:
                retry_after = min(max(0.0, retry_after), wire.MAX_SECONDS)
            self._shared.transmit(link, wire.Refuse(num, 0, error.code, text_of(error), retry_after))

    def layer_ready(self, now: float, key: int, layer: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a layer are in the source's memory. ConfigError when that can't be."""
        self._source.layer_ready(now, key, layer, start, stop)

    def extend(self, key: int, blocks: int) -> None:
        """The caller gave `blocks` more block ids."""
        self._source.extend(key, blocks)

    def finish(self, now: float, key: int, payload: bytes) -> None:
        """The caller is done: end the stream once everything is across. ConfigError when layers are missing."""
        self._source.finish(key, payload)

    # ------------------------------------------------------------------ the user's events, either side

    def cancel(self, now: float, key: int, reason: str) -> None:
        """End a stream of either direction as cancelled. One that has ended stays as it is, and a destination's that
        is decided ends as done, provisionally."""
        self.fail(now, key, Cancelled(reason))

    def fail(self, now: float, key: int, error: KVStreamError) -> None:
        """End a stream of either direction because of something this side can't mend; else like `cancel`."""
        self._source.fail(now, key, error)
        self._destination.fail(now, key, error)

    def shut(self, now: float, error: Cancelled | Fenced) -> None:
        """End everything: no new streams, offers refused, live streams ended with `error`, the peers told."""
        self._shared.closed = error
        self._destination.refuse_all(Refused(str(error)))
        self._source.fail_all(now, error)
        self._destination.fail_all(now, error)

    def drain(self, error: Refused | None) -> None:
        """Take nothing new until `drain(None)`: streams and offers are told `error`; what is live goes on, and so does
        what waits for an offer since before."""
        self._shared.draining = error
        if error is not None:
            self._destination.refuse_all(error)

    # ------------------------------------------------------------------ the user's events, destination side

    def set_handler(self, present: bool) -> None:
        """Whether offers that nobody waits for are handed out as Offered. Those pending are handed out now."""
        self._destination.set_handler(present)

    def receive(self, now: float, name: str, *, tokens: int, deadline: float, first_token: int = 0) -> int:
        """Wait for a stream of that name. Returns its key. Raises as `send` does."""
        return self._destination.receive(now, name, tokens=tokens, deadline=deadline, first_token=first_token)

    def fetch(
        self,
        now: float,
        name: str,
        *,
        tokens: int,
        exact: bool,
        sources: Sequence[str],
        token: bytes,
        deadline: float,
        first_token: int = 0,
        priority: int = 0,
        share: str = "",
    ) -> int:
        """Ask `sources`, one after the other, for a stream that they hold: exactly so many tokens, or up to so many.
        `token` is what no peer can guess. Returns the key of the stream. Raises as `receive` does."""
        return self._fetches.fetch(
            now,
            name,
            tokens=tokens,
            exact=exact,
            sources=sources,
            token=token,
            deadline=deadline,
            first_token=first_token,
            priority=priority,
            share=share,
        )

    def arriving(self, name: str) -> int:
        """The key of the stream of that name that is being received from a source; 0 when there is none."""
        return self._destination.arriving(name)

    def accept(self, now: float, offer_id: int, *, first_token: int = 0) -> int:
        """Take an offer handed out by Offered. Returns the stream's key. Raises Refused when it is gone."""
        return self._destination.accept(now, offer_id, first_token)

    def refuse(self, offer_id: int, error: KVStreamError) -> None:
        """Decline an offer handed out by Offered; nothing happens when it is gone."""
        self._destination.refuse(offer_id, error)

    def fail_waiting(self, now: float, names: Sequence[str], error: KVStreamError) -> None:
        """End those streams of these names that wait for an offer."""
        self._destination.fail_waiting(now, names, error)

    def connecting(self, peer: str) -> list[str]:
        """The names of the streams that wait for a connection to this peer."""
        return self._source.connecting(peer)

    # ------------------------------------------------------------------ events of links

    def link_up(
        self,
        now: float,
        link_id: int,
        peer: str,
        *,
        outgoing: bool,
        slots: int,
        slot_blocks: int,
        group_blocks: int = 0,
        version: int = wire.VERSION,
        incarnation: str = "",
    ) -> None:
        """A connection with this incarnation of a peer is established. `slot_blocks`: how many blocks of one layer fit
        into a slot; `group_blocks`: up to how many blocks in all layers that are ready together share a chunk;
        `version`: of the protocol."""
        stream_slots = math.ceil(slots * self._config.stream_share)
        link = Link(link_id, peer, outgoing, slots, slot_blocks, group_blocks, stream_slots, version, incarnation)
        self._shared.links[link_id] = link
        if outgoing:
            self._shared.timers.arm(now + self._config.idle_timeout, Timer.IDLE, link_id)
            self._source.link_up(now, link)
            self._fetches.link_up(now, link)

    def link_failed(self, now: float, peer: str, error: KVStreamError, *, silent: bool = False) -> None:
        """A Dial came to nothing; `silent`: nobody said no, nobody answered in time."""
        self._source.link_failed(now, peer, error, silent=silent)
        self._fetches.link_failed(now, peer, error)

    def replaced(self, now: float, peer: str, incarnation: str | None) -> None:
        """The peer is this incarnation now, or gone (None): none before it will come back to its streams."""
        self._destination.replaced(now, peer, incarnation)

    def link_lost(self, now: float, link_id: int, error: KVStreamError) -> None:
        """A connection is gone, whoever closed it. Its slots are gone with it."""
        link = self._shared.links.pop(link_id, None)
        if link is None:
            return
        link.dropping = True
        self._shared.timers.cancel(Timer.BEAT, link_id)
        self._shared.timers.cancel(Timer.IDLE, link_id)
        self._source.link_lost(now, link, error)
        self._fetches.link_lost(now, link, error)
        self._destination.link_lost(now, link, error)

    def drop_all(self, error: KVStreamError) -> None:
        """Close every link."""
        for link in self._shared.links.values():
            self._shared.drop(link, error)

    def frame(self, now: float, link_id: int, frame: wire.Frame) -> None:
        """A frame of a stream came in. A frame that breaks the protocol drops the link."""
        link = self._shared.links.get(link_id)
        if link is None or link.dropping:
            return
        link.silent = 0
        if link.discounted:
            self._destination.discount(link, silent=False)
        try:
            self._dispatch(now, link, frame)
        except ProtocolError as error:
            self.counters.protocol_errors += 1
            self._shared.drop(link, error)

    def _dispatch(self, now: float, link: Link, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Beat):
            if frame.reply and not link.live:
                self._shared.transmit(link, wire.Beat(self.streams))
        elif isinstance(frame, wire.End):
            if link.outgoing:
                self._source.on_end(now, link, frame)
            else:
                self._destination.on_end(now, link, frame)
        elif isinstance(frame, wire.Refuse) and frame.num in link.fetches:
            self._fetches.on_refuse(now, link, frame)
        elif isinstance(frame, wire.Accept | wire.Refuse | wire.Confirm) and link.outgoing:
            self._source.on_frame(now, link, frame)
        elif isinstance(frame, wire.Ready) and not link.outgoing:
            self._destination.on_ready(now, link, frame)
        elif isinstance(frame, wire.Offer) and not link.outgoing:
            self._destination.on_offer(now, link, frame)
        elif isinstance(frame, wire.Fetch) and not link.outgoing:
            self._on_fetch(link, frame)
        else:
            kind, way = type(frame).__name__, "its source" if not link.outgoing else "its destination"
            raise ProtocolError(f"a {kind} frame from {way} on an established connection")

    def _on_fetch(self, link: Link, frame: wire.Fetch) -> None:
        if frame.num <= link.last_num:
            self.counters.stale_frames += 1
            return
        link.last_num = frame.num
        if self._shared.closed is not None:
            self.refuse_fetch(link.id, frame.num, Refused(str(self._shared.closed)))
            return
        self._shared.commands.append(
            Fetched(
                link.id,
                frame.num,
                link.peer,
                frame.stream,
                frame.token,
                frame.tokens,
                frame.deadline,
                frame.priority,
                frame.share,
            )
        )

    # ------------------------------------------------------------------ reports on commands

    def routed(self, now: float, key: int, candidates: Sequence[str]) -> None:
        """What a Route has found; nothing is an answer too."""
        self._source.routed(now, key, candidates)

    def staging(self, command: Stage) -> None:
        """A Stage is about to be performed, or dropped with its link: the next one may be given."""
        self._source.staging()

    def staged(self, now: float, command: Stage, generation: int, checksum: int = 0) -> None:
        """A Stage was performed; the chunk can be announced under this generation, with its checksum if it has one."""
        link = self._shared.links.get(command.link)
        if link is not None:
            self._source.staged(now, link, command, generation, checksum)

    def stage_failed(self, now: float, command: Stage, error: KVStreamError) -> None:
        """A Stage could not be performed; its stream ends. PeerLost: the loss of the link is on its way here, or has
        been, and takes the slot with it."""
        link = self._shared.links.get(command.link)
        if link is not None and not isinstance(error, PeerLost):
            self._source.stage_failed(now, link, command, error)

    def moving(self, command: Move) -> None:
        """A Move is about to be performed, or dropped with its link: the next one may be given."""
        self._destination.begun()

    def moved(self, now: float, command: Move) -> None:
        """A Move was performed and its bytes are valid, or its stream has ended and nothing was touched."""
        self._destination.moved(now, self._shared.links.get(command.link), command)

    def move_failed(self, now: float, command: Move, error: KVStreamError) -> None:
        """The chunk's bytes could not be had or are not to be believed. PeerLost: as with `stage_failed`. Recalled: the
        source's End will say why."""
        self._destination.move_failed(now, self._shared.links.get(command.link), command, error)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Fire every timer that is due."""
        while (timer := self._shared.timers.pop(now)) is not None:
            match timer:
                case Timer.OUTBOUND, key:
                    self._source.expired(now, key)
                case Timer.INBOUND, key:
                    self._destination.expired(now, key)
                case Timer.RESUME, key:
                    self._destination.not_resumed(now, key)
                case Timer.RETRY, key:
                    self._source.ask_again(now, key)
                case Timer.RESERVATION, key:
                    self._destination.unused(now, key)
                case Timer.OFFER, key:
                    self._destination.offer_expired(now, key)
                case Timer.BEAT, key:
                    self._beat(now, self._shared.links[key])
                case Timer.IDLE, key:
                    idle = PeerLost(f"no stream for {self._config.idle_timeout} s (idle_timeout)")
                    self._shared.drop(self._shared.links[key], idle)

    def _beat(self, now: float, link: Link) -> None:
        """Speak, and judge the peer. Its time runs in beats: while this process was stopped or its loop held, what the
        peer sent is still unread, so such a time counts as one beat, however long it was."""
        shared = self._shared
        if not link.live:
            link.beating = False
            if link.outgoing:
                shared.timers.arm(now + self._config.idle_timeout, Timer.IDLE, link.id)
            return
        link.beats += 1
        link.silent += 1
        stall = f"{self._config.stall_timeout} s (stall_timeout)"
        ending = link.oldest_ending
        if link.silent > self._patience:
            link.mute = True
            shared.drop(link, PeerLost(f"{link.peer} was silent for {stall}"))
        elif ending is not None and link.beats - ending.since > self._patience:
            shared.drop(link, PeerLost(f"the end of a stream shared with {link.peer} was not answered for {stall}"))
        else:
            self._watch_progress(link)
            if link.outgoing and link.silent > self._reroute_patience:
                self._source.silent(now, link)
            if not link.spoke:
                shared.transmit(link, wire.Beat(self.streams, reply=True))
            link.spoke = False
            shared.timers.arm(now + self._config.beat_interval, Timer.BEAT, link.id)

    def _watch_progress(self, link: Link) -> None:
        """Tell of a peer that makes no progress, ever more rarely; and let nobody else wait for it."""
        interval = self._config.beat_interval
        if link.reading and link.silent > _SILENT_BEATS:
            self._destination.discount(link, silent=True)
        beats = link.beats - link.progress
        if not link.owed or beats * interval < self._config.stall_warning or beats < 2 * link.warned:
            return
        link.warned = beats
        self.counters.stalls += 1
        some = next(iter(link.outbound.values() if link.outgoing else link.inbound.values()), None)
        self._shared.commands.append(
            Stalled(
                link.peer,
                link.outgoing,
                beats * interval,
                link.owed,
                len(link.outbound) + len(link.inbound),
                some.name if some is not None else "",
            )
        )
