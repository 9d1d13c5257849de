"""Speed of the CPU kernels at SmolLM2-135M's shapes, beside torch's own products.

Weights and K/V go round a ring that exceeds the caches, as a model's layers do; the least of many timings counts, because other
programs only ever add time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from radixkv.kernels import AttentionMetadata, cpu

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
RING_BYTES = 96 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def least_seconds(calls: Sequence[Callable[[], object]], budget: float) -> float:
    """The shortest of the calls' times, going round them until ``budget`` seconds are spent."""
    least, end, i = float("inf"), time.perf_counter() + budget, 0
    while i < len(calls) + 3 or time.perf_counter() < end:
        start = time.perf_counter()
        calls[i % len(calls)]()
        taken = time.perf_counter() - start
        if i >= 3:
            least = min(least, taken)
        i += 1
    return least


def time_linear(rows: int, shape: tuple[int, int], dtype: torch.dtype, budget: float, against_torch: bool) -> dict[str, float]:
    """Seconds, GB/s of weights and GFLOP/s of one product, and torch's seconds."""
    weight = torch.randn(shape).to(dtype)
    copies = max(2, RING_BYTES // weight.nbytes)
    x = torch.randn(rows, shape[1]).to(dtype)
    packed = [cpu.pack_linear(weight, None) for _ in range(copies)]
    seconds = least_seconds([lambda p=p: cpu.linear(x, p) for p in packed], budget)  # type: ignore[misc]
    del packed
    result = {"seconds": seconds, "GB/s": weight.nbytes / seconds / 1e9, "GFLOP/s": 2 * rows * weight.numel() / seconds / 1e9}
    if against_torch:
        plain = [weight.clone() for _ in range(copies)]
        result["torch seconds"] = least_seconds([lambda w=w: functional.linear(x, w) for w in plain], budget)  # type: ignore[misc]
    return result


def attention_call(
    sequences: Sequence[tuple[int, int]], shared: int, dtype: torch.dtype, block_size: int = 16
) -> Callable[[], Tensor]:
    """A call of attention for sequences of (query tokens, length) whose first ``shared`` tokens lie in the same blocks."""
    common = shared // block_size
    counts = [-(-length // block_size) for _, length in sequences]
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    blocks = torch.randperm(common + sum(count - common for count in counts), dtype=torch.int32)
    tables[:, :common] = blocks[:common]
    used = common
    for s, count in enumerate(counts):
        tables[s, common:count] = blocks[used : used + count - common]
        used += count - common
    k_cache, v_cache = cpu.allocate_kv(used, block_size, KV_HEADS, HEAD_DIM, dtype, torch.device("cpu"))
    k_cache.normal_()
    v_cache.normal_()
    starts = torch.tensor([0, *(q for q, _ in sequences)]).cumsum(0).int()
    lengths = torch.tensor([n for _, n in sequences], dtype=torch.int32)
    unused = torch.zeros(0, dtype=torch.int64)
    segments = torch.tensor([[0, len(sequences), 0, common * block_size]], dtype=torch.int32) if common else None
    metadata = AttentionMetadata(starts, lengths, tables, unused, unused, 0, 0, segments)
    q = torch.randn(int(starts[-1]), HEADS, HEAD_DIM).to(dtype)
    return lambda: cpu.paged_attention(q, k_cache, v_cache, metadata, HEAD_DIM**-0.5)


def time_attention(sequences: Sequence[tuple[int, int]], shared: int, dtype: torch.dtype, budget: float) -> dict[str, float]:
    """Seconds, GB/s of K/V that the queries see, and GFLOP/s of one layer's attention."""
    item = torch.empty(0, dtype=dtype).element_size()
    seen = sum(length for _, length in sequences) * 2 * KV_HEADS * HEAD_DIM * item
    pairs = sum(q * length - q * (q - 1) // 2 for q, length in sequences)
    calls = [attention_call(sequences, shared, dtype) for _ in range(max(2, RING_BYTES // seen))]
    seconds = least_seconds(calls, budget)
    return {"seconds": seconds, "GB/s": seen / seconds / 1e9, "GFLOP/s": 4 * pairs * HEADS * HEAD_DIM / seconds / 1e9}


def time_small(dtype: torch.dtype, rows: int, budget: float) -> dict[str, float]:
    """Seconds of each of the cheap operations at this many rows."""
    hidden, gate_up = torch.randn(rows, 576).to(dtype), torch.randn(rows, 3072).to(dtype)
    qkv, weight, residual = torch.randn(rows, 960).to(dtype), torch.ones(576, dtype=dtype), torch.zeros(rows, 576, dtype=dtype)
    q, k, v = (x.view(rows, -1, HEAD_DIM) for x in torch.split(qkv, [576, 192, 192], dim=-1))
    positions, cos_sin = torch.arange(rows), torch.randn(2048, HEAD_DIM)
    k_cache, v_cache = cpu.allocate_kv(128, 16, KV_HEADS, HEAD_DIM, dtype, torch.device("cpu"))
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: cpu.rms_norm(hidden, weight, 1e-5),
        "add_rms_norm": lambda: cpu.add_rms_norm(hidden, residual, weight, 1e-5),
        "silu_mul": lambda: cpu.silu_mul(gate_up),
        "rope": lambda: cpu.rope(q, k, positions, cos_sin),
        "write_kv": lambda: cpu.write_kv(k, v, k_cache, v_cache, positions),
    }
    return {name: least_seconds([call], budget / 4) for name, call in calls.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(prog="cpu-kernels", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on each figure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's own products")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    figures: list[dict[str, object]] = []
    native = {name: cpu.is_native(dtype) for name, dtype in DTYPES.items()}
    print(f"{args.threads} threads, native kernels: {native}")
    for name in args.dtypes:
        dtype = DTYPES[name]
        if args.shapes:
            print(f"\n{name:9} linear        rows       us   GB/s  GFLOP/s  torch us  torch/ours")
        for shape in args.shapes:
            for rows in args.rows:
                if rows * SHAPES[shape][0] > 2_000_000:  # logits are only computed where a token is sampled
                    continue
                r = time_linear(rows, SHAPES[shape], dtype, args.seconds, not args.no_torch)
                theirs = r.get("torch seconds", float("nan"))
                outputs, inputs = SHAPES[shape]
                print(
                    f"{shape:9} {outputs:6}x{inputs:<5} {rows:5} {r['seconds'] * 1e6:8.0f} {r['GB/s']:6.1f} {r['GFLOP/s']:8.0f}"
                    f" {theirs * 1e6:9.0f} {theirs / r['seconds']:11.2f}",
                    flush=True,
                )
                figures.append({"dtype": name, "op": "linear", "shape": shape, "rows": rows, **r})
        print(f"\n{name:9} attention, a layer                  us   GB/s  GFLOP/s")
        for title, sequences, shared in (
            ("16 decodes at 1600", [(1, 1600)] * 16, 0),
            ("16 decodes at 1600, 1536 shared", [(1, 1600)] * 16, 1536),
            ("1 decode at 1600", [(1, 1600)], 0),
            ("1 decode at 8192", [(1, 8192)], 0),
            ("512 rows of prefill at 1600-2112", [(512, 2112)], 0),
            ("512 rows of prefill at 0-512", [(512, 512)], 0),
        ):
            r = time_attention(sequences, shared, dtype, args.seconds)
            print(f"{title:34} {r['seconds'] * 1e6:10.0f} {r['GB/s']:6.1f} {r['GFLOP/s']:8.0f}", flush=True)
            figures.append({"dtype": name, "op": "attention", "case": title, **r})
        for rows in (1, 16, 512):
            small = time_small(dtype, rows, args.seconds)
            print(f"{rows:3} rows, us: " + "  ".join(f"{op} {seconds * 1e6:.1f}" for op, seconds in small.items()), flush=True)
            figures.append({"dtype": name, "op": "small", "rows": rows, **small})
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "native": native, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
