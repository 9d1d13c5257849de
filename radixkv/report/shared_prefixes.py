"""Which prefixes earn the hits: segments of the tree of a workload's prompts, by the tokens they saved."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from radixkv.report.logged_request import LoggedRequest
from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import as_trace


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A part of prompts that the same requests have, as long as it can be: what a node of the radix tree is."""

    namespace: str
    start: int
    """Tokens before it."""
    end: int
    requests: int
    """That have it, and all before it."""
    tokens_saved: int
    """Of it, found in the cache: over all segments, exactly the cached tokens in blocks that are in the log."""
    example: int
    """Index of the first request that has it."""


def shared_prefixes(began: Sequence[LoggedRequest], most: int) -> list[SharedPrefix]:
    """The ``most`` that saved most, of those that at least two requests have.  O(blocks)."""
    paths = PrefixPaths([as_trace(line) for line in began])
    size, count = paths.block_size, paths.num_numbers
    uses, saved = np.zeros(count, np.int64), np.zeros(count, np.int64)
    parent, example, depth = np.full(count, -1), np.full(count, -1), np.zeros(count, np.int64)
    for index, (line, path) in enumerate(zip(began, paths, strict=True)):
        uses[path] += 1
        parent[path[1:]] = path[:-1]
        depth[path] = np.arange(len(path))
        fresh = path[example[path] < 0]
        example[fresh] = index
        cached = line.cached_tokens or 0
        found = path[: min(-(-cached // size), len(path))]
        saved[found] += np.minimum(size, cached - np.arange(len(found)) * size)
    head = np.arange(count)
    for node in np.flatnonzero((parent >= 0) & (uses == uses[parent])):  # ascending: a block's number is above its parent's
        head[node] = head[parent[node]]
    of_segment = np.zeros(count, np.int64)
    np.add.at(of_segment, head, saved)
    deepest = np.zeros(count, np.int64)
    np.maximum.at(deepest, head, depth)
    best = [node for node in np.argsort(-of_segment, kind="stable").tolist() if uses[node] > 1 and of_segment[node]][:most]
    return [
        SharedPrefix(
            namespace=began[example[node]].namespace,
            start=int(depth[node]) * size,
            end=min((int(deepest[node]) + 1) * size, began[example[node]].prompt_tokens),
            requests=int(uses[node]),
            tokens_saved=int(of_segment[node]),
            example=int(example[node]),
        )
        for node in best
    ]
