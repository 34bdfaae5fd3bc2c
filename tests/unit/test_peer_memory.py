"""Reads of another process's memory, tried on this process itself: whatever the tables, these bytes and no others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.transport import _host
from kvstream.transport._host import PeerMemory

BLOCKS = 64


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerMemory]:
    # The kernel lets every process read itself: no rights are needed, and nothing is skipped.
    memory = PeerMemory(os.getpid())
    yield memory
    memory.close()


def table(data: st.DataObject, count: int, name: str) -> npt.NDArray[np.uint64]:
    """Blocks in an order of some kind: stretches, descending, shuffled."""
    kind = data.draw(st.sampled_from(("from the start", "descending", "shuffled", "stretches")), label=name)
    ids = np.arange(BLOCKS)
    if kind == "descending":
        ids = ids[::-1]
    elif kind == "shuffled":
        ids = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(BLOCKS)
    elif kind == "stretches":
        ids = np.concatenate([ids[20:40], ids[:10], ids[50:], ids[10:20], ids[40:50]])
    return ids[:count].astype(np.uint64)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data())
def test_every_byte_comes_from_and_goes_where_the_tables_say(peer: PeerMemory, data: st.DataObject) -> None:
    run = data.draw(st.sampled_from((64, 192)))
    parts = data.draw(st.sampled_from((1, 2, 4)))  # runs of one block on that side which has it in pieces
    count = data.draw(st.integers(1, BLOCKS))
    source = np.random.default_rng(1).integers(0, 256, (BLOCKS, parts * run), np.uint8)
    target = np.zeros_like(source)
    theirs, ours = table(data, count, "theirs"), table(data, count, "ours")
    remote, local = (
        ids * np.uint64(parts * run) + np.uint64(memory.ctypes.data)
        for ids, memory in ((theirs, source), (ours, target))
    )
    remote_run = local_run = parts * run
    cut = data.draw(st.sampled_from(("neither", "remote", "local")))
    steps = np.arange(0, parts * run, run, dtype=np.uint64)
    if cut == "remote":
        remote, remote_run = (remote[:, None] + steps).ravel(), run
    elif cut == "local":
        local, local_run = (local[:, None] + steps).ravel(), run
    limit = data.draw(st.sampled_from((1, 7, 1024)))
    peer._MAX_RUNS = limit  # type: ignore[misc]
    peer.read(remote, remote_run, local, local_run)
    expected = np.zeros_like(source)
    expected[ours.astype(np.intp)] = source[theirs.astype(np.intp)]
    assert np.array_equal(target, expected)


def test_neighbours_are_one_run() -> None:
    runs = np.array([4096, 8192, 12288, 20480, 16384, 24576], np.uint64)
    assert _host._vectors(runs, 4096).tolist() == [[4096, 12288], [20480, 4096], [16384, 4096], [24576, 4096]]
    assert _host._vectors(runs[:1], 4096).tolist() == [[4096, 4096]]
