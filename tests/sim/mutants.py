"""Planted bugs: each breaks one rule of the production code, and the simulator has to find it.

    python -m tests.sim.mutants [NAME ...] [--seeds 0..199] [--faults harsh]

prints, for each mutant, the first seed that finds it and the violation. The tests run each on seeds known to find it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvstream import wire
from kvstream.discovery.broker import Conflict
from kvstream.discovery.registry import Registry
from kvstream.errors import KVStreamError
from kvstream.runtime.links import Links
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
    expect: str


def _slot_released_twice() -> Any:
    original = Outbound.confirm

    def confirm(self: Outbound, chunks: int) -> list[int]:
        slots = original(self, chunks)
        return [*slots, *slots[:1]]

    return patch.object(Outbound, "confirm", confirm)


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

    return patch.object(Links, "_close", close)


def _check_skipped() -> Any:
    """What was read is believed without asking whether the source still held it afterwards."""
    original = Streams._land

    def land(self: Streams, command: Any, taken: Any) -> Any:
        connection = self.links.connection(command.link)
        if connection is None:
            return original(self, command, taken)
        with patch.object(connection, "check", lambda *_: True):
            return original(self, command, taken)

    return patch.object(Streams, "_land", land)


def _recall_skipped() -> Any:
    original = Streams.notify

    def notify(self: Streams, command: Any) -> None:
        session = self._sessions.get(getattr(command, "stream", 0))
        if session is not None and type(command).__name__ == "Ended" and hasattr(session, "lent"):
            session.lent.clear()
        original(self, command)

    return patch.object(Streams, "notify", notify)


def _released_while_in_flight() -> Any:
    """A source that ends a stream gives its slots out again at once, while the destination may be reading them."""

    def part(self: Source, stream: Outbound, link: Any, error: KVStreamError) -> None:
        del link.outbound[stream.num]
        link.ending[stream.num] = Ending(stream.key, stream.epoch, link.beats, [])
        self._shared.transmit(link, wire.End(stream.num, stream.epoch, error.code, ""))
        self._release(link, [slot for _, slot in stream.in_flight])

    return patch.object(Source, "_part", part)


def _told_while_reading() -> Any:
    """A destination that ends a stream says so at once, while it is still reading the source's slots."""

    def end(self: Destination, stream: Inbound, error: KVStreamError, *, answer: bool = False) -> None:
        if stream.phase is Phase.DECIDED:
            self._finish(stream, None, provisional=True)
            return
        link = stream.link
        if link is not None:
            if not answer:
                link.ending[stream.num] = Ending(stream.key, stream.epoch, link.beats)
            self._shared.transmit(link, wire.End(stream.num, stream.epoch, error.code, "", answer=answer))
        self._finish(stream, error, provisional=False)

    return patch.object(Destination, "_end", end)


def _transmit_without(lost: Callable[[wire.Frame], bool]) -> Any:
    original = Shared.transmit

    def transmit(self: Shared, link: Any, frame: wire.Frame) -> None:
        if not lost(frame):
            original(self, link, frame)

    return patch.object(Shared, "transmit", transmit)


def _terminal_frame_dropped() -> Any:
    return _transmit_without(lambda frame: isinstance(frame, wire.End) and not frame.answer and frame.code != "done")


def _answer_omitted() -> Any:
    return patch.object(Shared, "answer", lambda *_: None)


def _lease_adopted() -> Any:
    """Another incarnation stands on the name, and its lease is taken for our own."""
    original = Registry._publish

    async def publish(self: Registry, own: Any) -> None:
        try:
            await original(self, own)
        except Conflict as conflict:
            own.revision = conflict.revision
            await original(self, own)

    return patch.object(Registry, "_publish", publish)


def _stale_end_believed() -> Any:
    """The source's own End, sent before it heard ours, is taken for the answer to it, with reads still under way."""

    def on_end(self: Destination, now: float, link: Any, frame: wire.End) -> None:
        ending = link.ending.get(frame.num)
        if ending is not None:
            del link.ending[frame.num]
            return
        original(self, now, link, frame)

    original = Destination.on_end
    return patch.object(Destination, "on_end", on_end)


def _confirmed_too_early() -> Any:
    """Everything that was announced is confirmed, in place or not."""

    def confirm(self: Destination, link: Any, stream: Inbound) -> None:
        self._shared.transmit(link, wire.Confirm(stream.num, stream.epoch, stream.chunks))

    return patch.object(Destination, "_confirm", confirm)


def _confirmed_too_much() -> Any:
    def confirm(self: Destination, link: Any, stream: Inbound) -> None:
        self._shared.transmit(link, wire.Confirm(stream.num, stream.epoch, stream.confirmed + 1))

    return patch.object(Destination, "_confirm", confirm)


def _decided_too_early() -> Any:
    """Done when the source says that this was all, with reads under way."""

    def decide(self: Destination, now: float, link: Any, stream: Inbound) -> bool:
        if stream.source_end is None:
            return False
        stream.phase = Phase.DECIDED
        self._shared.transmit(link, wire.End(stream.num, stream.epoch, "done", chunks=stream.chunks))
        self._shared.timers.arm(now + self._shared.config.end_wait, Timer.INBOUND, stream.key)
        return True

    return patch.object(Destination, "_decide", decide)


def _doubt_forgotten() -> Any:
    def in_doubt(error: KVStreamError, stream: Outbound) -> KVStreamError:
        return type(error)(str(error)) if type(error) is not KVStreamError else error

    return patch("kvstream.scheduler.source._in_doubt", in_doubt)


def _rerouted_when_in_doubt() -> Any:
    """The next destination is tried although this one may have finished: two decoders."""

    def link_lost(self: Source, now: float, link: Any, error: KVStreamError) -> None:
        if self._outgoing.get(link.peer) is link:
            del self._outgoing[link.peer]
        for stream in list(link.outbound.values()):
            self._next_or_end(now, stream, error)

    return patch.object(Source, "link_lost", link_lost)


def _deadline_of(kind: Timer) -> Any:
    original = Timers.arm

    def arm(self: Timers, when: float, which: Timer, ref: int) -> None:
        original(self, math.inf if which is kind else when, which, ref)

    return patch.object(Timers, "arm", arm)


def _source_without_deadline() -> Any:
    return _deadline_of(Timer.OUTBOUND)


def _destination_without_deadline() -> Any:
    return _deadline_of(Timer.INBOUND)


def _partial_blocks_sent() -> Any:
    """A block counts as computed as soon as its first token is."""

    def whole_blocks(self: Outbound, tokens: int) -> int:
        return math.ceil(tokens / self.block_tokens)

    return patch.object(Outbound, "_whole_blocks", whole_blocks)


def _slot_leaked() -> Any:
    """The slot of a chunk whose stream ended while it was gathered is not given back."""
    original = Source.staged

    def staged(self: Source, link: Any, command: Any, generation: int, checksum: int) -> None:
        if self._staging(command) is not None:
            original(self, link, command, generation, checksum)

    return patch.object(Source, "staged", staged)


def _written_after_the_end() -> Any:
    """Sessions are kept beyond their end, and a chunk that comes in late is still put in place."""
    original = Streams.notify

    def notify(self: Streams, command: Any) -> None:
        session = self._sessions.get(getattr(command, "stream", 0))
        original(self, command)
        if type(command).__name__ == "Ended" and session is not None:
            self._sessions[command.stream] = session

    return patch.object(Streams, "notify", notify)


def _blocks_never_unclaimed() -> Any:
    return patch.object(Streams, "_unclaim", lambda *_: None)


def _refusal_unheard() -> Any:
    return _transmit_without(lambda frame: isinstance(frame, wire.Refuse))


def _stays_finishing() -> Any:
    """The destination's decision does not end the stream on its source."""
    original = Source.on_end

    def on_end(self: Source, link: Any, frame: wire.End) -> None:
        stream = link.outbound.get(frame.num)
        if stream is not None and stream.phase is SourcePhase.FINISHING and frame.code == "done":
            return
        original(self, link, frame)

    return patch.object(Source, "on_end", on_end)


def _loss_not_told() -> Any:
    """Incoming streams of a lost connection are left to their deadlines, on a link that is no more."""

    def link_lost(self: Destination, link: Any, error: KVStreamError) -> None:
        for offer in list(link.offers.values()):
            self._withdraw(offer, error)

    return patch.object(Destination, "link_lost", link_lost)


MUTANTS = (
    Mutant("slot released twice", _slot_released_twice, (0,), "slots"),
    Mutant("fence skipped", _fence_skipped, (0,), "unfenced"),
    Mutant("generation check skipped", _check_skipped, (9,), "wrong bytes"),
    Mutant("recall skipped", _recall_skipped, (57,), "wrong bytes"),
    Mutant("slots released while in flight", _released_while_in_flight, (3,), "announced while it is read"),
    Mutant("source told while its slots are read", _told_while_reading, (3,), "ended as protocol"),
    Mutant("terminal frame dropped", _terminal_frame_dropped, (0,), "lost its source"),
    Mutant("answer to End omitted", _answer_omitted, (0,), "provisionally"),
    Mutant("lease adopted wrongly", _lease_adopted, (4,), "several holders"),
    Mutant("stale End believed", _stale_end_believed, (148,), "lost its source"),
    Mutant("confirmed before in place", _confirmed_too_early, (3,), "announced while it is read"),
    Mutant("confirmed beyond announced", _confirmed_too_much, (0,), "chunks confirmed of"),
    Mutant("decided with reads under way", _decided_too_early, (0,), "wrong bytes"),
    Mutant("doubt forgotten", _doubt_forgotten, (1,), "without doubt"),
    Mutant("rerouted when in doubt", _rerouted_when_in_doubt, (1,), "two decoders"),
    Mutant("source without deadline", _source_without_deadline, (0,), "after its bound"),
    Mutant("destination without deadline", _destination_without_deadline, (0,), "still waiting"),
    Mutant("partial blocks sent", _partial_blocks_sent, (2,), "wrong bytes"),
    Mutant("slot leaked", _slot_leaked, (1,), "free or in use"),
    Mutant("written after the end", _written_after_the_end, (0,), "has ended"),
    Mutant("blocks never unclaimed", _blocks_never_unclaimed, (0,), "claimed"),
    Mutant("refusal unheard", _refusal_unheard, (68,), "had refused it"),
    Mutant("decision not heard", _stays_finishing, (0,), "too far apart"),
    Mutant("loss not told", _loss_not_told, (0,), "was killed"),
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
