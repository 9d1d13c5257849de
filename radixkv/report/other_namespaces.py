"""What was asked before in another namespace: a miss that the walls between tenants cost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from radixkv.report.logged_request import LoggedRequest
from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import as_trace

_NOBODY, _SEVERAL = -1, -2


def with_other_namespaces(began: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """The requests with ``namespace`` as the reason for tokens that were unknown in theirs and had come before in another.

    In whole blocks, whose hashes must be equal in all namespaces (those of a request log are not).  O(blocks).
    """
    paths = PrefixPaths([msgspec.structs.replace(as_trace(line), namespace="") for line in began])
    owners = np.full(paths.num_numbers, _NOBODY)
    """Of each block, the namespace that it came in."""
    numbers: dict[str, int] = {}
    explained = []
    for line, path in zip(began, paths, strict=True):
        number = numbers.setdefault(line.namespace, len(numbers))
        of_others = (owners[path] != _NOBODY) & (owners[path] != number)
        owners[path] = np.where(of_others, _SEVERAL, number)
        elsewhere = len(path) if of_others.all() else int(of_others.argmin())
        reason = "diverged" if "diverged" in line.missed else "new"
        unknown = line.missed.get(reason, 0)
        moved = min(unknown, elsewhere * paths.block_size - (line.prompt_tokens - unknown))
        if moved > 0:
            missed = line.missed | {"namespace": moved, reason: unknown - moved}
            line = msgspec.structs.replace(line, missed={why: count for why, count in missed.items() if count})
        explained.append(line)
    return explained
