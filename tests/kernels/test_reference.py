"""The reference backend against torch's and transformers' own implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from radixkv.kernels import load_backend, reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "block_size", "head_dim"), [(1, 1, 64), (3, 16, 80), (8, 8, 128)])
def test_paged_attention_equals_torch_attention_on_dense_keys(
    paged_batch: Callable[..., Any], dtype: torch.dtype, group: int, block_size: int, head_dim: int
) -> None:
    batch = paged_batch([1, 7, 33, 5], [40, 7, 50, 16], block_size, 2, group, head_dim, dtype)
    out = batch.attend(reference, scale=0.2)
    wide = torch.promote_types(dtype, torch.float32)
    for s, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        q = batch.q[batch.rows(s)]
        mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        query, key, value = (x.to(wide).transpose(0, 1)[None] for x in (q, keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(out[batch.rows(s)], expected[0].transpose(0, 1).to(dtype))


@pytest.mark.parametrize(("window", "soft_cap"), [(4, None), (1, 2.0), (None, 0.5)])
def test_a_window_hides_older_keys_and_a_soft_cap_bounds_scores(
    paged_batch: Callable[..., Any], window: int | None, soft_cap: float | None
) -> None:
    batch = paged_batch([1, 5], [9, 7], 4, 1, 2, 8, torch.float64)
    out = batch.attend(reference, window=window, soft_cap=soft_cap)
    for s, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = batch.rows(s)
        for row in range(rows.start, rows.stop):
            seen = len(keys) - (rows.stop - 1 - row)
            seen_keys = slice(max(0, seen - (window or seen)), seen)
            for head in range(2):
                scores = keys[seen_keys, 0] @ batch.q[row, head] * 0.2
                scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
                torch.testing.assert_close(out[row, head], scores.softmax(0) @ values[seen_keys, 0])


def test_paged_attention_leaves_unowned_and_empty_rows_zero(paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1, 1], [5, 3], 4, 1, 2, 8, torch.float32)
    batch.metadata.seq_lens[1] = 0
    batch.q = torch.randn(4, 2, 8)
    out = batch.attend(reference)
    assert out[0].abs().min() > 0
    assert not out[1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rope_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=6 * 64, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128)
    positions = torch.tensor([0, 1, 2, 50, 127, 7])
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=torch.float32), positions[None])
    table = torch.zeros(128, 64)
    table[positions] = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1)
    qkv = torch.randn(6, 10, 64, dtype=dtype)
    q, k = qkv[:, :6], qkv[:, 6:8]
    expected = apply_rotary_pos_emb(q.clone(), k.clone(), cos[0], sin[0])
    untouched = qkv[:, 8:].clone()
    reference.rope(q, k, positions, table)
    torch.testing.assert_close((q, k), expected)
    assert torch.equal(qkv[:, 8:], untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 5, 96, dtype=dtype)
    assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5), norm(x))
    total = residual + x
    assert torch.equal(reference.add_rms_norm(x, residual, norm.weight, 1e-5), norm(total))
    assert torch.equal(residual, total)


def test_silu_mul_and_linear_equal_their_formulas() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 24, dtype=torch.float64)
    gate, up = gate_up[:, :12], gate_up[:, 12:]
    torch.testing.assert_close(reference.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)
    weight, bias = torch.randn(7, 24, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(reference.linear(gate_up, reference.pack_linear(weight, bias)), gate_up @ weight.T + bias)
    torch.testing.assert_close(reference.linear(gate_up, reference.pack_linear(weight, None)), gate_up @ weight.T)


def test_a_slot_of_minus_one_writes_nothing_and_others_write_one_row() -> None:
    k_cache, v_cache = reference.allocate_kv(3, 4, 2, 8, torch.float32, CPU)
    kv = torch.randn(3, 2, 2, 8)
    k, v = kv[:, 0], kv[:, 1]  # strided views
    reference.write_kv(k, v, k_cache, v_cache, torch.tensor([6, -1, 11]))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[1, 2], rows[0])
        assert torch.equal(cache[2, 3], rows[2])
        assert int(cache.ne(0).any(-1).any(-1).sum()) == 2


def test_copies_are_made_in_order_and_only_the_leading_rows() -> None:
    k_cache, v_cache = torch.randn(2, 4, 4, 1, 8)
    before_k, before_v = k_cache.clone(), v_cache.clone()
    reference.copy_blocks(k_cache, v_cache, torch.tensor([[0, 1, 3], [1, 2, 4], [3, 3, 0]]))
    for cache, before in ((k_cache, before_k), (v_cache, before_v)):
        assert torch.equal(cache[1], torch.cat((before[0, :3], before[1, 3:])))
        assert torch.equal(cache[2], cache[1])
        assert torch.equal(cache[3], before[3])
        assert torch.equal(cache[0], before[0])


def test_the_reference_backend_loads_by_name() -> None:
    assert load_backend("reference").paged_attention is reference.paged_attention
