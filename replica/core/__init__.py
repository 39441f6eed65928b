"""The decisions of a replica, pure: which slot, which pages, which batch.

Law of this package: no IO, no clock, no dice, no log, no tensor. Events come in as method calls
with `now` as the last argument; decisions go out as frozen values that the engine thread carries
out. So the same objects run under a real GPU, in a simulator and in a property test, and every one
that keeps state can accuse itself: `check()` raises when an invariant is broken.
"""
