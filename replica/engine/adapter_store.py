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
import logging
import os
import re
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Final

import torch

from replica.engine.adapter_files import (
    WEIGHTS_FILE,
    AdapterFiles,
    Signature,
    confined,
    open_config,
    open_weights,
    read_config,
    read_entries,
    signature,
)
from replica.engine.adapter_notes import Note, notes
from replica.engine.adapter_tensors import AdapterTensors
from replica.engine.bad_adapter import BadAdapter
from replica.engine.host_adapter import HostAdapter, pack, packed_bytes, ranks_of
from replica.engine.model_config import ModelConfig
from replica.engine.peft_config import CONFIG_FILE, PeftConfig
from replica.engine.sections import page_elements, pages_of
from replica.engine.tensor_values import check_values, is_finite, tensor
from replica.engine.weights import base_tensor, torch_dtype
from shared.ids import AdapterId

__all__ = ["AdapterFolder", "BadAdapter", "Found", "HostAdapter", "Refused"]

_log = logging.getLogger(__name__)

_DIGEST_VERSION: Final = b"loraplex adapter 1\n"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILES_MAX: Final = 4096
"""Names that are looked at to tell what kind of folder it is."""

_PASSING: Final = frozenset({"changed", "outside_root"})
"""Reasons that may go away while the files stay as they are."""


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
    notes: list[Note]


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
        base_dir: Path | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        """`dtype` is the engine's: weights are cast to it once, on their way into host memory.

        `base_dir` is the base's folder: a copy of one of its tables in an upload is passed over
        when it is equal; without it such a copy is refused. `pinned` is for engines on a GPU.
        """
        self._base_dir = base_dir
        self._pinned = pinned
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
        self.keep_only(set(adapters))
        return [self.examine(adapter) for adapter in adapters]

    def keep_only(self, adapters: Set[AdapterId]) -> None:
        """Forget what is known of all others."""
        for gone in self._verdicts.keys() - adapters:
            self._verdicts.pop(gone, None)

    def read(self, adapter: AdapterId) -> HostAdapter:
        """The adapter's weights in host memory, and the digest they have now; raises BadAdapter."""
        with ExitStack() as stack:
            try:
                opened = self._open(stack, adapter)
                data = self._content(adapter, opened)
            except OSError as error:
                raise BadAdapter("unreadable", str(error)) from error
        known = self._verdicts.get(adapter)
        if known and isinstance(known.answer, Found) and known.signatures == opened.signatures:
            digest = known.answer.digest
        else:
            digest = self._digest(opened.files, data)
        pairs = {
            module: (tensor(data, pair.A), tensor(data, pair.B), pair.scaling)
            for module, pair in opened.files.tensors.pairs.items()
        }
        host = pack(adapter, digest, self._model, pairs, self._dtype, pinned=self._pinned)
        if not is_finite(host.flat):
            raise BadAdapter(
                "non_finite", f"a weight is too large for {self._dtype}: serve it in another dtype"
            )
        return host

    def examine(self, adapter: AdapterId) -> Found | Refused:
        """The verdict on one folder."""
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
                digest = self._digest(opened.files, self._content(adapter, opened))
        except BadAdapter as bad:
            if before is None or bad.code in _PASSING:
                raise
            return _Verdict(before, _refused(adapter, bad))
        for note in opened.notes:
            _log.info(
                "adapter noted", extra={"adapter": adapter, "code": note.code, "note": note.message}
            )
        tensors = opened.files.tensors
        ranks = {module: pair.rank for module, pair in tensors.pairs.items()}
        size = packed_bytes(self._model, ranks, self._dtype.itemsize)
        pages = pages_of(ranks_of(self._model, ranks), self._model, self._page_elements)
        return _Verdict(opened.signatures, Found(adapter, digest, tensors.rank, size, pages))

    def _open(self, stack: ExitStack, adapter: AdapterId) -> _Opened:
        if not _NAME.fullmatch(adapter):
            raise BadAdapter("bad_name", "a name has up to 128 of A-Z a-z 0-9 . _ - in it")
        folder = confined(self._root, self._root / adapter)
        config_file = stack.enter_context(open_config(self._root, folder))
        names = [entry.name for entry in islice(folder.iterdir(), _FILES_MAX)]
        raw = read_config(config_file)
        config = PeftConfig.of(raw, names)
        weights = stack.enter_context(open_weights(self._root, folder))
        signatures = signature(config_file), signature(weights)
        entries = read_entries(weights, config, self._model, self._max_rank)
        tensors = AdapterTensors.of(entries, config, self._model, self._max_rank)
        files = AdapterFiles(config, tensors)
        return _Opened(weights, files, signatures, notes(raw, names, entries))

    def _content(self, adapter: AdapterId, opened: _Opened) -> bytearray:
        """The whole file. Read, not mapped: if it is cut short meanwhile, that is an error.

        Config and weights must still be the two that lie in the folder: one replaced while it is
        read, file by file or as a whole, is never served as a mixture.
        """
        file = opened.weights
        data = bytearray(os.fstat(file.fileno()).st_size)
        file.seek(0)
        if file.readinto(data) != len(data) or self._signatures(adapter) != opened.signatures:
            raise BadAdapter("changed", "the adapter changed while it was read: try again")
        return data

    def _digest(self, files: AdapterFiles, data: bytearray) -> str:
        """The version of this content, which has been seen to be finite and to have an effect."""
        check_values(data, files.tensors)
        for name, entry in files.tensors.tables.items():
            table = None if self._base_dir is None else base_tensor(self._base_dir, name)
            if table is None or not torch.equal(tensor(data, entry).float(), table.float()):
                raise BadAdapter(
                    "modified_base_weights",
                    f"the file brings its own {name}, which is not the base's: train without it, "
                    "or save with save_embedding_layers=False if it was not trained",
                    name,
                )
        content = hashlib.sha256(_DIGEST_VERSION + files.config.canonical() + b"\n")
        content.update(data)
        return content.hexdigest()

    def _signatures(self, adapter: AdapterId) -> tuple[Signature, Signature] | None:
        """Without opening anything; None while a file is missing."""
        folder = self._root / adapter
        try:
            return signature(folder / CONFIG_FILE), signature(folder / WEIGHTS_FILE)
        except OSError:
            return None


def _refused(adapter: AdapterId, bad: BadAdapter) -> Refused:
    return Refused(adapter, bad.code, bad.message, bad.param)
