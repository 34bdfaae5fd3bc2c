"""The source half of the scheduler core: the life of outgoing streams from `send` to their one end.

It owns candidates, offers, slots and their order, announcements, the way on when a destination is lost in mid-stream,
and the source's End. A slot that was announced is never given out again before the peer has confirmed it, has ended the
stream, or the link is gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvstream import wire
from kvstream.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Fenced,
    KVStreamError,
    PeerLost,
    ProtocolError,
    Refused,
    from_code,
)
from kvstream.scheduler.commands import Accepted, Declined, Dial, Ended, Rerouted, Route, Stage
from kvstream.scheduler.drain import MIN_RETRY_AFTER, DrainRate
from kvstream.scheduler.links import Ending, Link
from kvstream.scheduler.outbound import Outbound, Phase, SourceTurn
from kvstream.scheduler.shared import Shared, about, text_of
from kvstream.scheduler.stats import StreamState
from kvstream.scheduler.timers import Timer
from kvstream.scheduler.turns import Turns

__all__ = ["Source"]

_REDIAL = 0.05
"""Seconds between two tries to reach a destination to which there is no way at present."""
_ELSEWHERE = (Refused, Fenced, PeerLost)
"""A destination that ends a stream for one of these is not able to go on with it, but another may be."""


class Source:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._streams: dict[int, Outbound] = {}
        self._names: dict[str, int] = {}
        self._outgoing: dict[str, Link] = {}
        self._connecting: dict[str, list[int]] = {}
        self._turns = Turns[SourceTurn](shared.config.share_weights)
        self._towards: dict[str, int] = {}
        """Live streams by the peer that they go to, or try."""
        self._drain = DrainRate()
        """Streams that end per second."""
        self._uncut = True
        """Whether no Stage waits to be begun. One at a time: who is next is decided at the last moment, and what is
        ready by then can join the chunk."""
        self._unborn: dict[int, tuple[Outbound, KVStreamError]] = {}
        """Streams that ended while their peer was being connected: it may be waiting for them, so it will be told."""

    def __len__(self) -> int:
        return len(self._streams)

    def states(self, now: float) -> list[StreamState]:
        return [
            StreamState(
                stream=stream.name,
                direction="send",
                peer=stream.peer or "",
                epoch=stream.epoch,
                share_class=stream.group[0],
                waits_for=stream.waits_for,
                waited=max(0.0, now - stream.stepped),
                chunks_announced=stream.announced,
                chunks_confirmed=stream.confirmed,
                layers=stream.layers - len(stream.missing_layers),
                slots=stream.holding,
            )
            for stream in self._streams.values()
        ]

    def towards(self, peer: str) -> tuple[int, Link | None]:
        """How many live streams go to this peer, and the connection with it."""
        return self._towards.get(peer, 0), self._outgoing.get(peer)

    def waits_for_slot(self, link: Link) -> bool:
        """Whether any stream has something ready, and the link no slot for it."""
        return not link.free and self._turns.waits_for_room(link.id)

    @property
    def idle(self) -> bool:
        """No live stream, and nobody left to tell of one that ended."""
        return not self._streams and not self._unborn

    # ------------------------------------------------------------------ the user's events

    def send(
        self,
        now: float,
        name: str,
        *,
        tokens: int,
        held: int,
        candidates: Sequence[str],
        deadline: float,
        priority: int,
        share: str,
        metadata: bytes,
        retry: bool,
        copy: bool,
        fetch: bytes,
        routable: bool,
    ) -> int:
        shared = self._shared
        shared.check_open()
        _check_offer(name, tokens, candidates, deadline, priority, share, metadata)
        if name in self._names and not copy:
            raise ConfigError("stream", f"{name!r} is already being sent; a stream id is unique while it lives")
        if len(self._streams) >= shared.config.max_streams:
            raise Refused(
                f"{len(self._streams)} streams are being sent already (max_streams)",
                retry_after=self._drain.time_for(1),
            )
        blocks = math.ceil(tokens / shared.block_tokens)
        stream = Outbound(
            key=shared.next_id(),
            name=name,
            tokens=tokens,
            blocks=blocks,
            held=held,
            layers=shared.layers,
            block_tokens=shared.block_tokens,
            candidates=list(candidates),
            expires=now + deadline,
            due=shared.due(now, now + deadline, priority),
            group=(share, shared.is_short(blocks * shared.layers)),
            priority=priority,
            metadata=metadata,
            age=shared.next_id(),
            retry=retry,
            copy=copy,
            fetch=fetch,
            routable=routable,
        )
        self._drain.begun(now)
        self._streams[stream.key] = stream
        if not copy:
            self._names[name] = stream.key
        shared.timers.arm(stream.expires, Timer.OUTBOUND, stream.key)
        self._try_next(now, stream)
        return stream.key

    def layer_ready(self, now: float, key: int, layer: int, start: int, stop: int) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            stream.advance(layer, start, stop)
            stream.stepped = now
            self._continue(stream)

    def extend(self, key: int, blocks: int) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            stream.held += blocks

    def finish(self, key: int, payload: bytes) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        if not stream.all_ready:
            missing = stream.missing_layers
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ConfigError("done", f"layer_ready has not covered all {stream.tokens} tokens of layers {shown}")
        stream.payload = payload
        self._continue(stream)

    def fail(self, now: float, key: int, error: KVStreamError) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            self._end(now, stream, about(error, stream.name), tell=True)

    def fail_all(self, now: float, error: KVStreamError) -> None:
        for key in list(self._streams):
            self.fail(now, key, error)

    def expired(self, now: float, key: int) -> None:
        """A stream's deadline has passed."""
        stream = self._streams[key]
        state = f"{stream.phase.value} to {stream.peer}"
        if stream.phase in (Phase.STREAMING, Phase.FINISHING):
            state += f", {stream.confirmed} of {stream.announced} announced chunks confirmed"
        if missing := len(stream.missing_layers):
            state += f", {missing} layers not ready"
        self._end(now, stream, DeadlineExceeded(f"stream {stream.name}: the deadline passed ({state})"), tell=True)

    def connecting(self, peer: str) -> list[str]:
        keys = self._connecting.get(peer, [])
        return [stream.name for key in keys if (stream := self._streams.get(key)) is not None]

    # ------------------------------------------------------------------ links

    def connect(self, peer: str) -> Link | None:
        """The connection to a peer; None where there is none yet: then it is dialed, and link_up or link_failed will
        say what came of it."""
        link = self._outgoing.get(peer)
        if link is not None and not link.dropping:
            return link
        if peer not in self._connecting:
            self._connecting[peer] = []
            self._shared.commands.append(Dial(peer))
        return None

    def link_up(self, now: float, link: Link) -> None:
        self._outgoing[link.peer] = link
        for key in self._connecting.pop(link.peer, []):
            if (stream := self._streams.get(key)) is not None:
                self._reach(now, stream, link)
            elif (unborn := self._unborn.pop(key, None)) is not None:
                stream, error = unborn
                self._offer(now, stream, link)
                self._part(stream, link, error)

    def link_failed(self, now: float, peer: str, error: KVStreamError, *, silent: bool) -> None:
        for key in self._connecting.pop(peer, []):
            self._unborn.pop(key, None)
            stream = self._streams.get(key)
            if stream is None:
                continue
            if stream.accepted_by is None:
                self._next_or_end(now, stream, error)
            elif silent and not (stream.others or stream.routable) and self._may_come_back(now, stream, error):
                self._shared.timers.arm(now + _REDIAL, Timer.RETRY, stream.key)
            else:
                self._lost(now, stream, stream.why or error)

    def link_lost(self, now: float, link: Link, error: KVStreamError) -> None:
        self._turns.forget(link.id)
        if self._outgoing.get(link.peer) is link:
            del self._outgoing[link.peer]
        for stream in list(link.outbound.values()):
            if stream.accepted_by is None:
                self._next_or_end(now, stream, error)
            elif self._may_come_back(now, stream, error) and not (link.mute and stream.others):
                self._come_back(now, stream, error)
            else:
                self._lost(now, stream, error)

    def silent(self, now: float, link: Link) -> None:
        """A peer is silent for so long that those of its streams which can go elsewhere had better do."""
        error = PeerLost(f"{link.peer} was silent for {self._shared.config.reroute_timeout} s (reroute_timeout)")
        for stream in list(link.outbound.values()):
            if stream.accepted_by is None:
                if stream.candidates:
                    self._detach(stream, tell=_fenced(stream, error))
                    self._next_or_end(now, stream, error)
            elif self._may_reroute(stream) and stream.others:
                self._lost(now, stream, error, tell=_fenced(stream, error))
            elif self._may_reroute(stream) and stream.routable:
                self._ask(stream)

    # ------------------------------------------------------------------ orders, and a policy's answers

    def reroute(self, now: float, name: str, candidates: Sequence[str]) -> None:
        stream = self._streams.get(self._names.get(name, 0))
        if stream is None:
            raise ConfigError("stream", f"{name!r} is not being sent here")
        wanted = [peer for peer in candidates if peer != stream.peer] or ([] if candidates else stream.others)
        if not wanted:
            if candidates:
                raise ConfigError("to", f"stream {name} goes to {stream.peer} already")
            raise Refused(f"stream {name}: there is no destination but {stream.peer}; name one (to=)")
        if not self._may_reroute(stream):
            raise Refused(f"stream {name} was rerouted {stream.reroutes} times already (max_reroutes)")
        order = Cancelled(f"stream {name} is rerouted to {wanted[0]} by order")
        stream.failed = [peer for peer in stream.failed if peer not in wanted]
        stream.named = [*wanted, *(peer for peer in stream.named if peer not in wanted)]
        if stream.accepted_by is None:
            self._detach(stream, tell=_fenced(stream, order))
            stream.candidates = [peer for peer in stream.named if peer not in stream.failed]
            self._go_on(now, stream, order)
        else:
            self._lost(now, stream, order, tell=_fenced(stream, order), failed=False)

    def routed(self, now: float, key: int, candidates: Sequence[str]) -> None:
        stream = self._streams.get(key)
        if stream is None or not stream.asking:
            return
        stream.asking = False
        more = [peer for peer in candidates if peer not in (*stream.failed, *stream.tried, stream.peer)]
        stream.named += [peer for peer in more if peer not in stream.named]
        if stream.phase is Phase.ROUTING:
            stream.candidates = more
            self._go_on(now, stream, stream.why or PeerLost(f"{stream.peer} is lost"), ask=False)

    def _ask(self, stream: Outbound) -> None:
        if not stream.asking:
            stream.asking = True
            exclude = dict.fromkeys([*stream.failed, *stream.tried])
            if stream.peer is not None:
                exclude[stream.peer] = None
            self._shared.commands.append(Route(stream.key, tuple(exclude)))

    # ------------------------------------------------------------------ reports on Stage

    def staging(self) -> None:
        self._uncut = True
        self._stage()

    def staged(self, now: float, link: Link, command: Stage, generation: int, checksum: int) -> None:
        stream = self._staging(command)
        if stream is None:
            self._release(link, [command.slot])
            return
        stream.staged[command.chunk] = wire.Ready(
            stream.num,
            stream.epoch,
            command.chunk,
            command.layer,
            command.first,
            command.count,
            command.slot,
            generation,
            checksum,
            command.layers,
        )
        for ready in stream.announce():
            stream.stepped = now
            self._shared.transmit(link, ready)
        self._continue(stream)

    def stage_failed(self, now: float, link: Link, command: Stage, error: KVStreamError) -> None:
        stream = self._staging(command)
        if stream is not None:
            self._end(now, stream, about(error, stream.name), tell=True)
        self._release(link, [command.slot])

    def _staging(self, command: Stage) -> Outbound | None:
        """The stream of a Stage, unless it has ended or left that destination."""
        stream = self._streams.get(command.stream)
        there = stream is not None and stream.epoch == command.epoch and stream.accepted_by is not None
        return stream if there else None

    # ------------------------------------------------------------------ frames

    def on_frame(self, now: float, link: Link, frame: wire.Accept | wire.Refuse | wire.Confirm) -> None:
        stream = self._on_link(link, frame.num, frame.epoch)
        if stream is None:
            return
        if isinstance(frame, wire.Confirm):
            if frame.chunks > stream.announced:
                raise ProtocolError(
                    f"stream {stream.name}: {frame.chunks} chunks confirmed of {stream.announced} announced"
                )
            slots = stream.confirm(frame.chunks)
            if slots:
                stream.stepped = now
            self._enqueue(stream)
            self._release(link, slots)
        elif stream.phase is not Phase.OFFERED:
            raise ProtocolError(f"stream {stream.name}: a second answer to its offer")
        elif isinstance(frame, wire.Accept):
            if frame.first_token > stream.tokens:
                raise ProtocolError(f"stream {stream.name}: accepted from token {frame.first_token} of {stream.tokens}")
            self._accepted(now, link, stream, frame)
        elif stream.accepted_by is not None:
            why = stream.why or PeerLost(f"{stream.peer} has lost stream {stream.name}: {frame.message}")
            self._lost(now, stream, why)
        else:
            del link.outbound[stream.num]
            self._next_or_end(now, stream, from_code(frame.code, frame.message, retry_after=frame.retry_after))

    def _accepted(self, now: float, link: Link, stream: Outbound, frame: wire.Accept) -> None:
        commands = self._shared.commands
        resumed = stream.resumes
        if resumed:
            resent = stream.resumed(frame.have)
            self._shared.counters.resumes += 1
            why = stream.why or PeerLost(f"{stream.peer} was lost")
            commands.append(Rerouted(stream.key, resumed, link.peer, about(why, stream.name), resumed=True))
        else:
            resent = stream.accepted(frame.first_token)
            stream.incarnation = link.incarnation
        stream.stepped = now
        commands.append(Accepted(stream.key, link.peer, link.id, stream.epoch, resent=resent, resumed=resumed > 0))
        self._continue(stream)

    def on_end(self, now: float, link: Link, frame: wire.End) -> None:
        ending = link.ending.get(frame.num)
        if ending is not None and ending.epoch == frame.epoch:
            # Whether it answers our End or has crossed it: the peer reads no more. If it is done, it is so in an epoch
            # that does not count any more.
            self._shared.counters.stale_frames += frame.code == "done"
            del link.ending[frame.num]
            self._release(link, ending.slots)
            return
        stream = self._on_link(link, frame.num, frame.epoch)
        if stream is None:
            self._shared.answer(link, frame)
            return
        done = frame.code == "done"
        if (done or frame.answer) and not stream.maybe_done:
            raise ProtocolError(f"stream {stream.name}: an answer to an end that was never sent")
        if done and frame.answer:
            raise ProtocolError(f"stream {stream.name}: an answer in place of a decision")
        self._shared.answer(link, frame)
        slots = [slot for _, slot in stream.in_flight]
        error = None if done else from_code(frame.code, frame.message)
        if isinstance(error, _ELSEWHERE) and stream.accepted_by is not None:
            self._lost(now, stream, error, heard=True)
        else:
            self._end(now, stream, error, tell=False)
        self._release(link, slots)

    def _on_link(self, link: Link, num: int, epoch: int) -> Outbound | None:
        stream = link.outbound.get(num)
        if stream is not None and stream.epoch == epoch:
            return stream
        self._shared.late(link, num)
        return None

    # ------------------------------------------------------------------ steps

    def _try_next(self, now: float, stream: Outbound) -> None:
        peer = stream.candidates.pop(0)
        stream.offer_to(peer)
        self._count(stream, peer)
        stream.stepped = now
        self._connect(now, stream)

    def _connect(self, now: float, stream: Outbound) -> None:
        peer = stream.peer
        assert peer is not None
        link = self.connect(peer)
        if link is not None:
            self._reach(now, stream, link)
        else:
            self._connecting[peer].append(stream.key)

    def _reach(self, now: float, stream: Outbound, link: Link) -> None:
        """There is a connection with the stream's peer."""
        if stream.resumes and link.incarnation != stream.incarnation:
            self._lost(now, stream, PeerLost(f"{link.peer} was replaced by a newer incarnation"))
        elif stream.resumes and link.version < wire.RESUMES:
            self._lost(now, stream, PeerLost(f"{link.peer} speaks a protocol that knows no resuming"))
        else:
            self._offer(now, stream, link)

    def _may_come_back(self, now: float, stream: Outbound, error: KVStreamError) -> bool:
        """Whether the destination that had a stream may still have what it had of it, and go on."""
        in_time = not stream.resumes or now < stream.resume_until
        open_ = self._shared.closed is None and stream.layers <= wire.MAX_RESUMED
        return open_ and in_time and isinstance(error, PeerLost) and self._may_reroute(stream)

    def _come_back(self, now: float, stream: Outbound, error: KVStreamError) -> None:
        """Go on with the destination that had a stream, by a new connection."""
        stream.come_back(error, now + self._shared.config.resume_timeout)
        stream.stepped = now
        self._connect(now, stream)

    def _count(self, stream: Outbound, peer: str | None) -> None:
        """Count a stream among those of this peer, and no longer of another."""
        before, stream.counted = stream.counted, peer
        if before is not None:
            self._towards[before] -= 1
            if not self._towards[before]:
                del self._towards[before]
        if peer is not None:
            self._towards[peer] = self._towards.get(peer, 0) + 1

    def _next_or_end(self, now: float, stream: Outbound, error: KVStreamError) -> None:
        """This destination is out: on to the next candidate, to a pause before all are asked again, or to the end."""
        if stream.peer is not None:
            self._shared.commands.append(Declined(stream.peer, error))
            if not isinstance(error, Refused):
                stream.failed.append(stream.peer)
            elif stream.retry and error.retry_after is not None:
                stream.refused(stream.peer, error.retry_after)
        self._go_on(now, stream, error)

    def _go_on(self, now: float, stream: Outbound, error: KVStreamError, *, ask: bool = True) -> None:
        """Without a destination: try the next, pause, ask for more, or end with this error."""
        if stream.candidates:
            self._try_next(now, stream)
        elif stream.again and self._pause(now, stream):
            stream.stepped = now
        elif ask and stream.routable and stream.reroutes:
            stream.stepped = now
            stream.leave(Phase.ROUTING)
            stream.why = error
            self._count(stream, None)
            self._ask(stream)
        else:
            self._end(now, stream, about(error, stream.name), tell=False)

    def _may_reroute(self, stream: Outbound) -> bool:
        return stream.reroutes < self._shared.config.max_reroutes

    def _lost(
        self,
        now: float,
        stream: Outbound,
        error: KVStreamError,
        *,
        heard: bool = False,
        tell: KVStreamError | None = None,
        failed: bool = True,
    ) -> None:
        """The destination that had accepted a stream is out, for this reason: on to another, from layer 0, or to the
        end. `heard`: it has said so itself; `tell`: what it is told; `failed`: it is not to be asked again."""
        peer, doubt = stream.accepted_by, stream.maybe_done and not heard
        assert peer is not None
        if stream.phase is Phase.CONNECTING:
            stream.epoch -= 1  # it was meant for the same peer, and never offered
        if failed:
            self._shared.commands.append(Declined(peer, error))
        if not self._may_reroute(stream) or not (stream.others or stream.routable):
            if doubt:
                stream.doubts.append(peer)
                error = _in_doubt(error, stream)
            stream.resumes = 0
            self._end(now, stream, about(error, stream.name), tell=False)
            return
        epoch = stream.resumes or stream.epoch
        link, staged = stream.link, [ready.slot for ready in stream.staged.values()]
        self._detach(stream, tell=tell)
        stream.lost(peer, doubt=doubt, failed=failed)
        self._shared.counters.reroutes += 1
        self._shared.commands.append(Rerouted(stream.key, epoch, peer, about(error, stream.name)))
        self._go_on(now, stream, error)
        if link is not None and not link.dropping:
            self._release(link, staged)

    def _detach(self, stream: Outbound, *, tell: KVStreamError | None) -> None:
        """Take a stream away from where it is. With `tell` the peer hears of it, and what it may be reading stays taken
        until it answers."""
        link = stream.link
        if link is not None and tell is not None:
            self._part(stream, link, tell)
        elif link is not None:
            link.outbound.pop(stream.num, None)
        elif stream.phase is Phase.CONNECTING and stream.peer is not None:
            keys = self._connecting.get(stream.peer, [])
            if stream.key in keys:
                keys.remove(stream.key)
        self._shared.timers.cancel(Timer.RETRY, stream.key)
        stream.asking = False

    def _pause(self, now: float, stream: Outbound) -> bool:
        """Wait before those who refused for now are asked again; False when the deadline leaves no time for that.

        As long as they advise, and longer each time at least, which bounds how often they are asked; and spread, so
        that those who were refused together do not come back together.
        """
        wait = max(stream.pause, MIN_RETRY_AFTER * 2**stream.pauses) * (1.0 + self._shared.jitter() / 2)
        if now + wait >= stream.expires:
            return False
        stream.leave(Phase.PAUSING)
        self._count(stream, None)
        stream.pauses += 1
        self._shared.timers.arm(now + wait, Timer.RETRY, stream.key)
        return True

    def ask_again(self, now: float, key: int) -> None:
        """The pause of a stream is over."""
        stream = self._streams[key]
        if stream.resumes:
            self._connect(now, stream)
            return
        stream.candidates, stream.again = stream.again, []
        self._try_next(now, stream)

    def _offer(self, now: float, stream: Outbound, link: Link) -> None:
        link.last_num += 1
        stream.num = link.last_num
        stream.link = link
        stream.phase = Phase.OFFERED
        stream.stepped = now
        link.outbound[stream.num] = stream
        self._shared.watch(now, link)
        frame = wire.Offer(
            stream.num,
            stream.epoch,
            stream.name,
            stream.tokens,
            min(max(0.0, stream.expires - now), wire.MAX_SECONDS),
            stream.priority,
            stream.metadata,
            stream.group[0],
            stream.fetch,
            stream.resumes,
            stream.key if stream.copy else 0,
        )
        self._shared.transmit(link, frame)

    def _continue(self, stream: Outbound) -> None:
        """Do what the stream's state allows now: stage what is ready, finish when all is announced."""
        link = stream.link
        if link is None or stream.phase is not Phase.STREAMING:
            return
        self._enqueue(stream)
        self._stage()
        if stream.payload is not None and stream.drained:
            stream.phase = Phase.FINISHING
            end = wire.End(stream.num, stream.epoch, "done", chunks=stream.chunks, payload=stream.payload)
            self._shared.transmit(link, end)

    def _enqueue(self, stream: Outbound) -> None:
        """Let a stream that has blocks ready wait for a slot, unless it does already, or holds its share of them."""
        link = stream.link
        if (
            link is not None
            and stream.phase is Phase.STREAMING
            and stream.pending
            and stream.turn is None
            and stream.holding < link.stream_slots
        ):
            stream.turn = SourceTurn(stream, link)
            self._turns.push(stream.turn)

    def _stage(self) -> None:
        """Give a free slot to the next chunk of whose turn it is."""
        if not self._uncut:
            return
        while (turn := self._turns.pop()) is not None:
            stream, link = turn.stream, turn.link
            stream.turn = None
            if link.dropping:
                continue
            self._uncut = False
            if not link.owed:
                link.progressed()
            slot = link.free.pop()
            chunk, piece = stream.cut(link.slot_blocks, link.group_blocks)
            count = piece.stop - piece.first
            self._turns.charge(turn, count * piece.layers)
            self._enqueue(stream)
            self._shared.commands.append(
                Stage(
                    link.id,
                    stream.key,
                    stream.epoch,
                    chunk,
                    piece.layer,
                    piece.first,
                    count,
                    slot,
                    (stream.due, stream.age, chunk),
                    piece.layers,
                )
            )
            return

    def _release(self, link: Link, slots: Iterable[int]) -> None:
        """Slots that neither side uses any more."""
        before = len(link.free)
        link.free.extend(slots)
        if len(link.free) > before:
            link.progressed()
            self._turns.room(link.id)
        self._stage()

    def _end(self, now: float, stream: Outbound, error: KVStreamError | None, *, tell: bool) -> None:
        """The one place where a source's stream ends. With `tell` the peer hears of it, and the slots that it may read
        stay taken until it answers; those still being staged come back with the report on their Stage."""
        shared = self._shared
        del self._streams[stream.key]
        if not stream.copy:
            del self._names[stream.name]
        self._count(stream, None)
        self._drain.finished(now, 1, more=bool(self._streams))
        shared.timers.cancel(Timer.OUTBOUND, stream.key)
        shared.timers.cancel(Timer.RETRY, stream.key)
        connecting = stream.peer is not None and stream.key in self._connecting.get(stream.peer, ())
        doubts = dict.fromkeys(stream.doubts)
        if error is not None:
            if tell and stream.maybe_done and stream.peer is not None:
                doubts[stream.peer] = None
            error.in_doubt = tuple(doubts)
        stream.phase = Phase.ENDED
        stream.turn = None
        shared.ended(
            Ended(
                stream.key,
                error,
                b"",
                stream.epoch,
                stream.peer,
                provisional=False,
                ready=stream.all_ready,
                in_doubt=tuple(doubts),
            )
        )
        link = stream.link
        if link is None:
            if tell and connecting and error is not None and len(self._unborn) < shared.config.max_streams:
                self._unborn[stream.key] = stream, error
            return
        if tell and error is not None:
            self._part(stream, link, error)
        else:
            link.outbound.pop(stream.num, None)
        self._release(link, [ready.slot for ready in stream.staged.values()])

    def _part(self, stream: Outbound, link: Link, error: KVStreamError) -> None:
        """Tell the peer that the stream has ended here; what it may be reading stays taken until it answers."""
        del link.outbound[stream.num]
        slots = [slot for _, slot in stream.in_flight]
        link.ending[stream.num] = Ending(stream.key, stream.epoch, link.beats, slots)
        self._shared.transmit(link, wire.End(stream.num, stream.epoch, error.code, text_of(error)))


def _check_offer(
    name: str, tokens: int, candidates: Sequence[str], deadline: float, priority: int, share: str, metadata: bytes
) -> None:
    """Raise ConfigError for what a peer would refuse to decode: that would cost the connection, not just the stream."""
    if not 0 < len(name) <= wire.MAX_STREAM_ID or not _is_unicode(name):
        raise ConfigError("stream", f"must be 1 to {wire.MAX_STREAM_ID} characters of valid Unicode, is {name!r}")
    if not 0 < tokens <= wire.MAX_COUNT:
        raise ConfigError("tokens", f"must be 1 to {wire.MAX_COUNT}, is {tokens}")
    if not candidates:
        raise ConfigError("to", "names no destination")
    if math.isnan(deadline):
        raise ConfigError("deadline", "must be a number of seconds, is NaN")
    if abs(priority) > wire.MAX_PRIORITY:
        raise ConfigError("priority", f"must be {-wire.MAX_PRIORITY} to {wire.MAX_PRIORITY}, is {priority}")
    if len(share) > wire.MAX_SHARE or not _is_unicode(share):
        raise ConfigError("share_class", f"must be at most {wire.MAX_SHARE} characters of valid Unicode, is {share!r}")
    if len(metadata) > wire.MAX_METADATA:
        raise ConfigError("metadata", f"takes {len(metadata)} bytes, the limit is {wire.MAX_METADATA}")


def _is_unicode(text: str) -> bool:
    return text.isascii() or text == text.encode(errors="replace").decode()


def _in_doubt(error: KVStreamError, stream: Outbound) -> KVStreamError:
    """Of a stream that ends while its destination may be done."""
    mine = PeerLost(
        f"stream {stream.name}: everything was sent, but {stream.peer}'s decision did not come back: {error}"
    )
    mine.__cause__ = error.__cause__
    return mine


def _fenced(stream: Outbound, why: KVStreamError) -> Fenced:
    """What a destination is told whose epoch of a stream is over."""
    return Fenced(f"epoch {stream.epoch} of stream {stream.name} is over, the stream goes elsewhere: {why}")
