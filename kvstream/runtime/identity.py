"""Who this worker is, and the proof of it: name and rank, the incarnation drawn at this start, its secret key."""

from __future__ import annotations

import msgspec

from kvstream.discovery.records import check_name
from kvstream.layout import KVLayout, Shard
from kvstream.runtime.seams import Seams

__all__ = ["Identity"]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """`key` (hex) goes into the registry record, which only authenticated clients of the broker can read; on the data
    plane it is never sent, only used to prove the incarnation."""

    name: str
    shard: Shard
    incarnation: str
    key: str
    layout: KVLayout

    @classmethod
    def create(cls, name: str, shard: Shard, layout: KVLayout, seams: Seams) -> Identity:
        """A fresh incarnation. Raises ConfigError for a name that can't be a NATS subject token."""
        return cls(
            name=check_name("name", name),
            shard=shard,
            incarnation=seams.token(16).hex(),
            key=seams.token(32).hex(),
            layout=layout,
        )

    @property
    def worker(self) -> str:
        """The id of this worker: `instance/rank`."""
        return f"{self.name}/{self.shard.rank}"
