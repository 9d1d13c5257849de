"""``radixkv`` whose cache explains no miss, which no option of its own can do: what is left is the work that attribution adds.

Run as a script: ``python -P bench/unattributed.py serve ...``.
"""

from __future__ import annotations

import functools
import sys
from unittest import mock

COMMAND = (sys.executable, "-P", __file__)


def serve() -> int:
    """The command line, with :func:`work` for its worker."""
    from radixkv import cli
    from radixkv.server import launcher

    launcher.serve = functools.partial(launcher.serve, worker_command=[*COMMAND, "worker"])
    return cli.main()


def work() -> int:
    """The worker.  Its engine is made with another cache than it asks for."""
    from radixkv import engine
    from radixkv.cache import PrefixCache
    from radixkv.server import worker

    def unattributed(*args: object, attribution: bool, **kwargs: object) -> PrefixCache:
        assert attribution, "the engine has stopped asking for it"
        return PrefixCache(*args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(engine, "PrefixCache", unattributed):
        return worker.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        sys.exit(work())
    sys.exit(serve())
