"""AdapterCache: which adapter is in which slot and pages, who holds it, and what to load next.

Weights belong to a version, (adapter, digest), never to a name alone. Laws:

- One slot a version, and its own pages of the pool, as many as its ranks take. A lease ties a
  sequence to a slot, and ends exactly once, by `release`.
- A slot that is held, or loading, or whose adapter is pinned, or that an older waiter wants, is
  never given away for a load, and a load begins when it has a slot and all its pages at once
  (`room.py` says who leaves for whom).
- Waiters are served oldest first (ties by adapter): if one finds no slot, no younger one does.
- A load that `poll` asked for ends once, by `loaded` or `load_failed`, also when its adapter was
  withdrawn or replaced meanwhile: then the slot is emptied at that moment.
- New content under a name is another version. Who holds the old one finishes on it; who comes gets
  the new one; the old leaves its slot and host memory as soon as nobody holds it.
- FAILED is terminal, with its reason, until other content is offered or the adapter is withdrawn
  and offered again: a broken adapter is not read over and over.
- Host memory keeps at most `host_max` copies and `host_bytes` of them (`host_tier.py`). Two names
  with the same content are two adapters here; only their bytes in host memory count once.
- What is on no disk of this machine takes no slot while it comes: its load is given back
  (`postpone`) and it is fetched to host memory first. It blocks nobody meanwhile.

Commands come out of `poll` in the order in which they must be carried out.
"""

from __future__ import annotations

from replica.core.adapter_view import AdapterView
from replica.core.catalogue import Catalogue
from replica.core.commands import Command, Evict, EvictHost, Fetch, Load
from replica.core.far import Far
from replica.core.host_tier import HostTier, Version
from replica.core.pages import PagePool
from replica.core.room import Prospect, Room
from replica.core.slot_table import Slot, SlotTable
from replica.core.waiters import Waiters
from shared.ids import AdapterId
from shared.messages import Tier

__all__ = ["AdapterCache", "Command", "Evict", "EvictHost", "Fetch", "Load"]


class AdapterCache(AdapterView):
    """Decides; the engine thread carries out."""

    def __init__(
        self,
        *,
        slots: int,
        host_max: int | None = None,
        host_bytes: int | None = None,
        pool: PagePool,
        pages_max: int | None = None,
    ) -> None:
        """`pages_max`: pages of the pool that all adapters may have together. None: no limit."""
        if host_max is not None and host_max < slots:
            raise ValueError(f"host_max {host_max} is less than {slots} slots: raise max_cpu_loras")
        self._pool = pool
        pages_max = pool.pages if pages_max is None else pages_max
        super().__init__(
            catalogue=Catalogue(pins_max=slots - 1, pages_max=pages_max),
            slots=SlotTable(slots=slots),
            host=HostTier(places=host_max, max_bytes=host_bytes),
        )
        self._room = Room(slots=self._slots, pool=pool, pages_max=pages_max, spare=self._spare)
        self._waiters = Waiters()
        self._promised: frozenset[int] = frozenset()  # slots of adapters that somebody waits for
        self._far = Far(self._host)
        self._short = False  # a load lacks nothing but pages of the pool
        self._outbox: list[Command] = []
        self._changed = True  # something that decides placing has changed since the last poll

    # --- what the store says

    def offer(
        self, adapter: AdapterId, digest: str, rank: int, size_bytes: int, pages: int
    ) -> None:
        """The store has this content under this name; again with another digest: a new version."""
        self._retire(self._catalogue.offer(adapter, digest, rank, size_bytes, pages))
        host_bytes = self._host.max_bytes
        if host_bytes is not None and size_bytes > host_bytes:
            reason = f"it takes {size_bytes} bytes, host memory has {host_bytes}: raise host_bytes"
            self._catalogue.fail((adapter, digest), reason)

    def withdraw(self, adapter: AdapterId) -> None:
        """Gone from the store. Sequences that hold it finish; nobody else gets it."""
        self._retire(self._catalogue.withdraw(adapter))

    def failed(self, adapter: AdapterId, reason: str) -> None:
        """Validation refused what the store has under this name."""
        self._retire(self._catalogue.refuse(adapter, reason))

    def pin(self, adapter: AdapterId, on: bool) -> None:
        """Keep it in a slot whoever uses it. Raises ValueError with what to do when it cannot."""
        self._catalogue.pin(adapter, on)
        self._note()

    # --- what sequences ask

    def want(self, adapter: AdapterId, seq_id: str, now: float) -> None:
        """`seq_id` will need it: load it when its turn comes, and keep it until `acquire`."""
        if self._slots.held_by(seq_id) is None and self._waiters.add(seq_id, adapter, now):
            self._changed = True

    def acquire(self, adapter: AdapterId, seq_id: str, now: float) -> int | None:
        """The slot, held by `seq_id` from now on; or None, and it is wanted."""
        slot = self._slots.held_by(seq_id)
        if slot is None:
            slot = self._resident(adapter)
            if slot is None or slot.version is None:
                self.want(adapter, seq_id, now)
                return None
            self._waiters.remove(seq_id)
            self._slots.hold(slot, seq_id)
            self._host.touch(slot.version)
            self._states = None
        return slot.index

    def release(self, seq_id: str) -> None:
        """The end of a lease, or of a wait for one; harmless when there is neither."""
        if self._waiters.remove(seq_id):
            self._changed = True
        slot = self._slots.let_go(seq_id)
        if slot is not None:
            self._leave_if_old(slot)
            self._note()

    # --- what the engine reports

    def read(self, adapter: AdapterId, digest: str, reload_s: float = 0.0) -> None:
        """A copy is in host memory, on its way to a slot or fetched ahead; it took `reload_s`."""
        version = (adapter, digest)
        self._far.discard(version)
        letting_go = EvictHost(adapter, digest)
        slot = self._slots.find(version)
        if slot is not None and slot.loading:
            slot.tier = Tier.HOST
        elif not self._catalogue.is_current(version):
            self._outbox.append(letting_go)
            return
        if letting_go in self._outbox:  # it speaks of the copy that was there before this one
            self._outbox = [command for command in self._outbox if command != letting_go]
        size_bytes = self._catalogue.size_bytes(version)
        self._let_go(self._host.arrive(version, size_bytes, reload_s))
        self._note()

    def loaded(self, adapter: AdapterId, digest: str, slot: int) -> None:
        receiving = self._receiving((adapter, digest), slot)
        self._slots.settle(receiving)
        self._host.settle((adapter, digest))
        self._leave_if_old(receiving)
        self._note()

    def load_failed(self, adapter: AdapterId, digest: str, slot: int, reason: str) -> None:
        """What is in the slot now is nobody's weights: it is emptied before it is used again."""
        version = adapter, digest
        self._vacate(self._receiving(version, slot))
        self._let_go(self._host.drop(version))
        self._catalogue.fail(version, reason)
        self._note()

    def postpone(self, adapter: AdapterId, digest: str, slot: int) -> None:
        """It is on another machine: its load gives the slot back until a copy has been fetched."""
        version = (adapter, digest)
        self._vacate(self._receiving(version, slot))
        self._let_go(self._host.drop(version))
        self._far.add(version)
        self._note()

    def fetch_failed(self, adapter: AdapterId, digest: str, reason: str) -> None:
        version = (adapter, digest)
        self._far.discard(version)
        self._catalogue.fail(version, reason)
        self._note()

    # --- what comes out

    def poll(self, now: float) -> list[Command]:
        """Commands since the last poll. They follow from order alone: `now` decides nothing."""
        if self._changed or self._short:
            self._changed = False
            self._place()
        commands, self._outbox = self._outbox, []
        return commands

    def make_room(self, pages: int, *, keep: int | None = None) -> bool:
        """Idle adapters, but not the one in slot `keep`, leave until the pool has `pages`; False,
        and nobody leaves, if that is not enough."""
        if pages <= self._pool.available:
            return True
        current = map(self._catalogue.current, self._waiters.adapters())
        awaited = (self._slots.find(version) for version in current if version is not None)
        leaving = self._room.for_sequence(
            pages, {slot.index for slot in awaited if slot is not None}, keep
        )
        for slot in leaving or ():
            self._vacate(slot)
            self._changed = True
        return leaving is not None

    def prospect(self) -> Prospect:
        """What an unplaced adapter would find if those left that may leave for it."""
        return self._room.prospect(self._promised)

    def pages_of(self, adapter: AdapterId) -> int:
        """What a load of it takes; 0 when there is nothing to load."""
        version = self._catalogue.current(adapter)
        return 0 if version is None else self._catalogue.pages(version)

    def check(self) -> None:
        for part in (self._catalogue, self._slots, self._room, self._host, self._waiters):
            part.check()
        self.check_versions(self._waiters)

    # --- placing

    def _place(self) -> None:
        """Begin the loads that can begin: for waiters by age, then for the pinned."""
        unplaced: list[tuple[AdapterId, float]] = []
        self._short = False
        promised: set[int] = set()  # slots of adapters that someone older waits for
        for adapter, since in self._waiters.oldest_first():
            version = self._catalogue.current(adapter)
            if version is None:
                continue
            slot = self._slots.find(version)
            if slot is None and self._far.holds_back(version, self._outbox):
                continue
            if slot is None and not unplaced:
                slot = self._begin(version, promised)
            if slot is None:
                unplaced.append((adapter, since))
            else:
                promised.add(slot.index)
        for adapter in self._catalogue.pinned():
            version = self._catalogue.current(adapter)
            if (
                version is None
                or self._slots.find(version)
                or self._far.holds_back(version, self._outbox)
            ):
                continue
            self._begin(version, promised)
        self._unplaced, self._promised = tuple(unplaced), frozenset(promised)

    def _begin(self, version: Version, promised: set[int]) -> Slot | None:
        """Start a load; None, and nobody leaves, when no slot or too few pages can be spared."""
        pages, size_bytes = self._catalogue.pages(version), self._catalogue.size_bytes(version)
        if not self._host.has_room(version, size_bytes):
            return None  # loads that are under way have it all
        leaving = self._room.for_load(pages, promised)
        if leaving is None:
            self._short = self._short or self._room.prospect(promised).fits(pages).slot
            return None
        for idle in leaving:
            self._vacate(idle)
        slot, own = self._slots.empty(), self._pool.allocate(pages, cold=True)
        assert slot is not None, "a load was promised a slot"
        assert own is not None, "a load was promised its pages"
        tier = Tier.HOST if version in self._host else Tier.DISK
        self._let_go(self._host.reserve(version, size_bytes))
        self._slots.begin(slot, version, tier, tuple(own))
        self._outbox.append(Load(*version, slot.index, tier))
        self._states = None
        return slot

    def _retire(self, version: Version | None) -> None:
        """A version is no longer current: it leaves, or is left to those who use it."""
        slot = None if version is None else self._slots.find(version)
        if slot is not None:
            self._leave_if_old(slot)
        if version is not None:
            self._far.discard(version)
            if slot is None or not slot.loading:
                self._let_go(self._host.drop(version))
        self._note()

    def _leave_if_old(self, slot: Slot) -> None:
        version = slot.version
        if version is not None and slot.idle and not self._is_current(slot):
            self._vacate(slot)
            self._let_go(self._host.drop(version))

    def _vacate(self, slot: Slot) -> None:
        assert slot.version is not None
        self._outbox.append(Evict(slot.version[0], slot.index))
        self._pool.free(self._slots.vacate(slot))
        self._states = None

    def _let_go(self, versions: list[Version]) -> None:
        self._outbox.extend(EvictHost(*version) for version in versions)

    def _receiving(self, version: Version, slot: int) -> Slot:
        receiving = self._slots[slot]
        if not receiving.loading or receiving.version != version:
            raise ValueError(f"slot {slot} is not receiving {version}: it has {receiving.version}")
        return receiving

    def _note(self) -> None:
        self._changed = True
        self._states = None
