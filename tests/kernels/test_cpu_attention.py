"""Paged attention, K/V writes and block copies of the CPU backend, native and in torch.

The oracle is the reference in float64.  Rows of the cache that hold no token are NaN and unused block-table entries are out
of range, so that reading one shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixkv.kernels import AttentionMetadata, cpu, reference
from radixkv.platform import torch_threads

CPU = torch.device("cpu")
# Values are about 1, some 2: float32 rounding of scores and sums, or one rounding of the result and one of the weights.
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8, torch.float16: 2**-9}
UNUSED = 2**30
NATIVE_FIRST = [
    "native-float32", "native-bfloat16",
    *(pytest.param(f"torch-{name}", marks=pytest.mark.full) for name in ("float32", "bfloat16", "float16")),
]  # fmt: skip
"""For tests that take seconds in torch: there they wait for the whole grid."""

Shared = int | Sequence[int]
"""Tokens that each sequence shares with the one before it (the first one's number means nothing), or one number for all."""


def with_previous(shared: Shared, lengths: Sequence[int]) -> list[int]:
    each = [shared] * len(lengths) if isinstance(shared, int) else shared
    return [min(n, lengths[s - 1], lengths[s]) if s else 0 for s, n in enumerate(each)]


def tree_segments(common: Sequence[int], first: int = 0, start: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """As AttentionMetadata has them: what neighbouring sequences share, from what all share to what few do."""
    if len(common) < 2:
        return
    end = min(common[1:])
    if end > start:
        yield first, len(common), start, end
    cuts = [0, *(s for s in range(1, len(common)) if common[s] == end), len(common)]
    for one, other in pairwise(cuts):
        yield from tree_segments(common[one:other], first + one, end)


@dataclass
class Sequences:
    """Dense q, k, v of several sequences ``[length, heads, dim]``; any of their queries can be asked for in any batch."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def random(
        cls, lengths: Sequence[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, shared: Shared = 0
    ) -> Sequences:
        """Each sequence begins as the one before it, for as many tokens as it shares with that one."""
        generator = torch.Generator().manual_seed(sum(lengths) + heads * dim)

        def one(length: int, count: int) -> Tensor:
            return torch.randn(length, count, dim, generator=generator).to(dtype)

        result = cls([one(n, heads) for n in lengths], [one(n, kv_heads) for n in lengths], [one(n, kv_heads) for n in lengths])
        for s, common in enumerate(with_previous(shared, lengths)):
            for x in (result.k, result.v):
                x[s][:common] = x[s - 1][:common]
        return result

    def attend(
        self, block_size: int, spans: Sequence[tuple[int, int, int]], shared: Shared = 0, wide: bool = False, seed: int = 0
    ) -> list[Tensor]:
        """Attention of queries ``first .. end - 1`` of sequence s, for each span (s, first, end), in one batch.

        ``wide`` computes it in the reference and in float64.  What each shares with the one before it lies in the same blocks, as
        far as whole blocks go, and the kernel is told.
        """
        backend = reference if wide else cpu
        dtype = torch.float64 if wide else self.q[0].dtype
        kv_heads, dim = self.k[0].shape[1:]
        counts = [-(-end // block_size) for _, _, end in spans]
        common = [tokens // block_size for tokens in with_previous(shared, [end for _, _, end in spans])]
        num_blocks = sum(counts) + 2
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
        tables = torch.full((len(spans), max(counts) + 1), UNUSED, dtype=torch.int32)
        used = 0
        for i, count in enumerate(counts):
            own = count - common[i]
            tables[i, : common[i]] = tables[i - 1, : common[i]]
            tables[i, common[i] : count] = ids[used : used + own]
            used += own
        segments = torch.tensor(list(tree_segments([n * block_size for n in common])), dtype=torch.int32).view(-1, 4)
        k_cache, v_cache = backend.allocate_kv(num_blocks, block_size, kv_heads, dim, dtype, CPU)
        k_cache.fill_(float("nan"))
        v_cache.fill_(float("nan"))
        for i, (s, _, end) in enumerate(spans):
            positions = torch.arange(end)
            slots = tables[i, positions // block_size].long() * block_size + positions % block_size
            backend.write_kv(self.k[s][:end].to(dtype), self.v[s][:end].to(dtype), k_cache, v_cache, slots)
        query_lens = [end - first for _, first, end in spans]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        lengths = torch.tensor([end for _, _, end in spans], dtype=torch.int32)
        q = torch.cat([self.q[s][first:end] for s, first, end in spans]).to(dtype)
        unused = torch.empty(0, dtype=torch.int64)
        longest = max(end for _, _, end in spans)
        told = segments if shared else None
        metadata = AttentionMetadata(starts, lengths, tables, unused, unused, max(query_lens), longest, told)
        out = backend.paged_attention(q, k_cache, v_cache, metadata, dim**-0.5)
        assert out.dtype is dtype
        return list(out.split(query_lens))


def assert_right(sequences: Sequences, block_size: int, spans: Sequence[tuple[int, int, int]], shared: Shared = 0) -> None:
    got = sequences.attend(block_size, spans, shared)
    expected = sequences.attend(block_size, spans, shared, wide=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=ATOL[a.dtype])


MIXED = [(0, 0, 1), (1, 129, 130), (2, 63, 64), (3, 295, 300), (4, 130, 200), (5, 0, 33), (6, 64, 65)]
MIXED_LENGTHS = [end for _, _, end in MIXED]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (16, 1, 128), (2, 1, 256), (6, 2, 72)])
def test_mixed_batches_agree_with_float64(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    assert_right(Sequences.random(MIXED_LENGTHS, heads, kv_heads, dim, dtype), 16, MIXED)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32, 128])
def test_every_block_size_agrees_with_float64(dtype: torch.dtype, block_size: int) -> None:
    assert_right(Sequences.random(MIXED_LENGTHS, 6, 2, 64, dtype), block_size, MIXED)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["native-float32", "native-bfloat16"], indirect=True)  # torch_ops has no code of any one shape
@pytest.mark.parametrize("dim", [16, 24, 33, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 16, 64])
def test_the_whole_grid_agrees_with_float64(dtype: torch.dtype, dim: int, group: int) -> None:
    sequences = Sequences.random(MIXED_LENGTHS, 2 * group, 2, dim, dtype)
    for block_size in (1, 16, 128):
        assert_right(sequences, block_size, MIXED)


@pytest.mark.parametrize("dtype", NATIVE_FIRST, indirect=True)
def test_sequences_that_share_blocks_agree_with_float64(dtype: torch.dtype) -> None:
    lengths = [400, 350, 329, 300, 528, 331, 264, 270]
    sequences = Sequences.random(lengths, 9, 3, 64, dtype, shared=256)
    for shared in (0, 16, 64, 128, 256):
        assert_right(sequences, 16, [(s, n - 1, n) for s, n in enumerate(lengths)], shared)
    assert_right(sequences, 16, [(s, n - 1 - s, n) for s, n in enumerate(lengths)], shared=256)


def test_large_scores_neither_overflow_nor_lose_the_rest(dtype: torch.dtype) -> None:
    sequences = Sequences.random([150], 2, 1, 64, dtype)
    sequences.q[0] *= 30
    sequences.k[0] *= 30
    got, expected = (sequences.attend(16, [(0, 100, 150)], wide=wide)[0] for wide in (False, True))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-3 + ATOL[dtype])  # scores of thousands, rounded to 2e-4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), pytest.param(8, 8, 80, marks=pytest.mark.full), pytest.param(16, 1, 128, marks=pytest.mark.full)],
)
def test_a_querys_bits_depend_on_its_own_tokens_only(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Alone or in a batch, as a decode or in prefill chunks of any size, sharing blocks or not, wherever its blocks lie."""
    length, shared = 210, 128
    lengths = [length, 333, 140, 200]
    sequences = Sequences.random(lengths, heads, kv_heads, dim, dtype, shared)
    whole = sequences.attend(16, [(0, 0, length)])[0]

    def check(parts: list[Tensor], first: int) -> None:
        got = torch.cat(parts)
        assert torch.equal(got, whole[first : first + len(got)])

    for chunk in (7, 16, 50, 64, 100):
        check([sequences.attend(16, [(0, at, min(at + chunk, length))], seed=1)[0] for at in range(0, length, chunk)], 0)
    for at in (0, 1, 15, 62, 63, 64, 127, 128, 191, 209):
        check(sequences.attend(16, [(0, at, at + 1)], seed=2), at)
    others = [(1, 332, 333), (2, 60, 140), (3, 195, 200), (1, 0, 45)]
    check(sequences.attend(16, [*others, (0, 209, 210)])[-1:], 209)
    check(sequences.attend(16, [(0, 150, 210), *others])[:1], 150)
    decodes = [(s, n - 1, n) for s, n in enumerate(lengths)]
    for share in (0, 64, 128):
        check(sequences.attend(16, decodes, share)[:1], 209)
        check(sequences.attend(16, [*decodes[1:], (0, 205, 210)], share)[-1:], 205)


@pytest.mark.parametrize("dtype", NATIVE_FIRST, indirect=True)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 700), min_size=2, max_size=20),
    fractions=st.lists(st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]), min_size=20, max_size=20),
    query_lens=st.lists(st.sampled_from([1, 1, 1, 2, 5, 40]), min_size=20, max_size=20),
    block_size=st.sampled_from([4, 16, 64]),
    shape=st.sampled_from([(9, 3, 64), (2, 2, 72), (16, 2, 32)]),
)
def test_what_sequences_share_at_any_number_of_levels_changes_no_bit(
    dtype: torch.dtype,
    lengths: list[int],
    fractions: list[float],
    query_lens: list[int],
    block_size: int,
    shape: tuple[int, int, int],
) -> None:
    """Told or not, read together or one by one."""
    shared = [int(n * fraction) for n, fraction in zip(lengths, fractions, strict=False)]
    sequences = Sequences.random(lengths, *shape, dtype, shared)
    spans = [(s, max(0, n - query_lens[s]), n) for s, n in enumerate(lengths)]
    together = sequences.attend(block_size, spans, shared)
    for a, b in zip(together, sequences.attend(block_size, spans), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(together, sequences.attend(block_size, spans, shared, wide=True), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=ATOL[a.dtype])


def test_the_block_size_changes_no_bit(dtype: torch.dtype) -> None:
    sequences = Sequences.random(MIXED_LENGTHS, 6, 2, 64, dtype)
    expected = torch.cat(sequences.attend(16, MIXED))
    for block_size in (1, 2, 8, 32, 128):
        assert torch.equal(torch.cat(sequences.attend(block_size, MIXED)), expected), block_size


def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    sequences = Sequences.random([1500, 700, 650, 640], 6, 2, 64, dtype, shared=640)
    batches = [[(0, 1499, 1500)], [(0, 1400, 1500), (1, 699, 700)], [(1, 699, 700), (2, 649, 650), (3, 639, 640)]]
    for batch in batches:
        results = []
        for count in (1, 2, 5):
            with torch_threads(count):
                results.append(torch.cat(sequences.attend(16, batch, shared=576)))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", ["native-bfloat16"], indirect=True)
def test_whoever_takes_whichever_item_when_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long sequences, whose heads go together, beside six that share a prefix, head by head; many times, as threads race."""
    lengths, shared = [3000, 700, 700, 700, 700, 700, 700, 2900], [0, 0, 640, 640, 640, 640, 640, 0]
    calls: list[tuple[object, ...]] = []
    attend = cpu.paged_attention
    monkeypatch.setattr(cpu, "paged_attention", lambda *call: calls.append(call) or attend(*call))
    Sequences.random(lengths, 9, 3, 64, dtype, shared).attend(16, [(s, n - 1, n) for s, n in enumerate(lengths)], shared)
    with torch_threads(1):
        expected = attend(*calls[0])
    for threads in (3, 4, 5, 7):
        with torch_threads(threads):
            assert all(torch.equal(attend(*calls[0]), expected) for _ in range(500))


def test_rows_that_no_sequence_owns_are_zero(dtype: torch.dtype) -> None:
    k_cache, v_cache = cpu.allocate_kv(4, 16, 1, 64, dtype, CPU)
    slots = torch.arange(5)
    kv = torch.randn(5, 1, 64).to(dtype)
    cpu.write_kv(kv, kv, k_cache, v_cache, slots)
    metadata = AttentionMetadata(
        torch.tensor([0, 1, 3, 3], dtype=torch.int32), torch.tensor([5, 0, 5], dtype=torch.int32),
        torch.zeros(3, 1, dtype=torch.int32), slots, slots, 1, 5,
    )  # fmt: skip
    q = torch.randn(6, 2, 64).to(dtype)
    out = cpu.paged_attention(q, k_cache, v_cache, metadata, 0.125)
    assert out[0].abs().sum() > 0
    assert (out[1:] == 0).all()


def test_queries_may_be_a_view_of_a_fused_tensor(dtype: torch.dtype) -> None:
    sequences = Sequences.random([100], 9, 3, 64, dtype)
    expected = sequences.attend(16, [(0, 60, 100)])[0]
    qkv = torch.full((100, 15 * 64), float("nan"), dtype=dtype)
    qkv[:, : 9 * 64] = sequences.q[0].flatten(1)
    sequences.q[0] = qkv[:, : 9 * 64].view(100, 9, 64)
    k_cache, v_cache = cpu.allocate_kv(7, 16, 3, 64, dtype, CPU)
    fused_kv = torch.cat((sequences.k[0], sequences.v[0]), 1)
    cpu.write_kv(fused_kv[:, :3], fused_kv[:, 3:], k_cache, v_cache, torch.arange(100))
    metadata = AttentionMetadata(
        torch.tensor([0, 40], dtype=torch.int32), torch.tensor([100], dtype=torch.int32),
        torch.arange(7, dtype=torch.int32)[None], torch.empty(0), torch.empty(0), 40, 100,
    )  # fmt: skip
    assert torch.equal(cpu.paged_attention(sequences.q[0][60:], k_cache, v_cache, metadata, 0.125), expected)


def read_cache(k_cache: Tensor, v_cache: Tensor, block_size: int, dim: int) -> tuple[Tensor, Tensor]:
    """K and V as the reference lays them out, ``[blocks, block_size, heads, dim]``."""
    blocks = k_cache.shape[0]
    if k_cache.dim() == 4:
        return k_cache.clone(), v_cache.clone()
    if k_cache.dim() == 6:  # pairs of dimensions beside each token
        k_cache = k_cache.transpose(4, 5).flatten(3, 4)
    if v_cache.dim() == 5:  # pairs of tokens beside each dimension
        v_cache = v_cache.transpose(3, 4)
    heads = k_cache.shape[1]
    k = k_cache.transpose(3, 4).reshape(blocks, heads, block_size, dim).transpose(1, 2).clone()
    return k, v_cache.reshape(blocks, heads, block_size, dim).transpose(1, 2).clone()


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 64])
def test_writes_land_in_their_slots_and_a_slot_of_minus_one_writes_nothing(dtype: torch.dtype, block_size: int) -> None:
    blocks, heads, dim, tokens = 256 // block_size, 3, 40, 100
    ours, theirs = (b.allocate_kv(blocks, block_size, heads, dim, dtype, CPU) for b in (cpu, reference))
    generator = torch.Generator().manual_seed(block_size)
    k, v = (torch.randn(tokens, heads, dim, generator=generator).to(dtype) for _ in range(2))
    slots = torch.randperm(256, generator=generator)[:tokens]
    slots[::3] = -1
    cpu.write_kv(k, v, *ours, slots)
    reference.write_kv(k, v, *theirs, slots)
    for got, expected in zip(read_cache(ours[0], ours[1], block_size, dim), theirs, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_copies_take_the_leading_rows_in_order_and_touch_nothing_else(dtype: torch.dtype, block_size: int) -> None:
    blocks, heads, dim = 8, 2, 40
    ours, theirs = (b.allocate_kv(blocks, block_size, heads, dim, dtype, CPU) for b in (cpu, reference))
    k, v = (torch.randn(blocks * block_size, heads, dim).to(dtype) for _ in range(2))
    slots = torch.arange(blocks * block_size)
    cpu.write_kv(k, v, *ours, slots)
    reference.write_kv(k, v, *theirs, slots)
    copies = torch.tensor(
        [(0, 1, block_size), (1, 2, max(1, block_size // 2)), (2, 3, 1), (4, 5, max(1, block_size - 1)), (6, 7, 0)]
    )
    cpu.copy_blocks(*ours, copies)
    reference.copy_blocks(*theirs, copies)
    for got, expected in zip(read_cache(ours[0], ours[1], block_size, dim), theirs, strict=True):
        assert torch.equal(got, expected)


def test_a_fresh_cache_is_zero(dtype: torch.dtype) -> None:
    for cache in cpu.allocate_kv(50, 16, 3, 64, dtype, CPU):
        assert cache.shape[0] == 50
        assert cache.numel() == 50 * 16 * 3 * 64
        assert (cache == 0).all()


@pytest.mark.usefixtures("native")
def test_wrong_dtypes_are_refused_rather_than_read_as_something_else() -> None:
    caches = cpu.allocate_kv(4, 16, 1, 64, torch.float32, CPU)
    one, x = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, 64)
    tables, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(TypeError, match="slots int64"):
        cpu.write_kv(x, x, *caches, one)
    with pytest.raises(TypeError, match="cache's dtype"):
        cpu.write_kv(x.bfloat16(), x, *caches, one.long())
    with pytest.raises(TypeError, match="lengths int32"):
        cpu.paged_attention(x, *caches, AttentionMetadata(starts, one.long(), tables, one, one, 1, 1), 1.0)
    with pytest.raises(TypeError, match="cache's dtype"):
        cpu.paged_attention(x.bfloat16(), *caches, AttentionMetadata(starts, one, tables, one, one, 1, 1), 1.0)


@pytest.mark.full
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "flags",
    [
        ("-DVBYTES=16", "-DMATRIX_TILES=0"),
        ("-DVBYTES=32", "-DMATRIX_TILES=0"),
        ("-DVBYTES=64", "-DMATRIX_TILES=0"),
        ("-DVBYTES=64", "-DMATRIX_TILES=0", "-DDOT_PAIRS=1"),
        ("-DVBYTES=64", "-DEMULATE_TILES", "-DDOT_PAIRS=1"),
    ],
    ids=["128 bits", "256 bits", "512 bits", "dot pairs", "matrix tiles"],
)
def test_the_code_for_every_cpu_agrees_with_float64(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler splits vectors that are wider than this CPU's, and matrix tiles are emulated, so every code runs anywhere."""
    lib = cpu.build.load(cpu.build.build(flags))
    monkeypatch.setattr(cpu, "library", lambda: lib)
    for dtype in (torch.float32, torch.bfloat16):
        for heads, kv_heads, dim in ((9, 3, 64), (4, 4, 80), (16, 1, 128), (6, 2, 72)):
            assert_right(Sequences.random(MIXED_LENGTHS, heads, kv_heads, dim, dtype), 16, MIXED)
        x, weight = torch.randn(150, 601).to(dtype), torch.randn(203, 601).to(dtype)
        packed = cpu.pack_linear(weight, None)
        whole = cpu.linear(x, packed)
        torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, rtol=2**-7, atol=1e-3)
        for rows in range(1, 30):
            assert torch.equal(cpu.linear(x[:rows], packed), whole[:rows])
        even = cpu.pack_linear(weight[:192], None)
        assert isinstance(even, cpu.PackedLinear)
        for rows in (1, 17, 150):
            assert torch.equal(cpu.gated_linear(x[:rows], even), cpu.silu_mul(cpu.linear(x[:rows], even)))
        gate_up = torch.randn(5, 2 * 77).to(dtype)
        torch.testing.assert_close(cpu.silu_mul(gate_up).double(), reference.silu_mul(gate_up.double()), rtol=2**-6, atol=1e-5)
