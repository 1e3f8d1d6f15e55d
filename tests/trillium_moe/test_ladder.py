import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import stages
from configs.ablations.recall import get_config as recall
from configs.ladder import get_config as one_stage
from configs.pretrain import get_config as pretrain
from experiments import curriculum
from experiments.common import command
from tests.trillium_moe.toy import toy_task
from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    KDAConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from trillium_moe.config_files import from_config_dict
from trillium_moe.model.kda import KDA
from trillium_moe.train.checkpoint import CheckpointError
from trillium_moe.train.ladder import Gate, climb
from trillium_moe.train.ladder_report import table
from trillium_moe.train.loop import fit
from trillium_moe.train.schedule import make_schedule
from trillium_moe.train.state import model_def

BASE = Config(name="tiny-8k", data=DataConfig(seq_len=128, batch_size=16), train=TrainConfig(steps=1000))
NAMES = ("8k", "64k", "256k", "1m")


def test_stages_of_a_ladder():
    ladder = stages.ladder(BASE, NAMES)
    assert [c.data.seq_len for c in ladder.values()] == [128, 1024, 4096, 16_384]
    # tokens per step stay 2048 until a step would hold under four rows
    assert [c.data.batch_size for c in ladder.values()] == [16, 4, 4, 4]
    tokens = [c.data.batch_size * c.data.seq_len * (c.train.steps - c.train.first_step) for c in ladder.values()]
    assert sum(tokens) == pytest.approx(1000 * 2048, rel=0.02)
    assert tokens[0] / sum(tokens) == pytest.approx(0.8, abs=0.02)
    for before, after in zip([*ladder.values()], [*ladder.values()][1:]):
        assert after.train.first_step == before.train.steps
        assert after.data.mixture.before[0] == before.data.mixture.text
        assert after.optim.horizon == ladder["1m"].train.steps
    assert ladder["1m"].name == "tiny-1m"
    given = stages.ladder(BASE, NAMES, steps=(9, 5, 3, 1), floor=1)
    assert [c.train.steps for c in given.values()] == [9, 14, 17, 18]
    assert [c.data.batch_size for c in given.values()] == [16, 2, 1, 1]
    assert [c.mesh.context for c in stages.ladder(BASE, NAMES, devices=8).values()] == [1, 4, 8, 8]


def test_one_cosine_or_one_for_every_stage():
    ladder = stages.ladder(BASE, NAMES, steps=(50, 30, 20, 10))
    whole = make_schedule(OptimConfig(), 110)
    for config in ladder.values():
        rate = make_schedule(config.optim, config.train.steps)
        for step in range(config.train.first_step, config.train.steps):
            assert float(rate(step)) == pytest.approx(float(whole(step)), rel=1e-6)
    again = stages.ladder(BASE, NAMES, steps=(50, 30, 20, 10), rate="rewarm")["64k"]
    rates = [float(make_schedule(again.optim, again.train.steps)(step)) for step in range(50, 81)]
    peak = 0.4 * BASE.optim.lr
    assert rates[0] == pytest.approx(peak / 4) and rates[3] == pytest.approx(peak) == max(rates)
    assert rates[-1] == pytest.approx(0.1 * peak) and rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize("call, message", [
    (lambda: stages.ladder(BASE, ("64k", "8k")), "stages='64k,8k': windows must grow"),
    (lambda: stages.ladder(BASE, ("8k", "65k")), "did you mean '64k'"),
    (lambda: stages.ladder(BASE, NAMES, steps=(1, 2)), "one number for each of 8k,64k,256k,1m"),
    (lambda: stages.ladder(BASE, NAMES, mixtures="recal"), "did you mean 'recall'"),
    (lambda: stages.ladder(dataclasses.replace(BASE, data=DataConfig(seq_len=100)), NAMES),
     "data.seq_len=100: must divide the 8192 of 8k"),
    (lambda: Gate("halt"), "gate='halt': must be one of warn, stop"),
    (lambda: TrainConfig(first_step=5), "train.start='': train.first_step=5 needs the run"),
    (lambda: TrainConfig(steps=5, first_step=5, start="x"), "train.first_step=5: must lie in"),
])  # fmt: skip
def test_what_is_no_ladder(call, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        call()


def test_a_window_that_the_mesh_cannot_hold(tmp_path):
    odd = dataclasses.replace(BASE, mesh=MeshConfig(context=1, data=1))
    ladder = stages.ladder(odd, ("8k", "64k"), steps=(2, 2))
    ladder["64k"] = dataclasses.replace(ladder["64k"], mesh=MeshConfig(data=1, context=3))
    with pytest.raises(ConfigError, match="mesh.context=3: does not fill the 1 device"):
        climb(ladder, tmp_path, lambda config: None)
    assert not list(tmp_path.iterdir())  # found before anything ran


def test_a_run_begins_where_another_ended(tmp_path):
    steps = lambda n, **kw: TrainConfig(steps=n, log_every=1, eval_every=0, checkpoint_every=0, **kw)
    whole = fit(steps(6), tmp_path / "whole", toy_task(), progress=False)
    fit(steps(4), tmp_path / "a", toy_task(), progress=False)
    rest = dataclasses.replace(toy_task(), start=str(tmp_path / "a"))
    rest.batches.set_state({"i": 4})  # its data are its own: here they happen to be the rest of the first run's
    then = fit(steps(6, first_step=4, start="a"), tmp_path / "b", rest, progress=False)
    assert then.step == 6 and int(then.state.step) == 6
    for x, y in zip(jax.tree.leaves(whole.state), jax.tree.leaves(then.state)):
        assert np.array_equal(x, y)
    missing = dataclasses.replace(toy_task(), start=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="gone' holds no checkpoint"):
        fit(steps(6, first_step=4, start="x"), tmp_path / "c", missing, progress=False)
    other = dataclasses.replace(toy_task(), start=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="train.first_step=3: .* a run of 4 steps"):
        fit(steps(6, first_step=3, start="x"), tmp_path / "d", other, progress=False)


def cell(task, length, accuracy):
    return {"task": task, "length": length, "accuracy": accuracy, "n": 100, "chance": 0.001}


def test_gate():
    gate = Gate(short_loss=0.01, needle=0.99, hard="multi_query")
    good = {"short_loss": 2.0, "cells": [cell("needle", 512, 1.0), cell("multi_query", 512, 0.6)]}
    assert gate.verdicts(512, good, None) == []
    before = {"short_loss": 1.995, "cells": [cell("multi_query", 512, 0.5)]}
    assert gate.verdicts(512, good, before) == []
    bad = {"short_loss": 2.02, "cells": [cell("needle", 512, 0.9), cell("multi_query", 512, 0.5)]}
    needle, loss, hard = gate.verdicts(512, bad, before)
    assert needle == "needle at 512 tokens is 90.0%, the gate asks for 99.0%"
    assert loss.startswith("the loss at the first window rose by 0.0250 nats")
    assert hard == "multi_query at 512 tokens went from 50.0% to 50.0%, the gate asks for a rise"
    perfect = {"short_loss": 2.0, "cells": [cell("multi_query", 512, 1.0)]}
    assert gate.verdicts(512, perfect, perfect) == []  # nothing above everything


def test_table():
    stage = {"window": 512, "steps": 3, "rows": 2, "short_loss": 2.0,
             "tokens_per_second": 1234.5, "peak_bytes": 3 << 30,
             "cells": [cell("needle", 512, 0.995), cell("needle", 1024, 0.5)],
             "text": [{"length": 512, "gain": 0.25}], "failed": []}
    text = table({"8k": stage, "64k": {**stage, "failed": ["too little"], "text": [], "cells": stage["cells"][:1]}})
    assert "| after stage | task | 512 | 1,024 |" in text
    assert "| 8k | needle | 99.5 (100) | 50.0 (100) |" in text and "| 64k | needle | 99.5 (100) |  |" in text
    assert "| 8k | 512 | 3 x 2 | 3,072 | 1,234 | 3.0 GiB | 2.0000 | 0.2500 | passed |" in text
    assert "| too little |" in text and json.dumps(text)


def test_a_stage_on_its_own_is_that_of_the_ladder():
    of = lambda options: from_config_dict(one_stage(options))
    base = from_config_dict(pretrain("scale=tiny,shrink=64"))
    ladder = stages.ladder(base, NAMES, tokens=10_000_000)
    for name, config in ladder.items():
        assert of(f"scale=tiny,shrink=64,tokens=10000000,stage={name}") == config
    assert of("scale=tiny,shrink=64,stage=1m,start=runs/x/256k").train.start == "runs/x/256k"
    with pytest.raises(ConfigError, match="option='stag'"):
        of("stag=64k")


def test_recall_protocol():
    arms = {mixer: from_config_dict(recall(f"task=mqar,mixer={mixer},length=512")) for mixer in ("kda", "gdn", "mla")}
    assert {name: c.model.mixers for name, c in arms.items()} == {
        "kda": ("kda", "kda"), "gdn": ("kda", "kda"), "mla": ("mla", "mla")}
    assert all(c.model.ffns == ("dense", "dense") and c.data.seq_len == 512 for c in arms.values())
    shapes = {name: model_def(c.model)[1] for name, c in arms.items()}
    assert shapes["kda"]["kda"]["dt_bias"].shape == (2, 2, 128) and shapes["gdn"]["kda"]["dt_bias"].shape == (2, 2, 1)
    with pytest.raises(ConfigError, match="mixer='kdaa': .*did you mean 'kda'"):
        recall("mixer=kdaa")


def test_one_decay_per_head_is_the_same_in_all_its_channels():
    c = ModelConfig(d_model=16, n_layers=1, mla_layers=(-1,), kda=KDAConfig(n_heads=2, head_dim=8, decay_per="head"))
    mixer = KDA(c, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 16)), jnp.float32)
    g = mixer.log_decay(mixer.decay_logits(x))
    assert g.shape == (1, 5, 2, 8) and np.array_equal(g, np.broadcast_to(g[..., :1], g.shape))
    assert len(np.unique(g)) == 10  # tokens and heads differ


def test_lengths_within_reach():
    windows = [128, 1024, 4096, 16384]
    assert curriculum.lengths(128, windows, 16384, 0) == (64, 128, 256, 1024, 4096, 16384)
    assert curriculum.lengths(128, windows, 16384, 8) == (64, 128, 256, 1024)
    assert curriculum.lengths(16384, windows, 16384, 8) == (128, 1024, 4096, 8192, 16384)  # the last stage: everywhere


@pytest.mark.parametrize("flags, message", [
    (["--stages=64k,8k"], "config stages='64k,8k': windows must grow"),
    (["--steps=1,two"], "flag --steps=1,two: must be whole numbers"),
    (["--steps=3"], "config steps=(3,): give one number for each of 8k,64k,256k,1m"),
    (["--mix=recal"], "did you mean 'recall'"),
    (["--tasks=nedle", "--steps=1,1,1,1"], "did you mean 'needle'"),
    (["--hard=pile"], "config hard='pile': must be one of"),
    (["--config.mesh.context=2"], "mesh.context=2: does not fill the 1 devices; give mesh.context=1"),
])  # fmt: skip
def test_wrong_commands(flags, message, tmp_path, capsys):
    config = "--config=configs/pretrain.py:scale=tiny,shrink=64"
    argv = [config, f"--workdir={tmp_path / 'x'}", *flags]
    code = command(curriculum.__doc__, curriculum.define, curriculum.run, argv)
    err = capsys.readouterr().err
    assert code == 2 and message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "x").exists()
