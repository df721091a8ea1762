"""A few random kills; ``python -m tests.kills`` makes hundreds."""

from tests.kills import run


def test_a_killed_process_leaves_a_version() -> None:
    assert sum(run(4, seed=1).values()) == 4
