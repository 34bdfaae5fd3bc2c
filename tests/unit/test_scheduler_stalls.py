"""Who waits for whom, and how long: the states that the scheduler core reports, and the stalls that it tells of."""

from __future__ import annotations

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import PeerLost
from kvstream.scheduler.commands import Command, Drop, Move, Stage, Stalled
from kvstream.scheduler.core import Scheduler
from kvstream.scheduler.stats import PeerState, StreamState, WaitsFor

LAYERS, BLOCK_TOKENS = 2, 4
CONFIG = RuntimeConfig(deadline=1000.0, beat_interval=0.1, stall_timeout=50.0, stall_warning=1.0)


class Side:
    """One core with a clock, and a peer that answers beats but does nothing else by itself."""

    def __init__(self, config: RuntimeConfig = CONFIG) -> None:
        self.core = Scheduler(config, layers=LAYERS, block_tokens=BLOCK_TOKENS)
        self.now = 100.0
        self.commands: list[Command] = []
        self.speaks: set[int] = {1}
        """The links whose peer is heard with every beat."""

    def take(self, *, begin: bool = True) -> list[Command]:
        found: list[Command] = []
        while commands := self.core.take():
            found.extend(commands)
            for command in commands:
                if begin and isinstance(command, Stage):
                    self.core.staging(command)
                elif begin and isinstance(command, Move):
                    self.core.moving(command)
        self.commands += found
        return found

    def after(self, seconds: float) -> list[Stalled]:
        """Let time pass; the stalls that were told."""
        self.take()
        end, count = self.now + seconds, len(self.commands)
        while (due := self.core.next_timer()) is not None and due <= end:
            self.now = due
            self.core.tick(due)
            for link in self.speaks:
                self.core.frame(due, link, wire.Beat(1))
            self.take()
        self.now = end
        return [command for command in self.commands[count:] if isinstance(command, Stalled)]

    def hear(self, frame: wire.Frame, link: int = 1) -> None:
        self.core.frame(self.now, link, frame)

    @property
    def stream(self) -> StreamState:
        (state,) = self.core.stream_states(self.now)
        return state

    @property
    def peer(self) -> PeerState:
        (state,) = self.core.peer_states()
        return state

    def waits(self, kind: WaitsFor, waited: float) -> None:
        assert (self.stream.waits_for, round(self.stream.waited, 6)) == (kind, waited)

    # -- source

    def up(self, *, slots: int = 2, outgoing: bool = True) -> None:
        self.core.link_up(self.now, 1, "d", outgoing=outgoing, slots=slots, slot_blocks=2)

    def send(self) -> int:
        return self.core.send(self.now, "s", tokens=8, held=2, candidates=["d"], deadline=500.0)

    def ready(self, key: int, layer: int) -> None:
        self.core.layer_ready(self.now, key, layer, 0, 8)

    def staged(self) -> None:
        """Perform what is to be staged."""
        for command in self.take():
            if isinstance(command, Stage):
                self.core.staged(self.now, command, 7)


def test_what_a_source_waits_for_from_its_offer_to_its_end() -> None:
    side = Side()
    key = side.send()
    side.after(0.5)
    side.waits("connection", 0.5)
    side.up(slots=1)
    side.after(0.25)
    side.waits("answer", 0.25)
    side.hear(wire.Accept(1, 1))
    side.after(2.0)
    side.waits("engine", 2.0)
    assert side.stream.peer == "d"
    side.ready(key, 0)
    side.take()
    side.waits("turn", 0.0)
    side.staged()
    side.after(0.5)
    side.waits("turn", 0.5)  # the gather was begun before, and is not done
    (stage,) = [command for command in side.commands if isinstance(command, Stage)]
    side.core.staged(side.now, stage, 7)
    side.waits("engine", 0.0)
    side.after(0.25)
    side.ready(key, 1)
    side.after(0.75)
    side.waits("slot", 0.75)
    assert (side.stream.slots, side.peer.slots_used, side.peer.waiting) == (1, 1, False)  # at its share of the slots
    side.hear(wire.Confirm(1, 1, 1))
    side.staged()
    side.core.finish(side.now, key, b"")
    side.after(0.5)
    side.waits("confirmation", 0.5)
    side.hear(wire.Confirm(1, 1, 2))
    side.after(0.25)
    side.waits("end", 0.25)
    assert (side.stream.chunks_announced, side.stream.chunks_confirmed) == (2, 2)
    side.hear(wire.End(1, 1, "done"))
    assert side.core.stream_states(side.now) == []


def test_who_waits_for_slots_that_others_hold_is_seen_with_the_peer() -> None:
    side = Side()
    side.up(slots=1)
    for name in ("x", "y"):
        key = side.core.send(side.now, name, tokens=8, held=2, candidates=["d"], deadline=500.0)
        side.ready(key, 0)
    for num in (1, 2):
        side.hear(wire.Accept(num, 1))
    side.after(1.0)
    assert [state.waits_for for state in side.core.stream_states(side.now)] == ["turn", "slot"]
    assert side.peer.waiting
    assert side.peer.streams == 2


def test_what_a_destination_waits_for_from_receive_to_its_end() -> None:
    side = Side()
    side.up(outgoing=False)
    side.core.receive(side.now, "s", tokens=8, deadline=500.0)
    side.after(0.5)
    side.waits("offer", 0.5)
    side.hear(wire.Offer(1, 1, "s", 8, 400.0))
    side.after(0.25)
    side.waits("chunk", 0.25)
    side.hear(wire.Ready(1, 1, 0, 0, 0, 2, 0, 7))
    side.after(0.5)
    side.waits("bytes", 0.5)
    assert (side.peer.moves, side.peer.slots_used) == (1, 1)
    (move,) = [command for command in side.commands if isinstance(command, Move)]
    side.core.moved(side.now, move)
    side.after(0.25)
    side.waits("chunk", 0.25)
    side.hear(wire.Ready(1, 1, 1, 1, 0, 2, 1, 7))
    side.take()
    side.hear(wire.End(1, 1, "done", chunks=2))
    second = [command for command in side.commands if isinstance(command, Move)][-1]
    side.core.moved(side.now, second)
    side.after(0.125)
    side.waits("end", 0.125)


def test_a_read_that_has_not_its_turn_yet_waits_for_this_process() -> None:
    side = Side()
    side.up(outgoing=False)
    for num, name in ((1, "x"), (2, "y")):
        side.core.receive(side.now, name, tokens=8, deadline=500.0)
        side.hear(wire.Offer(num, 1, name, 8, 400.0))
        side.hear(wire.Ready(num, 1, 0, 0, 0, 2, num - 1, 7))
    side.take(begin=False)
    assert [state.waits_for for state in side.core.stream_states(side.now)] == ["bytes", "turn"]


# ---------------------------------------------------------------------- stalls


def stalled_source() -> Side:
    side = Side()
    side.up()
    key = side.send()
    side.hear(wire.Accept(1, 1))
    side.ready(key, 0)
    side.staged()
    return side


def test_a_peer_that_owes_confirmations_is_named_ever_more_rarely() -> None:
    side = stalled_source()
    assert side.after(0.95) == []
    stalls = side.after(20.0)
    assert [round(stall.seconds, 1) for stall in stalls] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert stalls[0] == Stalled("d", True, stalls[0].seconds, chunks=1, streams=1, example="s")
    assert side.core.counters.stalls == 5
    assert side.peer.stalled > 20


def test_progress_ends_a_stall_and_the_next_is_told_afresh() -> None:
    side = stalled_source()
    key = 1
    assert len(side.after(1.5)) == 1
    side.ready(key, 1)
    side.staged()
    side.hear(wire.Confirm(1, 1, 1))
    assert side.peer.stalled == 0
    assert side.after(0.9) == []
    assert len(side.after(0.5)) == 1


def test_a_stream_that_waits_for_its_engine_is_no_stall_of_the_peer() -> None:
    side = Side()
    side.up()
    side.send()
    side.hear(wire.Accept(1, 1))
    assert side.after(10.0) == []
    assert side.peer.stalled == 0
    key = 1
    side.ready(key, 0)
    side.staged()
    # What came before the first chunk does not count against the peer.
    assert side.after(0.9) == []


def test_a_read_that_hangs_is_a_stall_of_its_source() -> None:
    side = Side()
    side.up(outgoing=False)
    side.core.receive(side.now, "s", tokens=8, deadline=500.0)
    side.hear(wire.Offer(1, 1, "s", 8, 400.0))
    assert side.after(5.0) == []
    side.hear(wire.Ready(1, 1, 0, 0, 0, 2, 0, 7))
    (stall,) = side.after(1.5)
    assert (stall.outgoing, stall.chunks, stall.example) == (False, 1, "s")


def test_time_in_which_this_process_did_not_run_is_no_stall() -> None:
    side = stalled_source()
    side.now += 30.0
    side.core.tick(side.now)
    side.hear(wire.Beat(1))
    assert not [command for command in side.take() if isinstance(command, Stalled)]


# ---------------------------------------------------------------------- reads of silent peers


def test_reads_from_a_silent_peer_do_not_keep_others_from_theirs() -> None:
    side = Side(RuntimeConfig(deadline=1000.0, beat_interval=0.1, stall_timeout=50.0, moves=2, peer_moves=2))
    for link in (1, 2):
        side.core.link_up(side.now, link, f"s{link}", outgoing=False, slots=8, slot_blocks=0)
        side.core.receive(side.now, f"r{link}", tokens=80, deadline=500.0)
        side.hear(wire.Offer(1, 1, f"r{link}", 80, 400.0), link)
        for chunk in range(4):
            side.hear(wire.Ready(1, 1, chunk, 0, chunk, 1, chunk, 7), link)
    moves = [command for command in side.take() if isinstance(command, Move)]
    assert [move.link for move in moves] == [1, 1]
    side.speaks = {2}
    side.after(0.5)
    moves = [command for command in side.commands if isinstance(command, Move)]
    assert [move.link for move in moves] == [1, 1, 2, 2]

    # It is heard again: now there are more reads than may be, so nobody gets any until there are less.
    side.hear(wire.Beat(1), 1)
    side.core.moved(side.now, moves[2])
    side.core.moved(side.now, moves[3])
    assert not [command for command in side.take() if isinstance(command, Move)]
    side.core.moved(side.now, moves[0])
    assert len([command for command in side.take() if isinstance(command, Move)]) == 1


def test_a_silent_peer_that_is_lost_is_counted_once() -> None:
    side = Side(RuntimeConfig(deadline=1000.0, beat_interval=0.1, stall_timeout=50.0, moves=2, peer_moves=2))
    side.speaks = set()
    side.up(outgoing=False)
    side.core.receive(side.now, "s", tokens=8, deadline=500.0)
    side.hear(wire.Offer(1, 1, "s", 8, 400.0))
    side.hear(wire.Ready(1, 1, 0, 0, 0, 2, 0, 7))
    side.after(1.0)
    assert side.core._destination._reading == 0
    side.core.link_lost(side.now, 1, PeerLost("gone"))
    assert side.core._destination._reading == 0
    assert not [command for command in side.commands if isinstance(command, Drop)]
