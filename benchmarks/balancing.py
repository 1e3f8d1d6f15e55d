"""Every balancing rule from the same skewed router: python -m benchmarks.balancing [--out docs/balancing.png]

A router of random weights leans: tokens share a direction and experts differ along it, so that without a rule the
busiest expert has many times its share. Every step routes fresh tokens; a rule sees them and sets the bias of the next
step (aux_loss instead moves the router by Adam on its gradient alone). All rules see the same tokens. The floor is what
independent tokens show under perfect balance, sqrt(2 ln n / q) for n experts of q tokens each. batch_threshold is not
here: experts pick tokens, so its loads are equal by construction, at the price of causality.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels.router import router
from trillium_moe.config import MoEConfig
from trillium_moe.model.router import aux_loss, exact_bhat, next_bias

D = 128  # width of a token
ARMS = {
    "quantile": {"balancing": "quantile"},
    "quantile_exact": {"balancing": "quantile_exact"},
    "load_quantile": {"balancing": "load_quantile"},
    "sign 1e-2": {"balancing": "sign", "sign_eta": 1e-2},
    "sign 1e-3": {"balancing": "sign", "sign_eta": 1e-3},
    "aux_loss": {"balancing": "aux_loss"},
    "none": {"balancing": "none"},
}
COLOURS = ("#12306b", "#2f6fde", "#0f9b8e", "#d9822b", "#b4540a", "#8a5fc0", "#697586")


def tokens(key, M: int):
    """[M, D] normal, with a common mean along the first axis."""
    return jax.random.normal(key, (M, D)).at[:, 0].add(4.0)


def skewed_router(key, E: int, lean: float):
    """[D, E]; the logits' mean of expert e is spread by `lean`, their deviation over tokens is 1."""
    weights = jax.random.normal(key, (D, E)) / D**0.5
    return weights.at[0].set(lean / 4 * jax.random.normal(jax.random.fold_in(key, 1), (E,)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def run(c: MoEConfig, M: int, steps: int, seed: int, lean: float):
    """MaxVio before every step's update, [steps + 1]."""
    key, E = jax.random.key(seed), c.n_experts
    adam = optax.adam(1e-3)
    real = jnp.ones(M, bool)

    def step(carry, i):
        weights, bias, opt = carry
        x = tokens(jax.random.fold_in(key, i + 1), M)
        score = lambda weights: jax.nn.sigmoid(jnp.dot(x, weights, precision="highest"))
        scores = score(weights)
        found = router(scores, bias, k=c.k, bins=c.bins if c.balancing == "quantile" else 0)
        stats = {"load": found.load_E[None]}
        if c.balancing == "quantile":
            stats["histogram"] = found.histogram[None]
        if c.balancing == "quantile_exact":
            stats |= {"bhat": exact_bhat(scores, found.cutoff_M, c.k)[None], "batches": jnp.ones(1, jnp.int32)}
        if c.balancing == "aux_loss":
            gradient = jax.grad(lambda w: c.aux_weight * aux_loss(score(w), found.load_E, real))(weights)
            updates, opt = adam.update(gradient, opt)
            weights = optax.apply_updates(weights, updates)
        load = found.load_E
        return (weights, next_bias(c, bias[None], stats)[0], opt), load.max() / load.mean() - 1

    weights = skewed_router(key, E, lean)
    start = weights, jnp.zeros(E), adam.init(weights)
    return jax.lax.scan(step, start, jnp.arange(steps + 1))[1]


def draw(curves: dict[str, np.ndarray], floor: float, title: str, path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7.6, 4.3), layout="constrained")
    axes = picture.subplots()
    for (name, curve), colour in zip(curves.items(), COLOURS):
        axes.plot(np.arange(len(curve)), np.maximum(curve, 1e-3), color=colour, label=name, lw=1.8)
    axes.axhline(floor, color="#1c2733", ls=(0, (4, 3)), lw=1.1)
    axes.annotate(f"sampling floor {floor:.2f}", (0, floor), xycoords=("axes fraction", "data"), xytext=(6, -4),
                  textcoords="offset points", va="top", fontsize=8.5)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("log")
    axes.set_xlim(0, max(map(len, curves.values())) - 1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda v, _: f"{v:g}")
    axes.set(xlabel="updates of the bias", ylabel="MaxVio: largest load / mean - 1")
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6eaf0")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0.01, 0.12))
    FigureCanvasAgg(picture)
    picture.savefig(path, dpi=160, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lean", type=float, default=0.7, help="spread of the experts' mean logits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--out", help="write the curves as a PNG, and as .npz beside it")
    args = parser.parse_args()
    E, k, M = args.experts, args.k, args.tokens
    floor = float(np.sqrt(2 * np.log(E) / (M * k / E)))
    shown = [s for s in (0, 1, 2, 3, 5, 10, 20, 50, 100, 200) if s <= args.steps]
    print(f"{E} experts, top {k}, {M} fresh tokens a step, seed {args.seed}; sampling floor {floor:.3f}", flush=True)
    print("MaxVio after updates   " + "".join(f"{s:8d}" for s in shown), flush=True)
    curves = {}
    for name in args.arms.split(","):
        config = MoEConfig(n_experts=E, k=k, **ARMS[name])
        curves[name] = np.asarray(run(config, M, args.steps, args.seed, args.lean))
        print(f"  {name:20s} " + "".join(f"{curves[name][s]:8.3f}" for s in shown), flush=True)
    if args.out:
        np.savez_compressed(args.out.removesuffix(".png") + ".npz", floor=floor, **curves)
        draw(curves, floor, f"{E} experts, top {k}, {M:,} tokens a step", args.out)


if __name__ == "__main__":
    main()
