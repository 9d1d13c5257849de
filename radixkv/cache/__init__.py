"""The prefix cache: no torch, no I/O, usable alone."""

from radixkv.cache.block_pool import BlockPool, OutOfBlocks
from radixkv.cache.events import Event, Evicted, Hit, Stored
from radixkv.cache.lease import Lease
from radixkv.cache.miss import Miss, Parting
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import BlockCopy, PrefixCache
from radixkv.cache.radix_tree import Match, RadixTree
from radixkv.cache.retention import Retention
from radixkv.cache.snapshot import Snapshot, SnapshotNode
from radixkv.cache.stats import CacheStats, HitCounts

__all__ = [
    "BlockCopy", "BlockPool", "CacheStats", "Event", "Evicted", "Hit", "HitCounts", "Lease", "Match", "Miss", "Node", "OutOfBlocks",
    "Parting", "PrefixCache", "RadixTree", "Retention", "Snapshot", "SnapshotNode", "Stored",
]  # fmt: skip
