"""The largest model's train step, one group of its layers at full width, compiled for a pod that is not there."""

import json
import subprocess
import sys

import pytest

from tests.pallas_kernels.test_kda_tpu import absent_mesh

DEVICES, EXPERTS, LATENT, WIDTH = 128, 896, 3584, 3072

COMMAND = [
    "--config=configs/pretrain.py:scale=trillium_2t8,stage=8k,shrink=1", "--config.model.n_layers=13",
    "--topology=v5p:4x4x8", f"--config.data.batch_size={DEVICES}", f"--config.mesh.expert={DEVICES}",
    "--config.model.moe.capacity=1.25", "--json",
]  # fmt: skip


@pytest.mark.aot
def test_one_group_of_layers_fits_a_pod():
    """One dense layer and twelve mixture layers: 8,192 tokens and seven experts of each layer on every chip."""
    absent_mesh("v5p:2x2x1")  # skips without libtpu
    run = subprocess.run([sys.executable, "-m", "experiments.compile", *COMMAND], capture_output=True, text=True,
                         timeout=900)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.strip().splitlines()[-1])
    assert result["devices"] == DEVICES and result["mesh"]["expert"] == DEVICES
    assert result["tokens_per_step"] == DEVICES * 8192
    size, sent = result["bytes"], result["collectives"]
    assert size["peak"] < size["hbm"] == 95e9
    experts = 12 * EXPERTS // DEVICES * 3 * LATENT * WIDTH * 4  # float32; everything else is a few percent
    assert experts < size["parameters"] < 1.1 * experts
    assert sent["ragged-all-to-all"]["count"] >= 4 * 12  # there and back, forward and backward, in every mixture layer
