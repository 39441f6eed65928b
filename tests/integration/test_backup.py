"""What the operators' text says of backing up and restoring is what it takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.state.ledger import Ledger, Record
from gateway.state.registry import Registry
from gateway.store.embedded import serving
from gateway.store.redis import Store
from shared.clock import wall
from shared.ids import ReplicaId, RequestId, TenantId

README = (Path(__file__).parents[2] / "helm/README.md").read_text()
CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")
NEEDS_CLI = pytest.mark.skipif(CLI is None, reason="no valkey-cli (Debian: redis-tools)")


def said(heading: str, kind: str) -> str:
    """The one code block of that kind under a heading of the text."""
    part = README.split(f"\n### {heading}\n")[1].split("\n##")[0]
    [block] = re.findall(rf"```{kind}\n(.*?)```", part, re.DOTALL)
    return str(block)


async def bill(folder: Path, *requests: str, tenant: str = "") -> tuple[set[str], int]:
    """Enter these and make that tenant; then who is there, and how many requests are billed."""
    with serving(folder / "store") as server:
        store = Store(server.url, timeout_s=2)
        registry, ledger = Registry(store), Ledger(store, folder / "ledger.spool")
        await store.start()
        await registry.start()
        await ledger.start()
        try:
            if tenant:
                await registry.create(tenant)
            for name in requests:
                ledger.record(record(name))
            now = wall()
            rows = await ledger.usage(now - 3600, now + 60)
            found = {one.id for one in registry.tenants()}
        finally:
            await ledger.close()
            await registry.close()
            await store.close()
        backup(server.url.removeprefix("unix://"), folder)
    return found, sum(row["requests"] for row in rows)


def record(name: str) -> Record:
    return Record(
        *(RequestId(name), TenantId("poets"), "pirate", "", ReplicaId("replica-0")),
        *(7, 0, 4, 0.0, 0.1, 0.2, "ok", False, wall()),
    )


def backup(socket: str, folder: Path) -> None:
    """By the text's own command."""
    if CLI is None:
        return
    command = said("Back up and restore, on one machine", "sh").splitlines()[1]
    command = command.replace("valkey-cli", CLI).replace("$D/store/store.sock", socket)
    run(command, folder)


def keep_from_outside(folder: Path) -> None:
    """As `kubectl exec` runs it, and its output is the backup."""
    text = said("Back up and restore, in a cluster", "sh")
    [inside] = re.findall(r"sh -c '(export.*?)' >", text, re.DOTALL)
    with serving(folder / "store") as server:
        client = [str(CLI), "-s", server.url.removeprefix("unix://")]
        subprocess.run([*client, "config", "set", "requirepass", "hush"], check=True)
        inside = inside.replace("valkey-cli", " ".join(client))
        inside = inside.replace("/data", str(folder)).replace("/etc/valkey", str(folder))
        (folder / "valkey.conf").write_text("port 6379\nrequirepass hush\n")
        with (folder / "kept.rdb").open("wb") as rdb:
            subprocess.run(["sh", "-ec", inside], stdout=rdb, check=True)


def replace_beneath(folder: Path) -> None:
    """As in the pod, whose first process is the server."""
    text = said("Back up and restore, in a cluster", "sh")
    [inside] = re.findall(r"sh -c '(cd /data.*?)' <", text, re.DOTALL)
    with serving(folder / "store") as server:
        pid = (folder / "store" / "lock").read_text().split()[0]
        inside = inside.replace("/data", str(folder / "store")).replace("kill 1", f"kill {pid}")
        with (folder / "kept.rdb").open("rb") as rdb:
            subprocess.run(["sh", "-ec", inside], stdin=rdb, check=True)
        assert server._process.wait(10) == 0


def run(command: str, folder: Path) -> None:
    script = f"set -e; D={folder}; cd {folder}\n{command}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_copied_folder_is_the_same_fleet(tmp_path: Path) -> None:
    await bill(tmp_path / "one", "r1", "r2", tenant="poets")
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("*.sock"))
    assert await bill(tmp_path / "two", "r2", "r3") == ({"poets"}, 3)  # and r2 is known


@NEEDS_CLI
async def test_a_backup_of_a_running_store_brings_back_tenants_and_the_bill(tmp_path: Path) -> None:
    await bill(tmp_path, "r1", "r2", tenant="poets")
    shutil.copy(tmp_path / "backup.rdb", tmp_path / "kept.rdb")
    assert await bill(tmp_path, "r3", tenant="later") == ({"poets", "later"}, 3)
    shutil.copy(tmp_path / "kept.rdb", tmp_path / "backup.rdb")
    run("\n".join(said("Back up and restore, on one machine", "sh").splitlines()[3:]), tmp_path)
    assert await bill(tmp_path, "r2") == ({"poets"}, 2)


@NEEDS_CLI
async def test_the_clusters_store_is_replaced_beneath_a_running_server(tmp_path: Path) -> None:
    await bill(tmp_path, "r1", tenant="poets")
    keep_from_outside(tmp_path)
    await bill(tmp_path, "r3", tenant="later")
    replace_beneath(tmp_path)
    assert await bill(tmp_path) == ({"poets"}, 1)
