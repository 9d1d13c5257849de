"""Llama: the forward pass that Llama, Mistral, Qwen2 and Qwen3 share, over a packed batch and a paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from radixkv.kernels import AttentionMetadata, Backend, DecoderLayer, DecoderShape, FusedLayers
from radixkv.kernels.quantized import QuantizedWeight, concatenate
from radixkv.model.config import ModelConfig
from radixkv.model.kv_storage import KVStorage
from radixkv.model.rope import cos_sin_table


class Llama:
    """Weights packed for one backend.

    ``get(name)`` gives a weight under its Hugging Face name, in the dtype and on the device of the model; ``get_quantized(name)``
    one of few bits as it is stored, for backends that multiply such, and None for others.  Weights are asked for one after the
    other and packed at once, so that memory peaks at about one copy of the model.
    """

    def __init__(
        self, config: ModelConfig, get: Callable[[str], Tensor], backend: Backend,
        get_quantized: Callable[[str], QuantizedWeight | None] = lambda name: None,
    ) -> None:  # fmt: skip
        self.config = config
        self._backend = backend
        self._embedding = get("model.embed_tokens.weight")
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        table = cos_sin_table(config.rope, config.head_dim, config.max_position_embeddings)
        self._cos_sin = table.to(self.device)
        self._scale = 1.0 / math.sqrt(config.head_dim)

        pack_quantized = getattr(backend, "pack_quantized", None)

        def packed(names: list[str], has_bias: bool) -> Any:
            weights = [f"{name}.weight" for name in names]
            bias = torch.cat([get(f"{name}.bias") for name in names]) if has_bias else None
            if pack_quantized is not None and (quantized := concatenate([get_quantized(name) for name in weights])) is not None:
                as_stored = pack_quantized(quantized, bias, self.dtype)
                if as_stored is not None:
                    return as_stored
            return backend.pack_linear(torch.cat([get(name) for name in weights]), bias)

        self._layers: list[DecoderLayer] = []
        self._first_norm = get("model.layers.0.input_layernorm.weight")
        for i in range(config.num_layers):
            prefix = f"model.layers.{i}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            last = i + 1 == config.num_layers
            self._layers.append(
                DecoderLayer(
                    qkv=packed([f"{attention}.{part}_proj" for part in "qkv"], config.qkv_bias),
                    o=packed([f"{attention}.o_proj"], config.o_bias),
                    gate_up=packed([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
                    down=packed([f"{mlp}.down_proj"], config.mlp_bias),
                    post_norm=get(f"{prefix}.post_attention_layernorm.weight"),
                    next_norm=get("model.norm.weight" if last else f"model.layers.{i + 1}.input_layernorm.weight"),
                    q_norm=get(f"{attention}.q_norm.weight") if config.qk_norm else None,
                    k_norm=get(f"{attention}.k_norm.weight") if config.qk_norm else None,
                )
            )
        self._fused: tuple[KVStorage, FusedLayers | None] | None = None
        """The layers as one call, and the storage they write into."""
        self._lm_head = packed(["model.embed_tokens" if config.tie_word_embeddings else "lm_head"], False)

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv: KVStorage, rows: Tensor | None = None) -> Tensor:
        """Hidden states ``[T, hidden]`` of int64 ``token_ids`` ``[T]``, after the last norm; their K and V go into ``kv``.

        With ``rows``, int64 ``[n]``, those of these rows alone, ``[n, hidden]``: each the last of its sequence.  Of the others the
        last layer computes nothing but K and V, a thirtieth of the work for a model of 30 layers.

        All K/V of a layer are written before its attention reads: a sequence may read blocks that another fills in this step.
        """
        backend, config = self._backend, self.config
        residual = functional.embedding(token_ids, self._embedding)
        x: Tensor = backend.rms_norm(residual, self._first_norm, config.rms_norm_eps)
        if (fused := self._fused_layers(kv)) is not None:
            return fused(x, residual, metadata, rows)

        linear, add_rms_norm, silu_mul = backend.linear, backend.add_rms_norm, backend.silu_mul
        rope, write_kv, paged_attention = backend.rope, backend.write_kv, backend.paged_attention
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        head_dim, eps, scale, cos_sin = config.head_dim, config.rms_norm_eps, self._scale, self._cos_sin
        positions, slots = metadata.positions, metadata.slot_mapping
        num_tokens = token_ids.shape[0]
        for layer, (k_cache, v_cache) in zip(self._layers, kv.layers, strict=True):
            qkv, o, gate_up, down, post_norm, next_norm, q_norm, k_norm = layer
            q, k, v = linear(x, qkv).view(num_tokens, -1, head_dim).split_with_sizes(heads, 1)
            if q_norm is not None and k_norm is not None:
                q, k = backend.rms_norm(q.contiguous(), q_norm, eps), backend.rms_norm(k.contiguous(), k_norm, eps)
            rope(q, k, positions, cos_sin)
            write_kv(k, v, k_cache, v_cache, slots)
            if rows is not None and layer is self._layers[-1]:
                q, residual, metadata = q[rows], residual[rows], metadata.of_last_tokens(rows)
            attended = paged_attention(q, k_cache, v_cache, metadata, scale).flatten(1)
            x = add_rms_norm(linear(attended, o), residual, post_norm, eps)
            x = add_rms_norm(linear(silu_mul(linear(x, gate_up)), down), residual, next_norm, eps)
        return x

    def _fused_layers(self, kv: KVStorage) -> FusedLayers | None:
        """All layers over ``kv`` as one call of the backend, if it has that."""
        if self._fused is None or self._fused[0] is not kv:
            fuse, c = getattr(self._backend, "fuse_layers", None), self.config
            shape = DecoderShape(c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, self._scale, self._cos_sin)
            self._fused = kv, fuse(self._layers, kv.layers, shape) if fuse is not None else None
        return self._fused[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        return self._backend.logits(hidden, self._lm_head)
