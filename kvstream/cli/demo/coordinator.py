"""Runs the demo: a NATS server, one prefill and two decode workers, and the prompts, one after the other.

Owns the course of events and its time limit. It computes nothing and holds no KV cache; it hears from the workers, and
it ends with a clear error as soon as one of them dies.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final, TypeVar

import msgspec

from kvstream.cli.demo import engine as example
from kvstream.cli.demo.children import Child, DemoError, describe_end
from kvstream.cli.demo.display import Display
from kvstream.cli.demo.messages import (
    Arrived,
    Baseline,
    Baselined,
    Decoded,
    Failed,
    FirstToken,
    LaneChoice,
    Prefill,
    Prefilled,
    Ready,
    Setup,
    WorkerMessage,
)
from kvstream.cli.demo.picture import Pipeline
from kvstream.cli.demo.report import DemoReport, PromptReport, make_pipeline, measure
from kvstream.discovery import EmbeddedServer

__all__ = ["Options", "Result", "Terminated", "run_demo"]

T = TypeVar("T", bound=WorkerMessage)

PREFILL: Final = "prefill-0"
DECODE: Final = ("decode-0", "decode-1")

BLAS_THREADS: Final = 1
"""Of each worker. The same everywhere, since it decides the order of summation and with it the last bit of a token's
score; and one, since the BLAS's own threads spin while they wait, which starves the event loops on few cores."""

WARM_UP: Final = "Name three rivers and three mountains of Europe, and say which of them are the longest and highest."

LAST_WORDS: Final = 1.0
"""How long a worker's error waits for news of a death that explains it, in seconds."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user chose."""

    model: example.ModelName
    lane: LaneChoice
    dtype: str
    new_tokens: int
    timeout: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, and the longest prompt's stream as a picture needs it."""

    report: DemoReport
    pipeline: Pipeline


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, as KeyboardInterrupt is none: nobody on the way may take it for a failure."""


async def run_demo(options: Options, display: Display) -> Result:
    """The demo, from start to end; afterwards no process of it is left, whatever happened.

    Raises DemoError when a worker dies or fails or the time is over, Terminated after SIGTERM, and what the server
    raises when it can't start.
    """
    task = asyncio.current_task()
    assert task is not None
    terminated = False

    def on_sigterm() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    demo = _Demo(options, display)
    try:
        async with asyncio.timeout(options.timeout):
            return await demo.run()
    except TimeoutError:
        raise DemoError(
            f"not finished within {options.timeout:g} s (while {demo.doing}); give it more with --timeout"
        ) from None
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class _Demo:
    def __init__(self, options: Options, display: Display) -> None:
        self._options = options
        self._display = display
        self._children: dict[str, Child] = {}
        self._expected: dict[tuple[str, type[WorkerMessage]], asyncio.Future[WorkerMessage]] = {}
        self._failed: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self.doing = "starting"

    async def run(self) -> Result:
        prompts = await asyncio.to_thread(example.prompts)
        self._stage("starting a NATS server")
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(EmbeddedServer())
            for name in (PREFILL, *DECODE):
                child = Child(
                    Setup(
                        name=name,
                        role="prefill" if name == PREFILL else "decode",
                        model=self._options.model,
                        dtype=self._options.dtype,
                        lane=self._options.lane,
                        new_tokens=self._options.new_tokens,
                    ),
                    nats_url=server.url,
                    blas_threads=BLAS_THREADS,
                    on_message=self._on_message,
                    on_stderr=self._on_stderr,
                )
                self._children[name] = await stack.enter_async_context(child)
                stack.callback(self._leave)
            return await self._watched(prompts, server)

    def _leave(self) -> None:
        """Ask all of them at once: they leave side by side, and the stack then waits for one after the other."""
        for child in self._children.values():
            child.leave()

    async def _watched(self, prompts: Mapping[str, str], server: EmbeddedServer) -> Result:
        """The course of events, cut short as soon as a process dies or a worker says that it failed."""
        course = asyncio.create_task(self._course(prompts), name="demo")
        server_ended = asyncio.create_task(server.wait(), name="NATS server")
        deaths = [*(child.ended for child in self._children.values()), server_ended]
        try:
            await asyncio.wait([course, self._failed, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if course.done():
                return course.result()
            if self._failed.done() and not any(death.done() for death in deaths):
                await asyncio.wait(deaths, timeout=LAST_WORDS, return_when=asyncio.FIRST_COMPLETED)
            if server_ended.done():
                raise DemoError(f"the NATS server ended while {self.doing}")
            raise self._explain()
        finally:
            course.cancel()
            server_ended.cancel()
            await asyncio.wait([course, server_ended])

    def _explain(self) -> DemoError:
        """A death that nobody announced comes first: what other workers say then is its consequence."""
        author, text = self._failed.result() if self._failed.done() else ("", "")
        for name, child in self._children.items():
            if child.ended.done() and name != author:
                return DemoError(f"{describe_end(name, child.ended.result())} while {self.doing}")
        return DemoError(f"{author} failed while {self.doing}: {text}")

    async def _course(self, prompts: Mapping[str, str]) -> Result:
        self._stage(f"loading the model {self._options.model} in three processes")
        began = time.monotonic()
        ready = await asyncio.gather(*(self._expect(name, Ready) for name in self._children))
        self._display.note(f"{', '.join(self._children)}: ready after {time.monotonic() - began:.1f} s")
        # Connections are opened and code paths run for the first time: that is not what the figures are about.
        for worker in DECODE:
            await self._streamed(f"warm-up-{worker}", WARM_UP, worker)
        results: list[tuple[PromptReport, Pipeline]] = []
        # Two by name, and from there on whichever the default policy chooses.
        destinations: list[str | None] = [*DECODE, *(None for _ in prompts)]
        for (name, text), to in zip(prompts.items(), destinations, strict=False):
            self._display.begin(name, ready[0].layers)
            results.append(await self._prompt(name, text, to))
        reports = tuple(report for report, _ in results)
        return Result(
            report=DemoReport(
                model=self._options.model,
                identical=all(report.identical and report.kv_identical for report in reports),
                prompts=reports,
            ),
            pipeline=max((pipeline for _, pipeline in results), key=lambda pipeline: pipeline.tokens),
        )

    async def _prompt(self, name: str, text: str, to: str | None) -> tuple[PromptReport, Pipeline]:
        worker, display = self._children[PREFILL], self._display
        self._step(name, f"{PREFILL} → {to or 'the least loaded decode worker'}")
        asked = time.monotonic()
        prefilled, decoded = await self._streamed(name, text, to)
        display.arrived(name, len(decoded.arrived))
        self._step(name, f"once more in {PREFILL} alone, to compare")
        baseline_asked = time.monotonic()
        worker.send(Baseline(stream=name, text=text))
        baselined = await self._expect(name, Baselined)
        report = measure(name, prefilled, decoded, baselined, asked=asked, baseline_asked=baseline_asked)
        same = "identical" if report.identical and report.kv_identical else "NOT identical"
        display.state(name, f"{report.tokens} tokens → {report.destination}, {report.lane}, {same}")
        return report, make_pipeline(self._options.model, report, prefilled, decoded)

    async def _streamed(self, stream: str, text: str, to: str | None) -> tuple[Prefilled, Decoded]:
        """Prefilled in one process, decoded in another."""
        self._children[PREFILL].send(Prefill(stream=stream, text=text, to=to, deadline=self._options.timeout))
        return await asyncio.gather(self._expect(stream, Prefilled), self._expect(stream, Decoded))

    # -- news

    async def _expect(self, key: str, kind: type[T]) -> T:
        """The message of this kind about a stream, or from a worker where it names none. It may have come already."""
        future = self._future(key, kind)
        try:
            message = await future
        finally:
            del self._expected[key, kind]
        assert isinstance(message, kind)
        return message

    def _future(self, key: str, kind: type[WorkerMessage]) -> asyncio.Future[WorkerMessage]:
        if (key, kind) not in self._expected:
            self._expected[key, kind] = asyncio.get_running_loop().create_future()
        return self._expected[key, kind]

    def _on_message(self, worker: str, message: WorkerMessage) -> None:
        if isinstance(message, Failed):
            if not self._failed.done():
                self._failed.set_result((worker, message.error))
        elif isinstance(message, Arrived):
            self._display.arrived(message.stream, message.layers)
        elif isinstance(message, FirstToken):
            self._step(message.stream, f"{worker} generates")
        else:
            key = worker if isinstance(message, Ready) else message.stream
            future = self._future(key, type(message))
            if not future.done():
                future.set_result(message)

    def _on_stderr(self, worker: str, line: str) -> None:
        self._display.note(f"{worker}: {line}")

    def _stage(self, text: str) -> None:
        self.doing = text
        self._display.stage(text)

    def _step(self, prompt: str, text: str) -> None:
        self.doing = f"{prompt}: {text}"
        self._display.state(prompt, text)
