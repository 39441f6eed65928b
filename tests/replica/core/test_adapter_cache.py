"""The cache against a model in dictionaries, with an engine that carries out what it is told."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.core.adapter_cache import AdapterCache, Evict, EvictHost, Load
from replica.core.pages import PagePool
from shared.ids import AdapterId
from shared.messages import AdapterStatus, Tier

NAMES = st.sampled_from([AdapterId(name) for name in "abcde"])
MOSTLY_NOT = st.sampled_from([False, False, False, True])
SEQUENCES = st.sampled_from([f"s{i}" for i in range(6)])
Version = tuple[AdapterId, str]


class Cache(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 3),
        more_host=st.integers(0, 2),
        sizes=st.lists(st.integers(0, 5), min_size=5, max_size=5),
        pages=st.integers(6, 20),
        for_keys=st.integers(0, 6),
    )
    def begin(
        self, slots: int, more_host: int, sizes: list[int], pages: int, for_keys: int
    ) -> None:
        """Adapters have `pages` but `for_keys`, and sequences whatever adapters have not."""
        self.size, self.host_max = slots, slots + more_host
        self.pool = PagePool(pages=pages, page_tokens=1)
        self.pages_max = pages - for_keys
        self.cache = AdapterCache(
            slots=self.size, host_max=self.host_max, pool=self.pool, pages_max=self.pages_max
        )
        self.sizes = {AdapterId(name): size for name, size in zip("abcde", sizes, strict=True)}
        self.keys: list[int] = []  # pages that sequences hold
        self.now = 0.0
        # what is true of the machine
        self.slots: dict[int, Version] = {}
        self.leaving: set[int] = set()  # slots of old versions that nobody holds
        self.host: set[Version] = set()
        self.loads: dict[int, Load] = {}
        # what is true of the world
        self.known: dict[AdapterId, str] = {}  # name -> digest that may be served
        self.faults: dict[AdapterId, tuple[str, str]] = {}  # name -> digest, reason
        self.pinned: set[AdapterId] = set()
        self.held: dict[str, Version] = {}
        self.waits: dict[str, tuple[float, AdapterId]] = {}
        self.used: list[Version] = []  # least recently used first
        for name in "abcde":
            self.offer(AdapterId(name), "v1")

    def use(self, version: Version) -> None:
        self.used = [other for other in self.used if other != version] + [version]

    def leave(self) -> None:
        for slot, version in self.slots.items():
            if not self.is_current(version) and version not in self.held.values():
                self.leaving.add(slot)

    def is_current(self, version: Version) -> bool:
        return self.known.get(version[0]) == version[1]

    # --- the store

    def offer(self, name: AdapterId, digest: str) -> None:
        self.cache.offer(name, digest, 8, 100, self.sizes[name])
        if digest in (self.known.get(name), self.faults.get(name, ("",))[0]):
            return
        self.faults.pop(name, None)
        self.known.pop(name, None)
        room = self.pages_max - sum(self.sizes[each] for each in self.pins(but=name))
        others = self.known.keys() - self.pinned
        largest = max((self.sizes[each] for each in others), default=0)
        if self.sizes[name] <= room - (largest if name in self.pinned else 0):
            self.known[name] = digest
            return
        (reason,) = [state.reason for state in self.cache.states() if state.adapter == name]
        assert "raise pages" in reason
        self.faults[name] = (digest, reason)

    def pins(self, *, but: AdapterId) -> list[AdapterId]:
        """Pinned adapters that can be loaded."""
        return [name for name in self.pinned if name in self.known and name != but]

    def withdraw(self, name: AdapterId) -> None:
        self.cache.withdraw(name)
        for world in (self.known, self.faults):
            world.pop(name, None)
        self.pinned.discard(name)

    def refuse(self, name: AdapterId) -> None:
        self.cache.failed(name, "it is a picture of a cat")
        self.known.pop(name, None)
        self.faults[name] = ("", "it is a picture of a cat")

    @rule(name=NAMES, change=st.sampled_from(["v1", "v2", "withdrawn", "refused"]))
    def change_the_store(self, name: AdapterId, change: str) -> None:
        if change == "withdrawn":
            self.withdraw(name)
        elif change == "refused":
            self.refuse(name)
        else:
            self.offer(name, change)
        self.leave()

    @rule(name=NAMES, on=st.booleans())
    def pin(self, name: AdapterId, on: bool) -> None:
        exists = name in self.known or name in self.faults
        pinned = [*self.pins(but=name), *([name] if name in self.known else [])]
        others = self.known.keys() - self.pinned - {name}
        largest = max((self.sizes[each] for each in others), default=0)
        fits = len(self.pinned - {name}) < self.size - 1 and (
            largest + sum(self.sizes[each] for each in pinned) <= self.pages_max
        )
        if not exists or (on and not fits):
            with pytest.raises(ValueError, match=r"add it first|unpin one first"):
                self.cache.pin(name, on)
            return
        self.cache.pin(name, on)
        (self.pinned.add if on else self.pinned.discard)(name)

    # --- sequences

    @rule(name=NAMES, seq=SEQUENCES, only_wants=MOSTLY_NOT)
    def acquire(self, name: AdapterId, seq: str, only_wants: bool) -> None:
        self.now += 1.0
        if seq in self.held or self.waits.get(seq, (0.0, name))[1] != name:
            return  # a sequence has one adapter, for life
        if only_wants:
            self.cache.want(name, seq, self.now)
            self.waits.setdefault(seq, (self.now, name))
            return
        slot = self.cache.acquire(name, seq, self.now)
        version = (name, self.known.get(name, ""))
        if slot is None:
            assert version not in self.slots.values()
            self.waits.setdefault(seq, (self.now, name))
            return
        assert self.slots[slot] == version, "new sequences get the current version"
        self.held[seq] = version
        self.waits.pop(seq, None)
        self.use(version)

    @rule(seq=SEQUENCES, times=st.integers(1, 2))
    def release(self, seq: str, times: int) -> None:
        for _ in range(times):
            self.cache.release(seq)
        self.waits.pop(seq, None)
        if seq in self.held:
            self.use(self.held.pop(seq))
        self.leave()

    @rule(want=st.integers(1, 6), headroom=st.integers(0, 2), evicts=st.booleans())
    def take_pages(self, want: int, headroom: int, evicts: bool) -> None:
        self.pool.headroom = headroom
        if evicts:
            self.give_way(want)
        self.keys += self.pool.allocate(min(want, self.pool.available)) or []

    def give_way(self, want: int) -> None:
        """Idle adapters leave for sequences, or none does."""
        before, idle = self.pool.available, self.idle()
        enough = before + sum(self.sizes[name] for name, _ in idle) >= want
        assert self.cache.make_room(want) == enough
        if not enough:
            assert self.pool.available == before
            return
        left = [v for v in idle if self.cache.slot_of(v[0]) is None]
        awaited = {name for _, name in self.waits.values()}
        lines = sorted(idle, key=lambda v: (v[0] in awaited, self.used.index(v)))
        assert left == lines[: len(left)], "the least recently used that nobody waits for first"
        for slot in [slot for slot, version in self.slots.items() if version in left]:
            del self.slots[slot]

    @rule(back=st.integers(1, 6))
    def give_pages_back(self, back: int) -> None:
        self.pool.free(self.keys[:back])
        del self.keys[:back]

    # --- the engine

    @rule()
    def poll(self) -> None:
        commands = self.cache.poll(self.now)
        for at, command in enumerate(commands):
            match command:
                case Load():
                    self.begin_load(command)
                case Evict():
                    follows = commands[at + 1 :]
                    self.evict(command, [item for item in follows if isinstance(item, Load)])
                case EvictHost(adapter, digest):
                    assert all((e.adapter, e.digest) != (adapter, digest) for e in self.reading())
                    self.host.discard((adapter, digest))
        assert self.cache.poll(self.now) == [], "a command is given once"
        self.nobody_waits_in_vain()

    def reading(self) -> list[Load]:
        return list(self.loads.values())

    def begin_load(self, load: Load) -> None:
        version = (load.adapter, load.digest)
        assert self.is_current(version)
        assert load.slot not in self.slots
        assert load.slot not in self.loads
        assert version not in self.slots.values()
        assert all((other.adapter, other.digest) != version for other in self.reading())
        assert load.tier == (Tier.HOST if version in self.host else Tier.DISK)
        self.loads[load.slot] = load

    def evict(self, command: Evict, loads_after: list[Load]) -> None:
        version = self.slots.pop(command.slot, None)
        if version is None:
            return  # a load that failed: nobody's weights are cleared
        assert version[0] == command.adapter
        if command.slot in self.leaving:
            self.leaving.remove(command.slot)
        else:
            assert version not in self.held.values(), "a held slot was evicted"
            assert version[0] not in self.pinned, "a pinned adapter was evicted"
            gain = loads_after[0]  # who leaves for it stands right before it
            rivals = [other for other in self.idle() if not self.older(other[0], gain.adapter)]
            assert all(self.used.index(version) < self.used.index(other) for other in rivals)
            assert not self.older(version[0], gain.adapter), "taken from an older waiter"

    def idle(self) -> list[Version]:
        """Who could have left instead: resident, current, unpinned, held by nobody."""
        return [
            version
            for version in self.slots.values()
            if version not in self.held.values()
            and self.is_current(version)
            and version[0] not in self.pinned
        ]

    def age(self, name: AdapterId) -> tuple[float, AdapterId]:
        return min((w for w in self.waits.values() if w[1] == name), default=(float("inf"), name))

    def older(self, name: AdapterId, than: AdapterId) -> bool:
        return self.age(name)[0] < float("inf") and self.age(name) < self.age(than)

    def nobody_waits_in_vain(self) -> None:
        """After a poll whoever has no slot finds every slot taken, for a reason."""
        placed = {*self.slots.values(), *((e.adapter, e.digest) for e in self.reading())}
        waiting = {name for _, name in self.waits.values() if name in self.known}
        left = sorted(self.age(name) for name in waiting if (name, self.known[name]) not in placed)
        assert self.cache.unplaced == tuple((name, since) for since, name in left)
        if left:
            name = left[0][1]
            may_leave = [version for version in self.idle() if not self.older(version[0], name)]
            freed = sum(self.sizes[leaver] for leaver, _ in may_leave)
            slot = bool(may_leave) or len(self.slots) + len(self.loads) < self.size
            held = self.cache.pages_used - freed + self.sizes[name]
            in_pool = self.pool.spare + freed >= self.sizes[name]
            assert not (slot and held <= self.pages_max and in_pool)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), fails=MOSTLY_NOT, reads=st.booleans())
    def end_load(self, data: st.DataObject, fails: bool, reads: bool) -> None:
        load = self.loads[data.draw(st.sampled_from(sorted(self.loads)))]
        version = (load.adapter, load.digest)
        if reads or not fails:
            self.cache.read(*version)
            self.host.add(version)
        del self.loads[load.slot]
        if fails:
            self.cache.load_failed(*version, load.slot, "torn")
            if self.is_current(version):
                del self.known[load.adapter]
                self.faults[load.adapter] = (load.digest, "torn")
        else:
            self.slots[load.slot] = version
            self.cache.loaded(*version, load.slot)
            self.use(version)
        self.leave()

    @rule()
    def end_all_loads(self) -> None:
        self.poll()
        for slot in sorted(self.loads):
            load = self.loads.pop(slot)
            self.cache.read(load.adapter, load.digest)
            self.host.add((load.adapter, load.digest))
            self.slots[slot] = (load.adapter, load.digest)
            self.cache.loaded(load.adapter, load.digest, slot)
            self.use((load.adapter, load.digest))
        self.leave()

    @rule(name=NAMES, digest=st.sampled_from(["v1", "v2"]))
    def fetch_ahead(self, name: AdapterId, digest: str) -> None:
        self.cache.read(name, digest)
        self.host.add((name, digest))

    # --- laws

    @invariant()
    def it_accuses_itself_of_nothing(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            self.pool.check([self.keys, *self.cache.holdings()])
            assert self.cache.host_used <= self.host_max
            assert self.cache.slots_used <= self.size

    @rule()
    def states_tell_the_truth(self) -> None:
        self.poll()
        states = {state.adapter: state for state in self.cache.states()}
        assert states.keys() == self.known.keys() | self.faults.keys()
        assert len(self.host | {(e.adapter, e.digest) for e in self.reading()}) <= self.host_max
        for name, state in states.items():
            assert state.pinned == (name in self.pinned)
            if name in self.faults:
                assert (state.status, state.tier) == (AdapterStatus.FAILED, Tier.DISK)
                assert (state.digest, state.reason) == self.faults[name]
                assert self.cache.refusal(name)
                continue
            version = (name, self.known[name])
            loading = any((e.adapter, e.digest) == version for e in self.reading())
            assert state.digest == version[1]
            assert (state.status is AdapterStatus.LOADING) == loading
            assert (state.tier is Tier.GPU) == (version in self.slots.values())
            if state.tier is not Tier.GPU:
                assert (state.tier is Tier.HOST) == (version in self.host)
            holders = sum(held == version for held in self.held.values())
            assert state.running == holders
            assert self.cache.refusal(name) is None

    def teardown(self) -> None:
        """When all sequences have left and nothing is offered, nothing is held anywhere."""
        if not hasattr(self, "cache"):
            return
        for seq in [*self.held, *self.waits]:
            self.cache.release(seq)
        self.held.clear()
        self.waits.clear()
        for name in sorted({*self.known, *self.faults}):
            self.withdraw(name)
        self.leave()
        self.end_all_loads()
        self.poll()
        self.pool.free(self.keys)
        assert self.pool.available == self.pool.pages
        assert (self.slots, self.host, self.cache.slots_used, self.cache.host_used) == (
            {},
            set(),
            0,
            0,
        )


TestCache = Cache.TestCase
