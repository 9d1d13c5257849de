"""Without a GPU, the Triton backend is tested in Triton's interpreter, which has to be chosen before anything imports Triton."""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
