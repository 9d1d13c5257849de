"""What the reasons of misses mean, in a few words (docs/cache.md has more)."""

from __future__ import annotations

MEANING = {
    "new": "nothing known went on from there",
    "diverged": "an earlier prompt goes on otherwise",
    "evicted": "was cached, and had to go",
    "partial_block": "an earlier prompt had it in a block that it did not fill",
    "in_flight": "another request was just computing it",
    "last_token": "all was known; the last token is always computed",
    "logprobs": "computed again for log-probabilities",
    "namespace": "another namespace has it",
    "unexplained": "the server did not say why",
}
