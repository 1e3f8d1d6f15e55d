"""Killed in the middle of a rollout and resumed: nothing is lost, nothing is trained on twice.

The bookkeeping alone: an engine without a model draws random calls from each sequence's seed and its policy's weights,
and an update adds up what it was given, so that weights tell apart any two histories. `test_rl_loop` has the model.
"""

import json
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trillium_moe.test_cache import config as model
from trillium_moe.infer import engine
from trillium_moe.infer.engine import Decoded, EngineConfig
from trillium_moe.rl import run as run_module
from trillium_moe.rl.config import RLConfig, RolloutConfig, TaskConfig
from trillium_moe.rl.loop import train
from trillium_moe.rl.protocol import Call
from trillium_moe.rl.report import summary, write_report
from trillium_moe.rl.rollout import Rollout
from trillium_moe.rl.run import Run, Work
from trillium_moe.train import checkpoint
from trillium_moe.train.metrics import is_timing, read_metrics
from trillium_moe.train.state import TrainState

CONFIG = RLConfig(
    name="bookkeeping", updates=6, log_every=1, eval_every=3, eval_tasks=8, checkpoint_every=2, sft_only=False,
    model=model(n_layers=1, vocab_size=480), task=TaskConfig(envs=("read_page:pages=2:entries=0",), noise=0.3),
    rollout=RolloutConfig(groups=3, samples=4, pause=0.5, lag=1, refill=0),
)  # fmt: skip


class Engine(engine.Engine):
    """Slots whose sequences say a random valid turn, a function of (weights, seed of the turn)."""

    def __init__(self, protocol):
        self.config = EngineConfig(slots=12, capacity=192, steps=5)
        self.protocol, self.weights, self.prefilled, self.computed = protocol, 0.0, 0, 0
        self.length, self.left, self.seeds = np.zeros(12, np.int64), np.zeros(12, np.int64), [0] * 12
        self.free = list(range(12))

    def load(self, params, _):
        self.weights = float(params["w"])

    def open(self):
        return self.free.pop()

    def close(self, slot):
        assert slot not in self.free
        self.left[slot] = 0
        self.free.append(slot)

    def fork(self, slot, k):
        return [self.open() for _ in range(k)]

    def extend_all(self, tokens):
        self.prefilled += sum(map(len, tokens.values()))

    def start(self, slot, n_tokens, sampling, stops):
        self.left[slot], self.seeds[slot] = n_tokens, sampling.seed

    def decode(self):
        tokens, logprobs = np.full((12, 5), -1, np.int32), np.zeros((12, 5), np.float32)
        for slot in np.flatnonzero(self.left):
            rng = np.random.default_rng([self.seeds[slot], zlib.crc32(repr(self.weights).encode())])
            ids = self.protocol.turn(Call("read_page", (str(rng.integers(1, 3)),)))
            if rng.random() < 0.4:
                ids = self.protocol.text("response") + [self.protocol.sep, *self.protocol.text("7"), self.protocol.end]
            tokens[slot, : len(ids)], logprobs[slot, : len(ids)] = ids, -rng.random(len(ids))
        self.left[:] = 0
        return Decoded(tokens, logprobs)


class Bookkeeping(Run):
    def initial(self):
        return TrainState(jnp.zeros((), jnp.int32), {"w": jnp.zeros((), jnp.float32)}, {}, {})

    init = initial

    def fresh(self, params, router_bias):
        return TrainState(jnp.zeros((), jnp.int32), {"w": params["w"] + 0}, {}, {})

    def supervise(self, state, *args, **kw):
        return state

    def engine(self, params, router_bias):
        if self.rollout is None:
            self.rollout = Rollout(Engine(self.protocol), self.protocol, self.config.task, self.config.rollout, 0)
        self.rollout.engine.load(params, router_bias)
        return self.rollout


def update(config, c, program, state, batches, distill):
    """Weights that tell what they were made of, in which order."""
    said = [b["sampler"].tobytes() + b["advantage"].tobytes() + b["tokens"].tobytes() for b in batches]
    w = state.params["w"] / 2 + zlib.crc32(b"".join(said)) / 2**32
    return TrainState(state.step + 1, {"w": w}, {}, {}), {"rl/micro_batches": len(said)}


class Killed(BaseException):
    pass


def test_a_kill_in_the_middle_of_a_rollout_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "policy_step", update)
    assert train(CONFIG, tmp_path / "whole", Bookkeeping(CONFIG), progress=False)

    turn, seen = Rollout._turn, []

    def dying(self, running, version, greedy):
        if version == 4 and not greedy and any(r.trajectory.turns for r in running):
            seen.append([(r.trajectory.id, len(set(r.trajectory.versions))) for r in running])
            raise Killed
        return turn(self, running, version, greedy)

    monkeypatch.setattr(Rollout, "_turn", dying)
    with pytest.raises(Killed):
        train(CONFIG, tmp_path / "cut", Bookkeeping(CONFIG), progress=False)
    assert seen[0] and checkpoint.steps(tmp_path / "cut")[-1] == 4
    monkeypatch.setattr(Rollout, "_turn", turn)
    assert train(CONFIG, tmp_path / "cut", Bookkeeping(CONFIG), progress=False)

    logs = [[json.loads(line) for line in (tmp_path / name / "trained.jsonl").read_text().splitlines()]
            for name in ("whole", "cut")]
    assert logs[0] == logs[1] and [line["update"] for line in logs[0]] == [1, 2, 3, 4, 5, 6]
    trained = [t for line in logs[0] for t in line["trajectories"]]
    assert len(trained) == len(set(trained)) > 12  # none twice
    assert {t for t, _ in seen[0]} & set(trained)  # and those that the kill hit were trained on after all
    shapes = {"step": jnp.zeros((), jnp.int32), "params": {"w": jnp.zeros((), jnp.float32)}}
    whole, cut = (checkpoint.restore(tmp_path / name, TrainState(**shapes, router_bias={}, opt_state={}))
                  for name in ("whole", "cut"))
    assert float(whole.state.params["w"]) == float(cut.state.params["w"]) and whole.data_state == cut.data_state
    metrics = [[{k: v for k, v in m.items() if not is_timing(k)} for m in read_metrics(tmp_path / name)]
               for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]
    assert max(m.get("rl/age_max", 0) for m in metrics[0]) >= 2  # lag 1, and paused ones older still

    # every group that was begun is in exactly one place
    work = Work.from_json(whole.data_state)
    waiting = [g[0].group for batch in work.queue for g in batch] + [g[0].group for g in work.open]
    groups = {int(t.split("/")[0]) for t in trained}
    assert not groups & set(waiting)
    assert len(groups) + len(waiting) + work.uniform + work.dropped == work.next_group

    assert summary(tmp_path)["runs"].keys() == {"cut", "whole"}
    page = write_report(tmp_path).read_text()
    assert "bookkeeping" in page and page.count("<img") >= 4 and "@" not in page.split("<main>")[1][:400]
