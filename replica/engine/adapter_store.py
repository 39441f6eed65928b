"""AdapterFolder: a directory of PEFT folders, one an adapter, named by their folders.

Law: an adapter is `Found` only if reading it will succeed: names, shapes and config against the
base, and every weight finite. Whatever is wrong with one is that one's `Refused`, with a code and
what to do; nothing raises out of `scan`, and nothing is read outside the root.

The digest is the adapter's version: sha256 over a version line, the config keys that change what it
computes (`PeftConfig.canonical`) and the bytes of its weights file. Copies under two names have one
digest; a changed weight, rank or alpha has another; a changed comment, path or date has not.

A folder is examined again only when inode, size or times of its two files changed: a rescan of
unchanged folders opens none. Calls may come from several threads.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from replica.engine.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFiles,
    Module,
    ModulePair,
    Signature,
    confined,
    inspect,
    open_config,
    open_weights,
    signature,
)
from replica.engine.bad_adapter import BadAdapter
from replica.engine.host_adapter import HostAdapter, pack, packed_bytes, ranks_of
from replica.engine.model_config import ModelConfig
from replica.engine.safetensors_header import TensorEntry
from replica.engine.sections import page_elements, pages_of
from replica.engine.weights import torch_dtype
from shared.ids import AdapterId

__all__ = ["AdapterFolder", "BadAdapter", "Found", "HostAdapter", "Refused"]

_DIGEST_VERSION: Final = b"loraplex adapter 1\n"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PASSING: Final = frozenset({"changed", "outside_root"})
"""Reasons that may go away while the files stay as they are."""

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Found:
    adapter: AdapterId
    digest: str
    rank: int  # the largest of its modules
    size_bytes: int  # in host memory
    pages: int  # of the engine's pool


@dataclass(frozen=True, slots=True)
class Refused:
    adapter: AdapterId
    reason_code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """One folder's files while they are open."""

    weights: BufferedReader
    files: AdapterFiles
    signatures: tuple[Signature, Signature]  # of config and weights


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is known of a folder as long as its files have these signatures."""

    signatures: tuple[Signature, Signature]
    answer: Found | Refused


class AdapterFolder:
    def __init__(
        self,
        root: Path,
        max_rank: int,
        model_config: ModelConfig,
        dtype: str = "float32",
        page_tokens: int = 16,
    ) -> None:
        """`dtype` is the engine's: weights are cast to it once, on their way into host memory."""
        self._root = root.resolve(strict=True)
        self._max_rank = max_rank
        self._model = model_config
        self._dtype = torch_dtype(dtype)
        self._page_elements = page_elements(model_config, page_tokens)
        self._verdicts: dict[AdapterId, _Verdict] = {}

    def scan(self) -> list[Found | Refused]:
        """Every folder under the root, in the order of their names; hidden ones are left out."""
        adapters = sorted(
            AdapterId(entry.name)
            for entry in self._root.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
        for gone in self._verdicts.keys() - set(adapters):
            self._verdicts.pop(gone, None)
        return [self._judge(adapter) for adapter in adapters]

    def read(self, adapter: AdapterId) -> HostAdapter:
        """The adapter's weights in host memory, and the digest they have now; raises BadAdapter."""
        with ExitStack() as stack:
            try:
                opened = self._open(stack, adapter)
                data = _content(opened)
            except OSError as error:
                raise BadAdapter("unreadable", str(error)) from error
        known = self._verdicts.get(adapter)
        if known and isinstance(known.answer, Found) and known.signatures == opened.signatures:
            digest = known.answer.digest
        else:
            digest = _digest(opened.files, data)
        pairs = {
            module: (_tensor(data, pair.A), _tensor(data, pair.B), pair.scaling)
            for module, pair in opened.files.pairs.items()
        }
        host = pack(adapter, digest, self._model, pairs, self._dtype)
        if not _is_finite(host.flat):
            raise BadAdapter("non_finite", f"a weight is too large for {self._dtype}")
        return host

    def _judge(self, adapter: AdapterId) -> Found | Refused:
        try:
            known = self._verdicts.get(adapter)
            if known is None or known.signatures != self._signatures(adapter):
                known = self._verdicts[adapter] = self._examine(adapter)
            return known.answer
        except BadAdapter as bad:
            return _refused(adapter, bad)
        except OSError as error:
            return Refused(adapter, "unreadable", str(error))

    def _examine(self, adapter: AdapterId) -> _Verdict:
        """Read everything once. Raises BadAdapter for what may pass while the files stay."""
        before = self._signatures(adapter)
        try:
            with ExitStack() as stack:
                opened = self._open(stack, adapter)
                digest = _digest(opened.files, _content(opened))
        except BadAdapter as bad:
            if before is None or bad.code in _PASSING:
                raise
            return _Verdict(before, _refused(adapter, bad))
        ranks = {module: pair.rank for module, pair in opened.files.pairs.items()}
        size = packed_bytes(self._model, ranks, self._dtype.itemsize)
        pages = pages_of(ranks_of(self._model, ranks), self._model, self._page_elements)
        return _Verdict(opened.signatures, Found(adapter, digest, opened.files.rank, size, pages))

    def _open(self, stack: ExitStack, adapter: AdapterId) -> _Opened:
        if not _NAME.fullmatch(adapter):
            raise BadAdapter("bad_name", "a name has up to 128 of A-Z a-z 0-9 . _ - in it")
        folder = confined(self._root, self._root / adapter)
        config = stack.enter_context(open_config(self._root, folder))
        names = [entry.name for entry in folder.iterdir()]
        weights = stack.enter_context(open_weights(self._root, folder))
        signatures = signature(config), signature(weights)
        files = inspect(config, weights, names, self._model, self._max_rank)
        return _Opened(weights, files, signatures)

    def _signatures(self, adapter: AdapterId) -> tuple[Signature, Signature] | None:
        """Without opening anything; None while a file is missing."""
        folder = self._root / adapter
        try:
            return signature(folder / CONFIG_FILE), signature(folder / WEIGHTS_FILE)
        except OSError:
            return None


def _refused(adapter: AdapterId, bad: BadAdapter) -> Refused:
    return Refused(adapter, bad.code, bad.message, bad.param)


def _digest(files: AdapterFiles, data: bytearray) -> str:
    """The version of this content, which has been seen to be finite and to have an effect."""
    _check_values(data, files.pairs)
    content = hashlib.sha256(_DIGEST_VERSION + files.config.canonical() + b"\n")
    content.update(data)
    return content.hexdigest()


def _content(opened: _Opened) -> bytearray:
    """The whole file. Read, not mapped: if it is cut short meanwhile that is an error, no crash."""
    file, (_, before) = opened.weights, opened.signatures
    data = bytearray(os.fstat(file.fileno()).st_size)
    file.seek(0)
    if file.readinto(data) != len(data) or signature(file) != before:
        raise BadAdapter("changed", "the weights changed while they were read; try again")
    return data


def _tensor(data: bytearray, entry: TensorEntry) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    count = (entry.end - entry.start) // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
    return flat.view(entry.shape)


def _check_values(data: bytearray, pairs: Mapping[Module, ModulePair]) -> None:
    effect = False
    for (layer, module), pair in pairs.items():
        A, B = _tensor(data, pair.A), _tensor(data, pair.B)
        if not (_is_finite(A) and _is_finite(B)):
            raise BadAdapter("non_finite", f"layer {layer} {module} holds NaN or infinity")
        effect = effect or bool(B.count_nonzero())
    if not effect:
        raise BadAdapter("zero_effect", "every lora_B is zero: the adapter was never trained")


def _is_finite(tensor: Tensor) -> bool:
    """By one sum, which is finite only if every term is. (Nobody's weights overflow it.)"""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return bool(torch.isfinite(tensor.sum(dtype=wide)))
