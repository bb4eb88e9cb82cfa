"""Draws the figures of the pages "Choosing a scale" and "Training".

`python -m bench.pictures` writes them to docs/images. Needs matplotlib. The same code gives the same bytes; the gain is drawn
from bench/results/accuracy.json, the losses from training.json in the same folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import fewbit as fb
from fewbit.formats import FORMATS

ROOT = Path(__file__).parent.parent
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def squared_error(x: np.ndarray, scale: float | np.ndarray) -> np.ndarray:
    """The squared error of each element in E2M1 under a scale, float64."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    return (E2M1[np.searchsorted(middles, np.abs(x) / scale)] * scale - np.abs(x)) ** 2


def counterexample() -> tuple[list[int], list[float]]:
    """Exponents, and the error of 31 elements at 1/4 and 3/4 and one of 4 under each power of two."""
    x = np.array([4.0] + [0.25, 0.75] * 15 + [0.75])
    exponents = list(range(-4, 3))
    return exponents, [float(squared_error(x, 2.0**e).sum()) for e in exponents]


def optimal_offsets(count: int = 2**16) -> tuple[np.ndarray, np.ndarray]:
    """How far above the smallest unsaturated E4M3 code the optimum is, and how often (Gaussian, tiles of 16)."""
    x = np.random.default_rng(0).standard_normal((count, 16)).astype(np.float32)
    q = jax.jit(lambda x: fb.quantize(x, "nvfp4"))(jnp.asarray(x))
    grid = FORMATS["e4m3fn"].values()[1:127]
    needed = np.abs(x).max(1) / 6 / np.asarray(q.tensor_scale).item()
    offsets = np.asarray(q.scale)[:, 0].astype(int) - 1 - np.searchsorted(grid, needed * (1 - 1e-7))
    places, counts = np.unique(offsets, return_counts=True)
    return places, counts / count


def main() -> None:
    """Writes the pictures."""
    description = "Draws the figures of the pages on scales and training into docs/images."
    argparse.ArgumentParser(prog="python -m bench.pictures", description=description).parse_args()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewbit", "font.size": 9}):
        _save("scales-nesting", _nesting)
        _save("scales-counterexample", _counterexample)
        _save("scales-window", _window)
        _save("scales-gain", _gain)
        _save("training-losses", _losses, len(_training()))


def _save(name: str, draw: Any, panels: int = 1) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if panels == 1 else 2.4 * panels, 3.2), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.3)
    draw(axes[0] if panels == 1 else axes)
    figure.savefig(ROOT / "docs" / "images" / f"{name}.svg", metadata={"Date": None})


def _nesting(axes: Any) -> None:
    x = np.linspace(0, 8, 3201)
    for scale, label, style in ((2.0, "2 s", "C3-"), (1.0, "s", "C0-"), (0.5, "s / 2", "C2:")):
        axes.plot(x, np.minimum(squared_error(x, scale), 1.3), style, label=label, linewidth=1.5)
    axes.set(xlabel="element, in units of s", ylabel="squared error", ylim=(0, 1.2), xlim=(0, 8))
    axes.axvline(6, color="0.5", linewidth=1, linestyle="--")
    axes.legend(loc="upper left", frameon=False)


def _counterexample(axes: Any) -> None:
    exponents, errors = counterexample()
    colours = ["C2" if e == -1 else "C0" if e in (0, 1) else "0.75" for e in exponents]
    axes.bar(exponents, errors, color=colours)
    for e, error in zip(exponents, errors, strict=True):
        axes.annotate(f"{error:g}", (e, min(error, 16)), ha="center", va="bottom")
    axes.set(xlabel="exponent of the scale (0 is the specification's)", ylabel="squared error of the block", ylim=(0, 18))


def _window(axes: Any) -> None:
    places, share = optimal_offsets()
    axes.axvspan(-4.5, 6.5, color="C2", alpha=0.15, label="proven window")
    axes.bar(places, 100 * share, color="C0")
    axes.set(
        xlabel="code of the optimum minus that of the smallest scale that saturates nothing",
        ylabel="blocks, %",
        xlim=(-7, 9),
    )
    axes.legend(frameon=False)


def _gain(axes: Any) -> None:
    rows = _results("accuracy")["rows"]
    nvfp4 = next(r for r in rows if r["table"] == "nvfp4" and r["weights"] == "gaussian" and r["tile"] == 16)
    names = ["naive", "four over six", "cheap6", "optimal", "continuous"]
    axes.bar(names, [nvfp4[n] for n in names], color="C0")
    for i, name in enumerate(names):
        axes.annotate(f"{nvfp4[name]:.3f}", (i, nvfp4[name]), ha="center", va="bottom")
    axes.set(ylabel="relative squared error, %", ylim=(0, 1.05))


def _losses(panels: Any) -> None:
    facts = _results("training")
    for axes, (framework, rows) in zip(panels, _training().items(), strict=True):
        for i, row in enumerate(rows):
            losses = [float(loss) for loss in row["losses"].split()]
            steps = facts["steps"] - facts["a_loss_is_the_mean_of"] * np.arange(len(losses))[::-1]
            axes.plot(steps, losses, f"C{i}", label=row["run"], linewidth=1, linestyle="--" if i == 0 else "-")
        axes.set(title=framework, xlabel="step", ylim=(1.8, 3.2))
    panels[0].set(ylabel=f"loss, nats (mean of {facts['a_loss_is_the_mean_of']} steps)")
    panels[-1].legend(frameon=False, fontsize="small", borderpad=0, borderaxespad=0.1)


def _training() -> dict[str, list[dict[str, Any]]]:
    """The rows of the training runs, by framework."""
    rows = _results("training")["rows"]
    return {name: [row for row in rows if row["framework"] == name] for name in dict.fromkeys(r["framework"] for r in rows)}


def _results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


if __name__ == "__main__":
    main()
