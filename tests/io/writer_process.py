"""A writer in a process of its own that stops, or dies, before a chosen system call; it imports no JAX, so it starts fast.

Run as a program with the directory of the sources. Each line of stdin is one write as JSON: `target`, `template` (the directory
whose files are written), `call` (the number of the call at which to stop; -1 for none), `dies` (whether it dies there) and
`in_two` (whether directories are exchanged in two renames). It answers `at` when it has stopped, and goes on after a line
`go`; and at the end `done: calls=N` with the calls that it made, or `refused: message`, or `died`.
"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import types

CALLS = ("open", "write", "mkdir", "rename", "unlink", "rmdir", "fsync", "close")


class Writer:
    """A writer process, from the side of the test."""

    def __init__(self, sources: pathlib.Path):
        arguments = [sys.executable, str(pathlib.Path(__file__)), str(sources)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, target, template, call=-1, *, dies=False, in_two=False) -> str:
        """Starts a write and gives the first answer: `at`, or the last one."""
        order = {"target": str(target), "template": str(template), "call": call, "dies": dies, "in_two": in_two}
        return self._asked(json.dumps(order))

    def go_on(self, answer: str) -> str:
        """The last answer of a write whose first answer is given."""
        return self._asked("go") if answer == "at" else answer

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()

    def _asked(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def main(sources: str) -> None:
    """Serves the lines of stdin."""
    for name, folder in (("fewbit", "fewbit"), ("fewbit.io", "fewbit/io")):  # the packages without their __init__
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(pathlib.Path(sources) / folder)]
    atomic, errors = importlib.import_module("fewbit.io.atomic_directory"), importlib.import_module("fewbit.errors")
    assert "jax" not in sys.modules
    at_once = atomic._exchanged_at_once
    count = stop = 0
    dies = False

    def counted(fn):
        def called(*args, **kwargs):
            nonlocal count
            count += 1
            if count - 1 == stop:
                if dies:
                    os._exit(9)
                say("at")
                assert sys.stdin.readline() == "go\n"
            return fn(*args, **kwargs)

        return called

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    atomic.exchange = counted(atomic.exchange)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        atomic._exchanged_at_once = (lambda staged, target: False) if order["in_two"] else at_once
        template = pathlib.Path(order["template"])
        files = {file.name: file.read_bytes() for file in sorted(template.iterdir())}
        child = os.fork() if order["dies"] else 0
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 9:
                say("died")
            continue
        count, stop, dies = 0, order["call"], order["dies"]
        try:
            with atomic.StagedDirectory(pathlib.Path(order["target"]), overwrite=True) as staged:
                for name, data in files.items():
                    staged.write(name, [data], len(data))
                staged.commit()
            answer = f"done: calls={count}"
        except errors.QuantError as error:
            answer = f"refused: {error}"
        stop = -1
        say(answer)
        if order["dies"]:
            os._exit(0)


def say(text: str) -> None:
    """One line of answer."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
