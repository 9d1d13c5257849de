"""SamplingParams: how one request's tokens are chosen, checked where it enters."""

from __future__ import annotations

import math

import msgspec

from radixkv.structured_outputs import StructuredOutputs

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
GREEDY_BELOW = 1e-5
"""Temperatures below this choose the highest logit: float32 could not divide by them."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to sample, and when to stop.  The names are the OpenAI API's and vLLM's.

    ``temperature=0`` (or below 0.00001) is greedy: the highest logit wins, ties to the lowest token id.

    Call :meth:`validate` at every door.  It raises ``ValueError`` naming the field and its limit.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches ``top_p``; in (0, 1]."""
    top_k: int = 0
    """Keep the ``top_k`` most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than ``min_p`` times the most probable one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or output (CTRL, Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output; in [-2, 2]."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, whatever else is in the batch."""
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many alternatives (0 to 20); None reports nothing."""
    prompt_logprobs: int | None = None
    """The same of every prompt token but the first.  All of the prompt is computed for that, cached or not."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of the returned text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    """The form the output must have.  It ends where the form is complete, ``ignore_eos`` or not."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return (
            bool(self.logit_bias) or self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def plain(self) -> bool:
        """The highest logit wins, and nothing is reported of the others."""
        return self.greedy and self.logprobs is None and not self.shapes_logits and self.structured_outputs is None

    def validate(self) -> SamplingParams:
        """Return self, or raise ``ValueError`` that names the first bad field and its limit."""
        try:  # what came over a wire has these types already, what Python code made may not
            msgspec.convert(msgspec.structs.asdict(self), SamplingParams)
        except msgspec.ValidationError as error:
            problem, _, field = str(error).partition(" - at `$.")
            raise ValueError(f"{field.removesuffix('`')} has a wrong type: {problem[0].lower()}{problem[1:]}") from None
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _range("temperature", self.temperature, 0.0, 100.0)
        _check(_finite(self.top_p) and 0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _check(self.top_k >= 0, "top_k", "0 (all) or more", self.top_k)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        if self.logprobs is not None:
            _range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _range("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(self.stop)} strings")
        _check(all(self.stop), "stop", "made of non-empty strings", list(self.stop))
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} token ids",
            f"{len(self.stop_token_ids)} token ids",
        )
        for token_id in self.stop_token_ids:
            _check(token_id >= 0, "stop_token_ids", "made of token ids of 0 or more", token_id)
        if self.logit_bias is not None:
            _check(
                len(self.logit_bias) <= MAX_LOGIT_BIAS,
                "logit_bias",
                f"at most {MAX_LOGIT_BIAS} entries",
                f"{len(self.logit_bias)} entries",
            )
            for token_id, bias in self.logit_bias.items():
                _check(token_id >= 0, "logit_bias", "keyed by token ids of 0 or more", token_id)
                _range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.structured_outputs is not None:
            _ = self.structured_outputs.kind_and_text
        return self


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _check(ok: bool, field: str, limit: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{field} must be {limit}, got {value!r}")


def _range(field: str, value: float, low: float, high: float) -> None:
    _check(_finite(value) and low <= value <= high, field, f"between {low:g} and {high:g}", value)
