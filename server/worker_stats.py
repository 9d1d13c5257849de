"""What several workers say of themselves, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_EACH = (
    "uptime_s", "requests", "prompt_tokens", "cached_tokens", "running", "waiting", "blocks_total", "blocks_free", "blocks_cached",
    "blocks_locked",
)  # fmt: skip
_ALIKE = ("block_size", "max_model_len", "kv_bytes_per_token", "prefix_caching", "dtype")


def merged(stats: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """``Engine.stats()`` of one worker as it is; of several, by index, added up, with ``workers`` to tell some of it apart.

    What the workers have in common stays as it is, and ``uptime_s`` is that of the oldest.
    """
    first, *others = stats.values()
    if not others:
        return first
    total = first
    for each in others:
        total = _sum(total, each)
    alike = {name: first[name] for name in _ALIKE if name in first}
    workers = [{"worker": index} | {name: each[name] for name in _OF_EACH if name in each} for index, each in stats.items()]
    uptime = {"uptime_s": max(each["uptime_s"] for each in stats.values())} if "uptime_s" in first else {}
    return total | alike | uptime | {"workers": workers}


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Numbers added, maps joined alike, all else as in ``one``."""
    result = dict(one)
    for name, value in other.items():
        mine = one.get(name)
        if isinstance(value, dict):
            result[name] = _sum(mine or {}, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            result[name] = (mine or 0) + value
    return result
