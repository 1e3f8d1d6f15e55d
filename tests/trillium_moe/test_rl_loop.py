"""The command's loop: killed in the middle of a rollout it goes on as if it had not been; sampler and trainer agree."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests.trillium_moe.test_cache import config as model
from trillium_moe.config import ConfigError, DtypeConfig, KDAConfig, MoEConfig, OptimConfig
from trillium_moe.rl.config import ObjectiveConfig, RLConfig, RolloutConfig, SFTConfig, TaskConfig
from trillium_moe.rl.loop import train
from trillium_moe.rl.report import summary, write_report
from trillium_moe.rl.rollout import Rollout
from trillium_moe.rl.run import Run, Work
from trillium_moe.train import checkpoint
from trillium_moe.train.metrics import is_timing, read_metrics

pytestmark = pytest.mark.slow  # some thirty seconds of compilation

CONFIG = RLConfig(
    name="test", updates=4, rows=4, log_every=1, eval_every=2, eval_tasks=8, checkpoint_every=2, sft_only=False,
    model=model(n_layers=2, n_dense_layers=2, scan_layers=False, remat="none", residual="none", vocab_size=480,
                kda=KDAConfig(n_heads=2, head_dim=8, implementation="reference")),
    sft=SFTConfig(steps=30, optim=OptimConfig(name="adamw", lr=1e-2, warmup=0.05)),
    optim=OptimConfig(name="adamw", lr=1e-3, schedule="wsd", decay=0.0),
    task=TaskConfig(envs=("read_page:entries=0:lines=1",), noise=0.5),
    rollout=RolloutConfig(groups=3, samples=4, pause=0.5, lag=1, refill=0, chunks=(24,)),
    objective=ObjectiveConfig(credit="turn", baseline="turn", kl=0.05, kl_anneal=4),
)  # fmt: skip


class Killed(BaseException):
    pass


def weights(workdir):
    step = max(checkpoint.steps(workdir))
    run = Run(CONFIG)
    start = jax.eval_shape(lambda: run.fresh(*(lambda s: (s.params, s.router_bias))(run.initial())))
    return checkpoint.restore(workdir, start, step=step).state


def test_a_kill_in_the_middle_of_a_rollout_loses_nothing(tmp_path, monkeypatch):
    programs = Run(CONFIG)
    assert train(CONFIG, tmp_path / "whole", programs, progress=False)

    turn, left = Rollout._turn, [0]

    def dying(self, running, version, greedy):
        # the third update's rollout, whose trajectories have begun under older policies
        left[0] += version == 2 and not greedy and any(r.trajectory.split == "train" for r in running)
        if left[0] == 3:
            raise Killed
        return turn(self, running, version, greedy)

    monkeypatch.setattr(Rollout, "_turn", dying)
    with pytest.raises(Killed):
        train(CONFIG, tmp_path / "cut", programs, progress=False)
    monkeypatch.setattr(Rollout, "_turn", turn)
    assert checkpoint.steps(tmp_path / "cut") == [2]
    assert train(CONFIG, tmp_path / "cut", programs, progress=False)

    logs = [[json.loads(line) for line in (tmp_path / name / "trained.jsonl").read_text().splitlines()]
            for name in ("whole", "cut")]
    assert logs[0] == logs[1] and [line["update"] for line in logs[0]] == [1, 2, 3, 4]
    trained = [t for line in logs[0] for t in line["trajectories"]]
    assert len(trained) == len(set(trained)) > 12  # none twice
    states = [weights(tmp_path / name) for name in ("whole", "cut")]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), *states)
    metrics = [[{k: v for k, v in m.items() if not is_timing(k)} for m in read_metrics(tmp_path / name)]
               for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]

    # the pull towards the policy that RL began with: nothing to pull at first
    kl = [m["rl/kl"] for m in metrics[0] if "rl/kl" in m]
    assert kl[0] < 1e-6 < kl[-1]

    # a lag of one: the second batch of a rollout is one version old; pauses make tokens older still
    ages = [m["rl/age_max"] for m in metrics[0] if "rl/age_max" in m]
    assert max(ages) >= 1
    on_policy = [m for m in metrics[0] if m.get("rl/age_max") == 0]
    assert all(m["rl/log_ratio_max"] < 1e-4 for m in on_policy)  # the sampler's log-probabilities are the trainer's
    assert "test" in write_report(tmp_path / "cut").read_text() and summary(tmp_path)["runs"].keys() == {"cut", "whole"}
    with pytest.raises(ConfigError, match="config objective: workdir=.*holds another run"):
        train(dataclasses.replace(CONFIG, objective=dataclasses.replace(CONFIG.objective, tau=0.5)), tmp_path / "cut")


def test_no_trajectory_is_lost():
    """Groups are trained on, uniform, dropped, waiting or open: every one that was begun is exactly one of these."""
    run = Run(CONFIG)
    state = run.init()
    state = run.fresh(state.params, state.router_bias)
    work, trained = Work(), []
    for update in range(4):
        run.iterate(state, work, update)
        work = Work.from_json(json.loads(json.dumps(work.to_json())))  # as a checkpoint keeps it
        trained += [g[0].group for g in work.queue.pop(0)]
    waiting = [g[0].group for batch in work.queue for g in batch] + [g[0].group for g in work.open]
    assert len(trained) + len(waiting) + work.uniform + work.dropped == work.next_group
    assert len(set(trained) | set(waiting)) == len(trained) + len(waiting)


@pytest.mark.parametrize("exact", [True, False])
def test_an_update_starts_from_the_sampled_probabilities(exact):
    """Quantised experts in bfloat16, several sequences a row: the gradient's own forward pass, not one like it."""
    small = dataclasses.replace(
        CONFIG.model, dtypes=DtypeConfig(compute="bfloat16"), scan_layers=True, remat="block", residual="block",
        kda=KDAConfig(n_heads=2, head_dim=8), n_dense_layers=1,
        moe=MoEConfig(n_experts=8, k=2, expert_dim=32, latent_dim=32, n_shared=1, quantise="mxfp4"),
    )  # fmt: skip
    rollout = dataclasses.replace(CONFIG.rollout, exact=exact, lag=0, pause=1.0)
    config = dataclasses.replace(CONFIG, row=256, model=small, objective=ObjectiveConfig(), rollout=rollout)
    run, work = Run(config), Work()
    state = run.supervise(run.init(), 30)
    state = run.fresh(state.params, state.router_bias)
    for update in range(2):
        run.iterate(state, work, update)
        state, metrics = run.learn(state, work.queue.pop(0), work, update)
        assert (metrics["rl/log_ratio_max"] < 4e-6) == exact


def test_exact_rollouts_need_a_forward_pass_of_its_own():
    with pytest.raises(ConfigError, match="config rollout.exact=True: needs model.scan_layers=True and model.remat"):
        dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, exact=True))
