"""What a request's `model` means: the base, or an adapter, perhaps in one version of it.

    name                an adapter, or the base, exactly as the fleet serves it: always tried first
    name@VERSION        the adapter as long as its digest begins with VERSION (6 or more hex digits)
    BASE:name[@VERSION] the same, as SGLang and Ray write it

Names are case-sensitive, in Unicode's NFC, of at most 256 bytes, without control characters and
without a path segment `..`; one that is not is told so (400). A name that nobody serves and one
that the tenant may not use are the same 404. Rights go by the adapter's own name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from gateway.core.dispatcher import Dispatcher
from gateway.errors import BadRequest, ModelNotFound
from gateway.state.tenants import NAME_BYTES_MAX, BadField, checked_name
from shared.ids import AdapterId

_VERSION: Final = re.compile(r"[0-9a-f]{6,64}", re.IGNORECASE)


class Target(NamedTuple):
    """What a request is for, in the fleet's own names."""

    name: str  # what the replica is asked for; on the bill and in metrics
    adapter: AdapterId | None  # None: the base
    version: str = ""  # what the adapter's digest must begin with


def resolve(
    model: str,
    dispatcher: Dispatcher,
    permitted: Callable[[str], bool],
    *,
    current: Callable[[str], str] = lambda adapter: "",
) -> Target:
    """Raises BadRequest for what can be no name, ModelNotFound for what this tenant has not.

    `current` says which version an adapter's plain name means; "": whichever a replica serves.
    """
    plain = len(model) <= NAME_BYTES_MAX and model.isascii() and model.isprintable()
    if not plain or ".." in model:
        _check(model)
    found: Target | None
    if dispatcher.knows(model):
        found = Target(model, None if model in dispatcher.bases() else AdapterId(model))
    else:
        found = next(_aliases(model, dispatcher), None)
    if found is None or not permitted(found.name):
        raise ModelNotFound(model)
    if found.adapter is not None and not found.version and (version := current(found.name)):
        return found._replace(version=version)
    return found


def is_version(digest: str, version: str) -> bool:
    """An adapter's digest, `sha256:HEX` or HEX, begins with this version."""
    return digest.rpartition(":")[2].lower().startswith(version)


def _check(model: str) -> None:
    try:
        checked_name("model", model)
    except BadField as error:
        raise BadRequest(f"{error}.", param="model") from None
    if not unicodedata.is_normalized("NFC", model):
        raise BadRequest("model: must be in Unicode's normal form NFC.", param="model")
    if ".." in model.split("/"):
        raise BadRequest("model: may have no segment '..'.", param="model")


def _aliases(model: str, dispatcher: Dispatcher) -> Iterator[Target]:
    """What an alias may mean, the likelier first."""
    names = [model]
    for base in sorted(dispatcher.bases()):
        if model.startswith(f"{base}:"):
            names.append(model[len(base) + 1 :])
    for name in names:
        if name != model and dispatcher.knows(name) and name not in dispatcher.bases():
            yield Target(name, AdapterId(name))
        bare, at, version = name.rpartition("@")
        if at and _VERSION.fullmatch(version):
            version = version.lower()
            digests = dispatcher.digests(AdapterId(bare))
            if any(is_version(digest, version) for digest in digests):
                yield Target(bare, AdapterId(bare), version)
