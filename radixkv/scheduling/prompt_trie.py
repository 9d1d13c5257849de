"""PromptTrie: the prompts of waiting requests, kept so that those that begin alike stand together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from radixkv.scheduling.request import Request

Tokens = NDArray[np.int32]


class PromptTrie:
    """A trie of prompts, one a namespace, as its sorted leaves and the tokens that neighbours share.

    A trie's subtrees are runs of its sorted leaves: two leaves share the least of what the neighbours between them share, as in a
    suffix array with its LCP table (Manber and Myers 1990; Abouelhoda, Kurtz and Ohlebusch 2004).  So there are no nodes to keep,
    and a question about all prompts is one pass over an array of n numbers.

    ``requests`` is the order.  ``columns``, float64 ``[num_columns, n]``, holds what a policy knows about each request, in the same
    order.  Prompts are sorted as bytes, which puts them in no meaningful order but keeps prefixes together; the copies take 4
    bytes a token.  Requests must not get further tokens while they are here.
    """

    def __init__(self, num_columns: int) -> None:
        self.requests: list[Request] = []
        self._keys: list[tuple[str, bytes]] = []
        self._rows = np.zeros((1 + num_columns, 16))
        """First row: the tokens that a prompt shares with the one before it, 0 for the first; then the columns."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def columns(self) -> NDArray[np.float64]:
        """float64 ``[num_columns, n]``, a view."""
        return self._rows[1:, : len(self.requests)]

    def add(self, request: Request, *values: float) -> None:
        """Put a request in its place, with its ``values`` for the columns.  O(log n) comparisons and O(n) moved, as memory."""
        n = len(self.requests)
        if n == self._rows.shape[1]:
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)), axis=1)
        key = _key(request.tokens, request.namespace)
        at = bisect_right(self._keys, key)
        self._keys.insert(at, key)
        self.requests.insert(at, request)
        self._rows[:, at + 1 : n + 1] = self._rows[:, at:n]
        self._rows[0, at] = self._shared_by_neighbours(at)
        self._rows[1:, at] = values
        if at < n:
            self._rows[0, at + 1] = self._shared_by_neighbours(at + 1)

    def remove(self, request: Request) -> None:
        """Take a request out.  Raises ``ValueError`` if it is not here.  Costs as :meth:`add`."""
        at = self.requests.index(request, bisect_left(self._keys, _key(request.tokens, request.namespace)))
        n = len(self.requests) - 1
        if at < n:  # what was on both sides of it shares the lesser of what each shared with it
            self._rows[0, at + 1] = self._rows[0, at : at + 2].min()
        self._rows[:, at:n] = self._rows[:, at + 1 : n + 1]
        del self.requests[at], self._keys[at]

    def any_shares_more(self, tokens: Tokens, namespace: str, n: int) -> bool:
        """Whether a prompt shares more than the first ``n`` of ``tokens``.  O(log prompts) comparisons."""
        key = _key(tokens, namespace)
        at = bisect_left(self._keys, key)
        more = key[1][: 4 * (n + 1)]
        return any(other == namespace and prompt.startswith(more) for other, prompt in self._keys[max(at - 1, 0) : at + 1])

    def shared_with(self, tokens: Tokens, namespace: str) -> NDArray[np.float64]:
        """How many leading tokens each prompt shares with ``tokens``: float64 ``[n]``.  O(n + tokens)."""
        n = len(self.requests)
        at = bisect_left(self._keys, _key(tokens, namespace))
        shared = self._rows[0, :n].copy()
        if at < n:
            shared[at] = _shared(tokens, namespace, self.requests[at])
            np.minimum.accumulate(shared[at:], out=shared[at:])
        if at > 0:  # what prompt i shares with i + 1 stands at i + 1
            shared[: at - 1] = self._rows[0, 1:at]
            shared[at - 1] = _shared(tokens, namespace, self.requests[at - 1])
            left = shared[at - 1 :: -1]
            np.minimum.accumulate(left, out=left)
        return shared

    def subtree(self, at: int, depth: int) -> tuple[int, int]:
        """The run ``[start, stop)`` of prompts that share at least ``depth`` tokens with prompt ``at``; depth at least 1.  O(n)."""
        ends = np.flatnonzero(self._rows[0, : len(self.requests)] < depth)
        after = int(np.searchsorted(ends, at, side="right"))
        return int(ends[after - 1]), int(ends[after]) if after < len(ends) else len(self.requests)

    def common(self, start: int, stop: int) -> float:
        """Tokens that all prompts of ``[start, stop)`` share, two at least."""
        return float(self._rows[0, start + 1 : stop].min())

    def branches(self, start: int, stop: int) -> NDArray[np.intp]:
        """Where the branches begin below the deepest node that holds the prompts of ``[start, stop)``, two at least."""
        inner = self._rows[0, start + 1 : stop]
        return np.concatenate(([start], start + 1 + np.flatnonzero(inner == inner.min())))

    def check(self) -> None:
        """Assert that the order is sorted and every shared length is what the prompts share.  For tests."""
        assert self._keys == sorted(self._keys)
        assert self._keys == [_key(request.tokens, request.namespace) for request in self.requests]
        assert [self._shared_by_neighbours(at) for at in range(len(self))] == self._rows[0, : len(self)].tolist()

    def _shared_by_neighbours(self, at: int) -> int:
        if at == 0:
            return 0
        request = self.requests[at]
        return _shared(request.tokens, request.namespace, self.requests[at - 1])


def _key(tokens: Tokens, namespace: str) -> tuple[str, bytes]:
    return namespace, tokens.tobytes()


def _shared(tokens: Tokens, namespace: str, request: Request) -> int:
    """Leading tokens in common; prompts of different namespaces have none."""
    n = min(len(tokens), request.num_tokens)
    if namespace != request.namespace or not n:
        return 0
    differ = tokens[:n] != request.tokens[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
