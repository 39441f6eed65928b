"""One thread's team is nobody else's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from replica.engine.threads import apart, lone, team


def test_a_thread_keeps_its_team_whatever_another_one_sets() -> None:
    with ThreadPoolExecutor(1) as steps, ThreadPoolExecutor(1, initializer=lone) as reader:
        steps.submit(team, 2).result()
        assert reader.submit(torch.get_num_threads).result() == 1
        assert steps.submit(torch.get_num_threads).result() == 2


def test_a_team_holds_from_the_first_operator_on() -> None:
    """A thread looks at the number only once it computes; by then another may have set it."""

    def late() -> int:
        team(2)
        torch.ones(4).sum()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1, initializer=lone) as reader, ThreadPoolExecutor(1) as steps:
        reader.submit(torch.get_num_threads).result()
        assert steps.submit(late).result() == 2


def test_apart_gives_back_what_was_made_or_raised() -> None:
    assert apart(lambda: 7) == 7

    def fails() -> Callable[[], None]:
        raise LookupError("no base")

    with pytest.raises(LookupError, match="no base"):
        apart(fails)
