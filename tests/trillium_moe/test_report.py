import json
import math
import re

import numpy as np
import pytest

from trillium_moe.config import Config, ConfigError, TrainConfig
from trillium_moe.config_files import save_config
from trillium_moe.train.facts import write_facts
from trillium_moe.train.metrics import MetricWriter
from trillium_moe.train.report import write_report

PICTURES = ["loss", "load", "history", "balance", "routing", "depth", "decay", "optimizer", "speed"]


def write_run(workdir, config, steps):
    """Plausible metrics of a run that has reached `steps`."""
    rng = np.random.default_rng(0)
    kinds, ffns = config.model.mixers, config.model.ffns
    K, L, E = kinds.count("kda"), ffns.count("moe"), config.model.moe.n_experts
    S, N = 2 * config.model.n_layers + 1, -(-config.model.n_layers // config.model.block_size) + 1
    centre = rng.uniform(-6, 0.5, (K, 2, 1))
    with MetricWriter(workdir) as writer:
        for step in [1, *range(10, steps + 1, 10)]:
            t = step / 300
            load = rng.poisson(800 * np.exp(rng.normal(size=(L, E)) * 0.5 * math.exp(-8 * t)))
            logits = rng.normal(size=(S, N)) * 2 * t
            logits[:, -1] += 2 * t
            alive = np.arange(N - 1) <= (np.arange(S) // 2 // config.model.block_size)[:, None]
            weights = np.exp(logits) * np.append(alive, np.ones((S, 1)), 1)
            violation = load.max(1) / load.mean(1) - 1
            values = {
                "train/loss": 1.5 + 4.1 * math.exp(-9 * t) + 0.06 * rng.normal(),
                "train/grad_norm": 0.3 + 2 * math.exp(-20 * t) + 0.05 * rng.random(),
                "optim/lr": 5e-3 * min(1, 20 * t) * (0.55 + 0.45 * math.cos(math.pi * t)),
                "router/max_violation": violation.mean(), "router/max_violation_worst": violation.max(),
                "router/min_violation": 1 - (load.min(1) / load.mean(1)).mean(),
                "router/entropy": 1 - 0.3 * math.exp(-8 * t),
                "router/bias_spread": 0.4 * t, "router/floor": math.sqrt(2 * math.log(E) / 800), "router/load_LE": load,
                "attn_res/weights_SN": weights / weights.sum(1, keepdims=True),
                "kda/log_decay_LHK": -np.exp(centre + rng.normal(size=(K, 2, 32))).clip(1e-4, 5),
                "perf/tokens_per_second": 9400 + 250 * rng.normal() - (2500 if step == 170 else 0),
            }
            if step % 50 == 0:
                values["router/churn"], values["router/churn_worst"] = 0.4 * math.exp(-2 * t), 0.6 * math.exp(-2 * t)
                values["heldout/bits_per_byte"] = 2.3 + 5.0 * math.exp(-8 * t)
            writer.write(step, values, arrays=step % 50 == 0 or step == 1)


@pytest.mark.parametrize("steps", [300, 20])
def test_report_is_self_contained_and_complete(steps, tmp_path):
    config = Config()
    save_config(config, tmp_path)
    write_facts(tmp_path, config, order0_bits_per_byte=4.83)
    write_run(tmp_path, config, steps)
    (tmp_path / "sample.txt").write_text("def f(x): return x < 1 & x > 0")
    page = write_report(tmp_path)
    text = page.read_text()
    pictures = PICTURES if steps == 300 else [p for p in PICTURES if p != "history"]  # of one moment there is none
    for name in pictures:
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
    assert text.count("data:image/png;base64,") == len(pictures)
    assert not re.search(r'(src|href)="(?!data:)', text) and "http" not in text
    assert not re.search(r"@[a-z]+@", text)
    assert "return x &lt; 1 &amp; x &gt; 0" in text
    assert ("finished" if steps == 300 else "step 20 of 300") in text
    assert "order-0 entropy" in text and "4.830 bits per byte" in text
    facts = json.loads((tmp_path / "run.json").read_text())
    assert f"{facts['parameters']['total']:,}" in text


def test_run_without_metrics_still_has_a_page(tmp_path):
    save_config(Config(train=TrainConfig(steps=7)), tmp_path)
    text = write_report(tmp_path).read_text()
    assert "No step has been logged yet" in text and "step 0 of 7" in text
    assert "<tr class=changed><th>steps</th><td>7</td>" in text


def test_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no config.json"):
        write_report(tmp_path)
