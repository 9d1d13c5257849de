"""Which backend a device gets."""

from __future__ import annotations

import sys

import pytest
import torch

from radixkv.kernels import backend_for


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("radixkv.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it now raises
    with pytest.raises(ValueError, match=r"pip install 'radixkv\[gpu\]'"):
        backend_for(torch.device("cuda"))
