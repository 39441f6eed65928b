"""Roster: which names are served, and from which folder each.

Names come from two places: every folder of the store is a name of its own, and a load call may
give a folder another name. Laws:

- What was unloaded by name stays away until its folder goes or changes, or it is loaded again.
- A name that was loaded by a call ends with its folder.
- The base's own name, and a name that is already a folder, are never given to another folder; a
  folder that comes later under a loaded name is served when that name is free again.
- Every change is one of three facts for the adapter cache, in order.

Pure, and owned by the engine thread; only `folder_of`, one look-up, is asked from other threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from replica.errors import BadAdapterRequest, UnknownAdapter
from shared.ids import AdapterId


@dataclass(frozen=True, slots=True)
class Offered:
    """This name has this content."""

    adapter: AdapterId
    digest: str
    rank: int
    size_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class Refused:
    """This name's content cannot be served."""

    adapter: AdapterId
    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This name is served no more."""

    adapter: AdapterId


Fact = Offered | Refused | Withdrawn


class Roster:
    def __init__(self, *, base_name: str) -> None:
        self._base_name = base_name
        self._folders: dict[AdapterId, Offered | Refused] = {}  # by folder, as last scanned
        self._aliases: dict[AdapterId, AdapterId] = {}  # name -> folder, where they differ
        self._loaded: set[AdapterId] = set()  # names that a call loaded
        self._hidden: dict[AdapterId, Offered | Refused] = {}  # unloaded, as the folder then was
        self._served: dict[AdapterId, Offered | Refused] = {}  # by name, as last told

    def folder_of(self, name: AdapterId) -> AdapterId:
        """The folder that a served name reads from."""
        return self._aliases.get(name, name)

    def scanned(self, found: Mapping[AdapterId, Offered | Refused]) -> list[Fact]:
        """The store as it is now; what is not in `found` is gone."""
        self._folders = dict(found)
        self._hidden = {
            name: then for name, then in self._hidden.items() if found.get(name) == then
        }
        for name in [name for name, folder in self._aliases.items() if folder not in found]:
            del self._aliases[name]
            self._loaded.discard(name)
        self._loaded.intersection_update({*found, *self._aliases})
        return self._news()

    def replaced(self, name: AdapterId, content: Offered) -> list[Fact]:
        """A read found newer content than the last scan."""
        folder = self.folder_of(name)
        if folder in self._folders:
            self._folders[folder] = content
        return self._news()

    def again(self, name: AdapterId) -> list[Fact]:
        """A name that failed for a passing reason gets another chance with the same content."""
        served = self._served.get(name)
        return [] if served is None else [Withdrawn(name), served]

    def check_load(self, name: AdapterId, folder: AdapterId, *, in_place: bool) -> None:
        """Raises BadAdapterRequest when this name may not be loaded from this folder."""
        if name == self._base_name:
            raise BadAdapterRequest(
                f"The lora adapter name '{name}' conflicts with a served base model.",
                param="lora_name",
                code="name_conflict",
            )
        if name != folder and name in self._folders:
            raise BadAdapterRequest(
                f"The name '{name}' belongs to the folder of that name; choose another.",
                param="lora_name",
                code="name_conflict",
            )
        if name in self._loaded and not in_place:
            raise BadAdapterRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
                code="already_loaded",
            )

    def load(self, name: AdapterId, folder: AdapterId, content: Offered) -> list[Fact]:
        """Serve `folder` under `name`; `check_load` has passed and `content` was read from it."""
        self._loaded.add(name)
        self._hidden.pop(name, None)
        self._folders[folder] = content
        self._aliases.pop(name, None)
        if name != folder:
            self._aliases[name] = folder
        return self._news()

    def unload(self, name: AdapterId) -> list[Fact]:
        """Raises UnknownAdapter when nothing of that name is served."""
        if name not in self._served:
            raise UnknownAdapter(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._loaded.discard(name)
        self._aliases.pop(name, None)
        if name in self._folders:
            self._hidden[name] = self._folders[name]
        return self._news()

    def _news(self) -> list[Fact]:
        """What is served now, as facts that lead there from what was served before."""
        names = {folder: folder for folder in self._folders if folder not in self._hidden}
        names |= self._aliases
        now = {name: self._fact(name, self._folders[of]) for name, of in names.items()}
        gone = [Withdrawn(name) for name in sorted(self._served.keys() - now.keys())]
        new = [fact for name, fact in sorted(now.items()) if self._served.get(name) != fact]
        self._served = now
        return [*gone, *new]

    def _fact(self, name: AdapterId, content: Offered | Refused) -> Offered | Refused:
        if name == self._base_name:
            return Refused(name, "name_conflict: the base model has this name; rename the folder")
        if isinstance(content, Refused):
            return Refused(name, content.reason)
        return replace(content, adapter=name)
