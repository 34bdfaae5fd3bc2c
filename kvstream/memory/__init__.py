"""KV memory: pools of KV blocks, in host memory or on a GPU, and who holds which block.

This package moves bytes between a pool and flat host buffers and checks every bound itself. It never talks to
a peer and knows nothing of streams.
"""

from kvstream.memory.blocks import BlockAllocator
from kvstream.memory.plan import BlockPlan
from kvstream.memory.pool import KVPool
from kvstream.memory.staging import StagingLease, StagingSlab

__all__ = ["BlockAllocator", "BlockPlan", "KVPool", "StagingLease", "StagingSlab"]
