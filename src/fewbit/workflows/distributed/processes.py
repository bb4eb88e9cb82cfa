"""Agreement between the processes of a JAX cluster.

A cluster is what `jax.distributed.initialize` joined; without it there is one process, which agrees with itself.
"""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...errors import QuantError, UnsupportedError


def gathered(text: str) -> list[str]:
    """The texts of all processes, in their order; a barrier.

    When a process dies, JAX's runtime ends the others (`heartbeat_timeout_seconds` of `jax.distributed.initialize`).
    """
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(data.size, np.int32)).reshape(-1)
    padded = np.zeros(max(1, *lengths), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that every process runs, with a barrier at its end.

    An error in one process is raised in all, at the end of the block.

    Raises:
        QuantError: with the index and message of a process that failed, in the others.
    """
    error = None
    try:
        yield
    except (QuantError, UnsupportedError, OSError, MemoryError) as caught:
        error = caught
    messages = gathered(f"{type(error).__name__}: {error}" if error is not None else "")
    if error is not None:
        raise error
    for index, message in enumerate(messages):
        if message:
            raise QuantError(f"process {index} of {len(messages)} failed: {message}")
