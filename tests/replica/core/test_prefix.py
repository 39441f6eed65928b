"""A name says everything that is in a page, and nobody can make two texts of one name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replica.core.prefix import PageNames, root
from replica.core.sequence import Sampling, Sequence

DIGESTS = st.sampled_from(["", "a", "b", "('a',)", "a', 'b"])
SALTS = st.sampled_from(["", "a", "b", "a', 'b", "\x00"])
TOKENS = st.lists(st.integers(0, 300), min_size=4, max_size=12)


def names(digest: str, salt: str, tokens: list[int]) -> list[bytes]:
    seq = Sequence("s", None, tuple(tokens), Sampling(max_tokens=1), 0.0)
    made = PageNames(root=root(digest, salt), page_tokens=4)
    return made.first(len(tokens) // 4, seq)


@given(DIGESTS, SALTS, TOKENS, DIGESTS, SALTS, TOKENS)
def test_names_are_equal_where_weights_salt_and_all_tokens_before_are(
    digest: str,
    salt: str,
    tokens: list[int],
    other_digest: str,
    other_salt: str,
    other_tokens: list[int],
) -> None:
    mine, others = names(digest, salt, tokens), names(other_digest, other_salt, other_tokens)
    one_space = (digest, salt) == (other_digest, other_salt)
    for page, (name, other) in enumerate(zip(mine, others, strict=False)):
        end = 4 * page + 4
        assert (name == other) == (one_space and tokens[:end] == other_tokens[:end])


@given(TOKENS)
def test_names_do_not_depend_on_when_they_are_asked_for(tokens: list[int]) -> None:
    seq = Sequence("s", None, tuple(tokens[:4]), Sampling(max_tokens=9), 0.0)
    made = PageNames(root=root("", ""), page_tokens=4)
    for token in tokens[4:]:
        made.first(len(seq) // 4, seq)
        seq.output.append(token)
    assert made.first(len(seq) // 4, seq) == names("", "", tokens)
