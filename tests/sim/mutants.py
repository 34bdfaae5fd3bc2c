"""Planted bugs: each breaks one rule of the production code, and the simulator has to find it.

    python -m tests.sim.mutants [NAME ...] [--seeds 0..199] [--faults harsh]

prints, for each mutant, the first seed that finds it and the violation. The tests run each on seeds known to find it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvstream import wire
from kvstream.discovery.broker import Conflict
from kvstream.discovery.registry import Registry
from kvstream.errors import KVStreamError
from kvstream.runtime.copies import Copies
from kvstream.runtime.links import Links
from kvstream.runtime.sessions import SendStream
from kvstream.runtime.streams import Streams
from kvstream.scheduler.destination import Destination
from kvstream.scheduler.inbound import Inbound, Phase
from kvstream.scheduler.links import Ending
from kvstream.scheduler.outbound import Outbound
from kvstream.scheduler.outbound import Phase as SourcePhase
from kvstream.scheduler.shared import Shared
from kvstream.scheduler.source import Source
from kvstream.scheduler.timers import Timer, Timers
from kvstream.sim.plan import generate
from kvstream.sim.run import run

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`seeds` are known to find it under harsh faults; `expect` is in one of the violations."""

    name: str
    planted: Patch
    seeds: tuple[int, ...]
    expect: str = ""


def _replace(owner: type, name: str, planted: Callable[..., Any]) -> Any:
    """Patch a method by one with the same parameters: another one would be found for that alone."""
    original = inspect.signature(getattr(owner, name))
    if [*inspect.signature(planted).parameters] != [*original.parameters]:
        raise AssertionError(f"{owner.__name__}.{name} has changed to {original}: plant the bug anew")
    return patch.object(owner, name, planted)


def _slot_released_twice() -> Any:
    original = Outbound.confirm

    def confirm(self: Outbound, chunks: int) -> list[int]:
        slots = original(self, chunks)
        return [*slots, *slots[:1]]

    return _replace(Outbound, "confirm", confirm)


def _fence_skipped() -> Any:
    """A connection that ends is closed, and nobody waits until nothing can move on it any more."""
    original = Links._close

    def close(self: Links, link: Any, error: KVStreamError) -> None:
        spawn = self._spawn

        def without(group: Any, work: Any, name: str) -> Any:
            if group is self._fences:
                work.close()
                link.connection.close()
                return None
            return spawn(group, work, name)

        with patch.object(self, "_spawn", without):
            original(self, link, error)

    return _replace(Links, "_close", close)


def _check_skipped() -> Any:
    """What was read is believed without asking whether the source still held it afterwards."""

    def count(self: Copies, session: Any, connection: Any, command: Any, nbytes: int) -> None:
        session.moved_bytes += nbytes

    return _replace(Copies, "_count", count)


def _recall_skipped() -> Any:
    original = Streams.end

    def end(self: Streams, command: Any) -> None:
        session = self.session(command.stream)
        if isinstance(session, SendStream):
            session.lent.clear()
        original(self, command)

    return _replace(Streams, "end", end)


def _released_while_in_flight() -> Any:
    """A source that ends a stream gives its slots out again at once, while the destination may be reading them."""

    def part(self: Source, stream: Outbound, link: Any, error: KVStreamError) -> None:
        del link.outbound[stream.num]
        link.ending[stream.num] = Ending(stream.key, stream.epoch, link.beats, [])
        self._shared.transmit(link, wire.End(stream.num, stream.epoch, error.code, ""))
        self._release(link, [slot for _, slot in stream.in_flight])

    return _replace(Source, "_part", part)


def _told_while_reading() -> Any:
    """A destination that ends a stream says so at once, while it is still reading the source's slots."""
    original = Destination._end

    def end(
        self: Destination,
        now: float,
        stream: Inbound,
        error: KVStreamError,
        *,
        answer: bool = False,
        told: KVStreamError | None = None,
    ) -> None:
        link = stream.link
        if link is not None and stream.phase is not Phase.DECIDED:
            link.announced -= stream.reading
            stream.reading = 0
        original(self, now, stream, error, answer=answer, told=told)

    return _replace(Destination, "_end", end)


def _transmit_without(lost: Callable[[wire.Frame], bool]) -> Any:
    original = Shared.transmit

    def transmit(self: Shared, link: Any, frame: wire.Frame) -> None:
        if not lost(frame):
            original(self, link, frame)

    return _replace(Shared, "transmit", transmit)


def _terminal_frame_dropped() -> Any:
    return _transmit_without(lambda frame: isinstance(frame, wire.End) and not frame.answer and frame.code != "done")


def _answer_omitted() -> Any:
    return _replace(Shared, "answer", lambda self, link, frame: None)


def _lease_adopted() -> Any:
    """Another incarnation stands on the name, and its lease is taken for our own."""
    original = Registry._publish

    async def publish(self: Registry, own: Any) -> None:
        try:
            await original(self, own)
        except Conflict as conflict:
            own.revision = conflict.revision
            await original(self, own)

    return _replace(Registry, "_publish", publish)


def _stale_end_believed() -> Any:
    """The source's own End, sent before it heard ours, is taken for its answer: we say at once that all is over."""
    original = Destination.on_end

    def on_end(self: Destination, now: float, link: Any, frame: wire.End) -> None:
        ending = link.ending.get(frame.num)
        if ending is not None and ending.last_word is not None:
            del link.ending[frame.num]
            self._shared.answer(link, frame)
            return
        original(self, now, link, frame)

    return _replace(Destination, "on_end", on_end)


def _confirmed_too_early() -> Any:
    """Everything that was announced is confirmed, in place or not."""

    def confirm(self: Destination, link: Any, stream: Inbound) -> None:
        self._shared.transmit(link, wire.Confirm(stream.num, stream.epoch, stream.chunks))

    return _replace(Destination, "_confirm", confirm)


def _confirmed_too_much() -> Any:
    def confirm(self: Destination, link: Any, stream: Inbound) -> None:
        self._shared.transmit(link, wire.Confirm(stream.num, stream.epoch, stream.confirmed + 1))

    return _replace(Destination, "_confirm", confirm)


def _decided_too_early() -> Any:
    """Done when the source says that this was all, with reads under way."""

    def decide(self: Destination, now: float, link: Any, stream: Inbound) -> bool:
        if stream.source_end is None:
            return False
        stream.phase = Phase.DECIDED
        self._shared.transmit(link, wire.End(stream.num, stream.epoch, "done", chunks=stream.chunks))
        self._shared.timers.arm(now + self._shared.config.end_wait, Timer.INBOUND, stream.key)
        return True

    return _replace(Destination, "_decide", decide)


def _doubt_forgotten() -> Any:
    """A destination that may have finished a stream is left, and that is not told."""
    return patch.object(Outbound, "maybe_done", property(lambda self: False))


def _epoch_not_bumped() -> Any:
    """The next destination gets the stream under the epoch of the one before."""
    original = Outbound.offer_to

    def offer_to(self: Outbound, peer: str) -> None:
        original(self, peer)
        self.epoch = 1

    return _replace(Outbound, "offer_to", offer_to)


def _announced_only_once() -> Any:
    """What had been announced to the destination before is not sent to the next."""
    original = Outbound.accepted

    def accepted(self: Outbound, first_token: int) -> int:
        resent = original(self, first_token)
        self.pending = deque(piece for piece in self.pending if piece.first >= self.reached[piece.layer])
        return resent

    return _replace(Outbound, "accepted", accepted)


def _late_decision_believed() -> Any:
    """The destination that a stream was taken away from says that it is done, and that is believed."""
    original = Source.on_end

    def on_end(self: Source, now: float, link: Any, frame: wire.End) -> None:
        ending = link.ending.get(frame.num)
        stream = self._streams.get(ending.stream) if ending is not None else None
        if stream is not None and frame.code == "done":
            self._end(now, stream, None, tell=False)
        original(self, now, link, frame)

    return _replace(Source, "on_end", on_end)


def _old_gather_counts() -> Any:
    """A chunk that was gathered for the old destination is announced to the new one."""

    def staging(self: Source, command: Any) -> Outbound | None:
        return self._streams.get(command.stream)

    return _replace(Source, "_staging", staging)


def _gap_forgotten() -> Any:
    """A destination that keeps a stream takes what was announced for what is in place."""
    original = Inbound.suspend

    def suspend(self: Inbound, why: KVStreamError) -> None:
        expected = list(self.expected)
        original(self, why)
        self.expected = expected

    return _replace(Inbound, "suspend", suspend)


def _block_skipped() -> Any:
    """A stream that is resumed goes on one block too far."""
    original = Outbound.resumed

    def resumed(self: Outbound, have: list[int]) -> int:
        again = original(self, have)
        for piece in self.pending:
            piece.first = min(piece.first + 1, piece.stop - 1)
        return again

    return _replace(Outbound, "resumed", resumed)


def _suspended_for_ever() -> Any:
    """A destination waits for a source that does not come back until the stream's deadline."""
    return _deadline_of(Timer.RESUME)


def _deadline_of(kind: Timer) -> Any:
    original = Timers.arm

    silenced = kind

    def arm(self: Timers, when: float, kind: Timer, ref: int) -> None:
        original(self, math.inf if kind is silenced else when, kind, ref)

    return _replace(Timers, "arm", arm)


def _source_without_deadline() -> Any:
    return _deadline_of(Timer.OUTBOUND)


def _destination_without_deadline() -> Any:
    return _deadline_of(Timer.INBOUND)


def _partial_blocks_sent() -> Any:
    """A block counts as computed as soon as its first token is."""

    def whole_blocks(self: Outbound, tokens: int) -> int:
        return math.ceil(tokens / self.block_tokens)

    return _replace(Outbound, "_whole_blocks", whole_blocks)


def _slot_leaked() -> Any:
    """The slot of a chunk whose stream ended while it was gathered is not given back."""
    original = Source.staged

    def staged(self: Source, now: float, link: Any, command: Any, generation: int, checksum: int) -> None:
        if self._staging(command) is not None:
            original(self, now, link, command, generation, checksum)

    return _replace(Source, "staged", staged)


def _written_after_the_end() -> Any:
    """Sessions are kept beyond their end, and a chunk that comes in late is still put in place."""
    original = Streams.notify

    def notify(self: Streams, command: Any) -> None:
        session = self._sessions.get(getattr(command, "stream", 0))
        original(self, command)
        if type(command).__name__ == "Ended" and session is not None:
            self._sessions[command.stream] = session

    return _replace(Streams, "notify", notify)


def _blocks_never_unclaimed() -> Any:
    return _replace(Streams, "_unclaim", lambda self, session: None)


def _refusal_unheard() -> Any:
    return _transmit_without(lambda frame: isinstance(frame, wire.Refuse))


def _stays_finishing() -> Any:
    """The destination's decision does not end the stream on its source."""
    original = Source.on_end

    def on_end(self: Source, now: float, link: Any, frame: wire.End) -> None:
        stream = link.outbound.get(frame.num)
        if stream is not None and stream.phase is SourcePhase.FINISHING and frame.code == "done":
            return
        original(self, now, link, frame)

    return _replace(Source, "on_end", on_end)


def _loss_not_told() -> Any:
    """Incoming streams of a lost connection are left to their deadlines, on a link that is no more."""

    def link_lost(self: Destination, now: float, link: Any, error: KVStreamError) -> None:
        self._turns.forget(link.id)
        self._count(link, -link.reading)
        for offer in list(link.offers.values()):
            self._withdraw(offer, error)

    return _replace(Destination, "link_lost", link_lost)


def _told_before_the_blocks_are_free() -> Any:
    """A stream's user hears of its end while a read that outlasts a call is on its way into the blocks."""
    return _replace(Copies, "put_off", lambda self, command: False)


def _layers_of_a_group_swapped() -> Any:
    """A chunk of several layers is put in place in the wrong order."""

    def layers(command: Any) -> range:
        return range(command.layer + command.layers - 1, command.layer - 1, -1)

    original = Copies._land

    def land(self: Copies, session: Any, connection: Any, command: Any, data: Any) -> None:
        with patch("kvstream.runtime.copies._layers", layers):
            original(self, session, connection, command, data)

    return _replace(Copies, "_land", land)


def _asked_again_forgotten() -> Any:
    """Who pauses before it asks again is never woken."""
    return _replace(Source, "ask_again", lambda self, now, key: None)


MUTANTS = (
    Mutant("slot released twice", _slot_released_twice, (0,), "are free or in use"),
    Mutant("fence skipped", _fence_skipped, (0,), "unfenced"),
    Mutant("generation check skipped", _check_skipped, (255,), "wrong bytes"),
    Mutant("recall skipped", _recall_skipped, (15,), "wrong bytes"),
    Mutant("slots released while in flight", _released_while_in_flight, (109,), "than there are slots"),
    Mutant("source told while its slots are read", _told_while_reading, (3,), "while it is read"),
    Mutant("terminal frame dropped", _terminal_frame_dropped, (0,)),
    Mutant("answer to End omitted", _answer_omitted, (0,), "provisionally"),
    Mutant("lease adopted wrongly", _lease_adopted, (2,), "several holders"),
    Mutant("stale End believed", _stale_end_believed, (256,), "than there are slots"),
    Mutant("confirmed before in place", _confirmed_too_early, (5,), "while it is read"),
    Mutant("confirmed beyond announced", _confirmed_too_much, (0,), "confirmed of"),
    Mutant("decided with reads under way", _decided_too_early, (0,), "wrong bytes"),
    Mutant("doubt forgotten", _doubt_forgotten, (0,), "without doubt"),
    Mutant("epoch not bumped", _epoch_not_bumped, (68,), "two decoders"),
    Mutant("announced only once", _announced_only_once, (0,), "were due"),
    Mutant("late decision believed", _late_decision_believed, (22,), "where it is not"),
    Mutant("old gather counts", _old_gather_counts, (22,), "are free or in use"),
    Mutant("gap forgotten", _gap_forgotten, (8,), "ended as corrupted"),
    Mutant("block skipped by a resume", _block_skipped, (0,), "were due"),
    Mutant("suspended for ever", _suspended_for_ever, (0,), "has no bound"),
    Mutant("source without deadline", _source_without_deadline, (0,), "has no bound"),
    Mutant("destination without deadline", _destination_without_deadline, (0,), "has no bound"),
    Mutant("partial blocks sent", _partial_blocks_sent, (2,), "wrong bytes"),
    Mutant("slot leaked", _slot_leaked, (1,), "are free or in use"),
    Mutant("written after the end", _written_after_the_end, (0,), "sessions are left"),
    Mutant("blocks never unclaimed", _blocks_never_unclaimed, (0,), "still claimed"),
    Mutant("refusal unheard", _refusal_unheard, (209,), "had refused it"),
    Mutant("decision not heard", _stays_finishing, (6,), "too far apart"),
    Mutant("loss not told", _loss_not_told, (42,), "source was killed"),
    Mutant("end told before the blocks are free", _told_before_the_blocks_are_free, (6,), "was written"),
    Mutant("layers of a group swapped", _layers_of_a_group_swapped, (0,), "wrong bytes"),
    Mutant("asked again forgotten", _asked_again_forgotten, (0,), "has no bound"),
)


def hunt(mutant: Mutant, seeds: range, faults: Any) -> Iterator[tuple[int, list[str]]]:
    """Run a mutant on seeds; those that find it, with what they found."""
    with mutant.planted():
        for seed in seeds:
            result = run(generate(seed, workers=8, streams=40, faults=faults))
            if result.violations:
                yield seed, result.violations


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", default="0..199")
    parser.add_argument("--faults", default="harsh")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("..")
    survivors = 0
    for mutant in MUTANTS:
        if args.names and not any(name in mutant.name for name in args.names):
            continue
        seed, violations = next(hunt(mutant, range(int(first), int(last) + 1), args.faults), (None, [""]))
        survivors += seed is None
        print(f"{mutant.name}: {'SURVIVES' if seed is None else f'seed {seed}: {violations[0][:160]}'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
