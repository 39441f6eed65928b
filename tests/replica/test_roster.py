"""Which names are served from which folder, whatever comes, goes, is loaded or unloaded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replica.errors import BadAdapterRequest, UnknownAdapter
from replica.roster import Fact, Offered, Refused, Roster, Withdrawn
from shared.ids import AdapterId

A, B, X = AdapterId("a"), AdapterId("b"), AdapterId("x")


def _content(folder: AdapterId, digest: str = "1") -> Offered:
    return Offered(folder, digest, 8, 100, 3)


def _roster(*folders: AdapterId) -> Roster:
    roster = Roster(base_name="base")
    roster.scanned({folder: _content(folder) for folder in folders})
    return roster


def test_folders_come_change_and_go() -> None:
    roster = Roster(base_name="base")
    assert roster.scanned({A: _content(A)}) == [_content(A)]
    assert roster.scanned({A: _content(A)}) == []
    assert roster.scanned({A: _content(A, "2")}) == [_content(A, "2")]
    assert roster.scanned({A: Refused(A, "bad")}) == [Refused(A, "bad")]
    assert roster.scanned({}) == [Withdrawn(A)]


def test_a_loaded_name_follows_its_folder() -> None:
    roster = _roster(A)
    assert roster.load(X, A, _content(A)) == [Offered(X, "1", 8, 100, 3)]
    assert roster.folder_of(X) == A
    assert roster.scanned({A: _content(A, "2")}) == [_content(A, "2"), Offered(X, "2", 8, 100, 3)]
    assert roster.scanned({}) == [Withdrawn(A), Withdrawn(X)]
    assert roster.scanned({A: _content(A)}) == [_content(A)]


def test_what_was_unloaded_stays_away_until_its_folder_changes() -> None:
    roster = _roster(A)
    assert roster.unload(A) == [Withdrawn(A)]
    assert roster.scanned({A: _content(A)}) == []
    with pytest.raises(UnknownAdapter):
        roster.unload(A)
    assert roster.scanned({A: _content(A, "2")}) == [_content(A, "2")]


def test_what_was_unloaded_comes_back_when_loaded() -> None:
    roster = _roster(A)
    roster.unload(A)
    assert roster.load(A, A, _content(A)) == [_content(A)]
    assert roster.unload(A) == [Withdrawn(A)]


def test_names_that_may_not_be_loaded() -> None:
    roster = _roster(A, B)
    for name, code in ((AdapterId("base"), "name_conflict"), (B, "name_conflict")):
        with pytest.raises(BadAdapterRequest) as caught:
            roster.check_load(name, A, in_place=True)
        assert caught.value.reason == code
    roster.check_load(A, A, in_place=False)
    roster.load(A, A, _content(A))
    with pytest.raises(BadAdapterRequest, match="load_inplace"):
        roster.check_load(A, A, in_place=False)
    roster.check_load(A, A, in_place=True)


def test_a_folder_with_the_name_of_the_base_is_refused() -> None:
    [fact] = Roster(base_name="base").scanned({AdapterId("base"): _content(AdapterId("base"))})
    assert isinstance(fact, Refused)
    assert "name_conflict" in fact.reason


def test_a_folder_that_takes_a_loaded_name_waits_for_it() -> None:
    roster = _roster(A)
    roster.load(X, A, _content(A))
    both = {A: _content(A), X: _content(X, "9")}
    assert roster.scanned(both) == []
    assert roster.folder_of(X) == A
    assert roster.scanned({X: _content(X, "9")}) == [Withdrawn(A), _content(X, "9")]
    assert roster.folder_of(X) == X


names = st.sampled_from([A, B, X, AdapterId("base")])


class AnyOrder(RuleBasedStateMachine):
    """What the facts add up to is what the roster says it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster(base_name="base")
        self.disk: dict[AdapterId, Any] = {}
        self.served: dict[AdapterId, str] = {}  # name -> digest, "" refused
        self.unloaded: set[AdapterId] = set()  # ever

    def _apply(self, facts: list[Fact]) -> None:
        for fact in facts:
            match fact:
                case Offered(name, digest):
                    self.served[name] = digest
                case Refused(name):
                    self.served[name] = ""
                case Withdrawn(name):
                    assert name in self.served, "withdrawn, but never there"
                    del self.served[name]

    @rule(folder=names, digest=st.sampled_from(["1", "2", ""]))
    def appear(self, folder: AdapterId, digest: str) -> None:
        self.disk[folder] = _content(folder, digest) if digest else Refused(folder, "bad")

    @rule(folder=names)
    def vanish(self, folder: AdapterId) -> None:
        self.disk.pop(folder, None)

    @rule()
    def scan(self) -> None:
        self._apply(self.roster.scanned(dict(self.disk)))
        assert all(self.roster.folder_of(name) in self.disk for name in self.served)
        unseen = self.disk.keys() - self.served.keys()
        assert unseen <= self.unloaded, (
            "a folder is there, nobody unloaded it, and it is not served"
        )

    @rule(name=names, folder=names, in_place=st.booleans())
    def load(self, name: AdapterId, folder: AdapterId, in_place: bool) -> None:
        content = self.disk.get(folder)
        if not isinstance(content, Offered):
            return
        try:
            self.roster.check_load(name, folder, in_place=in_place)
        except BadAdapterRequest:
            return
        self._apply(self.roster.load(name, folder, content))
        assert self.served[name] == content.digest

    @rule(name=names)
    def unload(self, name: AdapterId) -> None:
        try:
            facts = self.roster.unload(name)
        except UnknownAdapter:
            assert name not in self.served
        else:
            self._apply(facts)
            assert name not in self.served
            self.unloaded.add(name)

    @invariant()
    def the_base_is_never_an_adapter(self) -> None:
        assert not self.served.get(AdapterId("base"))


TestAnyOrder = AnyOrder.TestCase
