"""An orchestrator in one file: it watches a cluster, routes, drains and reroutes, with nothing but NATS.

It runs next to workers that are there already, on any machine that reaches their NATS server:

    python examples/orchestrator.py                      # watch; move streams away from workers that stall
    python examples/orchestrator.py --retire decode-0    # empty a worker, so that it can be stopped

No KV cache passes through here, and no worker needs it: when it dies, streams go on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Collection

from kvstream import ControlClient, KVStreamError
from kvstream.discovery import Changed, Joined, Left, WorkerRecord
from kvstream.discovery.control import CreditStall


def pick(workers: list[WorkerRecord], without: Collection[str] = ()) -> str | None:
    """Routing: the decode worker with the fewest streams per free block."""
    fit = [
        record
        for record in workers
        if "decode" in record.roles and record.state == "ready" and record.id not in without and record.load.free_blocks
    ]
    best = min(fit, key=lambda record: record.load.streams / record.load.free_blocks, default=None)
    return best.id if best is not None else None


async def watch(control: ControlClient) -> None:
    """Say who comes and goes, and where the next request should go to."""
    async for change in control.watch():
        record = change.record
        if isinstance(change, Left):
            what = f"left ({change.reason})"
        elif isinstance(change, Joined | Changed):
            what = f"{record.state}, {record.load.streams} streams, {record.load.free_blocks} free blocks"
        else:
            what = "suspect"
        print(f"{record.id}: {what}; next request to {pick(await control.workers())}", flush=True)


async def move_away(control: ControlClient, stream: str, worker: str) -> None:
    """Reroute a stream that goes to `worker`. One that can't be moved stays where it is."""
    to = pick(await control.workers(), without={worker})
    if to is None:
        print(f"{stream}: nowhere to go but {worker}", flush=True)
        return
    try:
        await control.reroute(stream, to=to)
    except KVStreamError as error:
        print(f"{stream}: stays on {worker}: {error}", flush=True)
    else:
        print(f"{stream}: from {worker} to {to}", flush=True)


async def relieve(control: ControlClient) -> None:
    """Move streams away from destinations that make no progress."""
    async with control.events("credit-stall") as events:
        async for event in events:
            if isinstance(event, CreditStall) and event.role == "source" and event.stream:
                print(f"{event.peer} has stalled for {event.seconds:.1f} s", flush=True)
                await move_away(control, event.stream, event.peer)


async def retire(control: ControlClient, worker: str, budget: float) -> None:
    """Empty a worker: its streams move to others, or finish there within the budget."""
    worker = (info := await control.info(worker)).name + f"/{info.rank}"
    draining = asyncio.create_task(control.drain(worker, budget))
    for record in await control.streams():
        if record.role == "source" and record.peer == worker:
            await move_away(control, record.stream, worker)
    report = await draining
    print(
        f"{worker} is empty after {report.seconds:.1f} s: {report.finished} streams finished or moved, "
        f"{report.cancelled} cancelled; it can be stopped",
        flush=True,
    )


async def main(nats: str | None, worker: str | None, budget: float) -> None:
    async with await ControlClient.connect(nats) as control:
        watching = [asyncio.create_task(watch(control)), asyncio.create_task(relieve(control))]
        try:
            if worker is not None:
                await retire(control, worker, budget)
            else:
                await asyncio.gather(*watching)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Watch a cluster; route, drain and reroute.")
    parser.add_argument("--nats", metavar="URL", help="default: KVSTREAM_NATS_*, NATS_*, NATS context, kvstream server")
    parser.add_argument("--retire", metavar="WORKER", help="empty this worker and end")
    parser.add_argument("--budget", type=float, default=10.0, metavar="SECONDS", help="for --retire (default: 10)")
    args = parser.parse_args()
    try:
        asyncio.run(main(args.nats, args.retire, args.budget))
    except KeyboardInterrupt:
        pass
    except KVStreamError as error:
        sys.exit(f"orchestrator: {error}")
