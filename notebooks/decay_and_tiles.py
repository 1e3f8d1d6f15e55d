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
# # Why the decay is bounded
#
# KDA forgets: before a token is written, row c of the state is multiplied by $e^{g_c}$, $g_c \le 0$. Over a tile of
# 16 tokens the products $e^{g_1 + \dots + g_{16}}$ appear in a matrix of scores
#
# $$A_{ij} = \sum_c q_{ic}\, k_{jc}\, e^{G_{ic} - G_{jc}}, \qquad G_i = g_1 + \dots + g_i, \quad j \le i .$$
#
# A GPU or TPU wants this as one matrix product, $(q e^{G})(k e^{-G})^\top$. But $e^{-G}$ grows, and a number format
# ends somewhere. That is the whole story of the bound $g \ge -5$.

# %%
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

tile, K = 16, 64
limits = {
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
    "float32": float(np.finfo(np.float32).max),
}
for name, largest in limits.items():
    nats = np.log(largest)
    print(f"{name:9s} ends at e^{nats:5.1f}: {tile} tokens may decay by {nats / (tile - 1):.2f} nats each")

# %% [markdown]
# bfloat16 has the exponents of float32: 88.7 nats. With the decay split in the middle of the tile, $e^{G - G_{mid}}$
# on one side and its inverse on the other, half of that would do; the kernels in this repository take the first row
# as origin, and $15 \times 5 = 75 < 88$.
#
# With `softplus`, as in Kimi Linear, $g$ has no bound. Let us see when the product breaks.

# %%
rng = np.random.default_rng(0)
q, k = rng.normal(size=(2, tile, K)) / K**0.5


def exact(g: float) -> np.ndarray:
    """The scores of a tile whose channels all decay by g a token, with the difference taken before the exponential."""
    G = g * np.arange(tile)
    return np.tril((q @ k.T) * np.exp(G[:, None] - G[None, :]))


def product(g: float, dtype) -> np.ndarray:
    """The same as one matrix product of operands in `dtype`, summed in float32."""
    G = (g * np.arange(tile))[:, None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        left, right = (q * np.exp(G)).astype(dtype), (k * np.exp(-G)).astype(dtype)
        return np.tril(left.astype(np.float32) @ right.astype(np.float32).T)


gates = -np.linspace(0.05, 8, 160)
figure, axes = plt.subplots(figsize=(7.4, 3.8), layout="constrained")
for name, dtype, colour in (("float32", np.float32, "#0f9b8e"), ("bfloat16", ml_dtypes.bfloat16, "#2f6fde"),
                            ("float16", np.float16, "#d9822b")):
    error = [np.linalg.norm(product(g, dtype) - exact(g)) / np.linalg.norm(exact(g)) for g in gates]
    axes.plot(gates, np.where(np.isfinite(error), error, np.nan), color=colour, label=name)
    broken = gates[~np.isfinite(error)]
    if len(broken):
        axes.axvline(broken.max(), color=colour, ls=":", lw=1.4)
        print(f"{name} breaks at g = {broken.max():.2f}")
axes.axvspan(-8, -5, color="#e6eaf0", zorder=0)
axes.annotate("beyond the bound", (-6.5, 0.5), ha="center", color="#697586")
axes.set(yscale="log", xlabel="log decay of every token, nats", ylabel="relative error of the tile's scores",
         title="One dense product for a tile: where it breaks (dotted)")
_ = axes.legend(loc="center left")

# %% [markdown]
# Inside the bound bfloat16 is never worse than its own rounding, 2 to 3 decimal digits, at any decay. Beyond about
# 5.9 nats a token there is no result at all. A kernel for unbounded decay must therefore take the diagonal tiles
# element by element, with the difference $G_i - G_j$ before the exponential: work that no matrix unit can do.

# %%
error = lambda g: np.linalg.norm(product(g, ml_dtypes.bfloat16) - exact(g)) / np.linalg.norm(exact(g))
assert max(error(g) for g in gates[gates >= -5]) < 0.01
assert not np.isfinite(product(-8.0, ml_dtypes.bfloat16)).all()

# %% [markdown]
# ## What the bound costs
#
# A channel at the bound keeps $e^{-5} = 0.7\%$ of its content over one token. It could not forget much faster. The
# slow end, where memory is, is not touched: $g = -5\,\sigma(e^A z)$ reaches every half-life from 0.14 tokens up.

# %%
z = np.linspace(-12, 12, 400)
bounded = -5 / (1 + np.exp(-z))
softplus = -np.log1p(np.exp(z))
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for g, name, colour in ((bounded, "bounded, $-5\\,\\sigma(z)$", "#2f6fde"), (softplus, "softplus", "#d9822b")):
    left.plot(z, g, color=colour, label=name)
    right.plot(z, np.log(2) / -g, color=colour)
left.set(xlabel="decay logit z", ylabel="log decay g, nats", title="Decay")
right.set(xlabel="decay logit z", ylabel="half-life, tokens", yscale="log", title="Half-life")
_ = left.legend()

# %% [markdown]
# The planner in `pallas_kernels/kda/numerics.py` computes the same limit for any tile, and `model.kda.g_min` is
# checked against it before anything runs:

# %%
from pallas_kernels.kda.numerics import lowest_kernel_gate
from trillium_moe.config import ConfigError, KDAConfig

print({t: round(lowest_kernel_gate(t), 2) for t in (8, 16, 32, 64)})
try:
    KDAConfig(g_min=-8.0)
except ConfigError as error:
    print(error)
assert -6.0 < lowest_kernel_gate(16) <= -5.0
