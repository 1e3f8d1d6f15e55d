"""Exported Kimi-Linear checkpoints in Hugging Face's code: make test-transformers. Skipped without torch or a
transformers that has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import scales
from tests import goldens
from tests.models import random_variables
from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, MoEConfig
from trillium_moe.interop import layout
from trillium_moe.interop.export import export

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

F32 = DtypeConfig(compute="float32")


def their_logits(directory, tokens) -> np.ndarray:
    """Of every token, by the model that the library makes of a directory; all tensors must have found their places."""
    if not hasattr(transformers, "KimiLinearForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no KimiLinearForCausalLM; it came with 5.18")
    theirs, report = transformers.KimiLinearForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        return theirs.eval()(torch.tensor(np.asarray(tokens, np.int64)), use_cache=False).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("naming", [layout.LINEAR, layout.LIBRARY])
def test_exported_checkpoints_load_in_transformers_with_the_same_logits(naming, tmp_path):
    config, _, params, bias = goldens.model("kimi_linear_tiny", F32)
    export(tmp_path / "out", config, params, bias, naming=naming)
    ref = goldens.arrays("kimi_linear_tiny", "reference.safetensors")
    assert goldens.error(their_logits(tmp_path / "out", ref["input_ids"]), ref["logits"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("naming", [layout.LINEAR, layout.LIBRARY])
def test_a_model_of_other_dimensions_has_our_logits_there(naming, tmp_path):
    """No size equals another, so that no axis can pass for another; two dense layers, two shared experts, shards."""
    config = dataclasses.replace(
        scales.kimi_linear_48b(), vocab_size=300, d_model=56, n_layers=5, mla_layers=(1, 4), n_dense_layers=2,
        ffn_dim=88, scan_layers=False, remat="none", dtypes=F32,
        kda=KDAConfig(n_heads=3, head_dim=16, decay="softplus", gate="low_rank"),
        mla=MLAConfig(n_heads=5, q_lora_rank=0, kv_lora_rank=24, nope_dim=12, rope_dim=4, v_dim=20, gate="none"),
        moe=MoEConfig(n_experts=7, k=3, expert_dim=40, latent_dim=0, n_shared=2, routed_scale=1.7),
    )  # fmt: skip
    graphdef, params, bias = random_variables(config, std=0.1, noise=0.1)
    tokens = np.random.default_rng(1).integers(0, 300, (2, 40))
    ours = jax.jit(lambda t: nnx.merge(graphdef, params, bias)(t)[0])(jnp.asarray(tokens))
    export(tmp_path / "out", config, params, bias, naming=naming, dtype="float32", shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert float(np.abs(ours).max()) > 1
    assert goldens.error(their_logits(tmp_path / "out", tokens), ours) < 1e-4
