# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quantile balancing by hand
#
# A router gives every token a score for every expert and picks the best k of `score + bias`. The bias is there for
# balance alone: it never enters the weights of the experts. How should it be set?
#
# The usual answer is a small step: raise the bias of idle experts, lower that of busy ones. Quantile balancing
# computes it instead. This notebook does so in NumPy, in a dozen lines, and then compares with the operator that
# training uses.

# %%
import matplotlib.pyplot as plt
import numpy as np

rng = np.random.default_rng(0)
n, k, m = 32, 4, 8192  # experts, experts per token, tokens in a step
lean = 1.2 * rng.normal(size=n)  # an untrained router leans: experts differ in their mean logit


def scores() -> np.ndarray:
    """Fresh tokens: sigmoid scores [m, n]."""
    return 1 / (1 + np.exp(-(rng.normal(size=(m, n)) + lean)))


def choose(s: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The k experts of every token, [m, k]."""
    return np.argpartition(-(s + bias), k, axis=1)[:, :k]


def load(chosen: np.ndarray) -> np.ndarray:
    """Tokens of every expert over the mean."""
    return np.bincount(chosen.ravel(), minlength=n) / (m * k / n)


before = load(choose(scores(), np.zeros(n)))
print(f"busiest expert: {before.max():.1f} times its share; idle (under a tenth): {(before < 0.1).sum()} of {n}")

# %% [markdown]
# ## The bias that each token would need
#
# Token i takes expert j if $s_{ij} + b_j$ is among its k best, that is, if it beats the (k+1)-th best value,
# $\alpha_i$. So the token takes the expert exactly if
#
# $$b_j > \alpha_i - s_{ij}.$$
#
# The right side is the bias that this token *requires* of this expert. An expert with bias $b_j$ gets as many tokens
# as there are requirements below $b_j$. It should get $m k / n$ of them: so $b_j$ is the $k/n$ quantile of its
# requirements. No step size, no loop.

# %%
def quantile_bias(s: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The next bias, from one step's scores."""
    alpha = -np.partition(-(s + bias), k, axis=1)[:, k]  # the (k+1)-th largest
    required = np.sort(alpha[:, None] - s, axis=0)
    new = required[m * k // n]
    return new - new.mean()  # a constant added to all changes no choice


s = scores()
required = -np.partition(-s, k, axis=1)[:, k][:, None] - s
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for j, colour in ((int(before.argmax()), "#d9822b"), (int(before.argmin()), "#2f6fde")):
    axes.hist(required[:, j], bins=80, color=colour, alpha=0.6, label=f"expert {j}, {before[j]:.1f} times its share")
    axes.axvline(np.quantile(required[:, j], k / n), color=colour, lw=2)
axes.set(xlabel="bias that a token requires", ylabel="tokens", title="Lines: the k/n quantile, the new bias")
_ = axes.legend()

# %% [markdown]
# Moving all biases at once changes every $\alpha_i$ a little, so one update is not the end. But it comes close: this
# is exact minimisation of a convex function, one coordinate at a time (the dual of "best total score under equal
# loads").

# %%
def maxvio(chosen: np.ndarray) -> float:
    return load(chosen).max() - 1


def follow(rule, steps: int) -> list[float]:
    """MaxVio on fresh tokens before every update."""
    bias, out = np.zeros(n), []
    for _ in range(steps):
        s = scores()
        chosen = choose(s, bias)
        out.append(maxvio(chosen))
        bias = rule(s, bias, chosen)
    return out


steps = 60
curves = {
    "quantile": follow(lambda s, b, chosen: quantile_bias(s, b), steps),
    "sign, 0.01": follow(lambda s, b, chosen: b + 0.01 * np.sign(1 - load(chosen)), steps),
    "sign, 0.001": follow(lambda s, b, chosen: b + 0.001 * np.sign(1 - load(chosen)), steps),
}
floor = np.sqrt(2 * np.log(n) / (m * k / n))  # the largest of n Poisson counts is above the mean by about this

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for (name, curve), colour in zip(curves.items(), ("#12306b", "#0f9b8e", "#d9822b")):
    axes.plot(curve, label=name, color=colour)
axes.axhline(floor, color="#697586", ls="--", lw=1, label="sampling floor")
axes.set(xlabel="update", ylabel="MaxVio: largest load / mean - 1", yscale="log", title="Fresh tokens at every step")
_ = axes.legend()
print({name: round(float(curve[5]), 3) for name, curve in curves.items()}, f"floor {floor:.3f}")

# %%
assert curves["quantile"][5] < 2 * floor < curves["sign, 0.001"][5]

# %% [markdown]
# ## The operator
#
# Sorting all scores of a pod in every step would be too much. Training counts the requirements in a histogram of
# 1,000 bins while it routes (one all-reduce a step) and reads the quantile off. The same numbers, to a bin's width:

# %%
import jax.numpy as jnp

from pallas_kernels.router import quantile_bias as from_histogram
from pallas_kernels.router import router

s = scores()
found = router(jnp.asarray(s, jnp.float32), jnp.zeros(n, jnp.float32), k=k, bins=1000)
histogram = np.asarray(from_histogram(found.histogram[None], jnp.zeros((1, n), jnp.float32), k))[0]
exact = quantile_bias(s, np.zeros(n))
print(f"largest difference {np.abs(histogram - exact).max():.5f}, bin width {2 / 1000}")
assert np.abs(histogram - exact).max() < 2 * 2 / 1000
assert (np.sort(np.asarray(found.experts_MK), 1) == np.sort(choose(s, np.zeros(n)), 1)).all()
