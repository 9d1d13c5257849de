"""Times of the Triton kernels on this machine's GPU, beside what its memory and matrix units can do and torch's own attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from radixkv.kernels import AttentionMetadata, load_backend

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HIDDEN = 32, 8, 128, 16, 4096
"""Of Llama-3-8B."""
REPEATS = 20


class Case(NamedTuple):
    """A call to time, what it must move and multiply at least, and torch's call for the same."""

    title: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0
    torch_run: Callable[[], object] | None = None


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Of ``repeats`` calls, by CUDA events; the L2 cache is overwritten before each.

    Replayed from a CUDA graph, as the engine's decode steps are: launching from Python would take longer than a short kernel.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    for _ in range(3):  # compiles, which a capture may not
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1e3


def machine_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second of a large copy, read and written both counted, and operations a second of a large matrix product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device=device).to(dtype)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device),
        "matrix_flops": 2 * 8192**3 / median_seconds(lambda: torch.mm(a, b), device),
    }


def attention_case(
    title: str, sequences: Sequence[tuple[int, int]], shared: int, tree: bool, dtype: torch.dtype, device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """Attention of sequences of (query tokens, length) whose first ``shared`` tokens lie in the same blocks.

    ``tree`` tells the kernels so, and counts the shared tokens' bytes once.  torch gets dense K and V, gathered beforehand and
    padded to the longest sequence; where queries differ in number, there is no such call.
    """
    backend = load_backend("triton")
    common = shared // BLOCK_SIZE
    counts = [-(-length // BLOCK_SIZE) for _, length in sequences]
    num_blocks = common + sum(count - common for count in counts)
    blocks = torch.randperm(num_blocks, dtype=torch.int32)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    tables[:, :common] = blocks[:common]
    used = common
    for s, count in enumerate(counts):
        tables[s, common:count] = blocks[used : used + count - common]
        used += count - common
    caches = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype).to(kv_dtype or dtype)
    k_cache, v_cache = caches
    queries, lengths = (list(column) for column in zip(*sequences, strict=True))
    unused = torch.zeros(0, dtype=torch.int64, device=device)
    metadata = AttentionMetadata(
        torch.tensor([0, *queries], device=device).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device), unused, unused, max(queries), max(lengths),
        torch.tensor([[0, len(sequences), 0, shared]], dtype=torch.int32, device=device) if tree else None,
    )  # fmt: skip
    q = torch.randn(sum(queries), HEADS, HEAD_DIM, device=device, dtype=dtype)
    tokens = sum(lengths) - (len(sequences) - 1) * shared * tree
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in sequences)
    torch_run = None
    if kv_dtype is None and len(set(queries)) == 1:
        dense = [
            cache[metadata.block_tables.long()].flatten(1, 2)[:, : max(lengths)].transpose(1, 2).contiguous() for cache in caches
        ]
        rows = q.view(len(sequences), queries[0], HEADS, HEAD_DIM).transpose(1, 2)
        key = torch.arange(max(lengths), device=device)
        last = metadata.seq_lens[:, None] - queries[0] + torch.arange(queries[0], device=device)
        square = len(sequences) == 1 and queries == lengths
        all_seen = queries[0] == 1 and len(set(lengths)) == 1
        mask = None if square or all_seen else (key <= last[..., None])[:, None]
        torch_run = lambda: functional.scaled_dot_product_attention(  # noqa: E731
            rows, dense[0], dense[1], attn_mask=mask, is_causal=square, enable_gqa=True
        )
    return Case(
        title,
        lambda: backend.paged_attention(q, k_cache, v_cache, metadata, HEAD_DIM**-0.5),
        num_bytes=2 * tokens * KV_HEADS * HEAD_DIM * caches.element_size() + 2 * q.nbytes,
        flops=4 * pairs * HEADS * HEAD_DIM,
        torch_run=torch_run,
    )


def attention_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Decode with and without the tree, prefill with and without a cached prefix, both at once, narrow storage."""
    many, prompt = [(1, 4096)] * 64, 3840
    yield attention_case("decode, 1 x 32768", [(1, 32768)], 0, False, dtype, device)
    yield attention_case("decode, 64 x 4096", many, 0, False, dtype, device)
    yield attention_case("decode, 64 x 4096, 3840 shared, plain", many, prompt, False, dtype, device)
    yield attention_case("decode, 64 x 4096, 3840 shared, tree", many, prompt, True, dtype, device)
    yield attention_case("prefill, 1 x 4096", [(4096, 4096)], 0, False, dtype, device)
    yield attention_case("prefill, 512 after 3584 cached", [(512, 4096)], 0, False, dtype, device)
    yield attention_case("mixed, 512 of 4096 and 63 decodes", [(512, 4096), *many[1:]], 0, False, dtype, device)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        yield attention_case("decode, 64 x 4096, float8_e4m3fn", many, 0, False, dtype, device, torch.float8_e4m3fn)


def other_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The kernels that only move memory, at 8192 tokens."""
    backend, tokens = load_backend("triton"), 8192
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    k_cache, v_cache = backend.allocate_kv(2 * tokens // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype, device)
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    positions, table = torch.arange(tokens, device=device), torch.randn(tokens, HEAD_DIM, device=device)
    sources = torch.randperm(2 * tokens // BLOCK_SIZE, device=device)
    copies = torch.stack((sources[:256], sources[256:512], torch.full((256,), BLOCK_SIZE, device=device)), dim=1)
    x, weight = torch.randn(tokens, HIDDEN, device=device, dtype=dtype), torch.ones(HIDDEN, device=device, dtype=dtype)
    kv_bytes = k.numel() * k.element_size()
    block_bytes = k_cache[0].nbytes
    yield Case("write_kv", lambda: backend.write_kv(k, v, k_cache, v_cache, slots), 4 * kv_bytes)
    yield Case("rope", lambda: backend.rope(q, k, positions, table), 2 * (q.numel() + k.numel()) * q.element_size() + table.nbytes)
    yield Case("copy_blocks, 256", lambda: backend.copy_blocks(k_cache, v_cache, copies), 4 * 256 * block_bytes)
    yield Case(
        "rms_norm", lambda: backend.rms_norm(x, weight, 1e-5), 2 * x.nbytes,
        torch_run=lambda: functional.rms_norm(x, (HIDDEN,), weight, 1e-5),
    )  # fmt: skip


def time_case(case: Case, rates: dict[str, float], device: torch.device) -> dict[str, Any]:
    """Seconds, torch's, and what share of its time the GPU would need to move the bytes, or to do the products, at its best."""
    seconds = median_seconds(case.run, device)
    return {
        "case": case.title,
        "seconds": seconds,
        "share_of_copy": case.num_bytes / seconds / rates["copy_bytes_per_second"],
        "share_of_matrix": case.flops / seconds / rates["matrix_flops"],
        "torch_seconds": None if case.torch_run is None else median_seconds(case.torch_run, device),
    }
