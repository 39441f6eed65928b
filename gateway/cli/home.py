"""The data directory as the command line knows it: keys, the running fleet, logs, adapters.

`keys.json` (mode 0600) outlives a fleet, so that a second `loraplex up` prints the same keys;
`run/fleet.json` names the fleet that runs now and goes when it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.cli.failure import Failure


@dataclass(slots=True)
class Keys:
    """Secrets of this machine's own fleet."""

    admin: str = ""
    tenants: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Home:
    root: Path

    @property
    def keys_file(self) -> Path:
        return self.root / "keys.json"

    @property
    def fleet_file(self) -> Path:
        return self.root / "run" / "fleet.json"

    @property
    def gateway_config(self) -> Path:
        return self.root / "run" / "gateway.yaml"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def adapters(self, base_name: str) -> Path:
        """Adapters fit one base only, so each base has a folder of its own."""
        return self.root / "adapters" / base_name

    def make(self) -> None:
        """Create the folders; raises Failure when this place cannot be written."""
        try:
            for folder in (self.root, self.fleet_file.parent, self.store, self.logs):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not os.access(folder, os.W_OK | os.X_OK):  # it was there, and is read-only
                    raise self._unwritable(f"{folder} is not writable")
        except OSError as error:
            raise self._unwritable(error.strerror) from error

    def keys(self) -> Keys:
        raw = _read(self.keys_file)
        return Keys(admin=str(raw.get("admin", "")), tenants=dict(raw.get("tenants", {})))

    def save_keys(self, keys: Keys) -> None:
        _write_private(self.keys_file, {"admin": keys.admin, "tenants": keys.tenants})

    def running(self) -> dict[str, Any]:
        """What the running fleet wrote of itself; empty when none runs."""
        return _read(self.fleet_file)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """One fleet a data directory; the kernel lets go when the process ends, however it ends."""
        try:
            file = (self.root / "run" / "lock").open("w")
        except OSError as error:
            raise self._unwritable(f"{error.filename}: {error.strerror}") from error
        with file as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fleet = self.running()
                where = f" on {fleet['url']} (process {fleet['pid']})" if fleet else ""
                raise Failure(
                    f"a fleet already runs in {self.root}{where}. "
                    "Stop it with Ctrl-C, or use another --data-dir and --port."
                ) from None
            try:
                yield
            finally:
                self.fleet_file.unlink(missing_ok=True)

    def announce(self, fleet: dict[str, Any]) -> None:
        _write_private(self.fleet_file, fleet)

    def _unwritable(self, why: str | None) -> Failure:
        return Failure(
            f"cannot write to the data directory {self.root}: {why}. "
            "Choose another with --data-dir or LORAPLEX_DATA."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Failure(f"cannot read {path}: {error}. Mend it or remove it.") from error
    if not isinstance(raw, dict):
        raise Failure(f"{path} is not what was written there. Remove it and start again.")
    return raw


def _write_private(path: Path, body: dict[str, Any]) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(body, file, indent=2)
        file.write("\n")
    fresh.replace(path)
