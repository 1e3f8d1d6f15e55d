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
# # A pod plan from a laptop
#
# How many chips does the 2.78-trillion-parameter model need, and how should they be arranged? Everything here is
# computed from the config: nothing is allocated and nothing compiled. (`experiments.compile` then compiles the real
# program for the absent pod and reports XLA's own memory figures; `docs/pods.md`.)

# %%
import math

import jax
import matplotlib.pyplot as plt
import numpy as np

from configs.pretrain import get_config
from trillium_moe.config import MeshConfig
from trillium_moe.config_files import from_config_dict
from trillium_moe.parallel.chips import CHIPS
from trillium_moe.parallel.mesh import AXES, mesh_shape
from trillium_moe.parallel.sharding import state_shardings
from trillium_moe.train.counts import count_modules, human, totals
from trillium_moe.train.flops import step_flops
from trillium_moe.train.state import abstract_state

config = from_config_dict(get_config("scale=trillium_2t8,stage=8k,shrink=1"))
counts = totals(count_modules(config.model))
tokens = config.data.batch_size * config.data.seq_len
print({name: human(n) for name, n in counts.items() if n}, f"{tokens:,} tokens a step")

# %% [markdown]
# ## Time
#
# FLOPs of a step over what the chips can do, at a model-FLOPs utilisation of 40%: how long is a step, how long are 15
# trillion tokens?

# %%
flops, utilisation = step_flops(config).model, 0.4
for chip, n in (("v5p", 2048), ("v6e", 2048), ("tpu7x", 2048), ("h200", 1024)):
    seconds = flops / (CHIPS[chip].flops * n * utilisation)
    days = 15e12 / tokens * seconds / 86_400
    print(f"{n:5d} {chip:6s} {seconds:6.1f} s a step, {days:6.0f} days for 15T tokens")

# %% [markdown]
# ## Memory
#
# The state of training (float32 weights, momenta, router bias) by the sharding rules, per device. FSDP over `data`
# and `expert` cuts everything; `replica` does not.

# %%
state = abstract_state(config)


def state_gigabytes(mesh: MeshConfig, devices: int) -> float:
    """Of the fullest device."""
    shape = mesh_shape(mesh, devices)
    abstract = jax.sharding.AbstractMesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    placed = state_shardings(state, abstract)
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, state, placed)
    return sum(jax.tree.leaves(sizes)) / 1e9


devices = [256, 512, 1024, 2048, 4096]
arrangements = {
    "expert 8, data the rest": MeshConfig(expert=8, data=-1),
    "expert 128, data the rest": MeshConfig(expert=128, data=-1),
    "2 replicas, expert 128": MeshConfig(replica=2, expert=128, data=-1),
}
used = {name: [state_gigabytes(mesh, n) for n in devices] for name, mesh in arrangements.items()}

figure, axes = plt.subplots(figsize=(7.4, 4), layout="constrained")
for (name, values), colour in zip(used.items(), ("#2f6fde", "#0f9b8e", "#d9822b")):
    axes.plot(devices, values, "o-", color=colour, label=name)
for chip in ("v6e", "v5p", "h200"):
    axes.axhline(CHIPS[chip].hbm / 1e9, color="#697586", ls="--", lw=1)
    axes.annotate(f"{chip}: {CHIPS[chip].hbm / 1e9:.0f} GB", (devices[-1], CHIPS[chip].hbm / 1e9), ha="right",
                  va="bottom", color="#697586")
axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="gigabytes a device", title="State of training")
axes.set_xscale("log", base=2)
axes.set_xticks(devices, [f"{n:,}" for n in devices])
_ = axes.legend()

# %% [markdown]
# Activations come on top: saved are the sums of 8 blocks, [tokens, 7168] each, and a block's worth while it is worked
# on. At one row of 8,192 tokens a device:

# %%
blocks = -(-config.model.n_layers // config.model.block_size) + 1
saved = blocks * config.data.seq_len * config.model.d_model * 2 / 1e9
inside = 2 * config.model.block_size * config.data.seq_len * config.model.d_model * 2 / 1e9
print(f"block sums {saved:.1f} GB, sums inside a block {inside:.1f} GB")
assert used["expert 128, data the rest"][3] + saved + inside < CHIPS["v5p"].hbm / 1e9
np.testing.assert_allclose(used["2 replicas, expert 128"][4], used["expert 128, data the rest"][3], rtol=0.05)
