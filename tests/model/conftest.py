"""Small random models, GGUF files made from them, and sequences driven through ModelRunner without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from radixkv.cache import BlockCopy
from radixkv.kernels import load_backend
from radixkv.model.kv_storage import KVStorage
from radixkv.model.loader import load_model, load_model_config, resolve_model
from radixkv.model.runner import ModelRunner
from radixkv.platform import torch_threads
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request import Request

TINY: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to share, and on a busy machine threads wait for one another."""
    with torch_threads(1):
        yield


def make_model(name: str, seed: int = 0, **options: Any) -> Any:
    """A transformers model, float32, whose every weight is random (transformers starts biases at 0 and norms at 1)."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**TINY, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in key else 0.15 * noise)
    return model


def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """float32 ``[len(tokens), vocab]`` by transformers, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def batch_of(*chunks: tuple[Request, int, int], copies: Sequence[BlockCopy] = ()) -> Batch:
    """A batch of chunks: request, first token, number of tokens."""
    requests = [request for request, _, _ in chunks]
    leases = [lease for request in requests if (lease := request.lease) is not None]
    starts, counts = (np.array([chunk[k] for chunk in chunks], dtype=np.int64) for k in (1, 2))
    tables = np.zeros((len(chunks), max((len(lease.block_table) for lease in leases), default=0)), dtype=np.int32)
    for row, lease in zip(tables, leases, strict=True):
        row[: len(lease.block_table)] = lease.block_table
    return Batch(
        requests, starts, counts,
        samples=starts + counts == [request.num_tokens for request in requests],
        write_starts=np.array([lease.write_start for lease in leases], dtype=np.int64),
        block_tables=tables, copies=list(copies),
    )  # fmt: skip


class Driver:
    """Runs sequences through our model: prefill in chunks, then decode, all sequences batched, over shuffled blocks."""

    def __init__(self, name: str, num_blocks: int = 256, backend: str = "reference", dtype: torch.dtype = torch.float32) -> None:
        source = resolve_model(name, quiet=True)
        self.config = load_model_config(source)
        device = torch.device("cpu")
        self.model = load_model(source, self.config, dtype=dtype, device=device, backend=load_backend(backend))
        self.kv = KVStorage(self.config, num_blocks, BLOCK_SIZE, dtype, device, load_backend(backend))
        self.runner = ModelRunner(self.model, self.kv, max_num_seqs=16, max_model_len=self.config.max_position_embeddings)
        self.free = np.random.default_rng(7).permutation(num_blocks).astype(np.int32)

    def request(self, tokens: Sequence[int], room: int) -> Request:
        request = Request(f"r{len(self.free)}", list(tokens), SamplingParams(temperature=0.0, max_tokens=room))
        needed = -(-(len(tokens) + room) // BLOCK_SIZE)
        table, self.free = self.free[:needed], self.free[needed:]
        request.lease = SimpleNamespace(block_table=table, write_start=0)  # type: ignore[assignment]
        return request

    def logits(self, sequences: Sequence[Sequence[int]], num_decoded: int, chunk: int) -> list[torch.Tensor]:
        """For each sequence, float32 ``[num_decoded + 1, vocab]``: logits after its prompt and after each of its
        last ``num_decoded`` tokens.

        Every second sequence starts a step later than the one before, so that batches mix decodes and prefill chunks.
        """
        requests = [self.request(seq[: len(seq) - num_decoded], num_decoded) for seq in sequences]
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        step, computed = 0, [0] * len(requests)
        while any(len(r) <= num_decoded for r in rows):
            chunks = []
            for i, request in enumerate(requests):
                if len(rows[i]) <= num_decoded and step >= i % 2:
                    count = min(chunk, request.num_tokens - computed[i])
                    chunks.append((request, computed[i], count))
                    computed[i] += count
            batch = batch_of(*chunks)
            logits = self.runner.forward(batch).clone()
            assert logits.dtype == torch.float32
            assert logits.shape == (len(batch.sampling), self.config.vocab_size)
            for request, row in zip(batch.sampling, logits, strict=True):
                i = requests.index(request)
                rows[i].append(row)
                if len(rows[i]) <= num_decoded:
                    request.append(sequences[i][request.num_tokens])
            step += 1
        return [torch.stack(r) for r in rows]


def assert_agrees(driver: Driver, model: Any, *, lengths: Sequence[int] = (23, 9, 30), tolerance: float = 1e-4) -> None:
    """Our logits over the paged cache equal transformers' over whole sequences."""
    generator = np.random.default_rng(3)
    sequences = [generator.integers(0, driver.config.vocab_size, n).tolist() for n in lengths]
    num_decoded = 4
    for tokens, ours in zip(sequences, driver.logits(sequences, num_decoded, chunk=5), strict=True):
        theirs = reference_logits(model, tokens)[len(tokens) - num_decoded - 1 :]
        assert theirs.std() > 0.1, "the reference must tell tokens apart"
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path, arch: str, model: Any, *, kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:  # fmt: skip
    """Write ``model`` as llama.cpp's converter would; the weights take on the values that ``kinds`` can hold."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_eos_token_id(2)
    if extra:
        extra(writer)
    for name, weight in model.named_parameters():
        if name == "model.embed_tokens.weight":
            theirs = "token_embd.weight"
        elif name == "lm_head.weight":
            theirs = "output.weight"
        elif name == "model.norm.weight":
            theirs = "output_norm.weight"
        else:
            _, _, layer, rest = name.split(".", 3)
            stem, end = rest.rsplit(".", 1)
            theirs = f"blk.{layer}.{GGUF_NAMES[stem]}.{end}"
        array = weight.detach().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-2])
        if arch == "llama" and heads:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        kind = next((k for end, k in (kinds or {}).items() if name.endswith(end)), gguf.GGMLQuantizationType.F32)
        packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(theirs, packed, raw_dtype=kind)
        if kind != gguf.GGMLQuantizationType.F32:
            stored = gguf.quants.dequantize(packed, kind)
            if arch == "llama" and heads:
                stored = stored.reshape(heads, -1, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
            weight.data.copy_(torch.from_numpy(np.ascontiguousarray(stored)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above: test files can't import one another in importlib mode."""
    return SimpleNamespace(
        Driver=Driver, assert_agrees=assert_agrees, batch_of=batch_of, make_model=make_model, reference_logits=reference_logits,
        write_gguf=write_gguf, BLOCK_SIZE=BLOCK_SIZE, TINY=TINY,
    )  # fmt: skip
