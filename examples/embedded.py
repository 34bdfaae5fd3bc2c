"""The smallest program on kvstream: two processes, one KV cache, moved layer by layer while it is being "computed".

Run it: `python examples/embedded.py`. It starts a NATS server of its own and a decode worker in a second process, and
sends one prompt's KV cache from here, whose layers become ready one after the other; the decode worker prints each
layer as it arrives and compares a checksum of all bytes with that of the source.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys

import numpy as np

import kvstream
from kvstream.discovery import EmbeddedServer

LAYOUT = kvstream.KVLayout(layers=8, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
TOKENS = 100


def checksum(pool: kvstream.KVPool, blocks: list[int]) -> str:
    """Of the blocks of every layer, in table order."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in range(LAYOUT.layers):
        digest.update(pool.layer(layer)[blocks].tobytes())
    return digest.hexdigest()


async def prefill() -> None:
    """Compute a layer, report it ready, go on: the transfer runs beside the computation."""
    pool = kvstream.KVPool.allocate(LAYOUT, blocks=64)
    blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
    rng = np.random.default_rng()

    def compute(tx: kvstream.SendStream) -> None:  # on a thread, as an engine computes: never on the event loop
        for layer in range(LAYOUT.layers):
            cache = pool.layer(layer)
            cache[blocks] = rng.standard_normal((len(blocks), *LAYOUT.block_shape), np.float32).astype(cache.dtype)
            tx.layer_ready(layer)

    async with kvstream.Runtime("prefill-0", roles={"prefill"}, pool=pool) as rt:
        await rt.registry.wait_for("decode-0", timeout=30)  # it starts at the same time
        async with rt.send("request-1", blocks=blocks, tokens=TOKENS, to="decode-0", deadline=30) as tx:
            await asyncio.to_thread(compute, tx)
            report = await tx.done(payload={"first_token": 42, "checksum": checksum(pool, blocks)})
    print(f"prefill: {report.bytes} bytes to {report.peer} through the {report.lane} lane")


async def decode() -> None:
    """Take the layers as they come."""
    pool = kvstream.KVPool.allocate(LAYOUT, blocks=64)
    blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))[::-1]
    async with kvstream.Runtime("decode-0", roles={"decode"}, pool=pool) as rt:
        async with rt.receive("request-1", blocks=blocks, tokens=TOKENS, deadline=30) as rx:
            async for layer in rx:
                print(f"decode: layer {layer} is in place")
            await rx.done()
    same = checksum(pool, blocks) == rx.payload["checksum"]
    print(f"decode: first token {rx.payload['first_token']}, bytes {'identical' if same else 'DIFFER'}")
    sys.exit(0 if same else 1)


async def main() -> int:
    """The decode worker is a child process; credentials reach it through the environment, not its command line."""
    async with EmbeddedServer() as server:
        os.environ["KVSTREAM_NATS_URL"] = server.url
        child = await asyncio.create_subprocess_exec(sys.executable, __file__, "decode")
        try:
            await prefill()
            return await asyncio.wait_for(child.wait(), 30)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["decode"]:
        asyncio.run(decode())
    else:
        sys.exit(asyncio.run(main()))
