"""What happened in a run, and what must not have: the event log with its hash, the ends of every stream, violations.

Owns the invariants between the two sides of a stream. It observes only; nothing that it does may change the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstream.errors import KVStreamError, Recalled
from kvstream.runtime.reports import StreamEpoch
from kvstream.sim.plan import Fault

__all__ = ["Ledger", "Side"]

_SLACK = 0.05
"""Seconds that an end may come after what bounds it."""
_PROMPT = 0.25
"""Seconds within which one side hears of the other's end, where nothing is wrong: a round trip and a read under way."""
_KILL_SHOWS = 0.1
"""Seconds within which the death of a process shows at a peer to which nothing has happened."""
_MAX_VIOLATIONS = 50


@dataclass(slots=True)
class Side:
    """One end of a stream as its user sees it.

    `code` is None while it lives, "done", or an error's code; "absent" where it never was a stream (its worker was not
    there, or refused at once), "dead" where its process was killed before it ended.
    """

    stream: str
    worker: str
    process: str
    opened: float
    bound: float
    """When it has to have ended by its own deadline."""
    code: str | None = None
    text: str = ""
    ended: float = 0.0
    peer: str = ""
    epoch: int = 0
    in_doubt: tuple[str, ...] = ()
    provisional: bool = False
    verified: set[int] = field(default_factory=set[int])
    """Layers whose bytes were right when the stream said that they had arrived."""
    payload: object = None
    meddled: bool = False
    """Its user ends it early, or tries to."""
    left: tuple[StreamEpoch, ...] = ()
    """Source: destinations that lost the stream."""

    def end(self, now: float, code: str, error: KVStreamError | None = None) -> None:
        self.code = code
        self.ended = now
        if error is not None:
            self.text = str(error)
            self.in_doubt = error.in_doubt

    @property
    def done(self) -> bool:
        return self.code == "done"


class Ledger:
    """`now` is the virtual clock. `listeners` hear each note (time, kind, fields), for a timeline. `touched(a, b, t)`
    names the faults up to time t that may have had to do with workers a and b."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        layers: int,
        touched: Callable[[str, str, float], list[Fault]],
        resume_timeout: float = 0.0,
    ) -> None:
        self._resume_timeout = resume_timeout
        self._now = now
        self._layers = layers
        self._touched = touched
        self._hash = hashlib.blake2b(digest_size=16)
        self.violations: list[str] = []
        self.sources: dict[str, Side] = {}
        self.destinations: dict[str, list[Side]] = {}
        self.disturbed: dict[str, list[tuple[float, float]]] = {}
        """When each process was stopped or slowed, (from, to)."""
        self._refusals: list[tuple[str, str, float]] = []
        self.listeners: list[Callable[[float, str, tuple[object, ...]], None]] = []

    # -- the log

    def note(self, kind: str, *fields: object) -> None:
        """Put an event into the log. Its fields must print the same in every process."""
        now = self._now()
        self._hash.update(f"{now:.9f} {kind} {fields}\n".encode())
        for listener in self.listeners:
            listener(now, kind, fields)

    @property
    def log_hash(self) -> str:
        return self._hash.hexdigest()

    def violation(self, text: str) -> None:
        """Something that must never happen."""
        if len(self.violations) < _MAX_VIOLATIONS:
            self.violations.append(f"{self._now():.6f} {text}")
            self.note("violation", text)

    # -- the sides

    def source(self, stream: str, worker: str, process: str, bound: float) -> Side:
        side = self.sources[stream] = Side(stream, worker, process, self._now(), bound)
        return side

    def destination(self, stream: str, worker: str, process: str, bound: float) -> Side:
        side = Side(stream, worker, process, self._now(), bound)
        self.destinations.setdefault(stream, []).append(side)
        return side

    @property
    def sides(self) -> list[Side]:
        return [*self.sources.values(), *(side for sides in self.destinations.values() for side in sides)]

    def close_side(self, side: Side, code: str, error: KVStreamError | None = None, *, at: float | None = None) -> None:
        """A side has ended (now, or `at`), and its user knows."""
        if side.code is not None:
            self.violation(f"{_name(side)} ended as {side.code}, and again as {code}")
            return
        side.end(self._now() if at is None else at, code, error)
        self.note("end", side.stream, side.process, code, side.peer, side.epoch, side.in_doubt, side.provisional)
        if code in ("protocol", "layout"):
            self.violation(f"{_name(side)} ended as {code} although nobody broke the protocol: {side.text}")
        if code == "corrupted" and not isinstance(error, Recalled):
            self.violation(f"{_name(side)} ended as corrupted although nothing was: {side.text}")
        if code == "failed":
            self.violation(f"{_name(side)} ended without a typed reason: {side.text}")

    def process_killed(self, process: str) -> None:
        """Its sides that have not ended never will."""
        for side in self.sides:
            if side.process == process and side.code is None:
                side.end(self._now(), "dead")

    # -- judgement, when all is over

    def judge(self) -> None:
        """Hold the sides of each stream against each other."""
        for side in self.sides:
            if side.code is None:
                self.violation(f"{_name(side)} is still live at the end")
            elif side.code not in ("dead", "absent"):
                self._judge_bound(side)
        for stream, sides in self.destinations.items():
            source = self.sources.get(stream)
            self._judge_destinations(source, sides)
        for source in self.sources.values():
            sides = self.destinations.get(source.stream, [])
            self._judge_source(source, sides)
            for side in sides:
                self._judge_pair(source, side)
        self._judge_refusals()

    def _judge_bound(self, side: Side) -> None:
        late = side.ended - side.bound
        excess = sum(
            max(0.0, min(stop, side.ended) - max(start, side.opened))
            for start, stop in self.disturbed.get(side.process, ())
        )
        if late > excess + _SLACK:
            self.violation(f"{_name(side)} ended {late:.3f} s after its bound ({side.code}: {side.text})")

    def _judge_destinations(self, source: Side | None, sides: list[Side]) -> None:
        done = [side for side in sides if side.done]
        if len({side.epoch for side in done}) < len(done):
            self.violation(f"stream {done[0].stream} is done at {[side.process for side in done]}: two decoders")
        if source is not None and source.code not in (None, "dead", "absent"):
            # Only the newest epoch counts; of an older one the source has to say that it may be done as well.
            for side in done:
                if side.epoch > source.epoch:
                    self.violation(f"{_name(side)} is done in epoch {side.epoch}, which its source does not know")
                elif side.epoch < source.epoch and f"{side.worker}/0" not in source.in_doubt:
                    self.violation(f"{_name(side)} is done in epoch {side.epoch}, without doubt at its source {source}")
            done = [side for side in done if side.epoch == source.epoch]
        for side in done:
            if len(side.verified) != self._layers:
                self.violation(f"{_name(side)} is done with layers {sorted(side.verified)} verified")
            if source is None:
                self.violation(f"{_name(side)} is done without a source")
            elif source.done:
                if (side.worker, side.epoch) != (source.peer.partition("/")[0], source.epoch):
                    self.violation(f"{_name(side)} is done in epoch {side.epoch}; its source says {source}")
                if side.payload != source.payload:
                    self.violation(f"{_name(side)} has payload {side.payload}, sent was {source.payload}")
            elif not side.provisional and source.code != "dead":
                self.violation(f"{_name(side)} is done for good, but at its source it is {source.code}: {source.text}")
            elif source.code != "dead" and f"{side.worker}/0" not in source.in_doubt:
                self.violation(
                    f"{_name(side)} is done, and at its source {source.code} without doubt: {source.text} {source}"
                )

    def _judge_source(self, source: Side, sides: list[Side]) -> None:
        if not source.done:
            return
        peers = [side for side in sides if f"{side.worker}/0" == source.peer and side.epoch in (0, source.epoch)]
        # One whose process died may have been done; its bytes were seen as they came in.
        if not any(side.done or side.code == "dead" for side in peers):
            ends = [(side.process, side.code, side.epoch, side.text) for side in sides]
            self.violation(f"{_name(source)} is done at {source.peer}, where it is not: {ends}")

    def _judge_pair(self, source: Side, side: Side) -> None:
        """Between two workers that nothing has happened to, each hears of the other's end, and nobody is lost."""
        mine = side.peer == f"{source.worker}/0" and source.peer == f"{side.worker}/0" and side.epoch == source.epoch
        faults = self._touched(source.worker, side.worker, max(source.ended, side.ended))
        if source.code == "dead" and side.peer == f"{source.worker}/0":
            kills = [fault for fault in faults if fault.kind == "kill" and fault.who == (source.worker,)]
            if len(kills) == len(faults) and side.ended > source.ended + _KILL_SHOWS + self._resume_timeout:
                self.violation(
                    f"{_name(side)} took {side.ended - source.ended:.3f} s to see that its source was killed"
                )
        if faults or "dead" in (source.code, side.code):
            return
        if source.left:
            # It may have looked for another destination, and not found one.
            return
        if "corrupted" in (source.code, side.code):
            self.violation(f"stream {side.stream}: chunks were taken back, and nothing had happened: {side.text}")
        if side.code == "peer_lost":
            self.violation(f"{_name(side)} lost its source, to which nothing had happened: {side.text}")
        if source.code == "peer_lost" and mine:
            self.violation(f"{_name(source)} lost {source.peer}, to which nothing had happened: {source.text}")
        if source.done and side.done and side.provisional and not side.meddled:
            self.violation(f"{_name(side)} is done provisionally; its source is done, and nothing had happened to it")
        if mine and abs(source.ended - side.ended) > _PROMPT:
            self.violation(
                f"stream {side.stream}: {source.process} ended at {source.ended:.3f} as {source.code}, "
                f"{side.process} at {side.ended:.3f} as {side.code}: too far apart"
            )

    def refusal(self, stream: str, worker: str) -> None:
        """The user of a stream's only destination has refused it."""
        self._refusals.append((stream, worker, self._now()))

    def _judge_refusals(self) -> None:
        for stream, worker, when in self._refusals:
            source = self.sources.get(stream)
            if source is None or source.code == "dead":
                continue
            # What ails the broker alone delays no answer to an offer.
            if any(fault.who for fault in self._touched(source.worker, worker, source.ended)):
                continue
            if source.ended > when + _PROMPT:
                self.violation(f"{_name(source)} heard {source.ended - when:.3f} s late that {worker} had refused it")


def _name(side: Side) -> str:
    return f"stream {side.stream} on {side.process}"
