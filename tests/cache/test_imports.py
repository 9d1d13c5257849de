"""The cache is a library of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("statement", ["import radixkv.cache", "from radixkv import PrefixCache, BlockPool, RadixTree"])
def test_importing_the_cache_loads_no_torch_and_no_server(statement: str):
    code = f"{statement}; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "transformers", "zmq", "litestar", "msgspec", "rich", "triton"}
    assert not heavy & set(loaded)
