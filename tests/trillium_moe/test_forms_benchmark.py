"""benchmarks/forms.py: in float32 both forms of every layer are the same numbers."""

import numpy as np
import pytest

from benchmarks.forms import as_asked, forms, report
from configs import scales


def test_what_is_reported():
    name, relative, share = report("x", np.array([[3.0, 4.0]]), np.array([[3.0, 5.0]]))
    assert (name, share) == ("x", 0.5) and relative == pytest.approx(1 / 5)


@pytest.mark.slow
def test_forms_agree_in_float32():
    found = {name.strip(): relative for name, relative, _ in forms(as_asked(scales.tiny(), "float32", "", ""))}
    assert {"kda", "mla", "moe", "latents", "router logits", "output", "depth read"} <= set(found)
    assert max(found.values()) < 1e-5, found
