"""A simulated cluster: workers that run the production Runtime, each life in a process of its own, and their users.

Owns how workers start, leave and die, and what their users do with streams: compute, send, receive, answer offers,
cancel, check every byte. It decides nothing that a Runtime would, and reaches it by its public calls alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstream.errors import BrokerUnavailable, ConfigError, Fenced, KVStreamError, Refused
from kvstream.runtime.routing import LeastLoaded
from kvstream.runtime.runtime import Runtime
from kvstream.runtime.seams import Seams
from kvstream.runtime.sessions import Offer, ReceiveStream, SendStream
from kvstream.sim.broker import SimBroker, SimBrokerServer
from kvstream.sim.inspect import end_time
from kvstream.sim.ledger import Ledger, Side
from kvstream.sim.loop import Process, World
from kvstream.sim.memory import WatchedPool, content
from kvstream.sim.network import Conditions, Network, Node
from kvstream.sim.plan import Fault, Receiver, Scenario, StreamPlan, WorkerPlan
from kvstream.sim.rng import derive
from kvstream.sim.transport import SimTransport, Switchboard
from kvstream.transport.base import Lent, StagingBudget

__all__ = ["Cluster", "Life"]

_EPOCH = 1_700_000_000.0
"""The wall clock at virtual time 0, Unix seconds."""
_START_AGAIN = 0.4
"""A worker that could not start tries again after so many seconds."""


class _EngineFailed(Exception):
    """What an engine raises in the middle of a stream, in a scenario."""


@dataclass(slots=True)
class _Content:
    """The bytes of a stream's prompt, shape (layers, blocks, *block_shape)."""

    expected: npt.NDArray[np.uint8]

    def fill(self, pool: WatchedPool, layer: int, ids: list[int], start: int, stop: int) -> None:
        """What computing tokens [start, stop) of a layer does; the last ones bring the rest of their block along."""
        tokens = pool.layout.block_tokens
        view = pool.layer(layer)
        whole = stop > (len(self.expected[layer]) - 1) * tokens
        for block in range(start // tokens, -(-stop // tokens)):
            first = max(0, start - block * tokens)
            last = tokens if whole and block == len(self.expected[layer]) - 1 else min(tokens, stop - block * tokens)
            view[ids[block], :, first:last] = self.expected[layer, block, :, first:last]

    def prefix(self, pool: WatchedPool, ids: list[int], blocks: int) -> None:
        """A prefix of so many blocks is there already."""
        for layer in range(pool.layout.layers):
            pool.layer(layer)[ids[:blocks]] = self.expected[layer, :blocks]

    def matches(self, pool: WatchedPool, layer: int, ids: list[int]) -> bool:
        return bool((pool.layer(layer)[ids] == self.expected[layer]).all())


class Life:
    """One life of a worker: a process, its runtime once that is up, its memory, and the tasks of its users."""

    def __init__(self, cluster: Cluster, plan: WorkerPlan, number: int) -> None:
        self.cluster = cluster
        self.plan = plan
        self.name = f"{plan.name}#{number}"
        self.process: Process = cluster.world.process(self.name)
        self.process.set_exception_handler(self._on_exception)
        self.node: Node = cluster.network.node(self.process, plan.host, plan.name)
        self.rng = derive(cluster.scenario.seed, "life", self.name)
        self.pool = WatchedPool.watched(
            cluster.scenario.layout,
            blocks=plan.blocks,
            report=lambda text: cluster.ledger.violation(f"{self.name}: {text}"),
        )
        self.budget = StagingBudget(plan.staging_limit)
        self.transport: SimTransport | None = None
        self.runtime: Runtime | None = None
        """Set while it is up."""
        self.last_runtime: Runtime | None = None
        self.leaving = asyncio.Event()
        self.over = False
        self.tasks: dict[asyncio.Task[None], None] = {}

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.cluster.buried:
            error = context.get("exception")
            self.cluster.ledger.violation(f"{self.name}: {context['message']}: {error!r}")

    def start(self) -> None:
        self.process.call_soon(self.spawn, self._live())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of a user, or of the worker itself."""
        task = self.process.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        del self.tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.cluster.ledger.violation(f"{self.name}: {error!r} came out of a user's task")

    async def _live(self) -> None:
        while not self.leaving.is_set():
            try:
                await self._run()
            except (BrokerUnavailable, Fenced) as error:
                self.cluster.ledger.note("not up", self.name, error.code)
                if self.name in self.cluster.rivals:
                    break
                try:
                    async with asyncio.timeout(_START_AGAIN):
                        await self.leaving.wait()
                except TimeoutError:
                    pass
        self.over = True

    async def _run(self) -> None:
        """One start of the runtime, until it has to leave. Raises what a start raises."""
        cluster, process = self.cluster, self.process
        broker = await SimBroker.connect(cluster.broker, self.node)
        transport = self.transport = SimTransport(
            cluster.board, self.node, budget=self.budget, reads_memory=self.plan.reads_memory
        )
        runtime = Runtime(
            self.plan.name,
            pool=self.pool,
            roles=self.plan.roles,
            lanes=self.plan.lanes,
            config=cluster.scenario.config,
            broker=broker,
            transport=transport,
            seams=Seams(
                clock=process.time, wall=lambda: _EPOCH + process.time(), token=self.rng.randbytes, rng=self.rng
            ),
        )
        runtime.on_offer(self._offered)
        try:
            async with runtime:
                self.runtime = self.last_runtime = runtime
                cluster.ledger.note("up", self.name)
                await self.leaving.wait()
                self.runtime = None
        finally:
            self.runtime = None
            await transport.aclose()
            await broker.aclose()
        cluster.ledger.note("left", self.name)

    # ------------------------------------------------------------------ the source's user

    def send(self, plan: StreamPlan) -> None:
        """In this process: a user sends a stream."""
        self.spawn(self._send(plan))

    async def _send(self, plan: StreamPlan) -> None:
        ledger, pool, runtime = self.cluster.ledger, self.pool, self.runtime
        side = ledger.source(plan.name, self.plan.name, self.name, self.process.time() + plan.deadline)
        rng = derive(plan.seed, "source")
        if runtime is None:
            ledger.close_side(side, "absent")
            return
        needed = pool.layout.blocks_for(plan.tokens)
        try:
            ids = pool.hand_out(needed, rng.shuffle)
        except Refused:
            ledger.close_side(side, "absent")
            return
        tx: SendStream | None = None
        try:
            given = ids[: rng.randint(0, needed)] if plan.growing else ids
            tx = runtime.send(
                plan.name,
                blocks=given,
                tokens=plan.tokens,
                to=plan.to or (LeastLoaded(choices=plan.choices, candidates=2) if plan.choices else None),
                deadline=plan.deadline,
                priority=plan.priority,
                share_class=plan.share,
                retry=plan.retry,
                growing=plan.growing,
                metadata={"stream": plan.name},
            )
            pool.readers.update(dict.fromkeys(ids, tx))
            await self._use_tx(plan, side, tx, ids, len(given))
        except KVStreamError as error:
            if tx is None or not tx.ended:
                ledger.close_side(side, "absent", error)
            elif side.code is None:
                raise
        except _EngineFailed:
            pass
        finally:
            if tx is not None and tx.key and not tx.ended:
                ledger.violation(f"stream {plan.name} on {self.name} goes on after its context was left")
            pool.take_back(ids)
        if side.code is None:
            assert tx is not None
            await self._note_end(side, tx)

    async def _use_tx(self, plan: StreamPlan, side: Side, tx: SendStream, ids: list[int], given: int) -> None:
        actor: asyncio.TimerHandle | None = None
        me = asyncio.current_task()
        assert me is not None

        def act() -> None:
            nonlocal actor
            if plan.action == "cancel":
                actor = self.process.call_later(plan.action_at, self._cancel, tx)
            elif plan.action == "abandon":
                actor = self.process.call_later(plan.action_at, me.cancel)
            elif plan.action == "reroute":
                actor = self.process.call_later(plan.action_at, self._reroute, plan)

        try:
            async with tx:
                self.cluster.ledger.note("open", plan.name, self.name)
                await self._compute(plan, tx, ids, given, act)
                side.payload = {"stream": plan.name, "tokens": plan.tokens}
                await self._note_end(side, tx, side.payload)
        except asyncio.CancelledError:
            if not (plan.action == "abandon" and me.uncancel() == 0):
                raise
            if tx.key == 0:
                self.cluster.ledger.close_side(side, "absent")
        finally:
            if actor is not None:
                actor.cancel()

    async def _compute(
        self, plan: StreamPlan, tx: SendStream, ids: list[int], given: int, act: Callable[[], None]
    ) -> None:
        """Prefill, chunk by chunk, layer by layer."""
        prompt = _Content(content(self.pool.layout, plan.seed, len(ids)))
        bounds = [round(plan.tokens * n / plan.chunks) for n in range(plan.chunks + 1)]
        computed = 0
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            needed = self.pool.layout.blocks_for(stop)
            if needed > given:
                tx.extend(ids[given:needed])
                given = needed
            for layer in range(self.pool.layout.layers):
                if plan.gap:
                    await asyncio.sleep(plan.gap)
                computed += 1
                if computed == plan.action_after:
                    act()
                    if plan.action == "fail":
                        raise _EngineFailed
                if not tx.ended:
                    prompt.fill(self.pool, layer, ids, start, stop)
                tx.layer_ready(layer, (start, stop))

    def _reroute(self, plan: StreamPlan) -> None:
        """The user, or an orchestrator, orders a stream elsewhere."""
        if self.runtime is None:
            return
        try:
            self.runtime.reroute(plan.name, plan.order or None)
        except (ConfigError, Refused) as error:  # it has ended, or there is nowhere to go
            self.cluster.ledger.note("not rerouted", plan.name, error.code)
        else:
            self.cluster.ledger.note("ordered", plan.name)

    async def _note_end(self, side: Side, stream: SendStream | ReceiveStream, payload: object = None) -> None:
        """Wait for a stream's end and note it."""
        try:
            report = await (stream.done(payload) if isinstance(stream, SendStream) else stream.done())
        except KVStreamError as error:
            side.peer, side.epoch = stream.peer, stream.epoch
            if not stream.ended:
                raise
            self._note_epochs(side, stream)
            self.cluster.ledger.close_side(side, error.code, error, at=end_time(stream))
        else:
            side.peer, side.epoch, side.provisional = report.peer, report.epoch, report.provisional
            side.in_doubt = report.in_doubt
            self._note_epochs(side, stream)
            if isinstance(stream, ReceiveStream):
                side.payload = stream.payload
            self.cluster.ledger.close_side(side, "done", at=end_time(stream))

    def _note_epochs(self, side: Side, stream: SendStream | ReceiveStream) -> None:
        if isinstance(stream, SendStream) and stream.epochs:
            side.left = stream.epochs
            self.cluster.ledger.note("rerouted", side.stream, [(e.epoch, e.peer, e.why) for e in side.left])

    def cancel_all(self) -> None:
        """In this process: every user cancels."""
        streams = {id(grant): grant for grant in (*self.pool.readers.values(), *self.pool.writers.values())}
        for stream in streams.values():
            if isinstance(stream, SendStream | ReceiveStream):
                self._cancel(stream)

    def _cancel(self, stream: SendStream | ReceiveStream) -> None:
        if stream.key:
            stream.cancel()

    # ------------------------------------------------------------------ the destination's user

    def receive(self, plan: StreamPlan, receiver: Receiver) -> None:
        """In this process: a user waits for a stream."""
        if self.runtime is not None:
            self.spawn(self._receive(plan, receiver, self.runtime))

    async def _receive(self, plan: StreamPlan, receiver: Receiver, runtime: Runtime) -> None:
        ledger, config = self.cluster.ledger, self.cluster.scenario.config
        rng = derive(plan.seed, "destination", self.name)
        try:
            ids = self.pool.hand_out(self.pool.layout.blocks_for(plan.tokens), rng.shuffle)
        except Refused:
            return
        try:
            rx = runtime.receive(
                plan.name, blocks=ids, tokens=plan.tokens, first_token=receiver.first_token, deadline=receiver.deadline
            )
        except ConfigError:  # closed meanwhile
            self.pool.take_back(ids)
            return
        bound = self.process.time() + receiver.deadline + config.end_wait
        side = ledger.destination(plan.name, self.plan.name, self.name, bound)
        await self._use_rx(plan, receiver, side, rx, ids)

    async def _use_rx(
        self, plan: StreamPlan, receiver: Receiver, side: Side, rx: ReceiveStream, ids: list[int]
    ) -> None:
        side.meddled = receiver.action != "run" or plan.answer.kind == "raise_late"
        prompt = _Content(content(self.pool.layout, plan.seed, len(ids)))
        self._grant(plan, receiver.first_token, rx, ids, prompt)
        me = asyncio.current_task()
        assert me is not None
        actor: asyncio.TimerHandle | None = None
        if receiver.action == "cancel":
            actor = self.process.call_later(receiver.action_at, self._cancel, rx)
        elif receiver.action == "abandon":
            actor = self.process.call_later(receiver.action_at, me.cancel)
        try:
            async with rx:
                async for layer in rx:
                    self._verify(side, rx, prompt, layer, ids)
                    if receiver.action == "fail" and layer == 1:
                        raise _EngineFailed
                    if receiver.pause:
                        await asyncio.sleep(receiver.pause)
                await self._note_end(side, rx)
        except KVStreamError as error:
            if rx.key == 0:
                self.cluster.ledger.close_side(side, "absent", error)
        except _EngineFailed:
            pass
        except asyncio.CancelledError:
            if not (receiver.action == "abandon" and me.uncancel() == 0):
                raise
        finally:
            if actor is not None:
                actor.cancel()
            if rx.key and not rx.ended:
                self.cluster.ledger.violation(f"stream {plan.name} on {self.name} goes on after its context was left")
            if side.code is None and rx.ended:
                await self._note_end(side, rx)
            if side.done:
                for layer in range(self.pool.layout.layers):
                    self._verify(side, rx, prompt, layer, ids)
            self.pool.take_back(ids)
        if side.code is None:
            self.cluster.ledger.close_side(side, "absent")

    def _grant(self, plan: StreamPlan, first_token: int, rx: ReceiveStream, ids: list[int], prompt: _Content) -> None:
        held = len(ids) if first_token >= plan.tokens else first_token // self.pool.layout.block_tokens
        prompt.prefix(self.pool, ids, held)
        self.pool.writers.update(dict.fromkeys(ids[held:], rx))

    def _verify(self, side: Side, rx: ReceiveStream, prompt: _Content, layer: int, ids: list[int]) -> None:
        if prompt.matches(self.pool, layer, ids):
            side.verified.add(layer)
        else:
            self.cluster.ledger.violation(
                f"stream {side.stream} on {self.name}: layer {layer} came from {rx.peer} with wrong bytes"
            )

    async def _offered(self, offer: Offer) -> None:
        plan = self.cluster.streams.get(offer.stream)
        if plan is None or offer.metadata != {"stream": offer.stream}:
            self.cluster.ledger.violation(f"{self.name}: an offer of {offer.stream!r} with {offer.metadata!r}")
            return
        answer = plan.answer
        if answer.kind == "ignore":
            return
        if answer.delay:
            await asyncio.sleep(answer.delay)
        if answer.kind == "refuse":
            offer.refuse("not now", retry_after=0.1)
            if plan.to == (self.plan.name,) and not plan.retry:
                self.cluster.ledger.refusal(offer.stream, self.plan.name)
            return
        if answer.kind == "raise":
            raise _EngineFailed
        rng = derive(plan.seed, "destination", self.name)
        try:
            ids = self.pool.hand_out(self.pool.layout.blocks_for(plan.tokens), rng.shuffle)
        except Refused as error:
            offer.refuse(str(error), retry_after=0.1)
            return
        try:
            rx = offer.accept(ids, first_token=answer.first_token)
        except KVStreamError:  # too late, or closing
            self.pool.take_back(ids)
            return
        config = self.cluster.scenario.config
        deadline = config.deadline if offer.deadline is None else offer.deadline
        bound = self.process.time() + deadline + config.end_wait
        side = self.cluster.ledger.destination(plan.name, self.plan.name, self.name, bound)
        receiver = Receiver(
            worker=self.plan.name, at=0.0, deadline=math.inf, first_token=answer.first_token, pause=answer.pause
        )
        self.spawn(self._use_rx(plan, receiver, side, rx, ids))
        if answer.kind == "raise_late":
            raise _EngineFailed


class Cluster:
    """All of it. `lives` are the present lives of the workers, by the worker's name."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World()
        self.ledger = Ledger(
            lambda: self.world.now,
            layers=scenario.layout.layers,
            touched=self._touched,
            resume_timeout=scenario.config.resume_timeout,
        )
        conditions = Conditions(bandwidth=scenario.bandwidth, leisure=scenario.leisure, hiccups=scenario.hiccups)
        self.network = Network(self.world, conditions, observe=self.ledger.note)
        self.board = Switchboard(self.network, scenario.seed, guard=self._guard)
        self.broker = SimBrokerServer(self.network, scenario.seed)
        self.streams = {plan.name: plan for plan in scenario.streams}
        self.lives: dict[str, Life] = {}
        self.all_lives: dict[str, Life] = {}
        """By the name of the process, those of the past too."""
        self.rivals: dict[str, Life] = {}
        """Further processes that try to take the name of a worker that is there, by the name of the process."""
        self.buried = False
        self._numbers: dict[str, int] = {}
        self._plans = {plan.name: plan for plan in scenario.workers}

    def start(self) -> None:
        """Start every worker, and set the times at which users come."""
        at = self.world.fabric.call_at
        for plan in self.scenario.workers:
            self.begin(plan.name)
        for stream in self.scenario.streams:
            at(stream.at, self._send, stream)
            for receiver in stream.receivers:
                at(receiver.at, self._receive, stream, receiver)

    def _send(self, stream: StreamPlan) -> None:
        life = self.lives[stream.source]
        life.process.call_soon(life.send, stream)

    def _receive(self, stream: StreamPlan, receiver: Receiver) -> None:
        life = self.lives[receiver.worker]
        life.process.call_soon(life.receive, stream, receiver)

    def begin(self, worker: str) -> Life:
        """A new life of a worker."""
        number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
        life = self.lives[worker] = Life(self, self._plans[worker], number)
        self.all_lives[life.name] = life
        life.start()
        return life

    def rival(self, worker: str) -> Life:
        """A second process that tries, once, to start under a name that is taken."""
        number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
        life = Life(self, self._plans[worker], number)
        self.rivals[life.name] = self.all_lives[life.name] = life
        life.start()
        return life

    def kill(self, life: Life) -> None:
        """The process vanishes."""
        if not life.process.alive:
            return
        life.process.kill()
        self.ledger.note("killed", life.name)
        self.ledger.process_killed(life.name)
        self.board.kill(life.node)
        self.broker.kill(life.node)

    def leave(self, life: Life) -> None:
        """The worker is asked to close in order."""
        life.process.call_soon(life.leaving.set)

    def _guard(self, source: str, lent: Lent, destination: str, local: Lent) -> None:
        if not self.all_lives[source].pool.holds(lent):
            self.ledger.violation(f"{source} lent what is not in its pool")
        self.all_lives[destination].pool.check_borrowed(local)

    def _touched(self, a: str, b: str, when: float) -> list[Fault]:
        """The faults that began before and have to do with one of two workers, or with the broker."""
        hung = [
            Fault(kind="break", at=at, who=(a, b))
            for at, between in self.board.hung_reads
            if at <= when and between == frozenset((a, b))
        ]
        return hung + [
            fault
            for fault in self.scenario.faults
            if fault.at <= when
            and (not fault.who or a in (*fault.who, *fault.other) or b in (*fault.who, *fault.other))
        ]
