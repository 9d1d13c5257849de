"""What answers of every endpoint say alike."""

from __future__ import annotations

from typing import Any

from radixkv.server.messages import Usage

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't write, as in the OpenAI API."""


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "miss_reasons": usage.missed},
    }
