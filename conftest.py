"""The strictness that every test and every doctest runs under; it stands at the root because both trees need it."""

import collections
import contextlib
import functools
import gc
import importlib.util
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import beartype.typing  # noqa: F401 - the text of CHECKER names it
import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

# Tests, and the processes that they start, run on the CPU unless the caller says otherwise; eight devices give sharding
# something to shard over.
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first call of a test compiles, so a deadline would measure XLA; derandomized, so that a red run can be run again.
hypothesis.settings.register_profile("fewbit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fewbit")

# Sources that import an optional package at the top have no examples to run where it is missing.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["src/fewbit/torch/*.py"]
if not importlib.util.find_spec("triton"):
    collect_ignore_glob += ["src/fewbit/kernels/*/gpu/*.py", "src/fewbit/kernels/triton/*.py"]

# Annotations are checked at every call. An int is a float here, as PEP 484 has it; `Self` goes unchecked, because jaxtyping
# decorates method by method and beartype knows `Self` only where it decorates the class.
CHECKER = """beartype.beartype(conf=beartype.BeartypeConf(
    is_pep484_tower=True,
    hint_overrides=beartype.FrozenDict({beartype.typing.Self: beartype.typing.Any}),
))"""


# What stands in annotations that beartype alone does not check: shapes, and text that may name what only a type checker imports.
FOR_JAXTYPING = re.compile(r"jaxtyping|ForwardRef|(\[|, )'")


def jaxtyped(thing: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """As jaxtyping's, which takes 30 us a call for its memory of shapes, but without that for functions that name none."""
    if thing is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    function = getattr(thing, "fget", thing)
    if not inspect.isfunction(function) or FOR_JAXTYPING.search(repr(list(function.__annotations__.values()))):
        return with_shapes(thing, typechecker=typechecker)
    checked = typechecker(thing)
    if isinstance(thing, property):
        return checked

    @functools.wraps(thing)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (thing if jaxtyping_config.jaxtyping_disable else checked)(*args, **kwargs)

    return chosen


with_shapes = jaxtyping.jaxtyped
if not jaxtyping_config.jaxtyping_disable:  # JAXTYPING_DISABLE=1: millions of mutated files are read five times as fast
    jaxtyping.jaxtyped = jaxtyped
    install_import_hook("fewbit", CHECKER)


# Tests compile without LLVM's optimizations, a third of the time; `--optimize` has them optimized, as a user's programs are. So
# are the processes that tests start, but for `make test`, and these tests, which run for long, compare with printed numbers, or
# compare the bits of two programs.
OPTIMIZED = re.compile(
    r"tests/(test_migrating|models/test_smollm2|workflows/test_real_models)\b|tests/test_docs\.py::.*\[docs/lora\.md\]"
)

# `--optimize=numerics` (make test-newest) leaves out these folders, whose products and quantizers have tests in other folders.
ABOVE_NUMERICS = re.compile(r"tests/(calibration|frameworks|kvcache|models|recipe|training)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The size of the brute force, which `make test-long` raises a hundredfold; and how tests are compiled."""
    parser.addoption("--blocks", type=int, default=250, help="how many blocks of each kind a scale search is tried on")
    optimize = {"nargs": "?", "const": "all", "choices": ("all", "numerics")}
    parser.addoption("--optimize", **optimize, help="compile with LLVM's optimizations")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of the cases of each parametrized test, every N-th")


DAYS = 14
"""How long compiled programs are kept; those of all tests of one commit are about 200 MB."""


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what XLA compiles in the user's cache directory: most of the suite's time goes there.

    Every run of this user finds it, in any checkout, and so do the processes that tests start; where it cannot be written, pytest's cache
    has it. `-p no:cacheprovider` keeps nothing.
    """
    from fewbit.cli.compiled import user_directory  # after the import hook

    if not hasattr(config, "cache"):
        return
    kept = user_directory("tests") or config.cache.mkdir("jax")
    jax.config.update("jax_compilation_cache_dir", os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(kept)))
    for limit, none in (("min_compile_time_secs", 0), ("min_entry_size_bytes", -1)):
        os.environ.setdefault(f"JAX_PERSISTENT_CACHE_{limit.upper()}", str(none))
        jax.config.update(f"jax_persistent_cache_{limit}", none)
    if not hasattr(config, "workerinput"):
        remove_old(kept)


def remove_old(kept: Path) -> None:
    """Removes the programs that were compiled more than `DAYS` ago."""
    for file in kept.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run removed it
            if file.stat().st_mtime < time.time() - DAYS * 86400:
                file.unlink()


CASES = pytest.StashKey[collections.Counter[str]]()
"""How many cases of each test were collected."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks as slow the cases of a test after the n-th one, with `slow_after(n)`."""
    if (marker := item.get_closest_marker("slow_after")) is not None:
        name, (cases,) = item.nodeid.partition("[")[0], marker.args
        counts = item.config.stash.setdefault(CASES, collections.Counter())
        counts[name] += 1
        if counts[name] > cases:
            item.add_marker("slow")


# Files with tests of more than a minute begin a run: as the last ones they would keep one worker while the others wait.
BEGINNING = (
    "tests/workflows/test_memory.py",
    "tests/examples/",
    "tests/workflows/methods/test_experts.py",
    "tests/training/test_sharded",
)


@pytest.hookimpl(trylast=True)  # after the markers have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest tests first. With `--every N` leaves out all but every N-th case of each test; the first one stays."""
    items.sort(key=lambda item: not item.nodeid.startswith(BEGINNING))
    counts = collections.Counter[str]()
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left_out if counts[name] % config.getoption("--every") else chosen).append(item)
        counts[name] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Spares the garbage collector the packages, and has it look less often: tracing makes many objects, few of them garbage."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Imports the package, and refuses a stale extension, for which tests of kernels would be skipped as if it were missing.

    A source that pytest collects before its package imported it would run twice, and have two classes of each name.
    """
    import fewbit.training  # after the import hook
    import fewbit.workflows  # noqa: F401
    from fewbit.kernels import extension

    if stale := [name for name in extension.EXTENSIONS if extension.extension(name).is_stale]:
        raise pytest.UsageError(
            f"{', '.join(stale)}: built from other C++ sources than those of this checkout; {extension.HOW_TO_REBUILD}"
        )


@pytest.hookimpl(tryfirst=True)  # before fixtures, which compile, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Chooses how a test is compiled."""
    asked, name = item.config.getoption("--optimize"), item.nodeid
    is_optimized = OPTIMIZED.match(name) or asked == "all" or (asked == "numerics" and not ABOVE_NUMERICS.match(name))
    jax.config.update("jax_disable_most_optimizations", not is_optimized)


@pytest.fixture(autouse=True, scope="module")
def freed_code() -> Iterator[None]:
    """Frees what a module's tests compiled: kept for the whole run it takes gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def doctest_names(request: pytest.FixtureRequest) -> None:
    """The names that the examples of the docstrings use without importing them."""
    if isinstance(request.node, pytest.DoctestItem):
        if request.node.name.startswith(("fewbit.frameworks.linen", "fewbit.frameworks.nnx")):
            pytest.importorskip("flax")
        if request.node.name.startswith("fewbit.models.tokenizers.chat_template"):
            pytest.importorskip("jinja2")
        import fewbit as fb

        request.getfixturevalue("doctest_namespace").update(fb=fb, jax=jax, jnp=jnp, np=np)


@pytest.fixture
def block_count(request: pytest.FixtureRequest) -> int:
    """How many blocks of each kind a scale search is tried on."""
    count: int = request.config.getoption("--blocks")
    return count


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the checks of annotations off, for a test that hands in a wrong type to read our own message."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)
