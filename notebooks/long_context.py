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
# # Long context
#
# Why a hybrid: attention can look anything up, but keeps something of every token; a recurrent state has one size for
# ever, but cannot hold everything. What does each cost, and does the machinery keep its promises?

# %%
import dataclasses

import jax
import matplotlib.pyplot as plt
import numpy as np

from configs.scales import trillium_2t8
from trillium_moe.model.cache import abstract_cache

# %% [markdown]
# ## What a sequence costs
#
# The cache of the 2.78T model, from its shapes alone: 24 attention layers with 576 numbers a token, 69 recurrent
# layers with a state each. Beside it the same model with attention in all layers, and the keys and values that
# ordinary multi-head attention would keep.

# %%
released = trillium_2t8()


def gigabytes(config, context: int) -> float:
    cache = abstract_cache(config, 1, context, "bfloat16")
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) / 1e9


contexts = [2**i for i in range(10, 21)]
hybrid = [gigabytes(released, c) for c in contexts]
latent = [gigabytes(dataclasses.replace(released, kda_per_mla=0), c) for c in contexts]
heads, mla = released.mla.n_heads, released.mla
full = [2 * 93 * heads * (mla.nope_dim + mla.rope_dim + mla.v_dim) * c / 1e9 for c in contexts]

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for values, name, colour in ((full, "multi-head attention in 93 layers", "#697586"),
                             (latent, "latent attention in 93 layers", "#d9822b"),
                             (hybrid, "as released: 24 latent, 69 recurrent", "#2f6fde")):
    axes.plot(contexts, values, "o-", ms=3.5, color=colour, label=name)
axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="gigabytes for one sequence",
         title="The cache of one sequence")
axes.set_xscale("log", base=2)
_ = axes.legend()
print(f"a million tokens: {full[-1]:,.0f} GB, {latent[-1]:.0f} GB, {hybrid[-1]:.0f} GB")
assert full[-1] / hybrid[-1] > 50 and latent[-1] / hybrid[-1] > 3

# %% [markdown]
# ## Documents do not see one another
#
# Rows of a batch hold several documents. Attention, state and convolution all stop at their borders, exactly: change
# one document, and the other's logits keep every bit.

# %%
from configs.scales import tiny
from trillium_moe.config import Config
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect.walk import trained
from trillium_moe.train.state import new_model

config = dataclasses.replace(tiny(), n_layers=4)
_, params, bias = jax.jit(lambda: new_model(config, jax.random.key(0)))()
model = LoadedModel(Config(model=config), 0, params, bias, ByteTokenizer())
whole = trained(model)
forward = jax.jit(lambda tokens, ids: whole(tokens, ids)[0])

rng = np.random.default_rng(0)
tokens = rng.integers(0, 256, (1, 256)).astype(np.int32)
ids = np.repeat([[1, 2]], 128, axis=1).astype(np.int32)
changed = tokens.copy()
changed[:, :128] = rng.integers(0, 256, (1, 128))
a, b = forward(tokens, ids), forward(changed, ids)
print("second document bit for bit equal:", bool((a[:, 128:] == b[:, 128:]).all()))
assert (a[:, 128:] == b[:, 128:]).all() and not (a[:, :128] == b[:, :128]).all()

# %% [markdown]
# ## What the state holds
#
# Along one long document the state of each KDA layer fills up and then lives in balance between writing and
# forgetting: its norm stops growing. Effective rank: how many directions it really uses, out of 32.

# %%
from trillium_moe.inspect import memory

text = np.frombuffer((open(dataclasses.__file__, "rb").read())[:512], np.uint8).astype(np.int32)[None]
curve = memory.state_curve(model, text, every=16)
assert (curve.rank_LHN <= 32).all() and (curve.norm_LHN > 0).all()
memory.plot_states(curve)

# %% [markdown]
# Half of the channels of this untrained model have forgotten half after 10 to 20 tokens, the slowest keep it for a
# hundred: `dt_bias` starts them spread over two orders of magnitude. What training makes of them is in any run's
# report.

# %%
memory.plot_memory(model, memory.memory(model, text))
