"""Sampler: logits to one token a request, all requests of a step together.

The order is vLLM's and Hugging Face's: logit bias, penalties, grammar, temperature, top-k, top-p (of what top-k kept), min-p.  A
row's token depends on that row alone: filters are thresholds on its own probabilities, and a seeded row draws one number that is
a function of its seed and of how many tokens it has put out, from a counter-based generator (Philox: Salmon et al. 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.grammar import allowed_tokens
from radixkv.kernels import cpu
from radixkv.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from radixkv.scheduling.request import Request, TokenLogprobs

_FEW = 256  # up to here topk beats a sort
_entropy = np.random.default_rng()
_is_plain = attrgetter("plain")


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose the next token of each request from float32 ``logits`` ``[n, vocab]``, which may be overwritten.

    Returns the token ids, and log-probabilities for requests that ask for them (None for the others).  These are the model's own,
    before bias, penalties and temperature, as OpenAI and vLLM report them; equal ones are listed by token id.  A token of -1 means
    that the row's logits were not finite: the model overflowed, or its grammar allows nothing, and there is nothing to choose from.

    Costs O(n * vocab) on the device, and O(tokens so far) in numpy for each request with penalties.
    """
    if all(map(_is_plain, requests)):
        tokens, highest = _best(logits)
        return _finite(tokens, highest), [None] * len(requests)
    params = [request.params for request in requests]
    wants_logprobs = [row for row, p in enumerate(params) if p.logprobs is not None]
    raw_logprobs = logits[wants_logprobs].log_softmax(-1) if wants_logprobs else None
    if any(p.shapes_logits for p in params):
        _add_bias(logits, params)
        _penalise(logits, requests)
    _mask(logits, requests)
    greedy_tokens, highest = _best(logits)
    tokens = greedy_tokens if all(p.greedy for p in params) else _draw(logits, highest, greedy_tokens, params, requests)
    token_ids = _finite(tokens, highest)
    logprobs: list[TokenLogprobs | None] = [None] * len(params)
    if raw_logprobs is not None:
        found = token_logprobs(raw_logprobs, tokens[wants_logprobs], [params[row].logprobs or 0 for row in wants_logprobs])
        for row, own in zip(wants_logprobs, found, strict=True):
            logprobs[row] = own
    return token_ids, logprobs


def token_logprobs(logprobs: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of log-probabilities ``[n, vocab]``, those of ``tokens`` ``[n]`` and the ``counts`` highest of each row."""
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    # Always as many: which of several equals topk lists could otherwise depend on what other requests ask for.
    values, ids = logprobs.topk(min(MAX_TOP_LOGPROBS, logprobs.shape[1]))
    found = []
    for token_id, own, row_values, row_ids, count in zip(
        tokens.tolist(), chosen, values.tolist(), ids.tolist(), counts, strict=True
    ):
        best = sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprobs(token_id, own, best[:count]))
    return found


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the token of the highest logit, the first of equals, int64 ``[n]``, and that logit, float32 ``[n]``."""
    if logits.device.type == "cpu":
        return cpu.highest(logits)
    tokens = logits.argmax(-1)
    return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _finite(tokens: Tensor, highest: Tensor) -> list[int]:
    """``tokens``, but -1 where a row's highest logit is none."""
    return [token if isfinite(logit) else -1 for token, logit in zip(tokens.tolist(), highest.tolist(), strict=True)]


def _mask(logits: Tensor, requests: Sequence[Request]) -> None:
    """Rule out what the requests' grammars don't allow."""
    constrained = [(row, grammar) for row, request in enumerate(requests) if (grammar := request.grammar) is not None]
    if constrained:
        rows = [row for row, _ in constrained]
        allowed = torch.from_numpy(allowed_tokens([grammar for _, grammar in constrained], logits.shape[1]))
        logits[rows] = logits[rows].masked_fill(~allowed.to(logits.device), -torch.inf)


def _add_bias(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    vocab_size = logits.shape[1]
    entries = [(row, i, bias) for row, p in enumerate(params) for i, bias in (p.logit_bias or {}).items() if i < vocab_size]
    if entries:
        rows, ids, biases = (torch.tensor(column, device=logits.device) for column in zip(*entries, strict=True))
        logits[rows, ids] += biases.to(logits.dtype)


def _penalise(logits: Tensor, requests: Sequence[Request]) -> None:
    rows = [row for row, r in enumerate(requests) if r.params.repetition_penalty != 1.0]
    if rows:
        at, _ = _distinct(rows, [requests[row].tokens for row in rows], logits.device)
        penalty = torch.tensor([r.params.repetition_penalty for r in requests], device=logits.device)[at[0]]
        seen = logits[at]
        logits[at] = torch.where(seen > 0, seen / penalty, seen * penalty)
    rows = [row for row, r in enumerate(requests) if r.params.presence_penalty != 0.0 or r.params.frequency_penalty != 0.0]
    if rows:
        at, counts = _distinct(rows, [requests[row].output_token_ids for row in rows], logits.device)
        presence = torch.tensor([r.params.presence_penalty for r in requests], device=logits.device)[at[0]]
        frequency = torch.tensor([r.params.frequency_penalty for r in requests], device=logits.device)[at[0]]
        logits[at] -= presence + counts * frequency


def _distinct(
    rows: Sequence[int], sequences: Sequence[NDArray[np.int32]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Rows and token ids of the distinct tokens of each row's sequence, and how often each occurs; O(n log n) in all tokens."""
    row_of_token = np.repeat(np.array(rows, dtype=np.int64), [len(tokens) for tokens in sequences])
    keys, counts = np.unique(row_of_token << 32 | np.concatenate(sequences), return_counts=True)
    at = (torch.from_numpy(keys >> 32).to(device), torch.from_numpy(keys & 0xFFFFFFFF).to(device))
    return at, torch.from_numpy(counts).to(device)


def _draw(
    logits: Tensor, highest: Tensor, greedy_tokens: Tensor, params: Sequence[SamplingParams], requests: Sequence[Request]
) -> Tensor:
    """int64 ``[n]``; greedy rows take theirs of ``greedy_tokens``.  Overwrites ``logits``, whose row maxima are ``highest``."""
    device = logits.device
    # With the maximum at 0 no temperature, however small, overflows at the top.
    logits -= highest.unsqueeze(1)
    logits /= torch.tensor([[1.0 if p.greedy else p.temperature] for p in params], device=device)
    probs = logits.softmax(-1)
    if any(p.top_k or p.top_p < 1.0 or p.min_p for p in params):
        probs.masked_fill_(probs < _threshold(probs, params), 0.0)
    # The inverse of the distribution function, in order of token id; float64, as float32 sums lose the tail of a big vocabulary.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniform = torch.tensor([[_uniform(request)] for request in requests], dtype=torch.float64, device=device)
    # Below the total even where the product rounds up, so that the search ends at a token that is kept.
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, point, right=True).squeeze(1)
    return torch.where(torch.tensor([p.greedy for p in params], device=device), greedy_tokens, drawn)


def _threshold(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """float32 ``[n, 1]``: the probability down to which top-k, then top-p (of what top-k kept), and min-p keep tokens.

    Tokens as probable as the last one kept are kept too, so that nothing hangs on how equals are sorted.
    """
    vocab_size, device = probs.shape[1], probs.device
    threshold = probs.amax(-1, keepdim=True) * torch.tensor([[p.min_p] for p in params], device=device)
    bounds = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut = [row for row, p in enumerate(params) if p.top_p < 1.0 or bounds[row] < vocab_size]
    if cut:
        last_of_k = torch.tensor([[bounds[row] - 1] for row in cut], device=device)
        top_p = torch.tensor([[params[row].top_p] for row in cut], dtype=torch.float64, device=device)
        best = _largest(probs if len(cut) == len(params) else probs[cut], max(bounds[row] for row in cut))
        cumulative = best.cumsum(-1, dtype=torch.float64)
        reached = torch.searchsorted(cumulative, top_p * cumulative.gather(1, last_of_k))
        last_kept = best.gather(1, torch.where(top_p < 1.0, torch.minimum(reached, last_of_k), last_of_k))
        threshold[cut] = torch.maximum(threshold[cut], last_kept)
    return threshold


def _largest(probs: Tensor, count: int) -> Tensor:
    """The ``count`` largest of each row, or more, in falling order."""
    if count <= _FEW:
        return probs.topk(count).values
    if probs.device.type == "cpu":  # numpy sorts with SIMD: a tenth of torch.sort's time, and less than topk(1024) takes
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    return probs.sort(-1, descending=True).values


def _uniform(request: Request) -> float:
    """In [0, 1)."""
    seed = request.params.seed
    if seed is None:
        return _entropy.random()
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=request.num_output_tokens)).random()
