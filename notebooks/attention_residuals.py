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
# # Attention residuals
#
# A residual stream adds up: layer 60 reads the sum of 59 layers' outputs, each as loud as the others. Attention
# residuals let a layer *choose*: it reads a softmax-weighted mean of what earlier blocks of layers produced. Pictures
# of what that changes before any training, and of what it does not.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from trillium_moe.model.attn_res import read

rng = np.random.default_rng(0)
D, blocks = 64, 6
sealed = jnp.asarray(rng.normal(size=(blocks, 1, 1, D)), jnp.float32)  # sums of finished blocks
live = jnp.asarray(rng.normal(size=(1, 1, D)), jnp.float32)  # the block at work

# %% [markdown]
# ## One read
#
# The layer's pseudo-query $w$ scores each candidate by $\langle w, c / \mathrm{rms}(c)\rangle$. It starts at zero, so
# every read starts as a plain average; turned towards one candidate, it picks that one. Keys are normalised and
# values are not: a loud block is not chosen for being loud.

# %%
target = sealed[2, 0, 0]
sizes = np.linspace(0, 0.15, 40)
weights = np.array([read(size * target, sealed, blocks, live, True, 1e-5)[1] for size in sizes])
np.testing.assert_allclose(weights[0], 1 / (blocks + 1), rtol=1e-5)
assert weights[-1].argmax() == 2

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for i in range(blocks + 1):
    axes.plot(sizes, weights[:, i], color="#d9822b" if i == 2 else "#9cc2f5" if i < blocks else "#697586",
              label={0: "other blocks", 2: "block 2", blocks: "live sum"}.get(i))
axes.set(xlabel="length of the pseudo-query, along block 2", ylabel="weight", title="From an average to a choice")
_ = axes.legend()

# %% [markdown]
# ## The stream of a deep model
#
# Two models of 24 thin layers, equal but for their residuals. In the plain stream the input of a layer grows with
# depth, so each new layer counts for less. With attention residuals the sums start anew in every block.

# %%
from trillium_moe.config import Config, DtypeConfig, MLAConfig, ModelConfig
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect import depth
from trillium_moe.inspect.walk import sublayers
from trillium_moe.train.state import new_model

thin = ModelConfig(
    d_model=64, n_layers=24, n_dense_layers=24, kda_per_mla=0, ffn_dim=128, block_size=4, init_std=0.1,
    dtypes=DtypeConfig(compute="float32"),
    mla=MLAConfig(n_heads=2, q_lora_rank=0, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
)
models = {}
for residual in ("none", "block"):
    config = dataclasses.replace(thin, residual=residual)
    _, params, bias = jax.jit(lambda config=config: new_model(config, jax.random.key(0)))()
    models[residual] = LoadedModel(Config(model=config), 0, params, bias, ByteTokenizer())
tokens = rng.integers(0, 256, (2, 64)).astype(np.int32)

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
growth = {}
for (residual, model), colour in zip(models.items(), ("#d9822b", "#2f6fde")):
    live, sizes, U = np.zeros(()), [], 2 * thin.block_size
    for sub in sublayers(model, tokens):
        live = live * (residual == "none" or sub.index % U > 0) + np.asarray(sub.y_BTD)
        sizes.append(np.sqrt(np.mean(live**2)))
    growth[residual] = sizes
    axes.plot(sizes, color=colour, label={"none": "plain residual stream", "block": "blocks of 4 layers"}[residual])
axes.set(xlabel="sublayer", ylabel="root mean square of the running sum", title="How loud the sum gets")
_ = axes.legend()
assert max(growth["block"]) < max(growth["none"])

# %% [markdown]
# ## Where the gradient goes
#
# The gradient of the loss with respect to each layer's weights, in the same two models. Here nothing has changed yet:
# every read is an average, early layers are part of all that follows in both, and their gradients are the largest in
# both. Published curves that are flatter with attention residuals are of trained models.

# %%
batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": np.ones(tokens.shape, np.float32),
         "segment_ids": np.ones(tokens.shape, np.int32)}
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for (residual, model), colour in zip(models.items(), ("#d9822b", "#2f6fde")):
    kinds, norms = depth.gradient_norms(model, batch)
    ffn = [s for s, kind in enumerate(kinds) if kind == "dense"]
    axes.plot(ffn, norms[ffn], "o-", ms=3, color=colour,
              label={"none": "plain residual stream", "block": "blocks of 4 layers"}[residual])
    assert norms[ffn[0]] > 5 * norms[ffn[-1]]
axes.set(xlabel="sublayer", ylabel="gradient norm", yscale="log", title="Gradients of the feed-forward layers")
axes.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
axes.minorticks_off()
_ = axes.legend()

# %% [markdown]
# ## What each sublayer reads
#
# A row is a read, a column a candidate. A layer at the beginning of a block has no live sum to read; all weights of a
# row are equal as long as the pseudo-queries are zero. What a trained model makes of its freedom is in the report of
# every run ("Depth attention") and in `first_steps`.

# %%
data = depth.depth(models["block"], tokens)
np.testing.assert_allclose(data.read_SN.sum(1), 1, rtol=1e-5)
depth.plot_reads(data)
