"""The processes of a cluster agree on texts and on errors."""

import os
import signal

import jax
import pytest

from fewbit.errors import QuantError
from fewbit.workflows.distributed.processes import all_or_none, gathered
from tests import cluster

TEXTS = ["", "größer", "a" * 1000]


def agreement() -> list[object]:
    """What one process sees of the others' texts and errors."""
    index, seen = jax.process_index(), []
    for text in TEXTS:
        seen.append(gathered(text * index))
    with all_or_none():
        pass
    try:
        with all_or_none():
            if index == 1:
                raise QuantError("the disk is full")
    except QuantError as error:
        seen.append(str(error))
    return seen


def one_dies() -> None:
    """Process 1 dies while process 0 waits for it."""
    gathered("connected")
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered("here")


def test_one_process_agrees_with_itself():
    assert gathered("alone") == ["alone"]
    with pytest.raises(QuantError, match="the disk is full"), all_or_none():
        raise QuantError("the disk is full")


def test_two_processes_share_texts_and_errors():
    expected = [[text * index for index in range(2)] for text in TEXTS]
    found = cluster.run(agreement, 2)
    assert found == [[*expected, "process 1 of 2 failed: QuantError: the disk is full"], [*expected, "the disk is full"]]


@pytest.mark.slow
def test_jax_ends_a_process_that_waits_for_one_that_died():
    found = cluster.outcomes(one_dies, 2, seconds=100)
    assert found[1].status == -signal.SIGKILL
    assert found[0].status not in (0, -signal.SIGKILL), "it ended, and the scaffolding had not to kill it"


@pytest.mark.slow
def test_processes_that_hang_are_killed():
    assert [process.status for process in cluster.outcomes(hanging, 2, seconds=15)] == [-signal.SIGKILL] * 2


def hanging() -> None:
    """Never ends."""
    signal.pause()
