"""`python -m replica.adapter_check`: everything that is wrong, or odd, with one adapter's folder.

No replica is asked and no base is read but its config (and its tables, where an upload brings its
own copy of one). Prints one JSON object; exit code 1 when the adapter cannot be served.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replica.engine.adapter_findings import Finding, examine
from replica.engine.adapter_store import AdapterFolder, Found
from replica.engine.model_config import BadBase, ModelConfig
from shared.ids import AdapterId


def check(folder: Path, *, base: Path | None, max_rank: int, dtype: str) -> dict[str, Any]:
    """Raises BadBase for a base that cannot be served, OSError for a folder that cannot be read."""
    folder = folder.resolve(strict=True)
    model = None if base is None else ModelConfig.from_dir(base)
    found = examine(folder.parent, folder, model, max_rank)
    findings, digest = list(found.all), None
    if model is not None and found.servable:
        store = AdapterFolder(folder.parent, max_rank, model, dtype, base_dir=base)
        verdict = store.examine(AdapterId(folder.name))
        if isinstance(verdict, Found):
            digest = verdict.digest
        else:
            error = Finding("error", verdict.reason_code, verdict.message, verdict.param)
            findings.insert(0, error)
    return {
        "adapter": str(folder),
        "base": None if base is None else str(base),
        "servable": None if model is None and found.servable else digest is not None,
        "digest": digest,
        "rank": found.rank,
        "modules": list(found.modules),
        "findings": [asdict(finding) for finding in findings],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m replica.adapter_check")
    parser.add_argument("folder", type=Path, help="the adapter's folder")
    parser.add_argument("--base", type=Path, help="folder of the base it is for")
    parser.add_argument("--max-rank", type=int, default=64, help="the replica's max_lora_rank")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    args = parser.parse_args(argv)
    try:
        answer = check(args.folder, base=args.base, max_rank=args.max_rank, dtype=args.dtype)
    except (BadBase, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0 if answer["servable"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
