"""The parts of `kvstream bench` that need no peer: sizes, shapes of pools, and what it advises."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstream import ConfigError
from kvstream.cli.bench import _count, _size, add_arguments
from kvstream.cli.bench.protocol import CONCURRENT, LAYERS, MAX_BLOCK_BYTES, Shape, digest
from kvstream.cli.bench.report import Link, Row, Times, advice, judge_host, judge_network, link_lines, row_line

TIMES = Times(count=5, median=60.0, p99=90.0, max=95.0)
LINK = Link(
    to="bob/0",
    host="b\x1b[31m",
    same_host=True,
    lane="shared",
    direct_reads=True,
    transports="shared memory and direct reads, tcp/lo",
    first_byte_ms=TIMES,
    round_trip_us=TIMES,
)


def link(**changes: Any) -> Link:
    return msgspec.structs.replace(LINK, **changes)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("4K", 4096), ("4KiB", 4096), ("256MiB", 256 << 20), ("1G", 1 << 30)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert _size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "4KB", "-4K", "4.5K", "K", "4 TiB", "٤K", "9" * 13])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        _size(text)


@pytest.mark.parametrize("text", ["0", "1001", "x", "-1", "²"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        _count(text)


@pytest.mark.parametrize("line", [[], ["--to", "a", "--serve", "b"], ["--to", "a", "--block-bytes", "4KB"]])
def test_arguments_that_do_not_go_together(line: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(line)


@pytest.mark.parametrize("block_bytes", [64, 4096, 1 << 20, MAX_BLOCK_BYTES])
@pytest.mark.parametrize("blocks", [4, 5, 16, 63, 64, 65, 1000])
def test_a_shape_fits_and_divides_among_the_streams(block_bytes: int, blocks: int) -> None:
    nbytes = block_bytes * blocks
    shape = Shape.fit(block_bytes, nbytes)
    assert shape.nbytes <= nbytes
    assert shape.nbytes > nbytes - CONCURRENT * shape.layers * block_bytes
    assert shape.blocks >= CONCURRENT
    assert shape.blocks % CONCURRENT == 0
    assert 1 <= shape.layers <= LAYERS
    assert shape.layout.block_bytes == block_bytes
    assert sorted(shape.table(3)) == list(range(shape.blocks))


@pytest.mark.parametrize(
    ("block_bytes", "nbytes", "field"),
    [(4096, 3 * 4096, "--bytes"), (65, 1 << 20, "--block-bytes"), (MAX_BLOCK_BYTES * 2, 1 << 30, "--block-bytes")],
)
def test_a_shape_that_can_not_be(block_bytes: int, nbytes: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Shape.fit(block_bytes, nbytes)
    assert caught.value.field == field


def test_the_pool_is_the_slab_and_the_digest_that_of_its_blocks_in_order() -> None:
    shape = Shape.fit(64, 64 * 8)
    slab = np.arange(1024, dtype=np.uint32).view(np.uint8)
    pool = shape.pool(slab)
    pool.layer(shape.layers - 1).view(np.uint8)[...] = 0
    assert not slab[: shape.nbytes][-shape.block_bytes * shape.blocks :].any()
    assert slab[shape.nbytes :].any()
    table = np.arange(shape.blocks)
    before = digest(pool, table)
    assert digest(pool, table[::-1]) != before
    pool.layer(0).view(np.uint8).reshape(-1)[5] ^= 1
    assert digest(pool, table) != before


def test_nothing_is_advised_where_nothing_can_be_better() -> None:
    assert judge_host(LINK, None) == []
    assert judge_host(link(same_host=False, lane="put", direct_reads=False), None) == []


def test_a_slow_lane_on_one_host_is_explained_unless_it_was_asked_for() -> None:
    (check,) = judge_host(link(lane="put", direct_reads=False), None)
    assert "the lane is put" in check.found
    assert "one PID namespace" in check.remedy
    assert judge_host(link(lane="put", direct_reads=False), "put") == []


def test_two_copies_on_one_host_are_explained() -> None:
    (check,) = judge_host(link(direct_reads=False), None)
    assert check.name == "direct reads"
    assert check.remedy


def test_slow_messages_are_explained() -> None:
    (check,) = judge_host(link(round_trip_us=Times(5, 5000.0, 9000.0, 9000.0)), None)
    assert check.name == "round trip"
    assert "5000 us" in advice([check])
    assert "-> " in advice([check])
    assert judge_host(link(same_host=False, round_trip_us=Times(5, 5000.0, 9000.0, 9000.0)), None) == []


async def test_one_host_needs_no_network() -> None:
    assert await judge_network(LINK, None) == []
    assert await judge_network(link(same_host=False, lane="get"), None) == []


def test_text_holds_nothing_that_a_terminal_obeys() -> None:
    assert "\x1b" not in link_lines(link(same_host=False))
    assert "b?[31m" in link_lines(link(same_host=False))


def test_a_row_names_its_block_and_both_rates() -> None:
    line = row_line(Row(block_bytes=4096, nbytes=1, rounds=1, gbps=1.0, concurrent_gbps=2.0))
    assert " ".join(line.split()) == "4 KiB 1.00 GB/s 2.00 GB/s"
