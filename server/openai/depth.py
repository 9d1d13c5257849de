"""How deep a body's arrays and objects nest, found before anything is parsed."""

from __future__ import annotations

import numpy as np

from radixkv.server.errors import InvalidRequest

MAX_DEPTH = 64
"""Of arrays and objects in a body."""
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))


def check_depth(body: bytes) -> None:
    """Raise ``InvalidRequest`` where arrays and objects nest too deep; takes time linear in the body, and parses nothing."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    # Without escapes every quote begins or ends a string.
    marks = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS), dtype=np.uint8)
    outside = (marks == ord('"')).cumsum(dtype=np.int32) % 2 == 0
    opening, closing = (marks == ord("[")) | (marks == ord("{")), (marks == ord("]")) | (marks == ord("}"))
    steps = (opening & outside).view(np.int8) - (closing & outside).view(np.int8)
    depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"body must be JSON nested at most {MAX_DEPTH} deep, got {depth}")
