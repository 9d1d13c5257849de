"""EngineConfig: every choice made at start-up, in one typed struct.  The command line is derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Policy = Literal["lpm", "fcfs", "dfs-weight"]
EvictionPolicy = Literal["lru", "lfu", "cost"]
"""The cache's own, spelled out because the command line must not load numpy to show its help."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is started with; fixed for the life of the process.

    Parameters
    ----------
    model
        A built-in alias, a Hugging Face folder or hub id, or a ``.gguf`` file.
    dtype
        Type of weights, activations and KV cache. ``auto`` takes bfloat16 or float16, as the model was saved, where the hardware
        computes in it, otherwise float32.
    device
        Where the model runs. ``auto`` takes a GPU if there is one.
    kv_cache_tokens
        Tokens of key-value cache to hold, rounded down to whole blocks.
    block_size
        Tokens in a KV block, a power of two. Small blocks waste less memory, large ones make shorter block tables.
    max_model_len
        Longest prompt plus output in tokens. The model's own limit if not given, or the cache's size, if that is less.
    max_batch_tokens
        Token budget of one engine step, prefill chunks and decodes together.
    max_num_seqs
        Most sequences that run at once; further ones wait.
    enable_prefix_caching
        Keep finished sequences in the radix tree and share prefixes. Off, every prompt is computed whole.
    policy
        Order of the waiting queue: ``lpm`` (longest cached prefix first, with aging), ``fcfs``, or ``dfs-weight``.
    aging_tokens_per_second
        Under ``lpm``, each second of waiting counts as this many cached tokens, so that a cold request waits a bounded time.
    eviction_policy
        Which cached blocks go first: ``lru`` (least recently used), ``lfu`` (least often used, with ageing), or ``cost`` (least
        often used and cheapest to compute again).
    num_threads
        CPU threads of the engine. All cores if not given.
    """

    model: str = "smollm2-135m"
    dtype: Dtype = "auto"
    device: Device = "auto"
    kv_cache_tokens: int = 65536
    block_size: int = 16
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    enable_prefix_caching: bool = True
    policy: Policy = "lpm"
    aging_tokens_per_second: float = 256.0
    eviction_policy: EvictionPolicy = "lru"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        _check(0 < self.block_size <= 1024 and self.block_size & (self.block_size - 1) == 0, "block_size",
               "a power of two from 1 to 1024", self.block_size)  # fmt: skip
        _check(self.kv_cache_tokens >= 2 * self.block_size, "kv_cache_tokens", f"at least two blocks ({2 * self.block_size})",
               self.kv_cache_tokens)  # fmt: skip
        _check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2", self.max_model_len)
        _check(self.max_batch_tokens >= 1, "max_batch_tokens", "at least 1", self.max_batch_tokens)
        _check(1 <= self.max_num_seqs <= self.max_batch_tokens, "max_num_seqs",
               f"from 1 to max_batch_tokens ({self.max_batch_tokens}): each running sequence decodes one token a step",
               self.max_num_seqs)  # fmt: skip
        _check(self.aging_tokens_per_second > 0, "aging_tokens_per_second", "above 0", self.aging_tokens_per_second)
        _check(self.num_threads is None or self.num_threads >= 1, "num_threads", "at least 1", self.num_threads)

    @property
    def num_blocks(self) -> int:
        """Physical KV blocks in the pool."""
        return self.kv_cache_tokens // self.block_size


def _check(ok: bool, field: str, limit: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{field} must be {limit}, got {value!r}")
