"""KVStorage: the physical K and V blocks of all layers, in the backend's layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.cache import BlockCopy
from radixkv.kernels import Backend
from radixkv.model.config import ModelConfig
from radixkv.platform import available_memory


class KVStorage:
    """One (K, V) pair a layer, ``num_blocks`` blocks of ``block_size`` tokens each.  Who owns a block is the cache's business.

    Raises ``ValueError`` where the device has too little memory left.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, backend: Backend
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        tokens = num_blocks * block_size
        needed = tokens * config.kv_bytes_per_token(str(dtype).removeprefix("torch."))
        available = available_memory(device)
        if needed > available:
            raise ValueError(
                f"kv_cache_tokens must fit into memory: {tokens} tokens of this model take {needed / 2**30:.1f} GiB, "
                f"and {available / 2**30:.1f} GiB are available"
            )
        self.layers: list[tuple[Tensor, Tensor]] = [
            backend.allocate_kv(num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype, device)
            for _ in range(config.num_layers)
        ]
        self._device = device
        self._copy_blocks = backend.copy_blocks

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the leading rows of blocks, in order, in every layer."""
        table = torch.tensor(copies, dtype=torch.int64, device=self._device)
        for k_cache, v_cache in self.layers:
            self._copy_blocks(k_cache, v_cache, table)
