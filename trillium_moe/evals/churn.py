"""Routing churn: how many of the experts of the same tokens change from one evaluation to the next."""

from __future__ import annotations

import io

import numpy as np
from etils import epath

from trillium_moe.shapes import Int

PROBE = 1024  # tokens of the first held-out batch whose experts are remembered


def churn(workdir: epath.PathLike, step: int, experts_LMK: Int[np.ndarray, "L M k"]) -> dict[str, float]:
    """Compares the probe's experts with those of the evaluation before, and keeps them for the next one.

    They lie in `workdir/probe/<step>.npz`: a resumed run finds the file that an uninterrupted one would compare with.

    Returns:
      router/churn: share of choices that differ, mean over layers; router/churn_worst: of the layer that differs most.
      {} at the first evaluation.
    """
    folder = epath.Path(workdir) / "probe"
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [int(path.stem) for path in folder.glob("*.npz") if int(path.stem) < step]
    content = io.BytesIO()
    np.savez_compressed(content, experts=experts_LMK.astype(np.int16))
    (folder / f"{step:08d}.npz").write_bytes(content.getvalue())
    if not earlier:
        return {}
    with np.load(io.BytesIO((folder / f"{max(earlier):08d}.npz").read_bytes())) as file:
        changed_L = 1 - overlap(file["experts"], experts_LMK)
    return {"router/churn": float(changed_L.mean()), "router/churn_worst": float(changed_L.max())}


def overlap(before_LMK: Int[np.ndarray, "L M k"], after_LMK: Int[np.ndarray, "L M k"]) -> np.ndarray:
    """Share of a token's experts that both hold, whatever their order; mean over tokens, [L]."""
    same = before_LMK[..., :, None] == after_LMK[..., None, :]
    return same.any(-1).mean((1, 2))
