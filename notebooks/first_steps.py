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
# # First steps
#
# Build a model, train it for 100 steps on the source of Python's own standard library, and look inside. It is the
# smallest scale, `tiny`, with five of its nine layers, so that two CPU cores need about a minute and a half for all of
# this, most of it compilation.

# %%
import dataclasses
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from configs.pretrain import get_config
from trillium_moe.config_files import from_config_dict
from trillium_moe.train.counts import count_modules, human, totals

config = from_config_dict(get_config("scale=tiny,shrink=64"))  # windows of 128 bytes instead of 8,192
config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, n_layers=5),
    data=dataclasses.replace(config.data, batch_size=2),
    train=dataclasses.replace(config.train, steps=100, log_every=2, eval_every=0, eval_batches=8, sample_tokens=0,
                              checkpoint_every=0),
)
for name, count in count_modules(config.model).items():
    print(f"{name:32s} {human(count.total):>8s}   {human(count.active):>8s} active")
print({name: human(n) for name, n in totals(count_modules(config.model)).items() if n})

# %% [markdown]
# Every field of a config can be overridden on the command line (`--config.model.kda.g_min=-2.5`), and a value that
# cannot work says so before anything runs:

# %%
from trillium_moe.config import ConfigError, MoEConfig

try:
    MoEConfig(n_experts=4, k=4)
except ConfigError as error:
    print(error)

# %% [markdown]
# ## Train
#
# `train` is what `python -m experiments.train` calls. The directory holds everything: config, metrics, checkpoints.
# Calling it again would resume.

# %%
from trillium_moe.train.loop import train

workdir = tempfile.mkdtemp()
outcome = train(config, workdir, progress=False, report=False)
print({name: round(value, 3) for name, value in outcome.metrics.items()})
assert outcome.metrics["train/loss"] < 3 < np.log(256)

# %%
from trillium_moe.train.metrics import read_metrics

lines = read_metrics(workdir)
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot([line["step"] for line in lines], [line["train/loss"] for line in lines], color="#2f6fde", label="training")
axes.axhline(np.log(256), color="#697586", ls="--", lw=1, label="all bytes equally likely")
axes.plot(100, outcome.metrics["heldout/loss"], "o", color="#0f9b8e", label="held out")
axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None), title="Loss")
_ = axes.legend()

# %% [markdown]
# 100 steps of 256 bytes are not much: the model knows which bytes are frequent and a few words of Python.

# %%
from trillium_moe.infer.generate import generate, load_model
from trillium_moe.infer.sampling import Sampling

model = load_model(workdir)
print(generate(model, "def read(self, ", 120, Sampling(temperature=0.7, seed=0)))

# %% [markdown]
# ## Look inside
#
# Every probe is a function from a model and some text to data, with one beside it that draws the data.

# %%
from trillium_moe.data.pipeline import make_pipeline

batch = make_pipeline(config, "heldout", workdir, tokenizer=model.tokenizer, threads=0)[0]
tokens, documents = batch["tokens"], batch["segment_ids"]
print(tokens.shape)

# %% [markdown]
# **Memory.** Each KDA channel forgets at a rate of its own, between its shortest possible half-life and for ever.
# They start spread over two orders of magnitude; training moves them.

# %%
from trillium_moe.inspect import memory

memory.plot_memory(model, memory.memory(model, tokens, documents))

# %%
memory.plot_states(memory.state_curve(model, tokens))

# %% [markdown]
# **Depth.** What each sublayer reads: the sum of its own block, the sums of earlier blocks, the embedding.

# %%
from trillium_moe.inspect import depth

data = depth.depth(model, tokens, documents)
depth.plot_reads(data)

# %%
depth.plot_by_depth(data.kinds, data.output_S, "Size of each sublayer's output (root mean square)")

# %% [markdown]
# **Experts.** Loads are even, because quantile balancing makes them so. Do experts specialise? Take as domain whether
# a byte is a letter, a digit, white space or punctuation, and ask how many bits the expert tells about it.

# %%
from trillium_moe.inspect import experts

n = config.model.moe.n_experts
chosen = experts.choices(model, tokens, documents)
experts.plot_load(model, experts.load(chosen, n))

# %%
flat = tokens.reshape(-1)
is_in = lambda text: np.isin(flat, list(text.encode()))
letters = is_in("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
domain = np.select([letters, is_in("0123456789"), is_in(" \n\t")], [0, 1, 2], 3)
bits = experts.mutual_information(chosen, domain, n)
assert (bits > 0.01).all()
experts.plot_by_layer(bits, "What an expert tells about the kind of byte, bits")

# %%
experts.plot_co_activation(experts.co_activation(chosen, n), layer=len(chosen) - 1)

# %% [markdown]
# **Attention.** How many tokens each MLA head looks at. After so few steps: all of them, evenly, on the dashed line.
# Attention without positions starts as a mean over everything, and what 100 steps can learn, the KDA layers learn.

# %%
from trillium_moe.inspect import attention

attention.plot_entropy(attention.entropy(model, tokens, documents))

# %% [markdown]
# **Activations.** SiTU caps what comes out of a feed-forward network, whatever goes in.

# %%
from trillium_moe.inspect import activations

bound = config.model.situ_beta * config.model.situ_linear_beta
largest = activations.maxima(model, tokens, documents)
assert (largest.after_L < bound).all()
activations.plot_maxima(largest, bound)
