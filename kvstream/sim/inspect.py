"""What a simulation looks at in a runtime from the inside, to check what no user can see. It changes nothing."""

# pyright: reportPrivateUsage=false
# The one file of the simulator that looks behind the runtime's public face.

from __future__ import annotations

import math

from kvstream.runtime.runtime import Runtime
from kvstream.runtime.sessions import ReceiveStream, SendStream
from kvstream.scheduler.inbound import Phase as InboundPhase
from kvstream.scheduler.outbound import Phase
from kvstream.scheduler.timers import Timer
from kvstream.sim.transport import SimConnection

__all__ = ["end_time", "leftovers", "peers", "slot_faults", "wait_faults"]


def end_time(stream: SendStream | ReceiveStream) -> float:
    """When a stream ended, which its user may hear of later: he may have been busy."""
    return stream._end_time


def slot_faults(runtime: Runtime) -> list[str]:
    """Whether each slot of each outgoing link is free, or in use once. Empty when all is well."""
    streams = runtime._streams_or_none
    if streams is None:
        return []
    found: list[str] = []
    for link in streams.core._shared.links.values():
        if not link.outgoing:
            continue
        used = [slot for stream in link.outbound.values() for _, slot in stream.in_flight]
        used += [ready.slot for stream in link.outbound.values() for ready in stream.staged.values()]
        used += [slot for ending in link.ending.values() for slot in ending.slots]
        used += link.free
        connection = streams.links.connection(link.id)
        at_rest = (
            not link.live
            and not streams.driver._bulk
            and isinstance(connection, SimConnection)
            and not connection.operations
        )
        if (
            len(set(used)) != len(used)
            or not all(0 <= slot < link.slots for slot in used)
            or (at_rest and len(link.free) != link.slots)
        ):
            found.append(f"link to {link.peer}: slots {sorted(used)} of {link.slots} are free or in use")
    return found


def wait_faults(runtime: Runtime) -> list[str]:
    """Waits that nothing will end by itself. Empty when all is well."""
    streams = runtime._streams_or_none
    if streams is None:
        return []
    core = streams.core
    armed = core._shared.timers._live
    waits = [(Timer.OUTBOUND, key) for key in core._source._streams]
    waits += [(Timer.RETRY, key) for key, stream in core._source._streams.items() if stream.phase is Phase.PAUSING]
    waits += [(Timer.INBOUND, key) for key, stream in core._destination._streams.items() if stream.expires < math.inf]
    waits += [
        (Timer.RESUME, key)
        for key, stream in core._destination._streams.items()
        if stream.phase is InboundPhase.SUSPENDED
    ]
    waits += [(Timer.OFFER, offer.id) for offer in core._destination._offers]
    waits += [(Timer.BEAT, link.id) for link in core._shared.links.values() if link.live]
    return [f"{kind.value} {ref} has no bound" for kind, ref in waits if (kind, ref) not in armed]


def leftovers(runtime: Runtime) -> list[str]:
    """What a runtime without any stream still holds on to. Empty when all is well."""
    streams = runtime._streams_or_none
    if streams is None:
        return []
    core = streams.core
    found: list[str] = []
    if not core.idle:
        found.append("the scheduler is not idle")
    if core.slots_in_use:
        found.append(f"{core.slots_in_use} slots are in use")
    if streams._sessions:
        found.append(f"{len(streams._sessions)} sessions are left")
    if streams._written.any():
        found.append("blocks are still claimed by streams that write")
    if streams._offer_tasks:
        found.append(f"{len(streams._offer_tasks)} offer handlers are running")
    if streams._route_tasks:
        found.append(f"{len(streams._route_tasks)} routing policies are being asked")
    if core.counters.protocol_errors or streams.links.frames_refused:
        found.append(f"{core.counters.protocol_errors + streams.links.frames_refused} protocol errors were counted")
    for link in streams.links._links.values():
        connection = link.connection
        if isinstance(connection, SimConnection) and connection.lost:
            found.append(f"the connection with {link.peer} is lost, and not closed")
    return found


def peers(runtime: Runtime) -> dict[str, str]:
    """The incarnation of each worker that the runtime's registry knows."""
    return {record.id: record.incarnation for record in runtime.registry.records()}
