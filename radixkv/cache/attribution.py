"""Miss attribution: one reason for each prompt token that was not found in the cache."""

from __future__ import annotations

from itertools import islice

from radixkv.cache.lease import Lease
from radixkv.cache.miss import Finding
from radixkv.cache.radix_tree import Match, RadixTree
from radixkv.cache.tokens import Tokens, common_prefix

_new = tuple.__new__  # what Finding(...) does in the end, at half the time

PREFILLING_COMPARED = 64
"""Prompts being computed that a new one is compared with; the newest ones."""

NAMESPACES_COMPARED = 8
"""Other namespaces looked into for what a request found new in its own; the newest ones."""


def attribute(
    tree: RadixTree, match: Match, tokens: Tokens, namespace: str, matched: int, prefilling: dict[Lease, None], now: float
) -> Finding:
    """Say why ``tokens[matched:]`` were not found.

    ``match`` is that of ``tokens``, ``matched`` the tokens whose K/V will be used, ``prefilling`` the leases whose prompts go on
    beyond what they have published.  O(1) beyond the match itself, unless evicted tokens or running prompts are compared.
    """
    size = tree.block_size
    edge, common = match.edge, match.common
    stamp = None
    if edge is None:  # no known sequence goes on with the prompt's next token
        edge = match.node
        common = edge.num_tokens
        known = match.num_blocks * size
    else:
        stamp = edge.evicted
        if common == edge.num_tokens and edge.children:
            edge, common = tree.recall(edge, tokens)
        known = edge.start * size + common
    theirs, length = edge.edge, edge.num_tokens
    in_flight = evicted = partial_block = 0
    reached = matched
    if prefilling and matched < len(tokens):
        following = tokens.item(matched)
        for lease in islice(reversed(prefilling), PREFILLING_COMPARED):
            prompt = lease._prompt
            if len(prompt) <= reached or prompt.item(matched) != following or lease.namespace != namespace:
                continue
            shared = common_prefix(prompt, tokens)
            if shared > reached:
                in_flight += shared - reached
                reached = shared
                if shared > known:
                    known, theirs, common, length = shared, prompt, shared, len(prompt)
    if known > reached:
        filled = edge.start * size + edge.num_tokens // size * size  # where the edge's last full block ends
        if edge.evicted is None or filled <= reached or common < edge.num_blocks * size:
            partial_block = known - reached
        else:
            evicted = min(known, filled) - reached
            partial_block = known - reached - evicted
    rest = len(tokens) - known
    if not rest:  # all of it is known, but the last token would have been computed in any case
        if partial_block:
            partial_block -= 1
        elif evicted:
            evicted -= 1
        elif in_flight:
            in_flight -= 1
    elif known and common == length and theirs is edge.edge and edge.children:
        other = edge.any_child()
        theirs, common, length = other.edge, 0, other.num_tokens
    diverged = rest if known and common < length else 0
    return _new(
        Finding, (in_flight, evicted, partial_block, diverged, rest, known, theirs, common, stamp, now, tree.num_evicted_blocks)
    )


def found_elsewhere(tree: RadixTree, namespace: str, tokens: Tokens, known: int) -> int:
    """Tokens after the first ``known`` that another namespace has cached.  Looks at few namespaces, whatever their number."""
    best = known
    for name in islice(tree.namespaces(), NAMESPACES_COMPARED + 1):
        if name != namespace:
            best = max(best, tree.match(tokens, name).num_tokens(tree.block_size))
    return best - known
