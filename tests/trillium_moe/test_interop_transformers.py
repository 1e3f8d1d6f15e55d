"""An exported Kimi-Linear checkpoint in Hugging Face's code. Skipped without torch or a transformers that has it."""

import numpy as np
import pytest

from tests import goldens
from trillium_moe.config import DtypeConfig
from trillium_moe.interop import layout
from trillium_moe.interop.export import export

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("naming", [layout.LINEAR, layout.LIBRARY])
def test_exported_checkpoints_load_in_transformers_with_the_same_logits(naming, tmp_path):
    if not hasattr(transformers, "KimiLinearForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no KimiLinearForCausalLM; it came after 5.17")
    config, _, params, bias = goldens.model("kimi_linear_tiny", DtypeConfig(compute="float32"))
    export(tmp_path / "out", config, params, bias, naming=naming)
    theirs, report = transformers.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ref = goldens.arrays("kimi_linear_tiny", "reference.safetensors")
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor(ref["input_ids"].astype(np.int64)), use_cache=False).logits
    assert goldens.error(logits.numpy(), ref["logits"]) < 1e-4
