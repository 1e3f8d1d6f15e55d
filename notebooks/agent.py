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
# # A tool-using agent
#
# Reinforcement learning over many turns, part by part: a task with tools, the messages that carry it, what strategies
# without a model are worth, a small model that learns to speak the protocol, and one policy update from a group of its
# own attempts. A whole run is `make rl`.

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np

from trillium_moe.rl.env import Session, explorer, make_env, oracle, play
from trillium_moe.rl.protocol import Protocol
from trillium_moe.rl.vocabulary import WordTokenizer

# %% [markdown]
# ## A task
#
# What is asked for is not in the prompt: it stands on one of eight pages. `index` says on which, `read_page n` reads
# one. The oracle below knows the hidden state; everything it does passes through the same messages as a model's turns.
# Lines with ">" are the agent's.

# %%
pages = make_env("read_page:entries=0:lines=1:values=64")
protocol = Protocol(WordTokenizer())


def transcript(session: Session, policy) -> str:
    episode = session.episode
    ids = protocol.prompt(episode.tools, episode.question)
    own = [0] * len(ids)
    while not session.done:
        said = protocol.turn(policy(episode))
        outcome = session.step(protocol.parse(said, episode.tools))
        heard = [] if outcome.done else protocol.observation(outcome.observation)
        ids, own = ids + said + heard, own + [1] * len(said) + [0] * len(heard)
    return protocol.show(ids, own)


session = Session(pages.episode(3))
print(transcript(session, oracle))
print("\nsuccess", session.success, "with", session.calls, "calls")
assert session.success == 1

# %% [markdown]
# ## Nothing an agent says can break the task
#
# The parser takes any tokens. What is wrong has a name, costs a call and is answered with `error`.

# %%
tools = pages.episode(3).tools
message = lambda channel, text: [*protocol.text(channel), protocol.sep, *protocol.text(text), protocol.end]
attempts = {
    "read_page 4": message("tools", "read_page 4"),
    "read_page lemon": message("tools", "read_page lemon"),
    "open_door": message("tools", "open_door"),
    "no end": message("tools", "read_page 4")[:-1],
}
errors = {name: protocol.parse(ids, tools).error or "fine" for name, ids in attempts.items()}
print(errors)
assert list(errors.values()) == ["fine", "arguments", "unknown_tool", "parse"]

# %% [markdown]
# ## What a strategy is worth
#
# Before any learning: how often does a policy without a model succeed, by the calls that it may make? Asking the index
# first needs two calls. Trying pages at random needs luck, yet it is far from hopeless, so a reward for success alone
# leads there first.

# %%
budgets = (2, 3, 4, 6, 8, 12)


def success(policy, budget: int, episodes: int = 100) -> float:
    env = dataclasses.replace(pages, budget=budget)
    return float(np.mean([play(Session(env.episode(seed, "heldout")), policy).success for seed in range(episodes)]))


rng = np.random.default_rng(0)
curves = {
    "index, then the page (oracle)": [success(oracle, b) for b in budgets],
    "random calls, answers what it saw": [success(explorer(rng, stop=1.0), b) for b in budgets],
    "an answer without a call": [pages.episode(0).chance] * len(budgets),
}
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, curve), colour in zip(curves.items(), ("#12306b", "#2f6fde", "#697586")):
    axes.plot(budgets, curve, "o-", ms=4, color=colour, label=name)
axes.set(xlabel="calls allowed", ylabel="success", ylim=(-0.03, 1.08), title="read_page, 100 held-out tasks")
_ = axes.legend(loc=(0.03, 0.66))
assert curves["index, then the page (oracle)"][-1] == 1 > curves["random calls, answers what it saw"][-1] > 0.2

# %% [markdown]
# ## A model that speaks the protocol
#
# Two layers, one of KDA and one of attention, learn from traces of the random policy: the protocol, and no strategy.
# `Run` holds the programs: the rollout engine, which decodes all trajectories together, and an update that serves
# supervised and policy steps alike.

# %%
from configs.rl import get_config
from trillium_moe.config_files import from_config_dict
from trillium_moe.rl.config import RLConfig
from trillium_moe.rl.run import Run, Work

config = from_config_dict(get_config("env=read_page"), RLConfig)
config = dataclasses.replace(
    config, eval_tasks=32, sft=dataclasses.replace(config.sft, steps=48),
    rollout=dataclasses.replace(config.rollout, groups=4),
)
run = Run(config)
state = run.init()
rollout = run.engine(state.params, state.router_bias)

seen, well_formed, answered = [], [], []
for first in range(0, config.sft.steps + 1, 12):
    if first:
        state = run.supervise(state, 12, first - 12)
    tried = run.evaluate(state.params, state.router_bias)
    wrong = sum(n for t in tried for kind, n in t.errors.items() if kind in ("parse", "unknown_tool", "arguments"))
    seen.append(first)
    well_formed.append(1 - wrong / sum(t.turns for t in tried))
    answered.append(np.mean([t.end == "answer" for t in tried]))

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot(seen, well_formed, "o-", ms=4, color="#12306b", label="turns that say something valid")
axes.plot(seen, answered, "o-", ms=4, color="#0f9b8e", label="episodes that end in an answer")
axes.set(xlabel="supervised steps", ylabel="share", ylim=(-0.03, 1.05), title="32 held-out tasks, sampled")
_ = axes.legend()
assert well_formed[-1] > 0.8 > 0.5 > well_formed[0]

# %% [markdown]
# What it says now is valid and not yet clever:

# %%
t = tried[0]
print(run.protocol.show(t.parts[0].tokens, t.parts[0].mask))
print(f"\n{t.end}, success {t.success:g}, {t.calls} calls")

# %% [markdown]
# ## A group of attempts
#
# Policy updates compare several attempts at one task. They are forked from one prefill of the prompt and observations
# are appended, so most of what a history would cost is never computed. The advantage of a turn is the reward from it on
# minus the mean of what the group got from the same turn on; drawn are the first turns. Calls cost a little, the right
# answer is worth 1.

# %%
work = Work()
state = run.fresh(state.params, state.router_bias)
work.open = [rollout.new_group(number) for number in range(config.rollout.groups)]
rollout.engine.load(state.params, state.router_bias)
rollout.counts = type(rollout.counts)()
rollout.run(work.open, version=0)
print(f"{rollout.counts.saved:.0%} of the prefill tokens were saved by forks and appended observations")

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for g, group in enumerate(work.open):
    advantages, rewards = run.advantages(group, work, 0)
    axes.plot(np.full(len(group), g) + np.linspace(-0.25, 0.25, len(group)), [a[0] for a in advantages], "o", ms=5,
              color="#2f6fde")
    np.testing.assert_allclose(sum(a[0] for a in advantages), 0, atol=1e-6)
axes.axhline(0, color="#697586", lw=1)
axes.set(xticks=range(len(work.open)), xticklabels=[f"task {g}" for g in range(len(work.open))], ylabel="advantage",
         title=f"{config.rollout.samples} attempts at each task")
assert rollout.counts.saved > 0.5

# %% [markdown]
# ## One update
#
# The trainer computes the log-probability of every sampled token again. On tokens of the present policy it must agree
# with the sampler, or one of the two is wrong: the largest difference is printed. A token whose ratio has since moved
# out of [e^alpha, e^beta] gives no policy gradient (`k25`), whatever the sign of its advantage; the clipped minimum of
# PPO keeps it on one side.

# %%
start = run.fresh(state.params, state.router_bias)  # its copies stay: `objective.kl` pulls towards them
state, metrics = run.learn(state, work.open, work, 0, reference=(start.params, start.router_bias))
print({name: metrics[name] for name in ("rl/trained_tokens", "rl/log_ratio_max", "rl/entropy", "rl/masked")})
assert metrics["rl/log_ratio_max"] < 1e-3 and metrics["rl/masked"] == 0

# %%
import jax
import jax.numpy as jnp

from trillium_moe.rl.config import ObjectiveConfig
from trillium_moe.rl.objectives import Tokens, loss

ratios = np.linspace(-1.5, 1.5, 301).astype(np.float32)


def pull(name: str, advantage: float) -> np.ndarray:
    """How strongly a token of that log-ratio is pushed towards what it did: minus the gradient of its term."""
    n, fill = len(ratios), lambda value: jnp.full(len(ratios), value, jnp.float32)
    term = lambda logp: loss(Tokens(logp, fill(0.0), fill(0.0), fill(advantage), fill(1.0), fill(1.0),
                                    jnp.arange(n), n), ObjectiveConfig(name=name, tau=0.0))[0]
    return -np.asarray(jax.grad(term)(jnp.asarray(ratios)))


figure, panels = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained", sharey=True)
for axes, advantage in zip(panels, (1.0, -1.0)):
    for name, colour in (("k25", "#12306b"), ("grpo", "#d9822b")):
        axes.plot(ratios, pull(name, advantage), color=colour, label=name)
    axes.axhline(0, color="#697586", lw=0.8)
    axes.set(xlabel="log-ratio to the sampler", title=f"advantage {advantage:+g}")
panels[0].set_ylabel("pull on the token")
_ = panels[0].legend()
assert pull("k25", -1.0)[-1] == 0 and pull("grpo", -1.0)[-1] < 0

# %% [markdown]
# From here on it is repetition: `make rl` takes 400 supervised steps and 120 updates a seed, and its report draws what
# this notebook printed. What such a policy learns and what it does not is in `docs/results.md`.
