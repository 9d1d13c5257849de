"""The cache library alone: no model, no torch.  Two prompts share a prefix; the second finds the first one's blocks."""

from __future__ import annotations

import numpy as np

from radixkv import PrefixCache


def run(cache: PrefixCache, name: str, tokens: list[int], *, namespace: str = "") -> None:
    """A sequence's life: acquire blocks, compute what is missing, publish, release."""
    prompt = np.array(tokens, dtype=np.int32)
    lease = cache.acquire(prompt, namespace=namespace)
    if lease is None:
        print(f"{name}: no room now; try again when another sequence has been released")
        return
    for copy in cache.take_copies():
        print(f"{name}: first copy {copy.num_rows} rows of block {copy.source} to block {copy.target}")
    first = lease.num_cached_tokens
    print(f"{name}: {first} of {len(prompt)} tokens cached; compute positions {first}..{len(prompt) - 1}", end=" ")
    print(f"into blocks {lease.block_table[lease.write_start // cache.block_size :].tolist()} of {lease.block_table.tolist()}")
    # ... here an engine would run its model over tokens[first:], writing keys and values into those blocks ...
    cache.publish(lease, prompt, num_computed=len(prompt))
    cache.release(lease)


def main() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4)
    system_prompt = list(range(100, 110))
    run(cache, "first ", [*system_prompt, 1, 2, 3])
    run(cache, "second", [*system_prompt, 7, 8, 9])
    run(cache, "again ", [*system_prompt, 1, 2, 3])
    run(cache, "other tenant", [*system_prompt, 1, 2, 3], namespace="tenant-b")
    run(cache, "long  ", list(range(500, 548)))

    stats = cache.stats()
    print(f"\nhit rate {stats.total.hit_rate:.0%} over {stats.total.requests} requests, {stats.evicted_blocks} blocks evicted")
    for namespace, counts in stats.namespaces.items():
        print(f"  {namespace or '(default)':<12}{counts.cached_tokens} of {counts.prompt_tokens} tokens")


if __name__ == "__main__":
    main()
