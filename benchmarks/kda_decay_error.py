"""Error of the chunked KDA forms against decay, as docs/kda_decay_error.png: python -m benchmarks.kda_decay_error

Half of the channels lose a fixed number of nats per token, the other half next to nothing. Every chunked form is
compared with the recurrence in float64 on the same, rounded inputs, well past the decay that its tiles can hold.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from pallas_kernels.kda.config import ChunkConfig
from pallas_kernels.kda.numerics import lowest_kernel_gate
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.kda.xla import kda_xla

matplotlib.use("Agg")
import matplotlib.pyplot as plt

T, H, K, V, CHUNK = 128, 2, 64, 64, 64
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
RESULTS = {"output": 0, "gradient of the log decay": 1}
NOT_FINITE = 10.0  # where the picture puts them
DECAYS = np.unique(np.concatenate([np.geomspace(0.01, 50, 30), [1.3, 2.7, 5.0, 5.7]]))


def dense(tile: int):
    """Every tile one product: needs bounded decay, promised as the lowest that the tile can hold."""
    return functools.partial(kda_xla, config=ChunkConfig(CHUNK, tile), g_min=lowest_kernel_gate(tile))


def forms():
    """(name, implementation, lowest gate in nats or None, style)."""
    for tile, color in ((16, "#0b6e4f"), (32, "#d98e04"), (64, "#b3261e")):
        style = {"color": color, "lw": 2.2 if tile == 16 else 1.5, "zorder": 4 if tile == 16 else 3}
        yield f"bounded: dense {tile}-row tiles", dense(tile), lowest_kernel_gate(tile), style
    pairs = functools.partial(kda_xla, config=ChunkConfig(CHUNK, 16), g_min=None)
    yield "unbounded: pairs summed one by one", pairs, None, {"color": "#3b4a6b", "lw": 4.5, "alpha": 0.3, "zorder": 2}


def make(decay: float):
    """(q, k, v, g, beta, output cotangent)."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, T, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, d_o = rng.normal(size=(2, 1, T, H, V))
    g = np.broadcast_to(np.where(np.arange(K) % 2, -decay, -1e-3), q.shape)
    return q, k, v, g, 1 / (1 + np.exp(-rng.normal(size=(1, T, H)))), d_o


@functools.partial(jax.jit, static_argnums=0)
def evaluate(op, q, k, v, g, beta, d_o):
    """(o, dg)."""
    state = jnp.zeros((1, H, K, V), g.dtype)
    f = lambda g: op(q, k, v, g, beta, scale=K**-0.5, initial_state=state, segment_ids=None)[0]
    o, vjp = jax.vjp(f, g)
    return o, vjp(d_o.astype(o.dtype))[0]


def errors(op, dtype, decay: float) -> list[float]:
    """Relative error of o and dg, infinite where one is not finite."""
    rounded = [jnp.asarray(x, jnp.float32) for x in make(decay)]
    rounded = [x.astype(dtype) for x in rounded[:3]] + rounded[3:5] + [rounded[5].astype(dtype)]
    got = evaluate(op, *rounded)
    with jax.enable_x64(True):
        want = evaluate(kda_reference, *(jnp.asarray(np.asarray(x, np.float64)) for x in rounded))
    found = []
    for x, y in zip(got, want):
        x, y = np.asarray(x, np.float64), np.asarray(y)
        found.append(np.linalg.norm(x - y) / np.linalg.norm(y) if np.isfinite(x).all() else np.inf)
    return found


def draw(found, path: Path) -> None:
    """Two panels, output and gradient; curves run into a wall where they stop being finite."""
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9aa5b1"}
    with matplotlib.rc_context(style):
        fig, axes = plt.subplots(1, 2, figsize=(11, 4.9), sharex=True, sharey=True, layout="constrained")
        for ax, (result, index) in zip(axes, RESULTS.items()):
            ax.axvspan(DECAYS[0], 5, color="#0b6e4f", alpha=0.07, lw=0)
            ax.axhspan(NOT_FINITE / 3, 10 * NOT_FINITE, color="#b3261e", alpha=0.06, lw=0)
            for name, _, lowest, line in forms():
                for dtype in DTYPES:
                    y = np.array([e[index] for e in found[name, dtype]])
                    finite = np.isfinite(y)
                    label = name if dtype == "bfloat16" else None
                    ax.plot(DECAYS[finite], y[finite], label=label, **line)
                    if lowest is not None:
                        last = np.flatnonzero(finite)[-1]
                        wall = {"color": line["color"], "zorder": line["zorder"]}
                        ax.plot([DECAYS[last]] * 2, [y[last], NOT_FINITE], ls=":", lw=1.3, **wall)
                        ax.plot(DECAYS[last], NOT_FINITE, "X", ms=9, mec="white", **wall)
            ax.set(xscale="log", yscale="log", xlim=(DECAYS[0], DECAYS[-1]), ylim=(4e-8, 10 * NOT_FINITE))
            ax.set_xticks([0.01, 0.1, 1, 5, 50], ["0.01", "0.1", "1", "5", "50"])
            ax.set_yticks([10.0**n for n in range(-7, 1)])
            ax.minorticks_off()
            ax.grid(alpha=0.25, lw=0.6)
            ax.set_title(f"error of the {result}", loc="left", fontweight="bold", fontsize=11)
            ax.set_xlabel("decay of half the channels, nats per token")
            ax.text(0.012, NOT_FINITE, "not finite", color="#b3261e", fontsize=9.5, va="center")
            ax.text(0.012, 1.1e-2, "bfloat16 operands", color="#1c2733", fontsize=9.5)
            ax.text(0.012, 1e-6, "float32 operands", color="#1c2733", fontsize=9.5)
            ax.text(0.012, 6e-8, "reach of a gate with $g_{min}=-5$", color="#0b6e4f", fontsize=9.5)
        axes[0].set_ylabel("relative error against the recurrence")
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9.5)
        fig.savefig(path, dpi=130)
        plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/kda_decay_error.png"))
    args = parser.parse_args()
    found = {}
    for name, op, _, _ in forms():
        for dtype in DTYPES:
            found[name, dtype] = [errors(op, DTYPES[dtype], decay) for decay in DECAYS]
            at = ", ".join(f"{d:.2g}: {e[0]:.1e} {e[1]:.1e}" for d, e in list(zip(DECAYS, found[name, dtype]))[::5])
            print(f"{name}, {dtype} (decay: error of o, of dg): {at}", flush=True)
    draw(found, args.out)


if __name__ == "__main__":
    main()
