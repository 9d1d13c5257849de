"""The cache library alone, under an engine that is only pretended: no model, no torch.

Prompts share a prefix; the cache says which blocks to compute into, what was found, and why the rest was not.
"""

from __future__ import annotations

import numpy as np

from radixkv import PrefixCache
from radixkv.cache import Event, Evicted, Retention


def run(cache: PrefixCache, name: str, tokens: list[int], *, namespace: str = "", retention: Retention | None = None) -> None:
    """A sequence's life: acquire blocks, compute what is missing, publish, release."""
    prompt = np.array(tokens, dtype=np.int32)
    lease = cache.acquire(prompt, namespace=namespace, retention=retention)
    if lease is None:
        print(f"{name}: no room now; try again when another sequence has been released")
        return
    for copy in cache.take_copies():
        print(f"{name}: first copy {copy.num_rows} rows of block {copy.source} to block {copy.target}")
    first = lease.num_cached_tokens
    print(f"{name}: {first} of {len(prompt)} tokens cached; compute positions {first}..{len(prompt) - 1}", end=" ")
    print(f"into blocks {lease.block_table[lease.write_start // cache.block_size :].tolist()} of {lease.block_table.tolist()}")
    miss = lease.miss
    if miss is not None and miss.parting is not None:
        at, ours, theirs = miss.parting
        print(f"{'':>12}  prompts part at token {at}: {theirs.tolist()} / {ours.tolist()}")
    if miss is not None and miss.evicted:
        print(f"{'':>12}  {miss.evicted} tokens were evicted; {miss.evicted_blocks_since} more blocks would have kept them")
    # ... here an engine would run its model over tokens[first:], writing keys and values into those blocks ...
    cache.publish(lease, prompt, num_computed=len(prompt))
    cache.release(lease)


def main() -> None:
    cache = PrefixCache(num_blocks=16, block_size=4, attribution=True)

    def listen(event: Event) -> None:
        if isinstance(event, Evicted):
            print(f"{'':>12}  evicted: blocks {event.block_ids.tolist()}, tokens from {event.start} on")

    stop_listening = cache.subscribe(listen)
    system_prompt = list(range(100, 110))
    run(cache, "       first", [*system_prompt, 1, 2, 3], retention=Retention(priority=1, seconds=60))
    run(cache, "      second", [*system_prompt, 7, 8, 9])
    run(cache, "       again", [*system_prompt, 1, 2, 3])
    run(cache, "other tenant", [*system_prompt, 1, 2, 3], namespace="tenant-b")
    run(cache, "        long", list(range(500, 548)))
    run(cache, "      second", [*system_prompt, 7, 8, 9, 10])
    run(cache, "other tenant", [*system_prompt, 1, 2, 3], namespace="tenant-b")
    stop_listening()

    stats = cache.stats()
    print(f"\nhit rate {stats.total.hit_rate:.0%} over {stats.total.requests} requests, {stats.evicted_blocks} blocks evicted")
    for namespace, counts in stats.namespaces.items():
        missed = ", ".join(f"{tokens} {reason}" for reason, tokens in counts.missed.items() if tokens)
        print(f"  {namespace or '(default)':<12}{counts.cached_tokens} of {counts.prompt_tokens} tokens; missed: {missed}")


if __name__ == "__main__":
    main()
