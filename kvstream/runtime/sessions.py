"""The two ends of a stream as the user holds them: SendStream and ReceiveStream, and the Offer of an unannounced one.

They own what is per stream and not the scheduler's: block tables, the user's waits, times. They decide nothing; each
call becomes an event of the scheduler core, and each of its commands for this stream ends up in an `on_*` here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvstream import wire
from kvstream.errors import Cancelled, ConfigError, DeadlineExceeded, KVStreamError, Refused
from kvstream.memory import BlockPlan
from kvstream.memory.completion import Completion
from kvstream.runtime.checks import seconds, text, token_range, whole
from kvstream.runtime.reports import StreamEpoch, StreamReport
from kvstream.scheduler.commands import Accepted, Ended, Offered, Rerouted

if TYPE_CHECKING:
    from kvstream.runtime.holds import Hold
    from kvstream.runtime.streams import Streams
    from kvstream.transport.base import Connection

__all__ = ["Offer", "ReceiveStream", "SendStream"]

BlockIds = npt.NDArray[np.intp]


class _Stream:
    """What both ends share: identity, block table, times, the one end."""

    def __init__(self, streams: Streams, name: str, ids: BlockIds, tokens: int) -> None:
        self._streams = streams
        self._name = name
        self.ids = ids
        self.plans: dict[tuple[int, int], BlockPlan] = {}
        """Parts of the table as they were moved before, by first block and number: layers are cut alike."""
        self._tokens = tokens
        self.key = 0
        """The scheduler's key; 0 before the stream is opened."""
        self._entered = False
        self._opened = streams.clock()
        self._accepted = 0.0
        self._peer = ""
        self._lane = ""
        self._epoch = 0
        self._layer_times = [0.0] * streams.pool.layout.layers
        self._end: Ended | None = None
        self._end_time = 0.0
        self.moved_bytes = 0
        self._ended = asyncio.Event()

    @property
    def stream(self) -> str:
        """The stream's id."""
        return self._name

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def peer(self) -> str:
        """The other worker as `instance/rank`; empty before it is known."""
        return self._peer

    @property
    def age(self) -> float:
        """Seconds from when the stream was made to its end, or to now."""
        return (self._end_time or self._streams.clock()) - self._opened

    @property
    def epoch(self) -> int:
        """Grows from 1 with each destination that is tried, and with each new connection to the one that has it; 0
        before the first."""
        return self._epoch

    @property
    def ended(self) -> bool:
        """Whether the stream has reached its one end on this side."""
        return self._end is not None

    def cancel(self, reason: str = "cancelled by its user") -> None:
        """End the stream now; the other side is told. Nothing happens to one that has ended. On the loop's thread.

        A receiving stream has `ended` only when nothing is on its way into its blocks any more: nearly always at once,
        else within RuntimeConfig.end_wait; on a GPU, as soon as the device has made the copies that it has been given,
        however long it is busy. Until then, or until its context is left, the blocks are the stream's.
        """
        self._check_open("cancel")
        self._streams.cancel(self.key, reason)

    def _check_open(self, what: str) -> None:
        if self.key == 0:
            raise ConfigError("stream", f"{what}: {self._name!r} has not been entered; use it with `async with`")
        self._streams.check_here(what)

    def _enter(self) -> None:
        self._streams.check_here("async with")
        if self._entered:
            raise ConfigError("stream", f"{self._name!r} was entered before; each stream is used once")
        self._entered = True

    async def until_ended(self) -> None:
        """Wait for the end, whatever it is."""
        await self._ended.wait()

    async def _report(self) -> StreamReport:
        await self._ended.wait()
        end = self._end
        assert end is not None
        if end.error is not None:
            # A fresh traceback for each waiter; the error object itself carries what is valid and what is in doubt.
            raise end.error.with_traceback(None)
        return StreamReport(
            stream=self._name,
            peer=self._peer,
            epoch=end.epoch,
            lane=self._lane,
            tokens=self._tokens,
            layers=self._streams.pool.layout.layers,
            bytes=self.moved_bytes,
            opened=self._opened,
            accepted=self._accepted,
            ended=self._end_time,
            layer_times=tuple(self._layer_times),
            provisional=end.provisional,
            epochs=self._epochs(),
            in_doubt=end.in_doubt,
        )

    def _epochs(self) -> tuple[StreamEpoch, ...]:
        return ()

    # -- what the scheduler's commands say; called by Streams

    def on_accepted(self, command: Accepted, lane: str) -> None:
        self._accepted = self._streams.clock()
        self._peer = command.peer
        self._epoch = command.epoch
        self._lane = lane
        if not command.resumed:
            self.moved_bytes = 0

    def on_ended(self, command: Ended) -> None:
        self._end = command
        self.plans.clear()
        self._end_time = self._streams.clock()
        self._ended.set()


class SendStream(_Stream):
    """The source's end of a stream. Use it as an async context manager: leaving it before `done` cancels the stream.

    The blocks may be reused as soon as the stream has ended, however it ended: nothing reads them afterwards. With
    `hold=` they stay as they are for longer, so that the stream can be sent again: see `released`.
    """

    copy = False
    """Whether it is a copy of what is held."""
    fetch = b""
    """The token of the fetch that it answers."""

    def __init__(
        self,
        streams: Streams,
        name: str,
        ids: BlockIds,
        tokens: int,
        *,
        choose: Callable[[], Sequence[str]],
        route: Callable[[], Awaitable[Sequence[str]]],
        route_again: Callable[[Collection[str]], Coroutine[Any, Any, Sequence[str]]] | None,
        deadline: float,
        priority: int,
        share: str,
        metadata: bytes,
        retry: bool,
        hold: float = 0.0,
    ) -> None:
        super().__init__(streams, name, ids, tokens)
        self._choose = choose
        self._hold_ttl = hold
        self._hold: Hold | None = None
        self._released = False
        self._payload = b""
        self._route = route
        self._route_again = route_again
        self._left: list[StreamEpoch] = []
        """Destinations that had the stream and lost it."""
        self._resent = 0
        self._deadline = deadline
        self._priority = priority
        self._share = share
        self._retry = retry
        self._metadata = metadata
        self._layers = len(self._layer_times)
        self._clock = streams.clock
        self._is_device = streams.pool.is_device
        self._marks: deque[tuple[int, int, int, float, object | None]] = deque()
        self._wake_due = False
        self._awaited: Completion | None = None
        """The device event that the next mark waits for."""
        self._passed = asyncio.Event()
        self.lent: dict[tuple[Connection, int], int] = {}
        """What the peer may be reading in place: generation by connection and slot."""
        self.publishing: dict[tuple[Connection, int], None] = {}
        """Slots on their way to the peer."""

    async def __aenter__(self) -> Self:
        self._enter()
        candidates, deadline = self._choose(), self._deadline
        if not candidates:
            candidates, deadline = await self._look_for_destination()
        self._streams.open_send(
            self,
            candidates,
            deadline=deadline,
            priority=self._priority,
            share=self._share,
            metadata=self._metadata,
            retry=self._retry,
            routable=self._route_again is not None,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            self.cancel("left before done()" if error is None else f"its user failed: {type(error).__name__}")

    async def _look_for_destination(self) -> tuple[Sequence[str], float]:
        """Candidates, and the seconds that finding them has left of the deadline."""
        start = self._streams.driver.now()
        try:
            async with asyncio.timeout(self._deadline):
                candidates = await self._route()
        except TimeoutError:
            raise DeadlineExceeded(
                f"stream {self._name}: the deadline passed while its destination was looked for"
            ) from None
        return candidates, max(self._deadline - (self._streams.driver.now() - start), 0.0)

    def layer_ready(self, layer: int, tokens: tuple[int, int] | None = None, *, event: object | None = None) -> None:
        """KV of `layer` is in the pool, for the tokens [start, stop) (default: all). Callable from any thread; it never
        blocks and costs microseconds.

        On a GPU the layer counts as ready when the device has passed `event`, recorded behind what computes it: a
        cupy.cuda.Event, a torch.cuda.Event, or a cudaEvent_t as an int, whose owner keeps it until the stream has
        ended. It must not be recorded anew before the layer has gone, so take one for each layer. Without `event` it
        is what the calling thread's current CuPy stream has been given so far that counts: by default the legacy
        default stream, and so PyTorch's default stream, but no non-blocking stream. On the CPU an event is an error.

        Token ranges of a layer come in order; repeating one is harmless. Raises ConfigError for a layer or tokens out
        of range, and for what is no event; a gap, or tokens beyond the blocks given so far, end the stream with one. It
        does nothing after the end.
        """
        # The engine's own time, once per layer and with cold caches: each further call in here costs a microsecond.
        if type(layer) is not int or not 0 <= layer < self._layers:
            layer = whole("layer", layer, 0, self._layers - 1)
        start, stop = (0, self._tokens) if tokens is None else token_range(tokens, self._tokens)
        if self.key == 0:
            raise ConfigError("stream", f"layer_ready: {self._name!r} has not been entered; use it with `async with`")
        if event is not None:
            self._streams.pool.check_event(event)
        elif self._is_device:
            event = self._streams.pool.mark()
        self._marks.append((layer, start, stop, self._clock(), event))
        if not self._wake_due:
            self._wake_due = True
            self._streams.call_threadsafe(self._drain)

    def extend(self, blocks: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Append block ids to a stream opened with `growing=True`. On the loop's thread. Raises ConfigError."""
        self._check_open("extend")
        more = self._streams.pool.check_blocks(blocks)
        ids = self._streams.pool.check_blocks(np.concatenate([self.ids, more]))
        needed = self._streams.pool.layout.blocks_for(self._tokens)
        if len(ids) > needed:
            raise ConfigError("blocks", f"{len(ids)} blocks, but {self._tokens} tokens take only {needed}")
        added = len(ids) - len(self.ids)
        self.ids = ids
        self._streams.extend(self.key, added)

    async def done(self, payload: Any = None) -> StreamReport:
        """Hand over `payload` (None, bool, int, float, str, bytes, list, dict; 4 KiB encoded) and wait for the end.

        Returns when the destination has decided that everything is in place. Raises ConfigError when a layer was not
        reported ready (the stream goes on), else what ended the stream; PeerLost.in_doubt names a destination that may
        have finished although its answer was lost. Cancelling this wait does not end the stream; leaving its context
        does.
        """
        self._check_open("done")
        return await self.done_encoded(wire.encode_payload(payload))

    async def done_encoded(self, data: bytes) -> StreamReport:
        """`done` with a payload that is encoded already."""
        self._payload = data
        if self._hold is not None:
            self._hold.payload = data
        self._drain()
        while self._awaited is not None and not self.ended:
            self._passed.clear()
            await self._passed.wait()
        self._streams.finish(self.key, data)
        return await self._report()

    def cancel(self, reason: str = "cancelled by its user") -> None:
        """As of every stream; and what its user gives up is not held."""
        self._check_open("cancel")
        if not self.ended:
            self._hold_ttl = 0.0
        super().cancel(reason)

    @property
    def held(self) -> bool:
        """Whether other workers can have a copy of it from here."""
        return self._hold is not None and not self._hold.ended

    def release(self) -> None:
        """Do not hold the stream, or not any longer. Raises ConfigError when it has been called before."""
        self._check_open("release")
        if self._released:
            raise ConfigError("hold", f"{self._name!r} has been released already; release it once")
        self._released = True
        self._hold_ttl = 0.0
        if self._hold is not None:
            self._hold.release()

    async def released(self) -> None:
        """Wait until the blocks are the user's again: until the stream has ended, the time of its hold is over or
        `release` was called, and the last copy on its way has ended. How the stream ended is not told here."""
        self._check_open("released")
        await self._ended.wait()
        if self._hold is not None:
            await self._hold.released()

    def keep(self, command: Ended) -> None:
        """For Streams: hold the stream that ends now, if that was asked for, and all of it is there."""
        if self._hold_ttl and command.ready:
            self._hold = self._streams.holds.replace(
                self._name,
                self.ids,
                self._tokens,
                ttl=self._hold_ttl,
                payload=self._payload,
                metadata=self._metadata,
            )

    def _drain(self) -> None:
        """Hand the marks of the engine's thread to the core. On the loop."""
        self._wake_due = False
        if self.ended:
            self._marks.clear()
        while self._marks and self._awaited is None:
            layer, start, stop, when, event = self._marks.popleft()
            if event is None:
                self._mark(layer, start, stop, when)
            else:
                self._await_event(event, layer, start, stop)

    def _await_event(self, event: object, layer: int, start: int, stop: int) -> None:
        # The layer enters the core when the event has passed, not before: slots are for chunks that are ready, and a
        # gather that waited for an event on its stream would keep those of other streams waiting behind it.
        try:
            self._awaited = self._streams.pool.passed(event)
        except KVStreamError as error:
            self._streams.fail(self.key, error)
        else:
            self._awaited.add_done_callback(lambda passed: self._event_passed(passed, layer, start, stop))

    def _event_passed(self, passed: Completion, layer: int, start: int, stop: int) -> None:
        self._awaited = None
        self._passed.set()
        if self.ended:
            return
        error = passed.error()
        if error is not None:
            self._streams.fail(self.key, error)
            return
        self._mark(layer, start, stop, self._streams.clock())
        self._drain()

    async def route_again(self, exclude: Collection[str]) -> Sequence[str]:
        """Ask the policy for further destinations. Raises as it does, and Refused when there are none in time."""
        return [] if self._route_again is None else await self._route_again(exclude)

    @property
    def epochs(self) -> tuple[StreamEpoch, ...]:
        """The destinations that have had the stream and lost it, oldest first; the present one is not among them."""
        return tuple(self._left)

    def _epochs(self) -> tuple[StreamEpoch, ...]:
        assert self._end is not None
        return (*self._left, self._close_epoch(self._epoch, self._peer, "done", ""))

    def _close_epoch(self, epoch: int, peer: str, why: str, text: str) -> StreamEpoch:
        ended = self._end_time or self._streams.clock()
        return StreamEpoch(
            epoch=epoch, peer=peer, began=self._accepted, ended=ended, why=why, text=text, resent=self._resent
        )

    def on_accepted(self, command: Accepted, lane: str) -> None:
        super().on_accepted(command, lane)
        self._resent = command.resent

    def on_rerouted(self, command: Rerouted) -> None:
        """For Streams: a destination has lost the stream."""
        error = command.error
        self._left.append(self._close_epoch(command.epoch, command.peer, error.code, str(error)))

    def on_ended(self, command: Ended) -> None:
        super().on_ended(command)
        self._marks.clear()
        self._passed.set()

    def _mark(self, layer: int, start: int, stop: int, when: float) -> None:
        if stop == self._tokens:
            self._layer_times[layer] = when
        self._streams.layer_ready(self.key, layer, start, stop)


class ReceiveStream(_Stream):
    """The destination's end of a stream. Use it as an async context manager: leaving it early cancels the stream.

    Iterating yields each layer's index once, in ascending order, as soon as all its bytes are in place; the iteration
    ends after the last layer and raises what ended the stream when it fails before.
    """

    def __init__(
        self, streams: Streams, name: str, ids: BlockIds, tokens: int, first_token: int, deadline: float
    ) -> None:
        super().__init__(streams, name, ids, tokens)
        self.claimed: BlockIds = ids[:0]
        """The blocks that this stream writes, while it is live."""
        self.idle_after = streams.pool.mark()
        """On a GPU: an event behind what was issued on the device when the blocks were handed over."""
        self.layer_events: list[Any] = [None] * len(self._layer_times)
        self._first_token = first_token
        self._deadline = deadline
        self._arrived = [False] * len(self._layer_times)
        self._upto = 0
        self._progress = asyncio.Event()
        self._thread_progress = threading.Condition()

    async def __aenter__(self) -> Self:
        self._enter()
        if self.key == 0:
            self._streams.open_receive(self, self._first_token, self._deadline)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ended:
            return
        if error is not None or self._upto < len(self._arrived):
            self.cancel("left before its end" if error is None else f"its user failed: {type(error).__name__}")
            await self._until_ended()
            return
        try:
            await self._report()
        finally:
            if not self.ended:
                self.cancel("its user was cancelled while it waited for the end")
                await self._until_ended()

    async def _until_ended(self) -> None:
        """Also when cancelled, which takes effect afterwards: who has left the context may use the blocks for something
        else, so nothing may be on its way into them. Copies bounds it, but on a GPU, whose copies can't be stopped."""
        cancelled: asyncio.CancelledError | None = None
        while not self.ended:
            try:
                await self._ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    @property
    def payload(self) -> Any:
        """What the source gave to `done`; None before the end. ProtocolError when the source sent garbage."""
        return None if self._end is None else wire.decode_payload(self._end.payload)

    @property
    def layers_arrived(self) -> int:
        """How many layers are whole, from layer 0 on without a gap."""
        return self._upto

    def __aiter__(self) -> AsyncIterator[int]:
        return self._layers()

    async def _layers(self) -> AsyncIterator[int]:
        for layer in range(len(self._arrived)):
            await self._until(layer)
            yield layer

    async def _until(self, layer: int) -> None:
        self._check_open("iterating")
        while self._upto <= layer:
            if self._end is not None:
                raise self._end.error or Cancelled(f"stream {self._name}: ended before layer {layer}")
            self._progress.clear()
            await self._progress.wait()

    def wait_layer(self, layer: int, timeout: float) -> None:
        """For the engine's threads: block until `layer` and all before it are in place, at most `timeout` seconds.

        Raises TimeoutError, or what ended the stream; ConfigError on the loop's thread, which it would freeze.
        """
        layer = whole("layer", layer, 0, len(self._arrived) - 1)
        timeout = seconds("timeout", timeout, zero=True)
        if self._streams.is_here:
            raise ConfigError("thread", "wait_layer would block the event loop; there, iterate with `async for`")
        with self._thread_progress:
            arrived = self._thread_progress.wait_for(lambda: self._upto > layer or self._end is not None, timeout)
        if self._upto > layer:
            return
        if not arrived:
            raise TimeoutError(f"stream {self._name}: layer {layer} did not arrive within {timeout} s")
        assert self._end is not None
        raise self._end.error or Cancelled(f"stream {self._name}: ended before layer {layer}")

    def layer_event(self, layer: int) -> Any:
        """On a GPU: the cupy.cuda.Event recorded behind the last scatter into `layer`, which has to have arrived, for
        the engine's stream to wait for (`stream.wait_event`, or cudaStreamWaitEvent with its `ptr`). From any thread.
        Raises ConfigError for a layer that has not arrived yet, and on the CPU, where its arrival is all there is."""
        layer = whole("layer", layer, 0, len(self._arrived) - 1)
        if not self._streams.pool.is_device:
            raise ConfigError("pool", "is on the cpu, which has no events: use wait_layer, or iterate")
        if not self._arrived[layer]:
            raise ConfigError("layer", f"{layer} has not arrived: use wait_layer, or iterate, before layer_event")
        # Where nothing had to move, what came before is all there is.
        return self.layer_events[layer] or self.idle_after

    async def done(self) -> StreamReport:
        """Wait for the end: every byte in place, the source's payload taken over. Raises what ended the stream, with
        `valid_layers` set to those that are whole."""
        self._check_open("done")
        return await self._report()

    def on_arrived(self, layer: int) -> None:
        """For Streams: a layer is whole."""
        self._layer_times[layer] = self._streams.clock()
        with self._thread_progress:
            self._arrived[layer] = True
            while self._upto < len(self._arrived) and self._arrived[self._upto]:
                self._upto += 1
            self._thread_progress.notify_all()
        self._progress.set()

    def on_ended(self, command: Ended) -> None:
        """For Streams: the end."""
        with self._thread_progress:
            super().on_ended(command)
            self._thread_progress.notify_all()
        self._progress.set()


class Offer:
    """A stream that a source offers and nobody has called receive() for. Answer it once: accept or refuse."""

    def __init__(self, streams: Streams, command: Offered) -> None:
        self._streams = streams
        self._id = command.offer
        self._answered = False
        self.accepted: ReceiveStream | None = None
        """What `accept` returned."""
        self.stream = command.stream
        self.peer = command.peer
        """The source, as `instance/rank`."""
        self.tokens = command.tokens
        self.epoch = command.epoch
        self.priority = command.priority
        self.share_class = command.share
        self.deadline = command.deadline
        """What was left of the stream's deadline when the offer was sent, in seconds."""
        self.metadata: Any = wire.decode_payload(command.metadata)

    @property
    def answered(self) -> bool:
        """Whether accept or refuse has been called with success."""
        return self._answered

    def accept(self, blocks: Sequence[int] | npt.NDArray[np.integer[Any]], *, first_token: int = 0) -> ReceiveStream:
        """Take the stream into these blocks. The stream runs whether or not the result is entered as a context.

        Raises ConfigError (the offer stays open) or Refused when it is too late.
        """
        self._check_unanswered()
        stream = self._streams.accept_offer(self, self._id, blocks, first_token)
        self._answered = True
        self.accepted = stream
        return stream

    def refuse(self, reason: str, *, retry_after: float | None = None) -> None:
        """Decline it; the source gets a Refused with this text and goes on to its next candidate, if it has one."""
        self._check_unanswered()
        reason = text("reason", reason, 1000)
        wait = None if retry_after is None else seconds("retry_after", retry_after, zero=True)
        self._streams.refuse_offer(self._id, Refused(reason, wait))
        self._answered = True

    def _check_unanswered(self) -> None:
        self._streams.check_here("answering an offer")
        if self._answered:
            raise ConfigError("offer", f"the offer of {self.stream!r} has been answered already")
