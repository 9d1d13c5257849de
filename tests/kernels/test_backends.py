"""Which backend a device gets."""

from __future__ import annotations

import sys

import pytest
import torch

from radixkv.kernels import AttentionMetadata, backend_for, load_backend


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("radixkv.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it now raises
    with pytest.raises(ValueError, match=r"pip install 'radixkv\[gpu\]'"):
        backend_for(torch.device("cuda"))


@pytest.mark.parametrize("option", [{"window": 8}, {"soft_cap": 30.0}])
def test_the_cpu_refuses_what_it_does_not_compute(option: dict[str, float]) -> None:
    one = torch.tensor([1], dtype=torch.int32)
    metadata = AttentionMetadata(torch.tensor([0, 1], dtype=torch.int32), one, one[None], one.long(), one.long(), 1, 1)
    caches = load_backend("cpu").allocate_kv(2, 4, 1, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="knows no window and no soft_cap"):
        load_backend("cpu").paged_attention(torch.zeros(1, 1, 64), *caches, metadata, 1.0, **option)  # type: ignore[arg-type]
