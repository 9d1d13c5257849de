"""ModelRunner: a scheduler's batch in, one row of logits out for each sequence that samples, and log-probabilities of prompts.

On CUDA, batches of decodes alone run through graphs captured for a few batch sizes; smaller batches are padded up to the next one.
"""

from __future__ import annotations

import bisect
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.kernels import AttentionMetadata
from radixkv.model.kv_storage import KVStorage
from radixkv.model.llama import Llama
from radixkv.model.sampler import token_logprobs
from radixkv.scheduling.batch import Batch, ScheduledSequence

SCORED_AT_ONCE = 64
"""Rows of logits at once: a prompt's would be gigabytes."""

_last_token = attrgetter("last_token")


class Inputs(NamedTuple):
    """A batch as numpy arrays; shapes and types are those of :class:`~radixkv.kernels.AttentionMetadata`."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sampled_rows: NDArray[np.int64]
    max_query_len: int
    max_seq_len: int
    tree_segments: NDArray[np.int32] | None


def prepare_inputs(batch: Batch, block_size: int) -> Inputs:
    """Flatten a batch: O(tokens) in numpy."""
    starts, counts, tables = batch.starts, batch.counts, batch.block_tables
    ends = starts + counts
    rows = np.arange(len(batch))
    last_tokens = np.fromiter(map(_last_token, batch.requests), np.int64, len(batch))
    max_query_len = int(counts.max())
    if max_query_len == 1 and batch.samples.all():  # decodes alone
        query_start_loc = np.arange(len(batch) + 1, dtype=np.int32)
        row_of_token = last_rows = rows
        positions, token_ids = starts, last_tokens
    else:
        query_start_loc = np.zeros(len(batch) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        row_of_token, last_rows = np.repeat(rows, counts), query_start_loc[1:].astype(np.int64) - 1
        positions = np.arange(len(row_of_token)) + (starts - query_start_loc[:-1])[row_of_token]
        token_ids = np.empty(len(row_of_token), dtype=np.int64)
        token_ids[last_rows] = last_tokens
        for i in np.flatnonzero((counts > 1) | ~batch.samples).tolist():
            token_ids[query_start_loc[i] : query_start_loc[i + 1]] = batch.requests[i].tokens[starts[i] : ends[i]]
    blocks, offsets = np.divmod(positions, block_size)
    slots = tables[row_of_token, blocks] * np.int64(block_size) + offsets
    slots[positions < batch.write_starts[row_of_token]] = -1
    return Inputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_start_loc=query_start_loc,
        seq_lens=ends.astype(np.int32),
        block_tables=tables,
        sampled_rows=last_rows[batch.samples],
        max_query_len=max_query_len,
        max_seq_len=int(ends.max()),
        tree_segments=batch.tree_segments,
    )


class ModelRunner:
    """Runs batches of at most ``max_num_seqs`` sequences of at most ``max_model_len`` tokens."""

    def __init__(self, model: Llama, kv: KVStorage, *, max_num_seqs: int, max_model_len: int) -> None:
        self.model = model
        self.kv = kv
        self._graphs = DecodeGraphs(model, kv, max_num_seqs, max_model_len) if model.device.type == "cuda" else None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """float32 logits ``[n, vocab]``: a row for each sequence with ``samples``, in the batch's order.

        Block copies are made first. Sequences whose last known token is not in the batch give no row.  Log-probabilities of prompt
        tokens are added to the requests that want them.
        """
        if batch.copies:
            self.kv.copy(batch.copies)
        if not batch.requests:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        inputs = prepare_inputs(batch, self.kv.block_size)
        if batch.scores_prompts:
            hidden = self.model.forward(self._to_device(inputs.token_ids), self._metadata(inputs), self.kv)
            for seq, start in zip(batch.sequences, inputs.query_start_loc.tolist(), strict=False):
                self._score(seq, hidden[start : start + seq.num_tokens])
            return self.model.logits(hidden[self._to_device(inputs.sampled_rows)])
        if self._graphs is not None and inputs.max_query_len == 1:
            logits = self._graphs.replay(inputs)
            return logits if len(inputs.sampled_rows) == len(logits) else logits[self._to_device(inputs.sampled_rows)]
        rows = self._to_device(inputs.sampled_rows) if len(inputs.sampled_rows) < len(inputs.token_ids) else None
        return self.model.logits(self.model.forward(self._to_device(inputs.token_ids), self._metadata(inputs), self.kv, rows))

    def _score(self, seq: ScheduledSequence, hidden: Tensor) -> None:
        """Add to the sequence's request what its rows ``[num_tokens, hidden]`` say of its prompt, a few at a time."""
        request, scored = seq.request, seq.scored
        for first in scored[::SCORED_AT_ONCE]:
            tokens = request.tokens[first : min(first + SCORED_AT_ONCE, scored.stop)]
            row = first - 1 - seq.start
            logprobs = self.model.logits(hidden[row : row + len(tokens)]).log_softmax(-1)
            counts = [request.params.prompt_logprobs or 0] * len(tokens)
            assert request.prompt_logprobs is not None
            request.prompt_logprobs += token_logprobs(logprobs, self._to_device(tokens.astype(np.int64)), counts)

    def _metadata(self, inputs: Inputs) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=self._to_device(inputs.query_start_loc),
            seq_lens=self._to_device(inputs.seq_lens),
            block_tables=self._to_device(inputs.block_tables),
            slot_mapping=self._to_device(inputs.slot_mapping),
            positions=self._to_device(inputs.positions),
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            tree_segments=self._to_device(inputs.tree_segments) if inputs.tree_segments is not None else None,
        )

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)


class DecodeGraphs:
    """CUDA graphs of a decode step, for padded batch sizes 1, 2, 4, 8, 16, 24, ..., captured at start-up.

    A graph reads fixed buffers, so a step copies its inputs there.  Padding rows write nothing (slot -1) and read a row of block 0.
    """

    def __init__(self, model: Llama, kv: KVStorage, max_num_seqs: int, max_model_len: int) -> None:
        sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
        self._sizes = sizes[: bisect.bisect_left(sizes, max_num_seqs) + 1]
        most, device = self._sizes[-1], model.device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._metadata = AttentionMetadata(
            query_start_loc=torch.arange(most + 1, dtype=torch.int32, device=device),
            seq_lens=torch.ones(most, dtype=torch.int32, device=device),
            block_tables=torch.zeros(most, -(-max_model_len // kv.block_size), dtype=torch.int32, device=device),
            slot_mapping=torch.full((most,), -1, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            max_query_len=1,
            max_seq_len=max_model_len,
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = None
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first: the others fit in its memory pool
                self._step(model, kv, size)  # compiles kernels, which a capture may not
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = self._step(model, kv, size)
                pool = pool or graph.pool()
                self._graphs[size] = graph, logits

    def _step(self, model: Llama, kv: KVStorage, size: int) -> Tensor:
        m = self._metadata
        first = AttentionMetadata(
            m.query_start_loc[: size + 1], m.seq_lens[:size], m.block_tables[:size], m.slot_mapping[:size], m.positions[:size],
            m.max_query_len, m.max_seq_len,
        )  # fmt: skip
        return model.logits(model.forward(self._token_ids[:size], first, kv))

    def replay(self, inputs: Inputs) -> Tensor:
        """float32 logits ``[S, vocab]`` of a batch of ``S`` decodes; overwritten by the next replay."""
        count = len(inputs.seq_lens)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        m = self._metadata
        for buffer, values, padding in (
            (self._token_ids, inputs.token_ids, 0),
            (m.positions, inputs.positions, 0),
            (m.slot_mapping, inputs.slot_mapping, -1),
            (m.seq_lens, inputs.seq_lens, 1),
        ):
            buffer[:count].copy_(torch.from_numpy(values), non_blocking=True)
            buffer[count:size] = padding
        m.block_tables[:count, : inputs.block_tables.shape[1]].copy_(torch.from_numpy(inputs.block_tables), non_blocking=True)
        m.block_tables[count:size, 0] = 0
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]
