"""A KV holder: the engine that keeps streams for others. See `Holder`."""

from kvstream.holder.holder import Holder, HolderStats

__all__ = ["Holder", "HolderStats"]
