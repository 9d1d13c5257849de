"""Starts the command line; ``python -m radixkv`` is ``radixkv``.  Imports in here, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from radixkv import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
