"""Sampler: logits to one token a request, all requests of a step together.

The order is vLLM's and Hugging Face's: logit bias, penalties, temperature, top-k, top-p (of what top-k kept), min-p.  A row's token
depends on that row alone: filters are thresholds on its own probabilities, and a seeded row draws one number that is
a function of its seed and of how many tokens it has put out, from a counter-based generator (Philox: Salmon et al. 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from radixkv.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from radixkv.scheduling.request import Request, TokenLogprobs

_NUCLEUS_CANDIDATES = 1024
_entropy = np.random.default_rng()


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose the next token of each request from float32 ``logits`` ``[n, vocab]``, which may be overwritten.

    Returns the token ids, and log-probabilities for requests that ask for them (None for the others).  These are the model's own,
    before bias, penalties and temperature, as OpenAI and vLLM report them; equal ones are listed by token id.

    Costs O(n * vocab) on the device, and O(tokens so far) in numpy for each request with penalties.
    """
    params = [request.params for request in requests]
    wants_logprobs = [row for row, p in enumerate(params) if p.logprobs is not None]
    raw_logprobs = logits[wants_logprobs].log_softmax(-1) if wants_logprobs else None
    if any(map(_shapes_logits, params)):
        _add_bias(logits, params)
        _penalise(logits, requests)
    tokens = logits.argmax(-1) if all(p.temperature == 0 for p in params) else _draw(logits, requests)
    token_ids: list[int] = tokens.tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(params)
    if raw_logprobs is not None:
        chosen = raw_logprobs.gather(1, tokens[wants_logprobs].unsqueeze(1)).squeeze(1).tolist()
        # Always as many: which of several equals topk lists could otherwise depend on what other requests ask for.
        values, ids = raw_logprobs.topk(min(MAX_TOP_LOGPROBS, raw_logprobs.shape[1]))
        for row, own, row_values, row_ids in zip(wants_logprobs, chosen, values.tolist(), ids.tolist(), strict=True):
            best = sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            logprobs[row] = TokenLogprobs(token_ids[row], own, best[: params[row].logprobs])
    return token_ids, logprobs


def _shapes_logits(p: SamplingParams) -> bool:
    return bool(p.logit_bias) or p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _add_bias(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    vocab_size = logits.shape[1]
    entries = [(row, i, bias) for row, p in enumerate(params) for i, bias in (p.logit_bias or {}).items() if i < vocab_size]
    if entries:
        rows, ids, biases = (torch.tensor(column, device=logits.device) for column in zip(*entries, strict=True))
        logits[rows, ids] += biases.to(logits.dtype)


def _penalise(logits: Tensor, requests: Sequence[Request]) -> None:
    rows = [row for row, r in enumerate(requests) if r.params.repetition_penalty != 1.0]
    if rows:
        seen = _counts([requests[row].tokens for row in rows], logits) > 0
        penalty = torch.tensor([[requests[row].params.repetition_penalty] for row in rows], device=logits.device)
        own = logits[rows]
        logits[rows] = torch.where(seen, torch.where(own > 0, own / penalty, own * penalty), own)
    rows = [row for row, r in enumerate(requests) if r.params.presence_penalty != 0.0 or r.params.frequency_penalty != 0.0]
    if rows:
        counts = _counts([requests[row].output_token_ids for row in rows], logits)
        presence = torch.tensor([[requests[row].params.presence_penalty] for row in rows], device=logits.device)
        frequency = torch.tensor([[requests[row].params.frequency_penalty] for row in rows], device=logits.device)
        logits[rows] -= (counts > 0) * presence + counts * frequency


def _counts(sequences: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]], logits: Tensor) -> Tensor:
    """float32 ``[len(sequences), vocab]``: how often each token is in each sequence."""
    vocab_size = logits.shape[1]
    row_of_token = np.repeat(np.arange(len(sequences), dtype=np.int64), [len(tokens) for tokens in sequences])
    flat = torch.from_numpy(row_of_token * vocab_size + np.concatenate(sequences)).to(logits.device)
    return torch.bincount(flat, minlength=len(sequences) * vocab_size).view(len(sequences), vocab_size).to(logits.dtype)


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """int64 ``[n]``; rows of temperature 0 take their highest logit, the first of equals."""
    params = [request.params for request in requests]
    device = logits.device
    greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
    temperature = torch.tensor([[p.temperature or 1.0] for p in params], device=device)
    # With the maximum at 0 no temperature, however small, overflows at the top.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    rows = [row for row, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1.0 or p.min_p)]
    if rows:
        kept = probs[rows]
        threshold = _threshold(kept, [params[row] for row in rows])
        probs[rows] = torch.where(kept >= threshold, kept, 0.0)
    # The inverse of the distribution function, in order of token id; float64, as float32 sums lose the tail of a big vocabulary.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    uniform = torch.tensor([[_uniform(request)] for request in requests], dtype=torch.float64, device=device)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    # A product rounded up to the total would point past the end.
    drawn = torch.where(drawn < logits.shape[1], drawn, probs.argmax(-1))
    return torch.where(greedy, logits.argmax(-1), drawn)


def _threshold(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """float32 ``[m, 1]``: the probability down to which top-k, top-p and min-p keep tokens.

    Tokens as probable as the last one kept are kept too, so that nothing hangs on how equals are sorted.
    """
    vocab_size, device = probs.shape[1], probs.device
    threshold = probs.amax(-1, keepdim=True) * torch.tensor([[p.min_p] for p in params], device=device)
    bounds = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut = [row for row, p in enumerate(params) if p.top_p < 1.0 or bounds[row] < vocab_size]
    if cut:
        top_k = torch.tensor([[bounds[row]] for row in cut], device=device)
        top_p = torch.tensor([[params[row].top_p] for row in cut], dtype=torch.float64, device=device)
        # The most probable tokens usually settle it; rows whose top-p reaches further have their whole vocabulary sorted.
        candidates = max(bounds[row] if bounds[row] < vocab_size else min(_NUCLEUS_CANDIDATES, vocab_size) for row in cut)
        last, settled = _last_kept(probs[cut], top_k, top_p, candidates)
        wide = [i for i, done in enumerate(settled.flatten().tolist()) if not done]
        if wide:
            last[wide] = _last_kept(probs[[cut[i] for i in wide]], top_k[wide], top_p[wide], vocab_size)[0]
        threshold[cut] = torch.maximum(threshold[cut], last)
    return threshold


def _last_kept(probs: Tensor, top_k: Tensor, top_p: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Probability of the last token that top-k, then top-p keep, ``[m, 1]``; and whether the ``candidates`` best tokens tell."""
    best = probs.topk(candidates).values
    cumulative = best.cumsum(-1, dtype=torch.float64)
    last_of_k = top_k.clamp(max=candidates) - 1
    mass = torch.where(top_k < probs.shape[1], cumulative.gather(1, last_of_k), 1.0)
    reached = torch.searchsorted(cumulative, top_p * mass)
    return best.gather(1, torch.minimum(reached, last_of_k)), (reached < candidates) | (top_k <= candidates)


def _uniform(request: Request) -> float:
    """In [0, 1)."""
    seed = request.params.seed
    if seed is None:
        return _entropy.random()
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=request.num_output_tokens)).random()
