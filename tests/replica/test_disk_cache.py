"""The disk cache: within its budget, whole or absent, and the same after a restart."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.disk_cache import CacheTaken, DiskCache
from replica.engine.bad_adapter import BadAdapter
from shared.ids import AdapterId

A, B, C = (AdapterId(name) for name in "abc")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    cache = DiskCache(tmp_path, max_bytes=100)
    yield cache
    cache.check()
    cache.close()


def filled(size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "weights").write_bytes(b"x" * size) and None


def put(cache: DiskCache, key: AdapterId, size: int) -> None:
    cache.bring(key, size, filled(size))


def test_the_least_recently_used_goes_first(cache: DiskCache) -> None:
    put(cache, A, 40)
    put(cache, B, 40)
    with cache.hold(A) as there:
        assert there
    put(cache, C, 50)
    assert (A in cache, B in cache, C in cache) == (True, False, True)
    assert cache.used_bytes == 90


def test_a_restart_forgets_neither_what_is_there_nor_who_goes_first(tmp_path: Path) -> None:
    first = DiskCache(tmp_path, max_bytes=100)
    for at, key in enumerate((A, B)):
        put(first, key, 40)
        os.utime(first.adapters / key, (at, at))
    with first.hold(A):
        pass
    first.close()
    again = DiskCache(tmp_path, max_bytes=100)
    put(again, C, 50)
    assert (A in again, B in again) == (True, False)
    again.close()


def test_what_a_crash_left_half_is_gone_on_from_and_never_served(tmp_path: Path) -> None:
    def crash(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise KeyboardInterrupt

    first = DiskCache(tmp_path, max_bytes=100)
    with pytest.raises(KeyboardInterrupt):
        first.bring(A, 40, crash)
    assert A not in first
    first.close()
    again = DiskCache(tmp_path, max_bytes=100)
    assert A not in again
    found: list[bytes] = []
    again.bring(A, 40, lambda folder: found.append((folder / "weights").read_bytes()))
    assert found == [b"half"]
    assert A in again
    again.close()


def test_halves_make_room_before_wholes_do(cache: DiskCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * 30)
        raise BadAdapter("unreachable", "gone")

    with pytest.raises(BadAdapter, match="unreachable"):
        cache.bring(A, 60, fail)
    put(cache, B, 40)
    assert list(cache.adapters.parent.glob("incoming/*")), "there is room for it still"
    put(cache, C, 40)
    assert B in cache
    assert not list(cache.adapters.parent.glob("incoming/*"))


def test_what_is_held_stays(cache: DiskCache) -> None:
    put(cache, A, 60)
    with cache.hold(A), pytest.raises(BadAdapter, match="disk_full"):
        put(cache, B, 50)
    put(cache, B, 50)
    assert A not in cache


def test_what_never_fits_is_refused(cache: DiskCache) -> None:
    put(cache, A, 60)
    with pytest.raises(BadAdapter, match="too_large"):
        put(cache, B, 101)
    assert A in cache


def test_a_full_disk_is_that_adapters_fault_alone(cache: DiskCache) -> None:
    def full(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * 10)
        raise OSError(errno.ENOSPC, "No space left on device")

    put(cache, A, 40)
    with pytest.raises(BadAdapter, match="disk_full"):
        cache.bring(B, 40, full)
    assert A in cache
    assert not list(cache.adapters.parent.glob("incoming/*"))
    put(cache, B, 40)


def test_two_processes_do_not_share_a_cache(cache: DiskCache, tmp_path: Path) -> None:
    with pytest.raises(CacheTaken, match="its own"):
        DiskCache(tmp_path, max_bytes=100)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 120), st.booleans())))
def test_the_budget_holds_whatever_comes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]]
) -> None:
    cache = DiskCache(tmp_path_factory.mktemp("cache"), max_bytes=100)
    for name, size, uses in steps:
        key = AdapterId(name)
        if uses:
            with cache.hold(key):
                cache.check()
        elif size <= 100:
            put(cache, key, size)
            assert key in cache
        else:
            with pytest.raises(BadAdapter, match="too_large"):
                put(cache, AdapterId(f"{name}{size}"), size)
        cache.check()
    cache.close()
