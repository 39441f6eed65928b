"""Prefix: the names under which full pages of keys are found again.

    name_0 = H(root, tokens of page 0)      name_i = H(name_{i-1}, tokens of page i)
    root   = H(digest, salt)

So a name says everything that the keys and values in its page depend on: the weights, by the digest
of the adapter's content ("" is the base; a pool serves one base), and every token before and in the
page. New weights under an old name of an adapter have another digest and find nothing of the old.
A salt only divides: whoever brings one shares with those alone who bring the same. H is SHA-256, so
nobody can write a prompt whose name is that of another one, nor find another root's names.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from replica.core.sequence import Sequence


def root(digest: str, salt: str) -> bytes:
    """`repr` of a pair of strings is unambiguous: no two namespaces look alike."""
    return sha256(repr((digest, salt)).encode()).digest()


class PageNames:
    """Names of one sequence's full pages, made when first asked for and kept."""

    __slots__ = ("_names", "_page_tokens", "_root")

    def __init__(self, *, root: bytes, page_tokens: int) -> None:
        self._root = root
        self._page_tokens = page_tokens
        self._names: list[bytes] = []

    def belongs_to(self, root: bytes) -> bool:
        return self._root == root

    @property
    def made(self) -> list[bytes]:
        """All that were asked for so far."""
        return self._names

    def first(self, pages: int, seq: Sequence) -> list[bytes]:
        """Of the first `pages` pages, which the sequence's tokens must fill."""
        size, names = self._page_tokens, self._names
        for page in range(len(names), pages):
            tokens = array("I", seq.between(page * size, (page + 1) * size))
            before = names[-1] if names else self._root
            names.append(sha256(before + tokens.tobytes()).digest())
        return names[:pages]
