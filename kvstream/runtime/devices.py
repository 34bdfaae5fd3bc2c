"""From GPU to GPU: whether the bytes of a connection can stay on the devices, and the staging that they go through.

Owns the slab of device staging of one runtime, which connection has which slots of it, and the proof: the destination
reads a sample out of the source's slab into its own and compares. What fails there is no fault, the bytes then go by
way of the host. It must never give slots back before their connection is fenced, and never wait for the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstream.config import RuntimeConfig
from kvstream.errors import KVStreamError
from kvstream.log import get_logger
from kvstream.memory import KVPool, StagingLease, StagingSlab
from kvstream.memory.completion import Completion
from kvstream.runtime.reports import DevicePath
from kvstream.transport.base import Connection, DeviceOffer, DeviceStaging, Lane, Slab, Transport

__all__ = ["Devices"]

_SAMPLE_BYTES = 64
_PROOF_SECONDS = 1.0
"""Bound on the proof. The first look at a peer's memory maps all of it, which takes milliseconds."""

_log = get_logger("devices")


class Devices:
    """For a pool on the CPU, or one whose lanes don't include `get`, there is nothing here, and nothing is offered."""

    def __init__(self, pool: KVPool, config: RuntimeConfig, lanes: Sequence[Lane]) -> None:
        self._pool = pool
        self._config = config
        self._lanes = lanes
        self._slot_bytes = max(config.device_slot_bytes, pool.layout.block_bytes)
        self._slab: StagingSlab | None = None
        self._none = "its pool is on the cpu"
        """Why there is no slab."""
        self._leases: dict[Connection, StagingLease] = {}
        self._refused: dict[Connection, str] = {}
        """Connections that might have gone from GPU to GPU, and why they do not."""
        self._timeout = min(_PROOF_SECONDS, config.connect_timeout / 2)

    def attach(self, transport: Transport, slabs: Sequence[Slab], token: Callable[[int], bytes]) -> None:
        """For a pool on a GPU, before the transport starts: take the staging, and have the transport use it, and lend
        out of `slabs`, where the pool's blocks are. Never raises for want of it."""
        config = self._config
        if "get" not in self._lanes:
            self._none = "lane get is not allowed"
            return
        if config.checksums:
            self._none = "with checksums every byte goes by way of the host"
            return
        if config.device_staging <= _SAMPLE_BYTES:
            self._none = "there is none (device_staging)"
            return
        try:
            slab = self._pool.staging(config.device_staging, token(_SAMPLE_BYTES))
        except KVStreamError as error:
            self._none = f"no staging on the device: {error}"
            _log.warning("no staging on the device: all bytes go by way of the host", why=str(error))
            return
        memory = slab.memory
        exposed = Slab(memory.address, memory.nbytes, memory.array, slab.is_gpu)
        if transport.attach_device(DeviceStaging(exposed, slab.sample, self._pool.current)):
            self._slab = slab
            transport.expose([blocks._replace(gpu=slab.is_gpu) for blocks in slabs])
        else:
            self._none = f"the transport {transport.name} does not read the memory of GPUs"

    @property
    def used(self) -> int:
        """Bytes of staging that connections have."""
        return self._slab.used if self._slab is not None else 0

    @property
    def limit(self) -> int:
        """Bytes of staging there are."""
        return self._slab.limit if self._slab is not None else 0

    def lease(self, connection: Connection) -> StagingLease | None:
        """The staging of a connection whose bytes stay on the devices; None for any other."""
        return self._leases.get(connection) if connection.lends_device else None

    def path(self, connection: Connection, peer: str) -> DevicePath | None:
        """What has come of a connection; None where nothing was offered."""
        why = self._refused.get(connection)
        if why is None and not connection.lends_device:
            return None
        return DevicePath(peer=peer, outgoing=connection.dialed, used=connection.lends_device, why=why or "")

    # ------------------------------------------------------------------ source

    def offer(self, connection: Connection, slots: int) -> None:
        """Before `offer_lanes`."""
        if self._slab is None:
            return
        if self._take(connection, slots, self._slot_bytes) is None:
            self._refuse(connection, self._full(slots, self._slot_bytes))
        else:
            connection.offer_device(self._slot_bytes)

    # ------------------------------------------------------------------ destination

    async def prove(self, connection: Connection, offer: bytes) -> None:
        """Before `accept_lane`: settle whether bytes can come from GPU to GPU. Raises ProtocolError for garbage.
        When it is cancelled the connection has to be closed, which ends what is under way."""
        offered = connection.device_offered(offer)
        if offered is None:
            return
        why = offered.why or self._unfit(offered)
        if not why:
            why = await self._try(connection, offer, offered)
        connection.settle_device(why)
        if why:
            self._refuse(connection, why)
            self._drop_lease(connection)

    def _unfit(self, offered: DeviceOffer) -> str:
        if self._slab is None:
            return self._none
        least = max(self._pool.layout.block_bytes, len(offered.sample))
        if offered.slot_bytes < least:
            return f"its slots have {offered.slot_bytes} bytes, it takes {least}"
        return ""

    async def _try(self, connection: Connection, offer: bytes, offered: DeviceOffer) -> str:
        """Why it does not work, or ""."""
        lease = self._take(connection, offered.slots, offered.slot_bytes)
        if lease is None:
            return self._full(offered.slots, offered.slot_bytes)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._compare(connection, offer, offered.sample, lease)
        except TimeoutError:
            return f"nothing came of reading a sample within {self._timeout:g} s"
        except KVStreamError as error:
            return str(error)

    async def _compare(self, connection: Connection, offer: bytes, sample: bytes, lease: StagingLease) -> str:
        staged = lease.slot(0, len(sample))
        # The sample may be there already, from the connection before.
        await _copied(lease, self._pool.store(staged, bytes(byte ^ 0xFF for byte in sample)))
        reading = connection.try_device(offer, staged.address)
        lease.begin()
        reading.add_done_callback(lambda _: lease.over())
        await asyncio.shield(reading)
        fetched, found = self._pool.fetch(staged)
        await _copied(lease, fetched)
        return "" if found.tobytes() == sample else "what was read is not the peer's memory"

    # ------------------------------------------------------------------ both

    def opened(self, connection: Connection) -> None:
        """The lane is set."""
        if connection.lends_device:
            _log.info("bytes stay on the devices", peer=connection.peer_address)
            return
        self._drop_lease(connection)
        if connection.no_device:
            self._refuse(connection, connection.no_device)

    def _take(self, connection: Connection, slots: int, slot_bytes: int) -> StagingLease | None:
        lease = self._slab.lease(slots, slot_bytes) if self._slab is not None else None
        if lease is not None:
            self._leases[connection] = lease
            connection.when_fenced(lambda: self._fenced(connection))
        return lease

    def _drop_lease(self, connection: Connection) -> None:
        """Staging that is not used after all goes back: a sample that is still being read counts as a copy."""
        lease = self._leases.pop(connection, None)
        if lease is not None:
            lease.end()

    def _full(self, slots: int, slot_bytes: int) -> str:
        return f"no {slots} slots of {slot_bytes} bytes left of {self.limit} (device_staging)"

    def _refuse(self, connection: Connection, why: str) -> None:
        if connection not in self._refused:
            _log.info("bytes go by way of the host", peer=connection.peer_address, why=why)
            self._refused[connection] = why
            connection.when_fenced(lambda: self._fenced(connection))

    def _fenced(self, connection: Connection) -> None:
        self._refused.pop(connection, None)
        self._drop_lease(connection)


async def _copied(lease: StagingLease, copy: Completion) -> None:
    """Wait for a copy of the device that uses a slot of the lease."""
    lease.begin()
    copy.add_done_callback(lambda _: lease.over())
    await copy
