"""`KVPool`: one worker's paged KV memory, its own or an engine's, and the way of KV blocks in and out of it.

The pool checks every block id, layer and size itself before a byte moves, whoever calls. It never copies an
engine's memory to own it, never resizes it, and keeps no queue: a call moves what it is given, then returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from kvstream.errors import ConfigError, Corrupted, LayoutMismatch
from kvstream.layout import KVLayout
from kvstream.memory.arrays import ArrayOps, LayerMemory, Region, Staged, describe, disjoint, self_overlapping
from kvstream.memory.blocks import MAX_BLOCKS, BlockAllocator, BlockIds, block_table
from kvstream.memory.completion import COMPLETED, Completion
from kvstream.memory.cuda import event_handle
from kvstream.memory.devices import open_device
from kvstream.memory.plan import BlockPlan, TableIds
from kvstream.memory.staging import StagingSlab

__all__ = ["KVPool"]


class KVPool:
    """Paged KV memory: for each layer of `layout`, the same number of KV blocks, on one device.

    Made by `allocate` or `wrap`. Blocks travel in the wire form, whatever the memory's strides: the bytes of an
    array of shape (n, *layout.block_shape) in C order, blocks in the order of the block table.

    Not thread-safe, with one exception: `pack` and `unpack` of different blocks may run at the same time.

    On a GPU copies run on streams of the pool's own, which wait for no other stream by themselves. `pack` and `unpack`
    come after what the calling thread's current CuPy stream has been given (by default the legacy default stream, with
    which every stream synchronises that is not a non-blocking one), and have ended when they return. `pack_async` and
    `unpack_async` come after the event that they are given, and end later.
    """

    __slots__ = ("_allocator", "_arrays", "_layers", "_layout", "_ops")

    def __init__(
        self,
        layout: KVLayout,
        *,
        blocks: int,
        ops: ArrayOps,
        layers: Sequence[LayerMemory],
        arrays: Sequence[Any],
    ) -> None:
        """For `allocate` and `wrap`: memory that has been checked already."""
        self._layout = layout
        self._ops = ops
        self._layers = tuple(layers)
        self._arrays = tuple(arrays)
        self._allocator = BlockAllocator(blocks)

    @classmethod
    def allocate(cls, layout: KVLayout, *, blocks: int, device: str = "cpu") -> Self:
        """A pool with memory of its own: one zero-filled slab for all layers, layer after layer.

        `device` is "cpu", "cuda" (GPU 0) or "cuda:N"; a GPU needs CuPy. Host memory is touched here once, so this
        takes about 0.1 s per GB. Raises ConfigError naming `device` or `blocks`.
        """
        _check_layout(layout)
        if type(blocks) is not int or not 1 <= blocks <= MAX_BLOCKS:
            raise ConfigError("blocks", f"must be an int from 1 to {MAX_BLOCKS}, not {blocks!r}")
        ops = open_device(device)
        layer_bytes = blocks * layout.block_bytes
        nbytes = layout.layers * layer_bytes
        try:
            slab = ops.zeros(nbytes)
        except (MemoryError, OverflowError, ValueError) as error:  # the last two: too large to be a size at all
            raise ConfigError(
                "blocks", f"{blocks} blocks take {nbytes} bytes, which {ops.device} does not have; take fewer"
            ) from error
        shape = (blocks, *layout.block_shape)
        arrays = [
            ops.typed(slab[layer * layer_bytes : (layer + 1) * layer_bytes], layout.np_dtype, shape)
            for layer in range(layout.layers)
        ]
        layers = [ops.layer([describe(array, f"layer {i}")]) for i, array in enumerate(arrays)]
        return cls(layout, blocks=blocks, ops=ops, layers=layers, arrays=arrays)

    @classmethod
    def wrap(cls, layout: KVLayout, arrays: Sequence[Any]) -> Self:
        """A pool over an engine's own memory, without a copy.

        `arrays` has one entry per layer, shape (blocks, ...): a NumPy, CuPy or torch array, or anything with DLPack,
        an array interface or the buffer protocol, of any strides whose elements don't overlap. With parts="split" an
        entry may also be a pair (k, v), each of shape (blocks, ...). The elements are of the layout's dtype, or raw:
        bytes, or unsigned ints of the dtype's size. The pool keeps the arrays alive; they must not be resized.

        Raises LayoutMismatch where the arrays don't have the layout's layers, blocks, shape or dtype, and
        ConfigError where their memory can't be used: read-only, overlapping, or on several devices.
        """
        _check_layout(layout)
        if not hasattr(arrays, "__len__") or not hasattr(arrays, "__getitem__"):
            raise ConfigError("arrays", f"must be a sequence with one entry per layer, is a {type(arrays).__name__}")
        if len(arrays) != layout.layers:
            raise LayoutMismatch(f"arrays: {len(arrays)} layers given, the layout has {layout.layers}")
        parts = [_parts(layout, layer, array) for layer, array in enumerate(arrays)]
        blocks = parts[0][0].shape[0]
        device = parts[0][0].device
        for layer, regions in enumerate(parts):
            for region in regions:
                if region.shape[0] != blocks:
                    raise LayoutMismatch(f"layer {layer}: {region.shape[0]} blocks, but layer 0 has {blocks}")
                if region.device != device:
                    raise ConfigError("arrays", f"layer {layer} is on {region.device}, but layer 0 is on {device}")
        _check_disjoint(parts)
        ops = open_device(device)
        layers = [ops.layer(regions) for regions in parts]
        return cls(layout, blocks=blocks, ops=ops, layers=layers, arrays=arrays)

    @property
    def layout(self) -> KVLayout:
        """The layout of every block."""
        return self._layout

    @property
    def blocks(self) -> int:
        """Number of KV blocks; their ids are 0 to blocks - 1."""
        return self._allocator.blocks

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return self._ops.device

    @property
    def is_device(self) -> bool:
        """Whether the blocks are on a GPU, so that `pack_async` and `unpack_async` complete later."""
        return self._ops.is_device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self._layout.layers * self.blocks * self._layout.block_bytes

    def layer(self, layer: int) -> Any:
        """The array of one layer.

        Of an allocated pool: shape (blocks, *layout.block_shape), dtype layout.np_dtype (on a GPU unsigned ints of
        the same size for bfloat16 and fp8), a view of the slab. Of a wrapped pool: what was passed to `wrap`.
        """
        return self._arrays[self._check_layer(layer)]

    def plan(self, block_ids: TableIds) -> BlockPlan:
        """Check a part of a block table (n,) once, for all calls here that take block ids. Raises ConfigError."""
        ids = self._check_ids(block_ids)
        return block_ids if isinstance(block_ids, BlockPlan) else BlockPlan(self, ids)

    def pack(self, layer: int, block_ids: TableIds, out: npt.NDArray[np.uint8]) -> int:
        """Gather the blocks `block_ids` (n,) of one layer into the start of `out`, in wire form.

        `out` is flat, contiguous, writable host memory of n * layout.block_bytes bytes or more. Returns the bytes
        written. Runs inline: keep a call to a few MiB on an event loop, and on a GPU use `pack_async` there. Raises
        ConfigError, before any byte moves.
        """
        memory = self._layers[self._check_layer(layer)]
        ids, nbytes = self._check_pack(block_ids, out)
        if nbytes:
            memory.gather(ids, out[:nbytes].reshape(ids.size, -1))
        return nbytes

    def pack_async(
        self,
        layer: int,
        block_ids: TableIds,
        out: npt.NDArray[np.uint8],
        *,
        after: object | None = None,
    ) -> Completion:
        """As `pack`, but on a GPU it only issues the work, behind the event `after` (see `check_event`) if one is
        given: else the caller knows that the blocks are complete. Until the completion `out` is the device's. It should
        be page-locked (`pin`): to other memory the device copies while the caller waits.

        On the CPU the work is done on return. On the event loop's thread. Raises ConfigError, before any byte moves,
        and KVStreamError where the device does not take the work.
        """
        memory = self._layers[self._check_layer(layer)]
        if after is not None:
            self.check_event(after)
        ids, nbytes = self._check_pack(block_ids, out)
        if not nbytes:
            return COMPLETED
        return memory.gather_async(ids, out[:nbytes].reshape(ids.size, -1), after)

    def unpack(self, layer: int, block_ids: TableIds, data: npt.NDArray[np.uint8]) -> None:
        """Scatter `data`, in wire form, into the blocks `block_ids` (n,) of one layer.

        `data` is flat, contiguous host memory of exactly n * layout.block_bytes bytes. Where `block_ids` has
        duplicates (`check_blocks` refuses them), one of the blocks wins. Raises ConfigError for a wrong layer or
        id and Corrupted where the number of bytes is wrong, before any byte moves.
        """
        memory = self._layers[self._check_layer(layer)]
        ids = self._check_unpack(layer, block_ids, data)
        if ids.size:
            memory.scatter(ids, data.reshape(ids.size, -1))

    def unpack_async(
        self,
        layer: int,
        block_ids: TableIds,
        data: npt.NDArray[np.uint8],
        *,
        after: object | None = None,
    ) -> Completion:
        """As `unpack`, but on a GPU it only issues the work, behind the event `after` if one is given: else the caller
        knows that nothing on the device uses the blocks. Until the completion `data` and the blocks are the device's;
        its `event` is recorded behind the work. See `pack_async`."""
        memory = self._layers[self._check_layer(layer)]
        if after is not None:
            self.check_event(after)
        ids = self._check_unpack(layer, block_ids, data)
        if not ids.size:
            return COMPLETED
        return memory.scatter_async(ids, data.reshape(ids.size, -1), after)

    def staging(self, nbytes: int, sample: bytes) -> StagingSlab:
        """New memory on the pool's GPU, an allocation of its own, that other processes can be given; its first bytes
        are `sample`. Waits for the device. Raises KVStreamError where there is none left, or the pool is on the CPU."""
        memory, is_gpu = self._ops.staging(nbytes, sample)
        return StagingSlab(memory, sample, is_gpu=is_gpu)

    def pack_staged(self, layer: int, block_ids: TableIds, out: Staged) -> Completion:
        """As `pack_async`, into `out` of the pool's own device staging, exactly as large as the blocks: one launch.
        Until the completion `out` is the device's. Raises ConfigError, before any byte moves, and KVStreamError."""
        memory = self._layers[self._check_layer(layer)]
        return memory.gather_staged(self._check_staged(block_ids, out), out)

    def unpack_staged(
        self, layer: int, block_ids: TableIds, data: Staged, *, after: object | None = None
    ) -> Completion:
        """As `unpack_async`, out of `data` of the pool's own device staging: one launch. See `pack_staged`."""
        memory = self._layers[self._check_layer(layer)]
        if after is not None:
            self.check_event(after)
        return memory.scatter_staged(self._check_staged(block_ids, data), data, after)

    def store(self, staged: Staged, data: bytes) -> Completion:
        """Fill a few bytes of device staging."""
        return self._ops.store(staged, data)

    def fetch(self, staged: Staged) -> tuple[Completion, npt.NDArray[np.uint8]]:
        """A few bytes of device staging, in host memory that has them after the completion."""
        return self._ops.fetch(staged)

    def current(self) -> AbstractContextManager[object]:
        """The pool's device as the calling thread's current one; nothing on the CPU."""
        return self._ops.current()

    def pin(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Have the device copy from and to host memory without detours: page-lock the whole array that `buffer` is a
        part of, until that array goes. Takes a millisecond for some MiB the first time, and nothing later; nothing on
        the CPU. Where the system does not allow it (it is logged, once) copies work all the same, slower."""
        self._ops.pin(buffer)

    def mark(self) -> object | None:
        """An event behind all that the calling thread's current CuPy stream (by default the legacy default stream) has
        been given so far; None on the CPU. From any thread. Raises KVStreamError where the device has failed."""
        return self._ops.mark()

    def check_event(self, event: object) -> None:
        """Raises ConfigError unless `event` is one that this pool can wait for: a cupy.cuda.Event, a torch.cuda.Event
        or a cudaEvent_t as an int, recorded, of a pool on a GPU."""
        if not self.is_device:
            raise ConfigError("event", "is a GPU's, but the pool is on the cpu: leave it out, and call when it is done")
        event_handle(event)

    def passed(self, event: object) -> Completion:
        """When the device has passed `event`; found out without blocking. On the event loop's thread. Raises as
        `check_event`, and KVStreamError where the device has failed."""
        self.check_event(event)
        return self._ops.passed(event)

    @property
    def run_bytes(self) -> int:
        """The shortest run of memory that any layer's blocks are made of (see `addresses`); 0 where a layer's
        blocks are not made of equal runs."""
        return min((layer.spans.nbytes if layer.spans is not None else 0) for layer in self._layers)

    def addresses(self, layer: int, block_ids: TableIds) -> tuple[npt.NDArray[np.uint64], int] | None:
        """Where the blocks `block_ids` (n,) of one layer are in memory, of the host or the GPU, in wire order: the
        addresses of n * k runs of bytes, and the length of each run, k runs being one block.

        None where blocks are not made of equal runs of memory: with inner strides. Raises ConfigError for a wrong layer
        or id.
        """
        spans = self._layers[self._check_layer(layer)].spans
        if spans is None:
            return None
        return self.plan(block_ids).addresses(spans), spans.nbytes

    def mean_run(self, layer: int, block_ids: TableIds) -> float:
        """Mean length in bytes of the runs that `addresses` gives, neighbours joined; 0 where it gives none."""
        spans = self._layers[self._check_layer(layer)].spans
        return self.plan(block_ids).mean_run(spans) if spans is not None and len(block_ids) else 0

    @property
    def slabs(self) -> list[tuple[int, int]]:
        """The memory within which `addresses` are, as (address, bytes) of each stretch: disjoint, ascending. For who
        registers it as a whole; the pool keeps it alive. A stretch may hold bytes that are no block's."""
        stretches: list[tuple[int, int]] = []
        for low, high in sorted(
            extent for layer in self._layers if layer.spans is not None for extent in layer.spans.extents(self.blocks)
        ):
            # On a GPU what merely touches stays apart: a stretch has to be within one allocation.
            if stretches and low < stretches[-1][1] + (not self.is_device):
                stretches[-1] = (stretches[-1][0], max(stretches[-1][1], high))
            else:
                stretches.append((low, high))
        return [(low, high - low) for low, high in stretches]

    @property
    def shareable(self) -> bool:
        """Whether other processes can be given what is in `slabs`: on a GPU that depends on how it was allocated."""
        return all(self._ops.shareable(address) for address, _ in self.slabs)

    def check_blocks(self, ids: BlockIds, field: str = "blocks") -> npt.NDArray[np.intp]:
        """A caller's block table, validated once so that it can be trusted to be sane: a read-only copy, shape (n,).

        Raises ConfigError naming `field`, and the id at fault, where `ids` is empty, has anything but ints from 0 to
        blocks - 1, or lists a block twice.
        """
        table = block_table(ids, self.blocks, field)
        if not table.size:
            raise ConfigError(field, "is empty; a stream needs at least one block")
        return table

    @property
    def free_blocks(self) -> int:
        """Blocks that `acquire` could hand out now."""
        return self._allocator.free

    def acquire(self, n: int) -> list[int]:
        """Take the `n` lowest free blocks, ascending. Raises Refused, and takes none, where fewer are free.

        The account covers what goes through `acquire` and `release` only: an engine that hands out blocks of a
        wrapped pool by itself must not mix the two.
        """
        return self._allocator.acquire(n)

    def release(self, ids: BlockIds) -> None:
        """Give acquired blocks back. Raises ConfigError, and releases none, where one of them is not held."""
        self._allocator.release(ids)

    def __repr__(self) -> str:
        layout = self._layout
        return f"KVPool({self.blocks} blocks x {layout.layers} layers x {layout.block_bytes} bytes on {self.device})"

    def _check_layer(self, layer: int) -> int:
        # A negative index would be valid to Python and some other layer's memory to us.
        if not 0 <= layer < self._layout.layers:
            raise ConfigError("layer", f"must be 0 to {self._layout.layers - 1}, not {layer}")
        return layer

    def _check_pack(self, block_ids: TableIds, out: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.intp], int]:
        ids = self._check_ids(block_ids)
        nbytes = ids.size * self._layout.block_bytes
        _check_buffer("out", out)
        if not out.flags.writeable:
            raise ConfigError("out", "is read-only")
        if out.size < nbytes:
            raise ConfigError("out", f"has {out.size} bytes, but {ids.size} blocks need {nbytes}")
        return ids, nbytes

    def _check_unpack(self, layer: int, block_ids: TableIds, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
        ids = self._check_ids(block_ids)
        _check_buffer("data", data)
        nbytes = ids.size * self._layout.block_bytes
        if data.size != nbytes:
            raise Corrupted(f"layer {layer}: {data.size} bytes arrived for {ids.size} blocks, which take {nbytes}")
        return ids

    def _check_staged(self, block_ids: TableIds, staged: Staged) -> npt.NDArray[np.intp]:
        ids = self._check_ids(block_ids)
        nbytes = ids.size * self._layout.block_bytes
        if not nbytes or staged.nbytes != nbytes:
            raise ConfigError("block_ids", f"{ids.size} blocks take {nbytes} bytes, the staging has {staged.nbytes}")
        return ids

    def _check_ids(self, block_ids: TableIds) -> npt.NDArray[np.intp]:
        if isinstance(block_ids, BlockPlan):
            if block_ids.pool is not self:
                raise ConfigError("block_ids", "is the plan of another pool")
            return block_ids.ids
        if block_ids.ndim != 1 or block_ids.dtype.kind not in "iu":
            raise ConfigError(
                "block_ids", f"must be one-dimensional with ints, not {block_ids.dtype} of shape {block_ids.shape}"
            )
        if block_ids.size:
            low, high = int(block_ids.min()), int(block_ids.max())
            if low < 0 or high >= self.blocks:
                raise ConfigError(
                    "block_ids",
                    f"block {low if low < 0 else high} is outside the pool, whose blocks are 0 to {self.blocks - 1}",
                )
        return block_ids.astype(np.intp, copy=False)


def _check_layout(layout: object) -> None:
    if not isinstance(layout, KVLayout):
        raise ConfigError("layout", f"must be a KVLayout, is a {type(layout).__name__}")


def _check_buffer(field: str, buffer: npt.NDArray[np.uint8]) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ConfigError(field, f"must be a flat contiguous uint8 array, not {buffer.dtype} of shape {buffer.shape}")


def _parts(layout: KVLayout, layer: int, array: Any) -> list[Region]:
    """The regions of one entry of `wrap`'s arrays, each checked against the layout by itself."""
    field = f"arrays[{layer}]"
    shape = layout.block_shape
    if isinstance(array, (tuple, list)):
        pair = cast("Sequence[Any]", array)
        if layout.parts != "split" or len(pair) != 2:
            raise LayoutMismatch(
                f'layer {layer}: a pair (k, v) fits parts="split" alone; {len(pair)} arrays given, '
                f'parts="{layout.parts}"'
            )
        regions = [describe(pair[0], f"{field}[0]"), describe(pair[1], f"{field}[1]")]
        shape = shape[1:]
    else:
        regions = [describe(array, field)]
    for region in regions:
        _check_region(layout, layer, region, shape)
    return regions


def _check_region(layout: KVLayout, layer: int, region: Region, block_shape: tuple[int, ...]) -> None:
    itemsize = layout.np_dtype.itemsize
    raw = ("uint8", "int8", f"uint{8 * itemsize}", f"void{8 * itemsize}")
    if region.dtype != layout.dtype and region.dtype not in raw:
        raise LayoutMismatch(f"layer {layer}: dtype {region.dtype}, the layout has {layout.dtype}")
    if not region.shape or not region.shape[0]:
        raise LayoutMismatch(f"layer {layer}: no blocks in an array of shape {region.shape}; they are the first axis")
    inner = region.shape[1:]
    wanted = math.prod(block_shape) * itemsize
    # Any grouping of the axes will do, as long as it's one: the same axes in another order are another layout.
    reordered = region.itemsize == itemsize and len(inner) == len(block_shape) and inner != block_shape
    if region.block_bytes != wanted or reordered:
        split = layout.parts == "split" and region.shape[0] == 2
        raise LayoutMismatch(
            f"layer {layer}: {region.block_bytes} bytes of shape {inner} per block, the layout has {wanted} of shape "
            f"{block_shape}" + ("; where K and V are the first axis, pass the pair (a[0], a[1])" if split else "")
        )
    if not region.writable:
        raise ConfigError(f"arrays[{layer}]", f"layer {layer} is read-only, and blocks must be received into it")
    if self_overlapping(region):
        raise ConfigError(
            f"arrays[{layer}]",
            f"blocks of layer {layer} overlap, or can't be shown not to: strides {region.strides} bytes for shape "
            f"{region.shape} with {region.itemsize} bytes per element",
        )


def _check_disjoint(parts: Sequence[Sequence[Region]]) -> None:
    """No byte belongs to two layers, or to both K and V."""
    pending: list[tuple[int, Region]] = []  # those that may reach beyond the start of the next
    regions = [(layer, region) for layer, of_layer in enumerate(parts) for region in of_layer]
    for layer, region in sorted(regions, key=lambda entry: entry[1].extent):
        low = region.extent[0]
        pending = [(other, before) for other, before in pending if before.extent[1] > low]
        for other, before in pending:
            if not disjoint(before, region):
                both = f"K and V of layer {layer}" if other == layer else f"layers {other} and {layer}"
                raise ConfigError(
                    f"arrays[{layer}]",
                    f"{both} overlap in memory, or can't be shown not to: bytes {before.extent} and {region.extent}",
                )
        pending.append((layer, region))
