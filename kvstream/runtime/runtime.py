"""Runtime: one worker's presence in the cluster, and the calls by which an engine sends and receives KV cache.

It owns the life cycle (listen, register, serve, leave) and nothing of the streams themselves. A worker is registered
only once it can be reached, and unregistered before it stops answering.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Self, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.discovery import Changed, Joined, Left, Registry, connect_broker
from kvstream.discovery.broker import Broker
from kvstream.discovery.control import DrainReport
from kvstream.discovery.records import DataAddress, Load, State, WorkerRecord, check_name
from kvstream.errors import ConfigError, Fenced, KVStreamError, Missed, Refused, UnknownWorker
from kvstream.layout import Shard
from kvstream.log import get_logger
from kvstream.memory import KVPool
from kvstream.runtime.checks import instance, seconds, text, whole
from kvstream.runtime.control import Control, holders
from kvstream.runtime.devices import Devices
from kvstream.runtime.draining import Draining
from kvstream.runtime.events import Events
from kvstream.runtime.fetches import FetchStream
from kvstream.runtime.holds import Hold
from kvstream.runtime.identity import Identity
from kvstream.runtime.links import Links
from kvstream.runtime.reports import RuntimeStats, StreamReport
from kvstream.runtime.routing import (
    Candidate,
    Candidates,
    LeastLoaded,
    RouteRequest,
    RoutingPolicy,
    as_policy,
    chosen,
    named_candidates,
)
from kvstream.runtime.seams import Seams
from kvstream.runtime.sessions import ReceiveStream, SendStream
from kvstream.runtime.streams import OfferHandler, Streams
from kvstream.transport.base import LANES, Lane, ListenAddress, StagingBudget, Transport

__all__ = ["Runtime"]


class Runtime:
    """A worker. Use it as an async context manager; all methods but `layer_ready` are for the loop's thread.

    `name` is the logical instance, unique in the cluster per rank; `roles` are free words, "prefill" and "decode" among
    them. `nats` is a URL; None means the environment, then the selected NATS context, then this user's running
    `kvstream server`. `lanes` is "auto" or the lanes that are allowed. The data plane listens on
    loopback unless `data_interface` names an interface or address: who reaches its port can write into this process.
    `routing` picks the destination of streams that name none (default: `LeastLoaded()`).
    `broker`, `transport` and `seams` replace the parts of that name (tests, simulation); they are not closed here.

    Entering raises ConfigError, BrokerUnavailable, or Fenced when the name is held by another living worker.
    """

    def __init__(
        self,
        name: str,
        *,
        pool: KVPool,
        roles: Collection[str] = (),
        nats: str | None = None,
        lanes: Literal["auto"] | Lane | Sequence[Lane] = "auto",
        data_interface: str | None = None,
        shard: Shard | None = None,
        config: RuntimeConfig | None = None,
        routing: RoutingPolicy | None = None,
        broker: Broker | None = None,
        transport: Transport | None = None,
        seams: Seams | None = None,
    ) -> None:
        self.pool = instance("pool", pool, KVPool)
        self.config = RuntimeConfig() if config is None else instance("config", config, RuntimeConfig)
        self._seams = seams or Seams()
        rank = Shard() if shard is None else instance("shard", shard, Shard)
        self._identity = Identity.create(text("name", name, 64), rank, pool.layout, self._seams)
        self._roles = _roles(roles)
        self._lanes = _lanes(lanes, local=transport is not None)
        self._routing = LeastLoaded() if routing is None else as_policy(routing)
        if self._routing is None:
            raise ConfigError("routing", f"must be an object with a method `route` (RoutingPolicy), is {routing!r}")
        self._nats = nats
        self._data_interface = data_interface
        self._broker = broker
        self._broker_in_use: Broker | None = None
        self._transport = transport
        self._handler: OfferHandler | None = None
        self._closed = False
        self._closing = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._streams_or_none: Streams | None = None
        self._registry_or_none: Registry | None = None
        self._record: WorkerRecord | None = None
        self._draining: Draining | None = None
        self._staging = StagingBudget(self.config.staging_limit) if transport is None else transport.budget
        self._fenced = asyncio.Event()
        self._fenced_by: Fenced | None = None
        self._log = get_logger("runtime", worker=self._identity.worker)

    # ------------------------------------------------------------------ life cycle

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise ConfigError("runtime", f"{self.name} was entered before; make a new Runtime for a new start")
        self._stack = stack = AsyncExitStack()
        try:
            await self._start(stack)
        except BaseException:
            # Not handled, only undone: whatever stopped the start, a cancellation included, goes on to the caller.
            await stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave: unregister, end what is running as cancelled, tell the peers, close. Bounded; idempotent."""
        self._closed = True
        if self._stack is not None:
            async with self._closing:  # each step of leaving waits for the one before, whoever asks
                await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        config, identity = self.config, self._identity
        broker = self._broker
        if broker is None:
            broker = await connect_broker(self._nats, rng=self._seams.rng)
            stack.push_async_callback(broker.aclose)
        self._broker_in_use = broker
        streams = Streams(self.pool, config, self._seams.clock, self._seams.rng.random)
        stack.callback(streams.driver.stop)
        registry = await stack.enter_async_context(
            Registry(broker, ttl=config.lease_ttl, clock=asyncio.get_running_loop().time, rng=self._seams.rng)
        )
        transport = self._transport
        if transport is None:
            transport = _ucx_transport(self._data_interface, self._lanes, self._staging, config.put_window)
            stack.push_async_callback(transport.aclose)
        devices = Devices(self.pool, config, self._lanes)
        if self.pool.is_device:
            devices.attach(transport, streams.slabs, self._seams.token)
        else:
            transport.expose(streams.slabs)
        links = Links(
            identity,
            transport,
            registry,
            streams.driver,
            config,
            self._seams,
            self._lanes,
            on_mismatch=streams.fail_waiting,
            chunk_blocks=streams.chunk_blocks,
            borrows=not self.pool.is_device and self.pool.run_bytes > 0,
            devices=devices,
        )
        streams.links = links
        stack.push_async_callback(links.close)
        address = links.address = await transport.start(links.accepted)
        stack.push_async_callback(streams.close, config.close_wait)
        streams.set_handler(self._handler)
        self._streams_or_none, self._registry_or_none = streams, registry
        self._record = self._describe(address)
        events = Events(
            broker,
            self.worker,
            self.incarnation,
            rate=config.event_rate if config.control else 0.0,
            clock=asyncio.get_running_loop().time,
            wall=self._seams.wall,
        )
        draining = self._draining = Draining(self.worker, streams, registry, events, config.close_wait)
        if config.control:
            await stack.enter_async_context(Control(self, broker, events))
        await registry.register(self._record, on_fenced=self._on_fenced, load=self._load)
        stack.push_async_callback(self._unregister)
        if config.control:
            streams.observer = events
            events.joined(self._roles)
            stack.callback(lambda: events.left(drained=draining.active))
        follower = asyncio.create_task(self._follow(registry, streams), name=f"peers of {self.worker}")
        stack.push_async_callback(_end_task, follower)
        streams.on_load_changed(registry.load_changed)
        self._log.info("registered", host=address.host, port=address.port, roles=self._roles)

    async def _unregister(self) -> None:
        try:
            await self._registry.unregister()
        except KVStreamError as error:
            self._log.warning("could not unregister; the lease will run out", why=str(error))

    def _describe(self, address: ListenAddress) -> WorkerRecord:
        identity = self._identity
        shard = identity.shard
        return WorkerRecord(
            name=identity.name,
            rank=shard.rank,
            incarnation=identity.incarnation,
            key=identity.key,
            roles=self._roles,
            address=msgspec.convert(address, DataAddress, from_attributes=True),
            fingerprint=identity.layout.fingerprint(),
            shard=(shard.tp_rank, shard.tp_size, shard.pp_rank, shard.pp_size),
            pid=os.getpid(),
            host=socket.gethostname(),
            protocol=(wire.MIN_VERSION, wire.VERSION),
            load=self._load(),
            started=self._seams.wall(),
        )

    def _load(self) -> Load:
        streams = self._streams_or_none
        live = streams.core.streams if streams is not None else 0
        return Load(live, self.pool.free_blocks, self.pool.blocks)

    async def _follow(self, registry: Registry, streams: Streams) -> None:
        """A worker that came back under its name is a new peer: connections to the one before lead nowhere."""
        async with registry.watch(loads=False) as changes:
            async for change in changes:
                if isinstance(change, Joined | Changed):
                    streams.peers.seen(change.record, streams.driver.now())
                    streams.links.replaced(change.record.id, change.record.incarnation)
                elif isinstance(change, Left):
                    streams.peers.left(change.record.id)
                    streams.links.left(change.record.id)

    def _on_fenced(self, error: Fenced) -> None:
        """Another incarnation holds our name: nothing new may start here, and what runs must end."""
        self._log.error("fenced", why=str(error))
        self._fenced_by = error
        self._fenced.set()
        streams = self._streams_or_none
        if streams is not None:
            streams.core.shut(streams.driver.now(), error)
            streams.driver.pump()
            # The peers are told first; then they must not stay connected to the one that is no more.
            asyncio.get_running_loop().call_later(self.config.end_wait, streams.drop_links, error)

    # ------------------------------------------------------------------ what the user asks

    @property
    def name(self) -> str:
        """The logical instance."""
        return self._identity.name

    @property
    def worker(self) -> str:
        """This worker's id, `instance/rank`."""
        return self._identity.worker

    @property
    def incarnation(self) -> str:
        """Drawn at random at each start: what tells this life of the worker from the one before."""
        return self._identity.incarnation

    @property
    def record(self) -> WorkerRecord:
        """What this worker has registered."""
        if self._record is None:
            raise ConfigError("runtime", f"{self.name} has not been entered; use `async with Runtime(...)`")
        return self._record

    @property
    def registry(self) -> Registry:
        """The workers of the cluster: `workers()`, `lookup()`, `watch()`."""
        return self._registry

    @property
    def state(self) -> State:
        """Whether this worker takes streams ("ready") or lets those that are live finish ("draining")."""
        return "draining" if self._draining is not None and self._draining.active else "ready"

    @property
    def load(self) -> Load:
        """Open streams, and the free and total blocks of the pool."""
        return self._load()

    async def drain(self, budget: float) -> DrainReport:
        """Take nothing new, and return when nothing is live any more: at the end of `budget` (seconds) at the latest
        the streams that still are get cancelled.

        From the call on `send` and `receive` raise Refused, and offers are refused with a `retry_after`, so that
        sources go elsewhere; a `receive` that was there before still takes its stream. The registry says "draining".
        Streams that are cancelled here as their destination end as Refused, as which their sources may go elsewhere.
        The worker stays registered and draining, also when this is cancelled, until `resume` or `aclose`.
        """
        budget = seconds("budget", budget, zero=True)
        self._streams.check_here("drain")
        assert self._draining is not None
        return await self._draining.drain(budget)

    async def resume(self) -> None:
        """Take streams again; a drain that is under way ends and cancels nothing. Returns when the registry has it, or
        does not answer for a lease's time (it gets to know later)."""
        self._streams.check_here("resume")
        assert self._draining is not None
        await self._draining.resume()

    def cancel(self, stream: str, reason: str = "cancelled") -> int:
        """End the live streams of this id, sent or received here, as cancelled; how many. Raises UnknownStream."""
        return self._streams.cancel_named(text("stream", stream, wire.MAX_STREAM_ID), reason)

    async def until_fenced(self) -> Fenced:
        """Wait until another incarnation has taken this worker's name, if that ever happens; the error says which. From
        then on this runtime can only be closed."""
        await self._fenced.wait()
        assert self._fenced_by is not None
        return self._fenced_by

    def stats(self) -> RuntimeStats:
        """The state of this moment: live streams and what they wait for, connections, offers, staging, totals."""
        streams, budget = self._streams, self._staging
        core = streams.core
        offers, tokens = core.offers_waiting
        counters = core.counters
        return RuntimeStats(
            streams=tuple(core.stream_states(streams.driver.now())),
            peers=tuple(core.peer_states()),
            offers_waiting=offers,
            tokens_waiting=tokens,
            staging_used=budget.used,
            staging_limit=budget.limit,
            staging_quarantined=budget.quarantined,
            quarantined=tuple(streams.links.quarantined()),
            offers_refused=counters.offers_refused,
            reroutes=counters.reroutes,
            resumes=counters.resumes,
            stalls=counters.stalls,
            stale_frames=counters.stale_frames,
            protocol_errors=counters.protocol_errors,
            ended=tuple(counters.ended.items()),
            device_staging_used=streams.links.devices.used,
            device_staging_limit=streams.links.devices.limit,
            devices=tuple(streams.links.device_paths()),
            holds=tuple(streams.holds.states()),
        )

    def send(
        self,
        stream: str,
        *,
        blocks: Sequence[int] | npt.NDArray[np.integer[Any]],
        tokens: int,
        to: str | Sequence[str] | RoutingPolicy | None = None,
        deadline: float | None = None,
        priority: int = 0,
        share_class: str = "",
        metadata: Any = None,
        retry: bool = False,
        growing: bool = False,
        hold: float | None = None,
    ) -> SendStream:
        """Offer a stream and send it layer by layer as `layer_ready` is called: `async with rt.send(...) as tx`.

        `blocks` is the block table of the prompt's `tokens` in the pool (with `growing=True` it may be short and is
        completed by `tx.extend`). `to` names a worker, or several that are tried in order, or is a RoutingPolicy that
        picks them; None is the runtime's own policy. If the one that took the stream is lost in the middle of it, or
        silent for config.reroute_timeout, the stream goes on at the next, from layer 0, and StreamReport.epochs tells.
        `deadline` is in seconds from now (default: config.deadline), `metadata` is for the destination's offer handler.

        While more is ready than can be moved, classes (`share_class`: a tenant, a kind of work) get bytes in proportion
        to config.share_weights; within a class short streams and long ones take turns, and of a kind the earliest
        deadline goes first, each unit of `priority` (-1000 to 1000) counting as config.priority_step seconds. Both
        sides order alike.

        With `hold` other workers can have a copy of the stream for so many seconds after its end, by `fetch` or `push`;
        also where it broke, once all layers were ready, but not where its user cancelled it. Its blocks must stay as
        they are until `tx.released()`.

        Candidates that refuse with a `retry_after` can be asked again: with `retry` those that did are, after as long a
        pause as they advise, until the deadline. Raises ConfigError at once for bad values; entering it raises
        UnknownWorker or Refused.
        """
        streams = self._streams
        tokens = whole("tokens", tokens, 1, wire.MAX_COUNT)
        ids = streams.block_table(blocks, tokens, growing=growing)
        name = text("stream", stream, wire.MAX_STREAM_ID)
        priority = whole("priority", priority, -wire.MAX_PRIORITY, wire.MAX_PRIORITY)
        share = text("share_class", share_class, wire.MAX_SHARE) if share_class != "" else ""
        policy = self._routing if to is None else as_policy(to)
        candidates = named_candidates(to, self._identity.shard.rank) if policy is None else []
        request = RouteRequest(
            stream=name,
            tokens=tokens,
            blocks=self.pool.layout.blocks_for(tokens),
            share_class=share,
            priority=priority,
            me=self.record,
        )
        return SendStream(
            streams,
            name,
            ids,
            tokens,
            choose=lambda: self._choose(request, policy or candidates),
            route=lambda: self._route(request, policy or candidates),
            route_again=None if policy is None else lambda exclude: self._route(request, policy, exclude),
            deadline=self.config.deadline if deadline is None else seconds("deadline", deadline),
            priority=priority,
            share=share,
            metadata=wire.encode_metadata(metadata),
            retry=instance("retry", retry, bool),
            hold=0.0 if hold is None else seconds("hold", hold),
        )

    def reroute(self, stream: str, to: str | Sequence[str] | None = None) -> None:
        """Take a stream that is being sent away from its destination, and send it to `to` from layer 0 on, or to the
        first of several that takes it; None: to another of the candidates that it has. The engine goes on meanwhile.

        The destination that had it gets Fenced. If it had everything by then it may be done all the same:
        StreamReport.in_doubt names it. Raises ConfigError for a stream that is not being sent or is at `to` already,
        Refused when nobody is left to go to, or the stream was rerouted config.max_reroutes times.
        """
        streams = self._streams
        streams.check_here("reroute")
        name = text("stream", stream, wire.MAX_STREAM_ID)
        streams.reroute(name, [] if to is None else named_candidates(to, self._identity.shard.rank))

    def receive(
        self,
        stream: str,
        *,
        blocks: Sequence[int] | npt.NDArray[np.integer[Any]],
        tokens: int,
        first_token: int = 0,
        deadline: float | None = None,
    ) -> ReceiveStream:
        """Wait for a stream and take it into these blocks: `async with rt.receive(...) as rx`.

        Of a prefix that is here already, whole blocks before `first_token` are not moved. If not one chunk has come
        after config.reservation_timeout, it ends although its deadline may be later. Raises ConfigError for bad
        values, a stream that is being received already, or blocks that another live stream writes.
        """
        streams = self._streams
        tokens = whole("tokens", tokens, 1, wire.MAX_COUNT)
        ids = streams.block_table(blocks, tokens, growing=False)
        name = text("stream", stream, wire.MAX_STREAM_ID)
        first_token = whole("first_token", first_token, 0, tokens)
        wait = self.config.deadline if deadline is None else seconds("deadline", deadline)
        return ReceiveStream(streams, name, ids, tokens, first_token, wait)

    def hold(
        self,
        stream: str,
        *,
        blocks: Sequence[int] | npt.NDArray[np.integer[Any]],
        tokens: int,
        ttl: float | None = None,
        pinned: bool = False,
        payload: Any = None,
        metadata: Any = None,
        on_release: Callable[[Hold], None] | None = None,
    ) -> Hold:
        """Let other workers have copies of KV that is in these blocks, as a stream of that name: by `fetch` or `push`.

        For `ttl` seconds (default: config.hold_ttl), or as long as it is pinned: `pinned` begins with one pin. A copy
        comes with `payload` and `metadata`, as those of a stream do. The blocks must stay as they are until the hold is
        over; then `on_release(hold)` is called, on the loop, and must not raise. Raises ConfigError for bad values, a
        stream that is held already, or blocks that a live stream writes; Refused beyond config.max_holds.
        """
        streams = self._streams
        streams.check_here("hold")
        tokens = whole("tokens", tokens, 1, wire.MAX_COUNT)
        ids = streams.block_table(blocks, tokens, growing=False)
        if on_release is not None and not callable(on_release):
            raise ConfigError("on_release", f"must be a function of the hold, is {on_release!r}")
        return streams.holds.hold(
            text("stream", stream, wire.MAX_STREAM_ID),
            ids,
            tokens,
            ttl=self.config.hold_ttl if ttl is None else seconds("ttl", ttl),
            pinned=instance("pinned", pinned, bool),
            payload=wire.encode_payload(payload),
            metadata=wire.encode_metadata(metadata),
            on_release=on_release,
        )

    def held(self, stream: str) -> Hold | None:
        """What is held of a stream here, and not released yet."""
        return self._streams.holds.get(stream)

    @property
    def holds(self) -> tuple[Hold, ...]:
        """What is held here and not released yet, least recently used first."""
        return self._streams.holds.all()

    async def push(
        self,
        stream: str,
        to: str | Sequence[str] | RoutingPolicy | None = None,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        share_class: str = "",
        retry: bool = False,
    ) -> StreamReport:
        """Send a copy of a stream that is held here, from its first token on (`tokens`: how many; default: all).

        Arguments are as with `send`; the destination takes it by `receive` or its offer handler. What is held stays
        held, and does not expire before the copy has ended. Raises Missed when the stream is not held here (any more),
        or with fewer tokens, else as `send` and its `done`. Cancelling it cancels the copy.
        """
        streams = self._streams
        streams.check_here("push")
        name = text("stream", stream, wire.MAX_STREAM_ID)
        count = 0 if tokens is None else whole("tokens", tokens, 1, wire.MAX_COUNT)
        priority = whole("priority", priority, -wire.MAX_PRIORITY, wire.MAX_PRIORITY)
        share = text("share_class", share_class, wire.MAX_SHARE) if share_class != "" else ""
        policy = self._routing if to is None else as_policy(to)
        candidates = named_candidates(to, self._identity.shard.rank) if policy is None else []

        def request(tokens: int) -> RouteRequest:
            return RouteRequest(
                stream=name,
                tokens=tokens,
                blocks=self.pool.layout.blocks_for(tokens),
                share_class=share,
                priority=priority,
                me=self.record,
            )

        return await streams.holds.push(
            name,
            count,
            route=lambda tokens: self._route(request(tokens), policy or candidates),
            deadline=self.config.deadline if deadline is None else seconds("deadline", deadline),
            priority=priority,
            share=share,
            retry=instance("retry", retry, bool),
        )

    def fetch(
        self,
        stream: str,
        *,
        blocks: Sequence[int] | npt.NDArray[np.integer[Any]],
        source: str | Sequence[str] | None = None,
        tokens: int | None = None,
        first_token: int = 0,
        deadline: float | None = None,
        priority: int = 0,
        share_class: str = "",
    ) -> FetchStream:
        """Have a holder send what it holds of a stream into these blocks: `report = await rt.fetch(...)`, or
        `async with rt.fetch(...) as rx` to use each layer as it comes, as with `receive`.

        `source` names a worker, or several that are asked in order until one sends it; None asks the cluster, through
        the broker, who holds it. `tokens`: how many, from the first on, if they are not to be as many as it holds and
        these blocks take. Whole blocks before `first_token` are here already, and not moved. The broker is not needed
        for workers that are named and known. Raises ConfigError at once for bad values; then Missed when the last one
        asked does not hold the stream (any more), Refused when it can't send it now, UnknownWorker when none of them is
        registered, and whatever ends a stream.
        """
        streams = self._streams
        if tokens is None:
            ids = self.pool.check_blocks(blocks)
            room = len(ids) * self.pool.layout.block_tokens
        else:
            room = whole("tokens", tokens, 1, wire.MAX_COUNT)
            ids = streams.block_table(blocks, room, growing=False)
        name = text("stream", stream, wire.MAX_STREAM_ID)
        rank = self._identity.shard.rank
        sources = None if source is None else named_candidates(source, rank, "source")
        return FetchStream(
            streams,
            name,
            ids,
            room,
            whole("first_token", first_token, 0, room),
            exact=tokens is not None,
            find=lambda: self._holders(name) if sources is None else self._named(sources, "source"),
            token=self._seams.token(wire.TOKEN_BYTES),
            deadline=self.config.deadline if deadline is None else seconds("deadline", deadline),
            priority=whole("priority", priority, -wire.MAX_PRIORITY, wire.MAX_PRIORITY),
            share=text("share_class", share_class, wire.MAX_SHARE) if share_class != "" else "",
        )

    def on_offer(self, handler: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Decorator: `async def handler(offer)` is called, in a task of its own, for each stream that nobody waits for.

        It answers by `offer.accept(blocks=...)` or `offer.refuse(...)`; one that returns without an answer leaves the
        offer waiting (bounded by config.offer_wait). It is called for as many offers at a time as config.max_receiving
        leaves room for; of the others the most urgent comes next, each class in its share. Its task is cancelled when
        the source withdraws.
        """
        call = getattr(handler, "__call__", None)  # noqa: B004 - of an object that is callable by a coroutine method
        if not (inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)):
            raise ConfigError("handler", f"{handler!r} is not an `async def` function")
        self._handler = handler
        if self._streams_or_none is not None:
            self._streams_or_none.set_handler(handler)
        return handler

    # ------------------------------------------------------------------ helpers

    async def _route(
        self, request: RouteRequest, to: RoutingPolicy | list[str], exclude: Collection[str] = ()
    ) -> list[str]:
        """Workers to try, in order, when none was there at first: the registry's news is awaited, bounded. A policy is
        not shown those in `exclude`."""
        if isinstance(to, list):
            return await self._named(to, "to")
        found = await self._news_of(lambda: self._choose(request, to, exclude))
        if found:
            return found
        rank = self._identity.shard.rank
        raise Refused(
            f"{type(to).__name__} found no worker of rank {rank} with this layout and {request.blocks} free blocks"
            f" among {self._there()}",
            retry_after=0.5,
        )

    async def _named(self, workers: list[str], field: str) -> list[str]:
        """These workers, once one of them is there. Raises UnknownWorker naming `field`."""
        if await self._news_of(lambda: self._known(workers)):
            return workers
        raise UnknownWorker(field, f"no worker {' or '.join(workers)} is registered; there are {self._there()}")

    async def _holders(self, stream: str) -> list[str]:
        """Who holds a stream, by their own word, those of our rank. Raises Missed when nobody does."""
        assert self._broker_in_use is not None
        known = self._registry.records()
        told = await holders(self._broker_in_use, stream, timeout=self.config.connect_timeout / 2, expected=len(known))
        mine = str(self._identity.shard.rank)
        found = [worker for worker in told if worker.rpartition("/")[2] == mine and worker != self.worker]
        if not found:
            raise Missed(f"{stream}: no worker of rank {mine} says that it holds it; asked {len(known)}")
        return found

    def _known(self, workers: list[str]) -> list[str]:
        """These workers, if at least one of them is registered."""
        return workers if any(self._registry.lookup(worker) is not None for worker in workers) else []

    async def _news_of(self, look: Callable[[], list[str]]) -> list[str]:
        """What `look` finds, now or with the registry's next news, awaited for a bounded time."""
        found = look()
        if found:
            return found
        try:
            async with asyncio.timeout(self.config.connect_timeout / 2), self._registry.watch() as changes:
                async for _ in changes:
                    found = look()
                    if found:
                        break
        except TimeoutError:
            pass
        return found

    def _there(self) -> str:
        """The workers that there are, for an error's text."""
        registry = self._registry
        cut = "" if registry.connected else " (the broker can't be reached right now, so this may be out of date)"
        return (", ".join(record.id for record in registry.workers()[:20]) or "none") + cut

    def _choose(self, request: RouteRequest, to: RoutingPolicy | list[str], exclude: Collection[str] = ()) -> list[str]:
        """Workers to try, in order, as far as they are known now."""
        if isinstance(to, list):
            return self._known(to)
        answer: object = to.route(request, self._candidates(exclude), self._seams.rng.random)
        return chosen(to, answer, self._identity.shard.rank)

    def _candidates(self, exclude: Collection[str]) -> Candidates:
        """All other workers, as the registry tells and as our own streams have found them."""
        streams, registry = self._streams, self._registry
        now, wall = streams.driver.now(), self._seams.wall()

        def view(record: WorkerRecord) -> Candidate:
            live, connection = streams.core.towards(record.id)
            failures, backoff = streams.peers.backoff(record.id, now)
            return Candidate(
                record=record,
                streams=live,
                slots=connection.slots if connection is not None else 0,
                slots_used=connection.slots_used if connection is not None else 0,
                stalled=connection.stalled if connection is not None else 0.0,
                age=streams.peers.age(record, now, wall),
                failures=failures,
                backoff=backoff,
                suspect=registry.is_suspect(record.id),
            )

        me = self.worker
        return Candidates(
            [record for record in registry.records() if record.id != me and record.id not in exclude], view
        )

    @property
    def _streams(self) -> Streams:
        if self._closed:
            raise ConfigError("runtime", f"{self.name} has been closed; make a new Runtime")
        if self._streams_or_none is None:
            raise ConfigError("runtime", f"{self.name} has not been entered; use `async with Runtime(...)`")
        return self._streams_or_none

    @property
    def _registry(self) -> Registry:
        if self._registry_or_none is None:
            raise ConfigError("runtime", f"{self.name} has not been entered; use `async with Runtime(...)`")
        return self._registry_or_none


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _roles(roles: Collection[str]) -> tuple[str, ...]:
    if isinstance(roles, str) or not isinstance(roles, set | frozenset | list | tuple):
        raise ConfigError("roles", f"must be a set or list of words, is {roles!r}")
    return tuple(sorted({check_name("roles", text("roles", role, 64)) for role in roles}))


def _lanes(lanes: object, *, local: bool) -> tuple[Lane, ...]:
    """`local`: whether the transport is one that was passed in, which may be of one process."""
    if lanes == "auto":
        return LANES
    chosen: list[object] = [lanes]
    if isinstance(lanes, list | tuple):
        chosen = list(cast("Sequence[object]", lanes))
    allowed: tuple[Lane, ...] = (*LANES, "local") if local else LANES
    found: list[Lane] = [lane for lane in allowed if lane in chosen]
    if not found or any(lane not in allowed for lane in chosen):
        raise ConfigError("lanes", f"must be 'auto', or one or several of {', '.join(allowed)}; is {lanes!r}")
    return tuple(found)


def _ucx_transport(interface: str | None, lanes: tuple[Lane, ...], budget: StagingBudget, put_window: int) -> Transport:
    # Imported late: a process that brings its own transport needs no ucxx.
    from kvstream.transport.ucx import UcxTransport

    return UcxTransport(interface=interface, budget=budget, lanes=lanes, put_window=put_window)
