"""Quantizes a checkpoint in the processes of a JAX cluster.

Each process reads and writes a part of the tensors. The unit of work is a tensor file of the output. The files follow from the
plan, not from the number of processes, so they are those that one process writes, and an interrupted run resumes with more
processes or fewer. Each process writes its files as fewbit directories next to the output; process 0 links them into one directory
with one manifest.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..._json import canonical
from ...calibration.measure import Observation
from ...errors import QuantError
from ...io.files import file_sha256
from ...io.journal import Journal
from ...io.native.manifest import read_manifest
from ...io.native.writer import DirectoryWriter, write
from ...methods.scaling import AbstractScaling
from ...recipe.method import NEAREST, AbstractMethod
from ...recipe.plan import Plan
from ...recipe.rows import PlanRow
from ..convert.provenance import method_facts, outcome, provenance, source_files, stored_config, value_sha256
from ..convert.targets import check_path
from ..methods.importance_file import ImportanceFile
from ..model import Model, Value
from ..tensors import Outcome, TensorResult, quantized_tensors
from .processes import all_or_none, gathered

Part = tuple[PlanRow, ...]
"""The rows of a plan whose tensors are in one file of the output."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """What the processes do together.

    Attributes:
        model: the source.
        plan: its plan.
        method: how scales and codes are chosen.
        facts: what the manifest says of the method.
        observed: the statistics that it takes, by path.
    """

    model: Model
    plan: Plan
    method: AbstractMethod
    facts: dict[str, Any]
    observed: Mapping[str, Observation]

    @classmethod
    def of(cls, model: Model, plan: Plan, method: AbstractMethod, calibration: ImportanceFile | None) -> "_Task":
        """The task, with the statistics of an importance file."""
        check_needs_no_run(method, has_importance=calibration is not None)
        observed: Mapping[str, Observation] = {}
        if calibration is not None:
            observed = calibration.observations_for(method, model, plan)
        return cls(model, plan, method, method_facts(method, calibration), observed)

    def provenance(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The provenance of the output, with what identifies the source."""
        return provenance(self.model, self.plan, source) | self.facts


def quantize_distributed(
    model: Model,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    method: AbstractMethod = NEAREST,
    calibration: ImportanceFile | None = None,
    max_file_bytes: int = 2**30,
    on_tensor: Callable[[TensorResult], None] | None = None,
) -> Outcome:
    """Quantizes in all processes of a JAX cluster. The directory appears complete or not at all.

    Every process calls it with the same arguments, after `jax.distributed.initialize`. Each reads only the bytes of its own
    tensors. Finished files stay in `.<name>.fewbit-work` next to the output until that is complete: the same call after an
    interruption resumes from them, with any number of processes. The tensor files and `config.json` are byte for byte those of
    `quantize`. The manifest names the source by one hash of its tensors, because no process reads whole files.

    Args:
        model: the model; every process must be able to read it.
        plan: its plan; see `plan_model`.
        out: the output directory, on a file system that all processes share.
        overwrite: whether a directory that fewbit wrote earlier may be replaced.
        method: how scales and codes are chosen; it needs no run of the model, which no process has as a whole.
        calibration: the importance file of the method imatrix.
        max_file_bytes: the maximum size of a tensor file, which is the unit of work; a larger tensor gets its own.
        on_tensor: called after each tensor of this process.

    Returns:
        The directory and its sizes, in every process.

    Raises:
        QuantError: in every process, when one fails or was called with other arguments. An existing output is unchanged, and
            finished files remain for the next call. For a method that must run the model, before any work.
    """
    start, index = time.perf_counter(), jax.process_index()
    parts = output_files(plan, max_file_bytes)
    with contextlib.ExitStack() as stack:
        with all_or_none():
            task = _Task.of(model, plan, method, calibration)
            check_path("fewbit", Path(out), model, overwrite=overwrite)
        job = _agreed_job(task, parts)
        folder = Journal(out, {"job": job})
        with all_or_none():
            if index == 0:
                stack.enter_context(folder)
        with all_or_none():
            if not folder.path.is_dir():
                raise QuantError(f"{folder.path}, which process 0 made, is not there; write to a file system that all share")
        missing = _missing_parts(folder.path, parts, job)
        with all_or_none():
            for i in missing:
                _write_part(_part_path(folder.path, i), parts[i], task, job, on_tensor)
        with all_or_none():
            facts = [read_manifest(_part_path(folder.path, i)).facts for i in range(len(parts))]
            if index == 0:
                _join(folder.path, facts, task, out, overwrite=overwrite)
        if index == 0:
            folder.remove()
    results = [TensorResult.from_json(form) for part in facts for form in part["results"]]
    return outcome(model, Path(out).absolute(), results, time.perf_counter() - start)


def check_needs_no_run(method: AbstractMethod | AbstractScaling, *, has_importance: bool) -> None:
    """Refuses a method or scaling that must run the model. No process has the model as a whole.

    Args:
        method: the method or scaling.
        has_importance: whether an importance file takes the place of a run.

    Raises:
        QuantError: when it learns from a text.
    """
    if method.collect and not has_importance:
        raise QuantError(
            f"method {method.name} runs the whole model, which processes that read a part of it cannot; take rtn, hqq, or "
            "imatrix with an importance file"
        )


def output_files(plan: Plan, max_file_bytes: int) -> list[Part]:
    """The rows of a plan by the output file of their tensors. The files are in order."""
    parts: list[list[PlanRow]] = []
    size = 0
    for row in plan:
        if not parts or size + row.bytes_after > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += row.bytes_after
    return list(map(tuple, parts))


def shares(parts: Mapping[int, Part], count: int) -> list[list[int]]:
    """The parts of each of `count` processes. The largest goes first, each to the process with the fewest bytes to read."""
    loads = [0] * count
    result: list[list[int]] = [[] for _ in range(count)]
    sizes = {i: sum(row.bytes_before for row in part) for i, part in parts.items()}
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        loads[least] += sizes[i]
        result[least].append(i)
    return result


def _agreed_job(task: _Task, parts: Sequence[Part]) -> str:
    """A hash that identifies the job in all processes. QuantError where one was called with other arguments.

    The source's files are named by size and time as process 0 sees them, since each process may read a copy of its own.
    """
    same = {
        **task.provenance({}),
        "plan": task.plan.sha256,
        "files": list(map(len, parts)),
        "version": importlib.metadata.version("fewbit"),
    }
    own = gathered(_json_sha256(same))
    for i, other in enumerate(own):
        if other != own[0]:
            raise QuantError(
                f"process {i} has another model, plan, method or version of fewbit than process 0; start all alike"
            )
    stats = [[file.name, *_size_and_time(file)] for file in source_files(task.model)]
    return _json_sha256([own[0], gathered(canonical(stats).decode())[0]])


def _json_sha256(form: object) -> str:
    return hashlib.sha256(canonical(form)).hexdigest()


def _size_and_time(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


# --- one part ---


def _part_path(folder: Path, i: int) -> Path:
    return folder / f"file-{i + 1:05d}"


def _missing_parts(folder: Path, parts: Sequence[Part], job: str) -> list[int]:
    """The parts that this process has to write. Each finished part is checked by one process."""
    index, count = jax.process_index(), jax.process_count()
    every = dict(enumerate(parts))
    own = [i for i in shares(every, count)[index] if _is_finished(_part_path(folder, i), job)]
    finished = {int(i) for text in gathered(" ".join(map(str, own))) for i in text.split()}
    return shares({i: part for i, part in every.items() if i not in finished}, count)[index]


def _is_finished(path: Path, job: str) -> bool:
    """Whether a part of this job is there, with all its bytes."""
    try:
        manifest = read_manifest(path)
        whole = all(file_sha256(path / name) == entry.sha256 for name, entry in manifest.files.items())
    except QuantError:
        return False
    return whole and manifest.facts.get("job") == job


def _write_part(path: Path, rows: Part, task: _Task, job: str, on_tensor: Callable[[TensorResult], None] | None) -> None:
    """Quantizes the tensors of one file, and writes them.

    The file also gets their results and the hashes of their sources.
    """
    sources, tensors, results = {}, {}, []
    model, part = task.model, dataclasses.replace(task.plan, rows=rows)

    def load(name: str) -> Value:
        value = model.load(name)
        sources[name] = value_sha256(value)
        return value

    source = dataclasses.replace(model, load=load)
    for value, result in quantized_tensors(source, part, method=task.method, observed=task.observed):
        tensors[model.names.get(result.path, result.path)] = model.stored(result.path, value)
        results.append(result.to_json())
        if on_tensor is not None:
            on_tensor(result)
    if path.exists():
        shutil.rmtree(path)  # damaged, or of another job
    write(path, tensors, facts={"job": job, "results": results, "sources": sources}, max_shard_bytes=sys.maxsize)


# --- the whole ---


def _join(
    folder: Path,
    facts: Sequence[Mapping[str, Any]],
    task: _Task,
    out: str | os.PathLike[str],
    *,
    overwrite: bool,
) -> None:
    """Links the files of all parts into the output, and writes its one manifest."""
    sources = {name: digest for part in facts for name, digest in part["sources"].items()}
    identity = {"tensors_sha256": _json_sha256(sources)}
    with DirectoryWriter(
        out,
        config=stored_config(task.model),
        files=task.model.files,
        facts=task.provenance(identity),
        overwrite=overwrite,
        sources=[task.model.path],
    ) as writer:
        for i in range(len(facts)):
            writer.add_directory(_part_path(folder, i))
