"""Runs a function in several processes of one JAX cluster on this machine.

`run` starts the processes; each joins by `jax.distributed.initialize`, with gloo collectives between CPU devices, calls the
function, and gives back its JSON. As a program this file is one such process; it ends when its stdin closes, so that none
outlives the tests.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INITIALIZATION_SECONDS = 60
HEARTBEAT_SECONDS = 10
"""After how long the others notice that a process has died, where no collective tells them earlier."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """One process at its end: its exit status (negative: the signal), what its function returned, and its stderr."""

    status: int
    result: Any
    stderr: str


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that nobody but a gRPC server, which shares its ports, can bind until the end of the block."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def run(function: Callable[..., Any], count: int, *args: Any, devices: int = 1, seconds: float = 240) -> list[Any]:
    """What the function returns in each of `count` processes; fails when one fails.

    Args:
        function: a function of a module, called with `args`, which are JSON.
        count: the number of processes.
        args: what it is called with.
        devices: how many CPU devices each process has.
        seconds: after how long all processes are killed.
    """
    ended = outcomes(function, count, *args, devices=devices, seconds=seconds)
    for index, process in enumerate(ended):
        assert process.status == 0, f"process {index} of {count} ended with {process.status}:\n{process.stderr[-4000:]}"
    return [process.result for process in ended]


def outcomes(function: Callable[..., Any], count: int, *args: Any, devices: int = 1, seconds: float = 240) -> list[Ended]:
    """`run`, whatever the processes' exit status."""
    deadline = time.monotonic() + seconds
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes, outputs = [], []
        for index in range(count):
            order = {
                "module": function.__module__,
                "function": function.__name__,
                "args": args,
                "coordinator": f"127.0.0.1:{port}",
                "count": count,
                "index": index,
                "devices": devices,
                "result": f"{folder}/{index}.json",
            }
            output = stack.enter_context(open(f"{folder}/{index}.txt", "w+"))
            process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            )
            stack.callback(_end, process)
            processes.append(process)
            outputs.append(output)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
        return [
            Ended(process.wait(), _json(Path(folder) / f"{index}.json"), Path(output.name).read_text())
            for index, (process, output) in enumerate(zip(processes, outputs, strict=True))
        ]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def main(order: dict[str, Any]) -> None:
    """One process of the cluster."""
    threading.Thread(target=_exit_with_the_parent, daemon=True).start()
    import jax

    jax.config.update("jax_num_cpu_devices", order["devices"])
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        order["coordinator"],
        order["count"],
        order["index"],
        initialization_timeout=INITIALIZATION_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    result = getattr(importlib.import_module(order["module"]), order["function"])(*order["args"])
    Path(order["result"]).write_text(json.dumps(result))


def _exit_with_the_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock the interpreter needs to exit
    os._exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
