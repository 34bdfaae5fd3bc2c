"""The registry: this worker's lease, and the table of all workers as the lease table tells it.

A worker's entry lives as long as its lease is renewed; the broker is not believed against living workers: what
vanished with a broker is *suspect* and probed before it counts as gone, and while the broker is down the last table
stays. It must never do more than a worker's own incarnation may: another one on our name ends the registration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from kvstream.discovery.broker import Broker, Conflict, LeaseEvent, NobodyServes, Service, Synced
from kvstream.discovery.records import (
    Load,
    State,
    WorkerRecord,
    decode_record,
    encode_record,
    lease_key,
    parse_worker,
    worker_subject,
)
from kvstream.errors import BrokerUnavailable, ConfigError, Fenced, KVStreamError, PeerLost, UnknownWorker
from kvstream.log import get_logger

if TYPE_CHECKING:
    from random import Random

__all__ = ["Change", "Changed", "Changes", "Joined", "Left", "Registry", "Suspect"]

_log = get_logger("discovery")

LeftReason = Literal["unregistered", "lost", "missing"]
"""`unregistered` by itself; `lost`: its lease ran out and it does not answer; `missing`: gone from a broker that came
back, and it does not answer or did not return in time."""

UPDATE_SECONDS = 0.1
"""Updates are published at most this often; the last one always is."""
LOADS_PER_SECOND = 500
"""Loads that a watcher should have to take from all workers together: the more there are, the rarer each one's."""
SLIGHT_CHANGE = 1 / 16
"""A load that has changed by less than this share waits for a renewal."""
PROBE_SECONDS = 0.25
"""How long a worker has to answer whether it lives."""
PROBE_SPREAD = 0.1
"""Watchers wait up to this long before they probe: a living worker whose lease ran out while the broker was frozen
puts it back at once, and a fleet must not probe a fleet."""
PROBES_AT_A_TIME = 16
GIVE_UP_SECONDS = 1.0
"""How long leaving waits for the broker to take our lease back: it runs out by itself too."""
SUSPECT_LEASES = 3
"""A worker that answers but does not return to the table is given up after so many leases."""


class Joined(msgspec.Struct, frozen=True):
    """A worker is there. Also told once per known worker when a watch begins."""

    record: WorkerRecord


class Changed(msgspec.Struct, frozen=True):
    """A worker's record changed (a restart too: then the incarnations differ), or it is no longer suspect."""

    record: WorkerRecord
    old: WorkerRecord


class Suspect(msgspec.Struct, frozen=True):
    """A worker's lease is gone and it is not known yet whether it lives. Followed by Changed or Left."""

    record: WorkerRecord


class Left(msgspec.Struct, frozen=True):
    """A worker is gone."""

    record: WorkerRecord
    reason: LeftReason


Change = Joined | Changed | Suspect | Left


class _Entry(msgspec.Struct):
    """A worker in the table, and the task that finds out about it while it is suspect."""

    record: WorkerRecord
    trial: asyncio.Task[None] | None = None

    @property
    def suspect(self) -> bool:
        return self.trial is not None


class _Told(msgspec.Struct, frozen=True):
    record: WorkerRecord
    suspect: bool


class Changes:
    """A watch on the registry: an async context manager and iterator of Joined, Changed, Suspect, Left.

    Not a queue: it tells the difference between the table and what it told before. A slow reader sees fewer changes,
    never a wrong or a lost one, and costs one entry per worker.
    """

    def __init__(self, registry: Registry, table: dict[str, _Entry], *, loads: bool) -> None:
        self.loads = loads
        """Whether it tells of changes that are of a load alone."""
        self._registry = registry
        self._table = table
        self._told: dict[str, _Told] = {}
        self._due: dict[str, LeftReason] = {}
        self._wake = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> Self:
        self._registry.attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registry.detach(self)
        self.close()

    def mark(self, worker: str, reason: LeftReason = "lost") -> None:
        """This worker's entry changed; for Registry."""
        if worker not in self._table and worker not in self._told:
            self._due.pop(worker, None)
            return
        self._due[worker] = reason
        self._wake.set()

    def close(self) -> None:
        """End the iteration after what is still to be told; for Registry."""
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[Change]:
        return self

    async def __anext__(self) -> Change:
        # No await between taking a change and returning it: a cancelled wait loses nothing.
        while True:
            while self._due:
                worker = next(iter(self._due))
                change = self._difference(worker, self._due.pop(worker))
                if change is not None:
                    return change
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    def _difference(self, worker: str, reason: LeftReason) -> Change | None:
        entry, told = self._table.get(worker), self._told.get(worker)
        if entry is None:
            if told is None:
                return None
            del self._told[worker]
            return Left(told.record, reason)
        self._told[worker] = _Told(entry.record, entry.suspect)
        if told is None:
            if entry.suspect:
                # First that it exists, then that it is in doubt.
                self._told[worker] = _Told(entry.record, suspect=False)
                self._due[worker] = reason
            return Joined(entry.record)
        if entry.record != told.record:
            if entry.suspect:
                self._told[worker] = _Told(entry.record, suspect=False)
                self._due[worker] = reason
            return Changed(entry.record, told.record)
        if entry.suspect and not told.suspect:
            return Suspect(entry.record)
        if told.suspect and not entry.suspect:
            return Changed(entry.record, told.record)
        return None


class _Registration:
    """Our own lease. `version` counts what should be published, `published` what has been."""

    def __init__(
        self, record: WorkerRecord, on_fenced: Callable[[Fenced], None] | None, load: Callable[[], Load] | None
    ) -> None:
        self.record = record
        self.read_load = load
        self.key = lease_key(record.name, record.rank)
        self.on_fenced = on_fenced
        self.revision = 0
        self.expires = 0.0
        self.version = 0
        self.published = 0
        self.load = record.load
        """As it was sent last."""
        self.paced = 0.0
        """Until then what is published has the load that was sent last."""
        self.pacer: asyncio.TimerHandle | None = None
        self.urgent = asyncio.Event()
        self.waiters: dict[asyncio.Future[None], int] = {}
        self.ended: Fenced | None = None
        self.task: asyncio.Task[None] | None = None
        self.service: Service | None = None


class Registry:
    """Workers as the broker's lease table tells them, and this worker's place among them.

    `ttl` (seconds) is the lease of our own registration and the time for which a worker missing after a broker's
    restart stays suspect; use one value in a cluster. `rng` spreads what many workers would do at once. The broker is
    not closed by the registry. An async context manager: `start` on entry, `aclose` on exit.
    """

    def __init__(
        self, broker: Broker, *, rng: Random, ttl: float = 3.0, clock: Callable[[], float] | None = None
    ) -> None:
        if not isinstance(ttl, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] - callers need not be typed
            raise ConfigError("ttl", f"must be seconds, not {type(ttl).__name__}")
        if not 0.3 <= ttl <= 3600:
            raise ConfigError("ttl", f"{ttl} s; must be between 0.3 s and an hour")
        self._broker = broker
        self._rng = rng
        self._ttl = ttl
        self._pause = min(UPDATE_SECONDS, ttl / 10)
        self._clock = clock
        self._table: dict[str, _Entry] = {}
        self._watchers: dict[Changes, None] = {}
        self._probes = asyncio.Semaphore(PROBES_AT_A_TIME)
        self._synced = asyncio.Event()
        self._grew = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._own: _Registration | None = None
        self._rejoin: asyncio.TimerHandle | None = None
        self._end_listening = broker.on_connection(self._on_connection)
        self._trials: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.garbage = 0
        """Values on worker keys that were no records; ignored."""

    # -- life

    async def start(self, timeout: float = 5.0) -> None:
        """Begin to follow the lease table and wait for its first snapshot. Raises BrokerUnavailable."""
        if self._follower is not None or self._closed:
            raise ConfigError("registry", "a registry is started once")
        self._follower = asyncio.get_running_loop().create_task(self._follow())
        try:
            async with asyncio.timeout(timeout):
                waiter = asyncio.ensure_future(self._synced.wait())
                try:
                    await asyncio.wait({waiter, self._follower}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiter.cancel()
            if self._follower.done():
                # It ends by itself only with an error, or because the broker was closed.
                self._follower.result()
                raise BrokerUnavailable("the broker has been closed")
        except TimeoutError:
            await self.aclose()
            raise BrokerUnavailable(f"no snapshot of the registry within {timeout:g} s") from None
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Unregister if registered and the broker can be reached, and stop. Watches end. Idempotent."""
        self._closed = True
        self._end_listening()
        if self._rejoin is not None:
            self._rejoin.cancel()
        try:
            with suppress(KVStreamError):
                await self.unregister()
        finally:
            tasks = [*self._trials]
            if self._follower is not None:
                tasks.append(self._follower)
            for task in tasks:
                task.cancel()
            for watcher in list(self._watchers):
                watcher.close()
            if tasks:
                await asyncio.wait(tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def connected(self) -> bool:
        """The broker's `connected`. While it is False, `workers` is what was known last, and newcomers are not seen."""
        return self._broker.connected

    # -- who is there

    def workers(self) -> list[WorkerRecord]:
        """All workers known now, suspect ones too, by name and rank."""
        return sorted((entry.record for entry in self._table.values()), key=lambda record: (record.name, record.rank))

    def records(self) -> list[WorkerRecord]:
        """The same as `workers`, in the order in which they joined, and cheaper."""
        return [entry.record for entry in self._table.values()]

    def is_suspect(self, worker: str) -> bool:
        """Whether a worker's (`name/rank`) lease is gone and it is not known yet whether it lives."""
        entry = self._table.get(worker)
        return entry is not None and entry.suspect

    def lookup(self, worker: str) -> WorkerRecord | None:
        """The worker `name/rank`, or of `name` the lowest rank there is. None where there is none."""
        entry = self._table.get(worker)
        if entry is not None:
            return entry.record
        name, rank = parse_worker(worker)
        if rank is not None:
            entry = self._table.get(f"{name}/{rank}")
            return entry.record if entry is not None else None
        ranks = [entry.record for entry in self._table.values() if entry.record.name == name]
        return min(ranks, key=lambda record: record.rank, default=None)

    async def wait_for(self, worker: str, timeout: float) -> WorkerRecord:
        """`lookup`, waiting up to `timeout` seconds for it to join. Raises UnknownWorker that names who is known."""
        try:
            async with asyncio.timeout(timeout):
                while (record := self.lookup(worker)) is None:
                    self._grew.clear()
                    await self._grew.wait()
                return record
        except TimeoutError:
            known = ", ".join(record.id for record in self.workers()[:20]) or "nobody"
            cut_off = "" if self.connected else "; NATS can't be reached right now, so newcomers are not seen"
            raise UnknownWorker(
                "to", f"{worker!r} is not registered (waited {timeout:g} s); known: {known}{cut_off}"
            ) from None

    def watch(self, *, loads: bool = True) -> Changes:
        """Follow the workers: `async with registry.watch() as changes: async for change in changes`. Nearly all changes
        are of a load alone; without `loads` these are not told."""
        return Changes(self, self._table, loads=loads)

    def attach(self, watcher: Changes) -> None:
        """For Changes."""
        self._watchers[watcher] = None
        for worker in self._table:
            watcher.mark(worker)
        if self._closed:
            watcher.close()

    def detach(self, watcher: Changes) -> None:
        """For Changes."""
        self._watchers.pop(watcher, None)

    # -- our own place

    async def register(
        self,
        record: WorkerRecord,
        *,
        on_fenced: Callable[[Fenced], None] | None = None,
        load: Callable[[], Load] | None = None,
    ) -> None:
        """Take the name and keep it until `unregister`; broker outages are ridden out.

        A name whose holder is dead is taken over at once, one whose holder does not answer when its lease ends
        (within a lease). Raises Fenced, naming the holder, when a living worker has the name. `on_fenced` is called
        once if another incarnation takes it later; the registration has ended then. `load` is asked whenever the record
        is published; `load_changed` says that it should be.
        """
        if self._own is not None or self._closed:
            raise ConfigError("registry", "this registry holds a registration already, or has been closed")
        own = self._own = _Registration(record, on_fenced, load)
        try:
            encode_record(record)
            subject = worker_subject(record.name, record.rank, f"ping.{record.incarnation}")

            async def pong(_subject: str, _data: bytes) -> bytes:
                return record.incarnation.encode()

            # First the ping, so that nobody can find the entry and take its worker for dead.
            own.service = await self._broker.serve(subject, pong)
            await self._take_name(own)
            if self._own is not own:
                await self._give_up(own)
                raise ConfigError("registry", "closed while registering")
            own.task = asyncio.get_running_loop().create_task(self._keep(own))
        except BaseException:
            if self._own is own:
                self._own = None
            if own.service is not None:
                await own.service.aclose()
            raise

    async def update(self, *, load: Load | None = None, state: State | None = None) -> None:
        """Publish a new load or state; returns when the table has it, or a newer one.

        Updates that come close together are published as one. Raises Fenced when the registration has ended,
        BrokerUnavailable after a lease's time without success; the value is published later all the same.
        """
        own = self._registered()
        record = own.record
        record = msgspec.structs.replace(record, load=load or record.load, state=state or record.state)
        if record == own.record and own.published == own.version:
            return
        own.record = record
        own.version += 1
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own.waiters[waiter] = own.version
        own.urgent.set()
        try:
            async with asyncio.timeout(self._ttl):
                await waiter
        except TimeoutError:
            raise BrokerUnavailable(f"{record.id}: the registry was not updated within {self._ttl:g} s") from None
        finally:
            own.waiters.pop(waiter, None)
            waiter.cancel()
        if own.ended is not None:
            raise own.ended

    def load_changed(self) -> None:
        """Have the load published when its turn comes: the more workers there are, the rarer is each one's turn, and
        what has hardly changed goes with a renewal. Does nothing without a registration that reads its load."""
        own = self._own
        if own is not None and own.ended is None and own.task is not None and own.read_load is not None:
            self._pace(own, own.read_load())

    async def unregister(self) -> None:
        """Give the name back. Others see us leave at once; without a broker, or with one that does not answer within a
        second, when our lease ends. Idempotent."""
        own, self._own = self._own, None
        if own is None:
            return
        if own.pacer is not None:
            own.pacer.cancel()
        try:
            if own.task is not None:
                own.task.cancel()
                await asyncio.wait({own.task})
            if own.ended is None:
                with suppress(BrokerUnavailable, TimeoutError):
                    async with asyncio.timeout(GIVE_UP_SECONDS):
                        await self._give_up(own)
        finally:
            self._release_waiters(own)
            if own.service is not None:
                await own.service.aclose()

    @property
    def registered(self) -> bool:
        """Whether we hold a name, as far as we know."""
        return self._own is not None and self._own.ended is None and self._own.task is not None

    def _registered(self) -> _Registration:
        if self._own is None:
            raise ConfigError("registry", "nothing is registered")
        if self._own.ended is not None:
            raise self._own.ended
        return self._own

    def _now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    async def _take_name(self, own: _Registration) -> None:
        # A holder that neither answers nor renews is gone when its lease is; one more second for a broker that rounds.
        deadline = self._now() + self._ttl + 1.5
        while True:
            try:
                await self._publish(own)
            except Conflict as conflict:
                holder = decode_record(own.key, conflict.value) if conflict.value is not None else None
                if holder is None or holder.incarnation == own.record.incarnation:
                    own.revision = conflict.revision
                    continue
                answer = await self._ask(holder)
                if answer == "dead":
                    own.revision = conflict.revision
                    _log.info("taking over the name of a dead worker", worker=holder.id, dead=holder.incarnation)
                    continue
                if answer == "alive" or self._now() >= deadline:
                    raise _fenced(own.record, holder) from None
                await asyncio.sleep(self._rng.uniform(0.5, 1.0) * PROBE_SECONDS)
            else:
                return

    async def _publish(self, own: _Registration) -> None:
        """One compare-and-set of the current record; raises Conflict, BrokerUnavailable."""
        sent = self._now()
        if own.read_load is not None and sent >= own.paced:
            load = own.read_load()
            if load != own.load:
                own.record = msgspec.structs.replace(own.record, load=load)
                own.load, own.paced = load, sent + self._load_period()
        version, record = own.version, own.record
        own.revision = await self._broker.put(own.key, encode_record(record), ttl=self._ttl, revision=own.revision)
        # From when it was sent: the lease may have begun any time since.
        own.expires = sent + self._ttl
        own.published = version
        for waiter, wanted in list(own.waiters.items()):
            if wanted <= version and not waiter.done():
                waiter.set_result(None)

    async def _keep(self, own: _Registration) -> None:
        """Renew until cancelled or fenced."""
        failures = conflicts = 0
        while True:
            if failures or not own.urgent.is_set():
                await self._sleep_until_due(own, failures)
            own.urgent.clear()
            try:
                await self._publish(own)
            except Conflict as conflict:
                holder = decode_record(own.key, conflict.value) if conflict.value is not None else None
                if holder is not None and holder.incarnation != own.record.incarnation:
                    self._fence(own, holder)
                    return
                # Our own (an answer was lost), nothing (it expired, or the broker forgot), or garbage: go on from it.
                own.revision = conflict.revision
                conflicts += 1
                failures = max(0, conflicts - 3)  # somebody keeps writing there: no race with him
                own.urgent.set()
            except KVStreamError as error:
                failures += 1
                _log.info("lease not renewed", worker=own.record.id, error=str(error), failures=failures)
            else:
                failures = conflicts = 0
                # Updates within this pause become one.
                await asyncio.sleep(self._pause)

    def _load_period(self) -> float:
        """Seconds from one load of ours to the next, so that all workers' together come to LOADS_PER_SECOND."""
        return max(self._pause, len(self._table) / LOADS_PER_SECOND)

    def _pace(self, own: _Registration, load: Load) -> None:
        """Publish a load as soon as that may be, if it is worth it."""
        if own.pacer is not None or not _differs(load, own.load):
            return
        wait = own.paced - self._now()
        # The pause after each publication is pace enough for few workers.

        def due() -> None:
            own.pacer = None
            own.paced = 0.0
            own.urgent.set()

        if wait <= 0 or self._load_period() <= self._pause:
            due()
            return
        own.pacer = asyncio.get_running_loop().call_later(wait, due)

    async def _sleep_until_due(self, own: _Registration, failures: int) -> None:
        """Until the next renewal: a third of a lease after the last one was *sent*, i.e. relative to its end.

        After failures earlier and with jitter: a broker that came back gets its fleet within a tenth of a lease.
        """
        now = self._now()
        due = own.expires - self._ttl * 2 / 3
        if failures:
            due = now + self._rng.uniform(0.5, 1.0) * min(self._ttl / 10 * failures, self._ttl / 3)
            own.urgent.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - now)):
                await own.urgent.wait()

    def _fence(self, own: _Registration, holder: WorkerRecord) -> None:
        own.ended = _fenced(own.record, holder)
        _log.error("fenced", worker=own.record.id, by=holder.incarnation, host=holder.host, pid=holder.pid)
        self._release_waiters(own)
        if own.on_fenced is not None:
            # Not from within this task: what the callback raises is the loop's to report.
            asyncio.get_running_loop().call_soon(own.on_fenced, own.ended)

    def _release_waiters(self, own: _Registration) -> None:
        for waiter in list(own.waiters):
            if not waiter.done():
                waiter.set_result(None)

    async def _give_up(self, own: _Registration) -> None:
        for _ in range(2):
            try:
                await self._broker.delete(own.key, revision=own.revision)
            except Conflict as conflict:
                holder = decode_record(own.key, conflict.value) if conflict.value is not None else None
                if holder is None or holder.incarnation != own.record.incarnation:
                    return
                own.revision = conflict.revision
            else:
                return

    # -- following the table

    async def _follow(self) -> None:
        async with self._broker.watch() as events:
            async for event in events:
                if isinstance(event, Synced):
                    self._synced.set()
                else:
                    self._on_event(event)

    def _on_connection(self, connected: bool) -> None:
        own = self._own
        if not connected or own is None or own.task is None:
            return
        # A broker that lost its memory counts from 1 again, and somebody else's lease could stand at our number.
        # Revision 0 can't be mistaken: the next try is told what stands there.
        own.revision = 0
        self._rejoin_soon(own)

    def _rejoin_soon(self, own: _Registration) -> None:
        """Renew, but not at the same moment as the whole fleet, which has found out the same."""
        if self._rejoin is not None:
            self._rejoin.cancel()
        self._rejoin = asyncio.get_running_loop().call_later(self._rng.uniform(0.0, self._ttl / 20), own.urgent.set)

    def _on_event(self, event: LeaseEvent) -> None:
        words = event.key.split(".")
        if len(words) != 3 or words[0] != "w":
            return
        worker = f"{words[1]}/{words[2]}"
        record = decode_record(event.key, event.value) if event.value is not None else None
        own = self._own
        if (
            own is not None
            and event.key == own.key
            and (record is None or record.incarnation != own.record.incarnation)
        ):
            # Gone, or somebody else's: the next compare-and-set tells, so have it now. What a broker forgot, or let run
            # out while it was away, it has of everybody.
            if event.reason in ("expired", "missing") and self._now() < self._broker.steady_since + self._ttl:
                self._rejoin_soon(own)
            else:
                own.urgent.set()
        if record is not None:
            self._put(worker, record)
            return
        if event.value is not None:
            self.garbage += 1
            if self.garbage & (self.garbage - 1) == 0:  # not once for each: it may be a flood
                _log.warning("a value in the lease table is no worker record", key=event.key, so_far=self.garbage)
        entry = self._table.get(worker)
        if entry is None:
            return
        if event.reason == "deleted":
            self._remove(worker, "unregistered")
        elif entry.trial is None:
            # Garbage on a worker's key is as good as no lease: if the worker lives, it puts its own back.
            trial = self._try(worker, entry.record, at_once=event.reason == "expired")
            entry.trial = asyncio.get_running_loop().create_task(trial)
            self._trials[entry.trial] = None
            entry.trial.add_done_callback(lambda task: self._trials.pop(task, None))
            self._mark(worker)

    def _put(self, worker: str, record: WorkerRecord) -> None:
        entry = self._table.get(worker)
        load_alone = False
        if entry is None:
            self._table[worker] = _Entry(record)
        else:
            load_alone = entry.trial is None and _same_but_load(record, entry.record)
            if entry.trial is not None:
                entry.trial.cancel()
                entry.trial = None
            entry.record = record
        if load_alone:
            for watcher in self._watchers:
                if watcher.loads:
                    watcher.mark(worker)
            return
        self._grew.set()
        self._mark(worker)

    def _remove(self, worker: str, reason: LeftReason) -> None:
        entry = self._table.pop(worker)
        if entry.trial is not None and entry.trial is not asyncio.current_task():
            entry.trial.cancel()
        self._mark(worker, reason)

    def _mark(self, worker: str, reason: LeftReason = "lost") -> None:
        for watcher in self._watchers:
            watcher.mark(worker, reason)

    async def _try(self, worker: str, record: WorkerRecord, *, at_once: bool) -> None:
        """Find out about a worker whose lease is gone; ends by removing it, or is cancelled when its lease is back.

        `at_once`: the lease ran out, so it is late already. Otherwise a broker forgot it, and it has one lease's time;
        and so it has if the broker itself was away just now, since then the lease may have run out for that reason, and
        the worker may not have found its way back.
        """
        reason: LeftReason = "lost" if at_once else "missing"
        wait = self._rng.uniform(0.2, 1.0) * min(PROBE_SPREAD, self._ttl / 10) if at_once else self._ttl
        chances = SUSPECT_LEASES
        while chances:
            await asyncio.sleep(wait)
            wait = self._ttl
            answer = await self._ask(record)
            if answer == "unknown":
                # No broker, no judgement. When it is back the watch compares afresh, and then there is a lease's time.
                await self._broker.wait_connected()
                continue
            if answer == "alive":
                chances -= 1
                continue
            wait = self._broker.steady_since + self._ttl - self._now()
            if wait <= 0:
                break
        self._remove(worker, reason)

    async def _ask(self, record: WorkerRecord) -> Literal["alive", "dead", "silent", "unknown"]:
        """Ask a worker's incarnation whether it lives. `dead`: nobody serves it; `silent`: no answer."""
        subject = worker_subject(record.name, record.rank, f"ping.{record.incarnation}")
        async with self._probes:
            try:
                answer = await self._broker.request(subject, b"", timeout=PROBE_SECONDS)
            except NobodyServes:
                return "dead"
            except PeerLost:
                return "silent"
            except KVStreamError:
                return "unknown"
        return "alive" if answer == record.incarnation.encode() else "silent"


def _same_but_load(record: WorkerRecord, old: WorkerRecord) -> bool:
    """Whether at most the load differs; load and state are all that changes in the life of a worker."""
    return record.incarnation == old.incarnation and record.state == old.state


def _differs(load: Load, published: Load) -> bool:
    """Whether a change of load is worth telling: the first and the last stream, the last free block, or a good part."""
    if not (load.streams and published.streams and load.free_blocks and published.free_blocks):
        return load != published
    return (
        abs(load.streams - published.streams) > SLIGHT_CHANGE * published.streams
        or abs(load.free_blocks - published.free_blocks) > SLIGHT_CHANGE * published.free_blocks
        or load.blocks != published.blocks
    )


def _fenced(ours: WorkerRecord, holder: WorkerRecord) -> Fenced:
    return Fenced(
        f"{ours.id} is held by another living worker: host {holder.host}, pid {holder.pid}, incarnation "
        f"{holder.incarnation}; stop that one, or use another name"
    )
