"""Grammars: which tokens may come next, so that an output has the form that was asked for (llguidance).

A grammar is turned into a mask over the vocabulary at each step, in some ten microseconds for a JSON schema; see
https://github.com/guidance-ai/llguidance.  Where it leaves one way to go on, it says so, and no model need be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from radixkv.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_grammar(outputs: StructuredOutputs) -> None:
    """Raise ``ValueError`` that says what is wrong, without a tokenizer."""
    kind, text = outputs.kind_and_text
    if problem := llguidance.LLMatcher.validate_grammar(_compiled(kind, text), limits=_limits()):
        raise ValueError(f"structured_outputs can't be compiled: {_short(problem)}")


class Grammars:
    """Makes a :class:`Grammar` for each request that wants one."""

    def __init__(self, load: Callable[[], PreTrainedTokenizerBase], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``load`` is called when the first grammar is asked for."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        text = self._load().backend_tokenizer.to_str()
        return llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    def start(self, outputs: StructuredOutputs) -> Grammar:
        """Raises ``ValueError`` that says what is wrong with it."""
        kind, text = outputs.kind_and_text
        matcher = llguidance.LLMatcher(self._tokenizer, _compiled(kind, text), log_level=0, limits=_limits())
        if matcher.is_error():
            raise ValueError(f"structured_outputs can't be compiled: {_short(matcher.get_error())}")
        return Grammar(matcher)


class Grammar:
    """Where one output is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, in ``bitmask`` ``[words]``; none where there is an :attr:`error`."""
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, bitmask[None])
        if self._matcher.is_error():  # computing the mask may have hit a limit
            bitmask[:] = 0

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would cut them, up to where there is a choice.

        The last ones of a text that is certain are left out where they could be cut otherwise, depending on what follows.
        """
        return list(self._matcher.compute_ff_tokens())

    @property
    def finished(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why there is no going on: a limit was hit, most likely."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else None


def allowed_tokens(grammars: Sequence[Grammar], vocab_size: int) -> NDArray[np.bool_]:
    """bool ``[n, vocab]``: what each may go on with."""
    words = np.zeros((len(grammars), -(-vocab_size // 32)), dtype=np.int32)
    for grammar, row in zip(grammars, words, strict=True):
        grammar.fill(row)
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=vocab_size).view(np.bool_)


def _compiled(kind: str, text: str) -> str:
    try:
        return llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
    except Exception as error:  # its conversion from GBNF raises what it likes
        raise ValueError(f"structured_outputs can't be compiled: {_short(str(error))}") from None


def _limits() -> llguidance.LLParserLimits:
    """llguidance's own limits, with messages that say no more than what is wrong."""
    return llguidance.LLParserLimits(verbose_errors=False)


def _short(problem: str) -> str:
    return " ".join(problem.split())[:300]
