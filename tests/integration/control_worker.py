"""A worker in a process of its own for the tests of control: `python -m tests.integration.control_worker NAME [TO]`.

It takes whatever it is offered; with TO it also keeps one stream to that worker alive, a layer each 50 ms and never the
last one. NATS comes from the environment. Prints "ready" once it is registered, and ends with SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from kvstream import KVLayout, KVPool, KVStreamError, Offer, Runtime
from kvstream.cli.loop import until_signalled

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")


async def serve(name: str, to: str | None) -> None:
    pool = KVPool.allocate(LAYOUT, blocks=64)
    role = "decode" if to is None else "prefill"
    async with Runtime(name, roles={role}, pool=pool) as runtime:

        @runtime.on_offer
        async def _(offer: Offer) -> None:
            blocks = pool.acquire(LAYOUT.blocks_for(offer.tokens))
            try:
                async with offer.accept(blocks=blocks) as rx:
                    await rx.done()
            except KVStreamError:
                pass
            finally:
                pool.release(blocks)

        print("ready", flush=True)
        if to is None:
            await asyncio.Event().wait()
        with suppress(KVStreamError):
            async with runtime.send("r-1", blocks=[1, 2], tokens=8, to=to) as tx:
                for layer in range(LAYOUT.layers - 1):
                    tx.layer_ready(layer)
                    await asyncio.sleep(0.05)
                await tx._report()
        await asyncio.Event().wait()


async def main() -> None:
    await until_signalled(serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))


if __name__ == "__main__":
    asyncio.run(main())
