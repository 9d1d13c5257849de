"""The prefix cache: no torch, no I/O, usable alone."""

from radixkv.cache.block_pool import BlockPool, OutOfBlocks
from radixkv.cache.prefix_cache import BlockCopy, Lease, PrefixCache
from radixkv.cache.radix_tree import Match, Node, RadixTree
from radixkv.cache.stats import CacheStats, HitCounts

__all__ = ["BlockCopy", "BlockPool", "CacheStats", "HitCounts", "Lease", "Match", "Node", "OutOfBlocks", "PrefixCache", "RadixTree"]
