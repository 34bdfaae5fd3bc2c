"""The destination half of the scheduler core: the life of incoming streams from `receive` or an offer to their one end.

It owns pending offers, the order of reads, confirmations, what is kept of a stream whose connection is lost, and the
decision that a stream is done. The source never hears that a stream has ended while a read of its slots is under way
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvstream import wire
from kvstream.errors import (
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    Fenced,
    KVStreamError,
    PeerLost,
    ProtocolError,
    Recalled,
    Refused,
    from_code,
)
from kvstream.scheduler.commands import Accepted, Arrived, Ended, Move, Offered, Withdrawn
from kvstream.scheduler.drain import DrainRate
from kvstream.scheduler.inbound import DestinationTurn, Fetching, Inbound, Phase
from kvstream.scheduler.links import Ending, Link
from kvstream.scheduler.offers import Offers, PendingOffer
from kvstream.scheduler.outbound import first_block
from kvstream.scheduler.shared import Shared, about, text_of
from kvstream.scheduler.stats import StreamState
from kvstream.scheduler.timers import Timer
from kvstream.scheduler.turns import Turns

__all__ = ["Destination"]


class Destination:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._streams: dict[int, Inbound] = {}
        self._names: dict[str, Inbound] = {}
        self._offers = Offers(shared.config)
        self._drain = DrainRate()
        """Tokens of streams that end per second."""
        self._receiving = 0
        """Streams that have been accepted and live."""
        self._tokens = 0
        """Of these, in all."""
        self._handler = False
        self._turns = Turns[DestinationTurn](shared.config.share_weights)
        self._unbegun = False
        """Whether a Move waits to be begun. One at a time: who is next is decided at the last moment."""
        self._reading = 0
        """Moves under way, over all links whose peer is not silent."""

    def __len__(self) -> int:
        return len(self._streams)

    def states(self, now: float) -> list[StreamState]:
        return [
            StreamState(
                stream=stream.name,
                direction="receive",
                peer=stream.peer or "",
                epoch=stream.epoch,
                share_class=stream.group[0],
                waits_for=stream.waits_for,
                waited=max(0.0, now - stream.stepped),
                chunks_announced=stream.chunks,
                chunks_confirmed=stream.told,
                layers=stream.arrived,
                slots=len(stream.moving),
            )
            for stream in self._streams.values()
        ]

    @property
    def offers_waiting(self) -> tuple[int, int]:
        return len(self._offers), self._offers.tokens

    def waits_for_room(self, link: Link) -> bool:
        """Whether announced chunks wait because the link's share of reads is under way."""
        return link.reading >= self._shared.config.peer_moves and self._turns.waits_for_room(link.id)

    # ------------------------------------------------------------------ the user's events

    def set_handler(self, present: bool) -> None:
        self._handler = present
        self._ask()

    def receive(self, now: float, name: str, *, tokens: int, deadline: float, first_token: int) -> int:
        self._shared.check_open()
        if math.isnan(deadline):
            raise ConfigError("deadline", "must be a number of seconds, is NaN")
        if name in self._names:
            raise ConfigError("stream", f"{name!r} is already being received; a stream id is unique while it lives")
        self._check_room()
        offer = self._offers.named(name)
        if offer is not None and offer.frame.tokens != tokens:
            error = _tokens_differ(name, offer.frame.tokens, tokens)
            self._withdraw(offer, error)
            self._refuse(offer.link, offer.frame, error)
            self._ask()
            raise error
        stream = self._new(now, name, tokens, first_token, now + deadline)
        if offer is not None:
            self._take(offer)
            self._bind(now, stream, offer)
        return stream.key

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
        first_token: int,
        priority: int,
        share: str,
    ) -> Fetching:
        """Like `receive`, for a stream that will be asked for; what to ask for it with."""
        offer = self._offers.named(name)
        if offer is not None:
            raise ConfigError("stream", f"{name!r} is being offered by {offer.link.peer}; take it by receive()")
        key = self.receive(now, name, tokens=tokens, deadline=deadline, first_token=first_token)
        stream = self._streams[key]
        stream.fetching = Fetching(stream, token, list(sources), exact, first_token, priority, share)
        return stream.fetching

    def arriving(self, name: str) -> int:
        stream = self._names.get(name)
        return stream.key if stream is not None and stream.phase is not Phase.WAITING else 0

    def accept(self, now: float, offer_id: int, first_token: int) -> int:
        self._shared.check_open()
        offer = self._offers.get(offer_id)
        if offer is None:
            raise Refused("the offer can't be accepted any more: it was answered, withdrawn, or its time is over")
        self._check_room()
        stream = self._new(now, offer.frame.stream, offer.frame.tokens, first_token, offer.stream_expires)
        self._take(offer)
        self._bind(now, stream, offer)
        return stream.key

    def refuse(self, offer_id: int, error: KVStreamError) -> None:
        offer = self._offers.get(offer_id)
        if offer is not None:
            self._take(offer)
            self._refuse(offer.link, offer.frame, error)
            self._ask()

    def refuse_all(self, error: KVStreamError) -> None:
        for offer in self._offers:
            self._withdraw(offer, error)
            self._refuse(offer.link, offer.frame, error)

    def fail(self, now: float, key: int, error: KVStreamError) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            self._end(now, stream, about(error, stream.name))

    def fail_all(self, now: float, error: KVStreamError) -> None:
        # A worker that closes is no reason for a source to give up: it may find another destination.
        told = Refused(str(error)) if isinstance(error, Cancelled) else None
        for stream in list(self._streams.values()):
            self._end(now, stream, about(error, stream.name), told=told)

    def fail_waiting(self, now: float, names: Sequence[str], error: KVStreamError) -> None:
        for name in names:
            stream = self._names.get(name)
            # What is being fetched hears from its holder.
            if stream is not None and stream.phase is Phase.WAITING and stream.fetching is None:
                self._end(now, stream, about(error, name))

    # ------------------------------------------------------------------ time

    def offer_expired(self, now: float, offer_id: int) -> None:
        offer = self._offers.get(offer_id)
        if offer is not None:
            waited = self._shared.config.offer_wait
            error = Refused(
                f"nobody at the destination answered the offer within {waited} s (offer_wait)",
                retry_after=self._room_in(),
            )
            self._withdraw(offer, error)
            self._refuse(offer.link, offer.frame, error)
            self._ask()

    def unused(self, now: float, key: int) -> None:
        """Nothing has come of a stream for so long that its blocks are better used otherwise."""
        stream = self._streams[key]
        waited = self._shared.config.reservation_timeout
        state = "no source has offered it" if stream.phase is Phase.WAITING else f"{stream.peer} has sent no chunk"
        error = DeadlineExceeded(f"stream {stream.name}: {state} within {waited} s (reservation_timeout)")
        self._end(now, stream, error)

    def expired(self, now: float, key: int) -> None:
        """A stream's deadline has passed, or its wait for the answer to its End "done"."""
        stream = self._streams[key]
        if stream.recalled is not None and now < stream.expires:
            # The End that would have said why has not come.
            self._end(now, stream, about(stream.recalled, stream.name))
            return
        if stream.phase is Phase.WAITING:
            state = "no source has offered it"
        else:
            state = f"{stream.arrived} of {stream.layers} layers had arrived from {stream.peer}"
        self._end(now, stream, DeadlineExceeded(f"stream {stream.name}: the deadline passed ({state})"))

    # ------------------------------------------------------------------ links

    def link_lost(self, now: float, link: Link, error: KVStreamError) -> None:
        self._turns.forget(link.id)
        self._count(link, -link.reading)
        for offer in list(link.offers.values()):
            self._withdraw(offer, error)
        for stream in list(link.inbound.values()):
            if isinstance(error, PeerLost) and link.version >= wire.RESUMES:
                self._suspend(now, stream, error)
            else:
                self._end(now, stream, about(error, stream.name))
        self._ask()
        self._move()

    def _suspend(self, now: float, stream: Inbound, error: KVStreamError) -> None:
        """Keep a stream although its connection is lost: its source may come back."""
        shared, link = self._shared, stream.link
        assert link is not None
        del link.inbound[stream.num]
        if stream.phase is Phase.DECIDED:
            # It waits for the source's answer as before, and then is done all the same.
            stream.link = None
            return
        stream.suspend(error)
        shared.timers.arm(stream.expires, Timer.INBOUND, stream.key)
        shared.timers.arm(now + shared.config.resume_timeout, Timer.RESUME, stream.key)

    def not_resumed(self, now: float, key: int) -> None:
        """Its source has not come back in time."""
        stream = self._streams[key]
        self._end(now, stream, about(stream.lost or PeerLost(f"{stream.peer} was lost"), stream.name))

    def replaced(self, now: float, peer: str, incarnation: str | None) -> None:
        for stream in list(self._streams.values()):
            if stream.phase is Phase.SUSPENDED and stream.peer == peer and stream.incarnation != incarnation:
                self.not_resumed(now, stream.key)

    # ------------------------------------------------------------------ reports on Move

    def begun(self) -> None:
        """The Move that was given last is being performed."""
        self._unbegun = False
        self._move()

    def _move(self) -> None:
        """Have the next announced chunk brought in, if there is one and room for it."""
        if self._unbegun or self._reading >= self._shared.config.moves:
            return
        while (turn := self._turns.pop()) is not None:
            stream, link, frame = turn.stream, turn.link, turn.frame
            if link.dropping:
                continue
            self._unbegun = True
            if not link.reading:
                link.progressed()
            self._count(link, 1)
            link.reading += 1
            stream.reading += 1
            self._turns.charge(turn, frame.count * frame.layers)
            self._shared.commands.append(
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
                    frame.checksum,
                    turn.order,
                    frame.layers,
                    stream.num,
                )
            )
            return

    def _count(self, link: Link, reads: int) -> None:
        if not link.discounted:
            self._reading += reads

    def discount(self, link: Link, *, silent: bool) -> None:
        """Reads from a peer that has fallen silent may hang: they must not keep others from theirs."""
        if link.discounted != silent:
            self._count(link, -link.reading)
            link.discounted = silent
            self._count(link, link.reading)
            self._move()

    def _reported(self, link: Link | None, command: Move) -> tuple[Link, Inbound] | None:
        """A Move is over, one way or the other. Its stream, unless that has ended, or lost that link, meanwhile."""
        if link is not None:
            self._count(link, -1)
            link.reading -= 1
            link.progressed()
            link.announced -= 1
            self._turns.room(link.id)
        stream = self._streams.get(command.stream)
        if stream is None:
            if link is not None:
                self._late_move(link, command)
            return None
        if link is None or stream.link is not link or stream.epoch != command.epoch:
            # What it has brought is not counted, but its blocks are not written by it any more.
            stream.adrift -= 1
            self._rejoin(stream)
            return None
        return link, stream

    def moved(self, now: float, link: Link | None, command: Move) -> None:
        live = self._reported(link, command)
        if live is not None:
            link, stream = live
            stream.stepped = now
            for layer in stream.moved(command.chunk):
                self._shared.commands.append(Arrived(stream.key, layer))
            if not self._decide(now, link, stream):
                self._confirm(link, stream)
        self._move()

    def _confirm(self, link: Link, stream: Inbound) -> None:
        """Give slots back: at once when no read of the stream is under way that would do it later, else in halves of
        what the link has, so that the source never runs dry and a busy stream is not confirmed chunk by chunk."""
        due = stream.confirmed - stream.told
        if due and (not stream.moving or due >= link.slots // 2):
            stream.told = stream.confirmed
            self._shared.transmit(link, wire.Confirm(stream.num, stream.epoch, stream.confirmed))

    def move_failed(self, now: float, link: Link | None, command: Move, error: KVStreamError) -> None:
        live = self._reported(link, command)
        if live is not None:
            link, stream = live
            stream.reading -= 1
            if isinstance(error, PeerLost | Recalled):
                # The chunk stays announced and is not in place, whatever comes of the stream.
                link.announced += 1
                if isinstance(error, PeerLost):
                    return  # the loss of the link is on its way, and decides
                # The stream, or the connection, has ended at its source; so its End, or the loss, is on the way.
                stream.recalled = error
                expires = min(stream.expires, now + self._shared.config.end_wait)
                self._shared.timers.arm(expires, Timer.INBOUND, stream.key)
            else:
                del stream.moving[command.chunk]
                self._end(now, stream, about(error, stream.name))
        self._move()

    def _late_move(self, link: Link, command: Move) -> None:
        """A read for a stream that ended meanwhile: after the last one the source may hear the end."""
        ending = link.ending.get(command.num)
        if ending is not None and ending.stream == command.stream and ending.last_word is not None:
            ending.moving -= 1
            if ending.moving == 0:
                last, ending.last_word = ending.last_word, None
                self._shared.transmit(link, last)
                if last.answer:
                    del link.ending[command.num]

    # ------------------------------------------------------------------ frames

    def on_offer(self, now: float, link: Link, frame: wire.Offer) -> None:
        shared = self._shared
        if frame.num <= link.last_num:
            shared.counters.stale_frames += 1
            return
        link.last_num = frame.num
        waiting = self._names.get(frame.stream)
        if frame.resumes:
            self._on_resume(now, link, frame, waiting)
            return
        if waiting is not None and self._outdated(link, frame, waiting):
            self._end(now, waiting, Fenced(f"stream {frame.stream}: {link.peer} has begun epoch {frame.epoch} of it"))
            waiting = None
        error = self._judge(link, frame, waiting)
        if error is not None:
            self._refuse(link, frame, error)
            return
        remaining = shared.config.deadline if frame.deadline is None else frame.deadline
        expires = now + remaining
        due = shared.due(now, expires, frame.priority)
        blocks = math.ceil(frame.tokens / shared.block_tokens) * shared.layers
        group = frame.share, shared.is_short(blocks)
        offer = PendingOffer(shared.next_id(), link, frame, expires, due, group)
        shared.watch(now, link)
        if waiting is None:
            self._offers.add(offer)
            shared.timers.arm(now + min(shared.config.offer_wait, remaining), Timer.OFFER, offer.id)
            self._ask()
        elif (error := self._fit(waiting, frame)) is not None:
            self._refuse(link, frame, error)
            self._end(now, waiting, error)
        else:
            self._bind(now, waiting, offer)

    def _outdated(self, link: Link, frame: wire.Offer, stream: Inbound) -> bool:
        """Whether the source of a live stream offers it anew, under a later epoch."""
        return stream.link is not link and self._same_stream(link, frame, stream) and frame.epoch > stream.epoch

    def _same_stream(self, link: Link, frame: wire.Offer, stream: Inbound) -> bool:
        """Whether what is offered is the very one that is received here: names are not enough, a source may send copies
        of one name side by side, each with epochs of its own."""
        bound = stream.phase is not Phase.WAITING
        here = stream.peer, stream.incarnation, stream.copy
        return bound and here == (link.peer, link.incarnation, frame.copy)

    def _on_resume(self, now: float, link: Link, frame: wire.Offer, stream: Inbound | None) -> None:
        """The source of a stream comes back to it on a new connection."""
        shared = self._shared
        if (
            stream is None
            or not self._same_stream(link, frame, stream)
            or stream.link is link  # what is live on this very connection was not lost
            or not frame.resumes <= stream.epoch < frame.epoch  # between: our word on an earlier try was lost
            or stream.tokens != frame.tokens
            or stream.layers > wire.MAX_RESUMED
        ):
            self._refuse(link, frame, Refused(f"stream {frame.stream} is not here any more: nothing to resume"))
            return
        old = stream.link
        if old is not None:
            # Not noticed here yet: the source has given that connection up.
            error = PeerLost(f"{link.peer} has come back by a new connection")
            self._suspend(now, stream, error)
            shared.drop(old, error)
        shared.watch(now, link)
        stream.link, stream.num, stream.epoch = link, frame.num, frame.epoch
        stream.stepped = now
        link.inbound[stream.num] = stream
        if stream.phase is Phase.DECIDED:
            shared.transmit(link, wire.End(stream.num, stream.epoch, "done"))
            shared.timers.arm(now + shared.config.end_wait, Timer.INBOUND, stream.key)
        else:
            shared.timers.arm(now + shared.config.resume_timeout, Timer.RESUME, stream.key)
            self._rejoin(stream)

    def _rejoin(self, stream: Inbound) -> None:
        """Go on with a stream whose source has come back, as soon as nothing of before can write into its blocks."""
        link, shared = stream.link, self._shared
        if link is None or stream.phase is not Phase.SUSPENDED or stream.adrift:
            return
        stream.phase = Phase.STREAMING
        stream.lost = None
        shared.timers.cancel(Timer.RESUME, stream.key)
        shared.commands.append(Accepted(stream.key, link.peer, link.id, stream.epoch, stream.tokens, resumed=True))
        first_token = min(stream.tokens, stream.first_block * shared.block_tokens)
        shared.transmit(link, wire.Accept(stream.num, stream.epoch, first_token, list(stream.expected)))

    def on_ready(self, now: float, link: Link, frame: wire.Ready) -> None:
        stream = self._on_link(link, frame.num, frame.epoch)
        if stream is None:
            return
        if frame.slot >= link.slots:
            raise ProtocolError(f"stream {stream.name}: a chunk in slot {frame.slot} of {link.slots}")
        if link.announced == link.slots:
            raise ProtocolError(f"more chunks announced and not confirmed than there are slots ({link.slots})")
        stream.ready(frame)
        stream.stepped = now
        if not frame.chunk:
            self._shared.timers.cancel(Timer.RESERVATION, stream.key)
        link.announced += 1
        self._turns.push(DestinationTurn(stream, link, frame, self._shared.config.peer_moves))
        self._move()

    def on_end(self, now: float, link: Link, frame: wire.End) -> None:
        ending = link.ending.get(frame.num)
        if ending is not None and ending.epoch == frame.epoch:
            if ending.last_word is None:
                del link.ending[frame.num]
            else:
                # Our End waits for the last read; the source has spoken first, so ours will be the answer to it.
                ending.last_word = msgspec.structs.replace(ending.last_word, answer=True)
            return
        offer = link.offers.get(frame.num)
        if offer is not None and offer.frame.epoch == frame.epoch:
            self._withdraw(offer, from_code(frame.code, frame.message))
            self._shared.answer(link, frame)
            self._ask()
            return
        stream = self._on_link(link, frame.num, frame.epoch)
        if stream is None:
            self._shared.answer(link, frame)
        else:
            self._told(now, link, stream, frame)

    def _told(self, now: float, link: Link, stream: Inbound, frame: wire.End) -> None:
        """The source ended the stream, or said that it has announced everything, or heard our decision."""
        if stream.phase is Phase.SUSPENDED and frame.code == "done":
            raise ProtocolError(f"stream {stream.name}: an end before it was resumed")
        if stream.phase is not Phase.DECIDED and frame.answer:
            raise ProtocolError(f"stream {stream.name}: an answer to an end that was never sent")
        if frame.code != "done":
            self._end(now, stream, from_code(frame.code, frame.message), answer=True)
        elif frame.answer:
            self._finish(now, stream, None, provisional=False)
        elif stream.source_end is not None:
            self._shared.late(link, frame.num)
        elif frame.chunks != stream.chunks:
            raise ProtocolError(f"stream {stream.name}: {frame.chunks} chunks at the end, {stream.chunks} announced")
        else:
            stream.source_end = frame
            self._decide(now, link, stream)

    def _on_link(self, link: Link, num: int, epoch: int) -> Inbound | None:
        stream = link.inbound.get(num)
        if stream is not None and stream.epoch == epoch:
            return stream
        self._shared.late(link, num)
        return None

    # ------------------------------------------------------------------ streams

    def _new(self, now: float, name: str, tokens: int, first_token: int, expires: float) -> Inbound:
        shared = self._shared
        if not 0 <= first_token <= tokens:
            raise ConfigError("first_token", f"must be 0 to {tokens}, the stream's tokens, is {first_token}")
        stream = Inbound(
            key=shared.next_id(),
            name=name,
            tokens=tokens,
            blocks=math.ceil(tokens / shared.block_tokens),
            first_block=first_block(first_token, tokens, shared.block_tokens),
            layers=shared.layers,
            expires=expires,
            age=shared.next_id(),
            stepped=now,
        )
        self._streams[stream.key] = stream
        self._names[name] = stream
        shared.timers.arm(expires, Timer.INBOUND, stream.key)
        unused = now + shared.config.reservation_timeout
        if unused < expires:
            shared.timers.arm(unused, Timer.RESERVATION, stream.key)
        return stream

    def _bind(self, now: float, stream: Inbound, offer: PendingOffer) -> None:
        """Join a waiting stream and an offer."""
        shared, link = self._shared, offer.link
        if stream.fetching is not None:
            stream.fetching.answered()
            stream.fetching = None
        stream.link = link
        stream.peer = link.peer
        stream.incarnation = link.incarnation
        stream.copy = offer.frame.copy
        stream.num = offer.frame.num
        stream.epoch = offer.frame.epoch
        stream.phase = Phase.STREAMING
        stream.stepped = now
        if offer.stream_expires < stream.expires:
            stream.expires = offer.stream_expires
            shared.timers.arm(stream.expires, Timer.INBOUND, stream.key)
        stream.due = offer.due
        stream.group = offer.frame.share, shared.is_short((stream.blocks - stream.first_block) * stream.layers)
        self._receiving += 1
        self._tokens += stream.tokens
        self._drain.begun(now)
        link.inbound[stream.num] = stream
        shared.commands.append(Accepted(stream.key, link.peer, link.id, stream.epoch, stream.tokens))
        first_token = min(stream.tokens, stream.first_block * shared.block_tokens)
        shared.transmit(link, wire.Accept(stream.num, stream.epoch, first_token))
        if stream.first_block == stream.blocks:
            shared.timers.cancel(Timer.RESERVATION, stream.key)
            stream.arrived = stream.layers
            shared.commands.extend(Arrived(stream.key, layer) for layer in range(stream.layers))

    def _decide(self, now: float, link: Link, stream: Inbound) -> bool:
        """The destination decides: done when the source said that this was all, and all is in place. Its End gives
        back whatever slots are not confirmed. Returns whether there was anything to decide."""
        if stream.source_end is None or stream.confirmed < stream.chunks:
            return False
        if not stream.whole:
            lacking = [layer for layer, missing in enumerate(stream.missing) if missing]
            error = Corrupted(f"stream {stream.name}: the source is done, but layers {lacking[:8]} are not whole")
            self._end(now, stream, error)
            return True
        stream.phase = Phase.DECIDED
        self._shared.transmit(link, wire.End(stream.num, stream.epoch, "done", chunks=stream.chunks))
        self._shared.timers.arm(now + self._shared.config.end_wait, Timer.INBOUND, stream.key)
        return True

    def _end(
        self,
        now: float,
        stream: Inbound,
        error: KVStreamError,
        *,
        answer: bool = False,
        told: KVStreamError | None = None,
    ) -> None:
        """End a stream with an error, unless it is decided: the source may have heard that it is done, so it is.

        The source hears of it, or what is `told` in place of it, when no read of its slots is under way; `answer` when
        it was the source that ended it.
        """
        if stream.phase is Phase.DECIDED:
            self._finish(now, stream, None, provisional=True)
            return
        link = stream.link
        if stream.phase is not Phase.WAITING:
            error.valid_layers = stream.valid_layers
        if link is not None:
            word = told or error
            last = wire.End(stream.num, stream.epoch, word.code, text_of(word), answer=answer)
            # What was announced and is not being read never will be.
            moving = stream.reading
            link.announced -= len(stream.moving) - moving
            if moving or not answer:
                ending = Ending(stream.key, stream.epoch, link.beats, moving=moving)
                ending.last_word = last if moving else None
                link.ending[stream.num] = ending
            if not moving:
                self._shared.transmit(link, last)
        self._finish(now, stream, error, provisional=False)

    def _finish(self, now: float, stream: Inbound, error: KVStreamError | None, *, provisional: bool) -> None:
        """The one place where a destination's stream ends."""
        bound = stream.phase is not Phase.WAITING
        stream.phase = Phase.ENDED
        del self._streams[stream.key]
        del self._names[stream.name]
        self._shared.timers.cancel(Timer.INBOUND, stream.key)
        self._shared.timers.cancel(Timer.RESERVATION, stream.key)
        if stream.fetching is not None:
            stream.fetching.answered()
            stream.fetching = None
        self._shared.timers.cancel(Timer.RESUME, stream.key)
        if stream.link is not None:
            del stream.link.inbound[stream.num]
        if bound:
            self._receiving -= 1
            self._tokens -= stream.tokens
            self._drain.finished(now, stream.tokens, more=self._receiving > 0)
        payload = stream.source_end.payload if stream.source_end is not None and error is None else b""
        self._shared.ended(Ended(stream.key, error, payload, stream.epoch, stream.peer, provisional))
        self._ask()

    def _check_room(self) -> None:
        if len(self._streams) >= self._shared.config.max_streams:
            raise Refused(
                f"{len(self._streams)} streams are being received already (max_streams)", retry_after=self._room_in()
            )

    def _room_in(self) -> float:
        """When, by what was seen so far, about half of what is here now will have been served."""
        return self._drain.time_for((self._offers.tokens + self._tokens) / 2)

    # ------------------------------------------------------------------ offers

    def _judge(self, link: Link, frame: wire.Offer, waiting: Inbound | None) -> KVStreamError | None:
        """Why an offer has to be refused at once, if it has."""
        if self._shared.closed is not None:
            return Refused(str(self._shared.closed))
        if frame.tokens < 1:
            return ConfigError("tokens", f"must be at least 1, is {frame.tokens}")
        fetching = waiting.fetching if waiting is not None else None
        if frame.fetch:
            mine = fetching is not None and (fetching.token, fetching.peer) == (frame.fetch, link.peer)
            return None if mine else Refused(f"{frame.stream!r} is not being fetched from {link.peer} here any more")
        if fetching is not None:
            return ConfigError("stream", f"{frame.stream!r} is being fetched from {fetching.peer}")
        if waiting is not None:
            if waiting.phase is Phase.WAITING:
                return None
            if waiting.phase is Phase.SUSPENDED:
                wait = self._shared.config.resume_timeout
                return Refused(f"{frame.stream!r} of {waiting.peer} may still be resumed here", retry_after=wait)
            return ConfigError("stream", f"{frame.stream!r} is already being received from {waiting.peer}")
        if self._shared.draining is not None:
            return self._shared.draining
        pending = self._offers.named(frame.stream)
        if pending is not None:
            return ConfigError("stream", f"{frame.stream!r} is already offered by {pending.link.peer}")
        full = self._offers.full(frame)
        if full is None and len(self._streams) >= self._shared.config.max_streams:
            full = f"{len(self._streams)} streams are being received already (max_streams)"
        return Refused(full, retry_after=self._room_in()) if full is not None else None

    def _fit(self, stream: Inbound, frame: wire.Offer) -> ConfigError | None:
        """Make a waiting stream as long as what is offered for it, where that is open; else why it does not fit."""
        if frame.tokens == stream.tokens:
            return None
        fetching = stream.fetching
        if fetching is None or fetching.exact:
            return _tokens_differ(frame.stream, frame.tokens, stream.tokens)
        if frame.tokens > stream.tokens:
            return ConfigError(
                "blocks",
                f"{fetching.peer} holds {frame.tokens} tokens of stream {frame.stream!r}, the blocks given take"
                f" {stream.tokens}; give more blocks, or say how many tokens you want",
            )
        blocks = math.ceil(frame.tokens / self._shared.block_tokens)
        first = first_block(fetching.first_token, frame.tokens, self._shared.block_tokens)
        stream.cut_to(frame.tokens, blocks, first)
        return None

    def _ask(self) -> None:
        """Hand offers to the handler, as many as may be received at a time."""
        while (
            self._handler
            and self._shared.closed is None
            and self._receiving + self._offers.asked < self._shared.config.max_receiving
            and (offer := self._offers.next()) is not None
        ):
            self._hand_out(offer)

    def _hand_out(self, offer: PendingOffer) -> None:
        frame = offer.frame
        self._shared.commands.append(
            Offered(
                offer.id,
                offer.link.peer,
                frame.stream,
                frame.epoch,
                frame.tokens,
                frame.priority,
                frame.deadline,
                frame.metadata,
                frame.share,
            )
        )

    def _take(self, offer: PendingOffer) -> None:
        self._offers.remove(offer)
        self._shared.timers.cancel(Timer.OFFER, offer.id)

    def _withdraw(self, offer: PendingOffer, error: KVStreamError) -> None:
        """Take an offer away from a handler that may be at work on it."""
        self._take(offer)
        if offer.asked:
            self._shared.commands.append(Withdrawn(offer.id, error))

    def _refuse(self, link: Link, frame: wire.Offer, error: KVStreamError) -> None:
        self._shared.counters.offers_refused += 1
        retry_after = error.retry_after if isinstance(error, Refused) else None
        if retry_after is not None:
            retry_after = min(max(0.0, retry_after), wire.MAX_SECONDS)
        self._shared.transmit(link, wire.Refuse(frame.num, frame.epoch, error.code, text_of(error), retry_after))


def _tokens_differ(name: str, offered: int, expected: int) -> ConfigError:
    return ConfigError("tokens", f"stream {name!r} is offered with {offered} tokens but received with {expected}")
