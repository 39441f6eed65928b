"""Where this machine's own Loraplex keeps what it makes: one folder, that can be moved.

base/      base models that were prepared here (large, shared by everything that runs here)
store/     the embedded Valkey's append-only file
adapters/  the adapters `loraplex up` serves unless it is told another folder
logs/      one file a process
run/       what the running fleet wrote of itself; gone when it ends
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ENVIRONMENT: Final = "LORAPLEX_DATA"


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`$LORAPLEX_DATA`, or `~/.local/share/loraplex`; it may not exist yet."""
    named = environ.get(ENVIRONMENT)
    return Path(named).expanduser() if named else Path.home() / ".local" / "share" / "loraplex"
