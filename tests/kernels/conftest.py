"""What the backends' tests share: the CPU backend's variants, batches over shuffled blocks, a mended Triton interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv.kernels import AttentionMetadata, cpu


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where there is no C compiler."""
    try:
        cpu.build.find_compiler()
    except cpu.build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def native(compiler: None) -> None:
    """The compiled C kernels.  Where there is a compiler, kernels that it can't compile fail the test: the engine only warns."""
    cpu.build.load(cpu.build.build())
    assert cpu.is_native(torch.float32), "RADIXKV_NO_NATIVE is set"


@pytest.fixture(params=["native-float32", "native-bfloat16", "torch-float32", "torch-bfloat16", "torch-float16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Each dtype of the CPU backend, computed by the C kernels or by torch."""
    kind, name = request.param.split("-")
    if kind == "torch":
        monkeypatch.setattr(cpu, "is_native", lambda dtype: False)
    else:
        request.getfixturevalue("native")
    result: torch.dtype = getattr(torch, name)
    return result


@dataclass
class PagedBatch:
    """Packed queries, dense K and V of each sequence, and the same K and V scattered over blocks in shuffled order.

    Whatever no sequence may read is NaN: unused blocks, unused rows of last blocks, and the block that unused table entries name.
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata

    def rows(self, s: int) -> slice:
        return slice(int(self.metadata.query_start_loc[s]), int(self.metadata.query_start_loc[s + 1]))

    def attend(self, backend: Any, scale: float = 0.2, **options: Any) -> Tensor:
        out: Tensor = backend.paged_attention(self.q, self.k_cache, self.v_cache, self.metadata, scale, **options)
        return out

    def part(self, s: int, start: int, stop: int) -> PagedBatch:
        """Query rows ``start`` to ``stop`` of sequence ``s``, as a batch of their own."""
        rows = self.rows(s)
        length = int(self.metadata.seq_lens[s]) - (rows.stop - rows.start) + stop
        metadata = metadata_of([stop - start], [length], self.metadata.block_tables[s : s + 1])
        return replace(self, q=self.q[rows][start:stop], keys=[self.keys[s]], values=[self.values[s]], metadata=metadata)


def metadata_of(query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> AttentionMetadata:
    device = block_tables.device
    unused = torch.empty(0, dtype=torch.int64, device=device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return AttentionMetadata(starts, lengths, block_tables, unused, unused, max(query_lens), max(seq_lens))


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    """``paged_batch(query_lens, seq_lens, block_size, kv_heads, group, head_dim, dtype, device="cpu")``, the same at every call."""

    def build(
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_size: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> PagedBatch:
        torch.manual_seed(0)
        needed = [-(-length // block_size) for length in seq_lens]
        *ids, poisoned = torch.randperm(sum(needed) + 2).tolist()
        tables = torch.full((len(seq_lens), max(needed) + 1), poisoned, dtype=torch.int32)
        caches = torch.full((2, len(ids) + 1, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
        dense = [torch.randn(2, length, kv_heads, head_dim).to(dtype) for length in seq_lens]
        for s, count in enumerate(needed):
            tables[s, :count] = torch.tensor([ids.pop() for _ in range(count)])
            token = torch.arange(seq_lens[s])
            caches[:, tables[s, token // block_size].long(), token % block_size] = dense[s]
        fused = torch.randn(sum(query_lens), (group + 2) * kv_heads, head_dim).to(dtype).to(device)
        keys, values = zip(*(pair.to(device) for pair in dense), strict=True)
        k_cache, v_cache = caches.to(device)
        metadata = metadata_of(query_lens, seq_lens, tables.to(device))
        return PagedBatch(fused[:, : group * kv_heads], list(keys), list(values), k_cache, v_cache, metadata)

    return build


def _mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes bfloat16 operands of a dot for integers, and truncates to 16 and 8 bits where GPUs round.

    Dots are also summed in float64: in float32, numpy sums a row of a product in an order that depends on the row's place.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl
    narrow = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
    }

    def rounding_cast(self: Any, source: Any, target: Any, *_: Any) -> Any:
        kind, wanted = source.dtype.scalar, target.scalar
        if kind == wanted or not (kind in narrow or wanted in narrow):
            return cast(self, source, target)
        wide = torch.from_numpy(np.ascontiguousarray(source.data if kind in narrow else cast(self, source, tl.float32).data))
        if kind in narrow:
            dtype, bits = narrow[kind]
            wide = wide.view(bits).view(dtype).float()
        if wanted not in narrow:
            return cast(self, TensorHandle(wide.numpy(), tl.float32), target)
        dtype, bits = narrow[wanted]
        return TensorHandle(wide.to(dtype).view(bits).numpy(), wanted)

    def wide_dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32).data.astype(np.float64) for x in (a, b))
        return TensorHandle((a @ b + acc.data).astype(np.float32), tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", rounding_cast)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide_dot)


@pytest.fixture
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Triton backend: compiled where there is a GPU, else interpreted."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        _mend_interpreter(monkeypatch)
    from radixkv.kernels import triton as backend

    return backend
