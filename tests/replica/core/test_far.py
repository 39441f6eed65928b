"""What comes from another machine: no slot waits for it, and everybody who can run does."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replica.core.adapter_cache import AdapterCache, Evict, EvictHost, Fetch, Load
from replica.core.pages import PagePool
from shared.ids import AdapterId

NAMES = [AdapterId(name) for name in "abcdef"]
SIZES = dict(zip(NAMES, (10, 20, 30, 40, 10, 20), strict=True))
ANY = st.sampled_from(NAMES)
Version = tuple[AdapterId, str]


class FarAndNear(RuleBasedStateMachine):
    """An engine that reads what is on its disk and fetches the rest, each when it likes."""

    @initialize(slots=st.integers(1, 3), host_bytes=st.integers(40, 100), near=st.sets(ANY))
    def begin(self, slots: int, host_bytes: int, near: set[AdapterId]) -> None:
        self.pool = PagePool(pages=8, page_tokens=1)
        self.cache = AdapterCache(slots=slots, host_bytes=host_bytes, pool=self.pool)
        self.slots, self.host_bytes, self.near = slots, host_bytes, near
        self.host: set[Version] = set()
        self.loads: dict[int, Load] = {}
        self.fetches: list[Version] = []
        self.waits: dict[str, AdapterId] = {}
        self.lost: set[AdapterId] = set()
        self.now = 0.0
        for name in NAMES:
            self.cache.offer(name, f"{name}1", 8, SIZES[name], 1)

    def poll(self) -> None:
        for command in self.cache.poll(self.now):
            match command:
                case Load(adapter, digest, slot):
                    if adapter in self.near or (adapter, digest) in self.host:
                        self.loads[slot] = command
                    else:
                        self.cache.postpone(adapter, digest, slot)
                case Fetch(adapter, digest):
                    assert (adapter, digest) not in self.fetches, "asked for twice"
                    assert adapter not in self.near
                    self.fetches.append((adapter, digest))
                case EvictHost(adapter, digest):
                    self.host.discard((adapter, digest))
                case Evict():
                    pass

    @rule(name=ANY, seq=st.integers(0, 9))
    def want(self, name: AdapterId, seq: int) -> None:
        self.now += 1
        self.waits.setdefault(f"s{seq}", name)
        self.cache.acquire(self.waits[f"s{seq}"], f"s{seq}", self.now)
        self.poll()

    @rule(seq=st.integers(0, 9))
    def leave(self, seq: int) -> None:
        self.waits.pop(f"s{seq}", None)
        self.cache.release(f"s{seq}")
        self.poll()

    @rule()
    def load(self) -> None:
        for slot in list(self.loads):
            done = self.loads.pop(slot)
            self.host.add((done.adapter, done.digest))
            self.cache.read(done.adapter, done.digest, 0.1)
            self.cache.loaded(done.adapter, done.digest, slot)
        self.poll()

    @rule(well=st.sampled_from([True, True, False]))
    def arrive(self, well: bool) -> None:
        if not self.fetches:
            return
        adapter, digest = self.fetches.pop(0)
        if well:
            self.near.add(adapter)  # it is on the disk by now
            self.host.add((adapter, digest))
            self.cache.read(adapter, digest, 5.0)
        else:
            self.lost.add(adapter)
            self.cache.fetch_failed(adapter, digest, "the store is down")
        self.poll()

    @rule(name=ANY)
    def leave_the_disk(self, name: AdapterId) -> None:
        self.near.discard(name)

    @invariant()
    def it_accuses_itself_of_nothing(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.host_bytes <= self.host_bytes

    @invariant()
    def no_slot_waits_for_another_machine(self) -> None:
        if hasattr(self, "cache"):
            self.poll()
            assert self.cache.slots_used - len(self.loads) <= self.slots
            for version in self.fetches:
                assert self.cache.slot_of(version[0]) is None
                assert version[0] not in {load.adapter for load in self.loads.values()}

    def teardown(self) -> None:
        """If all that is fetched comes, all who wait get their turn."""
        if not hasattr(self, "cache"):
            return
        for seq in [seq for seq in self.waits if self.cache.slot_held(seq) is not None]:
            self.leave(int(seq[1:]))
        for _ in range(100):
            self.arrive(True)
            self.load()
            for seq, name in list(self.waits.items()):
                held = self.cache.acquire(name, seq, self.now) is not None
                if held or self.cache.refusal(name):
                    self.leave(int(seq[1:]))
        assert not self.waits, "somebody waits in vain"


TestFarAndNear = FarAndNear.TestCase
