"""What an install without the `replica` extra lacks, said before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from gateway.cli.failure import Failure

_REPLICA: Final = ("torch", "tokenizers", "safetensors", "numpy", "jinja2", "llguidance", "obstore")
"""What a replica imports on any device; found only, since importing torch takes seconds."""


def require_replica() -> None:
    """Raises Failure when this Python cannot run a replica."""
    if missing := [name for name in _REPLICA if find_spec(name) is None]:
        raise Failure(
            f"a replica cannot run here without {', '.join(missing)}: "
            "pip install 'loraplex[replica]'"
        )
