"""FLOPs of a step against counts by hand."""

import dataclasses

import pytest

from configs import scales
from trillium_moe.config import Config, DataConfig, OptimConfig
from trillium_moe.train.flops import step_flops


def test_the_released_model():
    config = Config(model=scales.trillium_2t8(), data=DataConfig(seq_len=8192, batch_size=512, tokenizer="bpe"))
    flops = step_flops(config)
    tokens = 512 * 8192
    assert flops.matmul == pytest.approx(2 * 104.2e9 * tokens, rel=2e-3)
    assert flops.attention == 24 * 8192 * 96 * (192 + 128) * tokens
    assert flops.kda == 69 * 96 * 6 * 128 * 128 * tokens
    assert flops.model == 3 * (flops.matmul + flops.attention + flops.kda)
    # every expert matrix, 3072 x 3584: 5 iterations of two products with the 3072 x 3072 Gram matrix and its square
    experts = 92 * 896 * 3 * 5 * (4 * 3072**2 * 3584 + 2 * 3072**3)
    assert experts < flops.optimizer < 1.1 * experts
    assert flops.executed == 5 / 3 * flops.model + flops.optimizer  # remat block: three forwards
    adamw = dataclasses.replace(config, optim=OptimConfig(name="adamw"))
    assert step_flops(adamw).optimizer == 0
