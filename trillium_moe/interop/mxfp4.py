"""MXFP4 as released: E2M1 codes, two per byte, one E8M0 scale per 32 inputs (model.md 8.1)."""

from __future__ import annotations

import numpy as np

GROUP = 32  # input elements that share a scale
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # code -> value; bit 3 is the sign


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 weights [out, in] from codes uint8 [out, in/2] and scales uint8 [out, in/32]; exact.

    Element 2j of a row is the low nibble of byte j, element 2j+1 the high one; a scale byte s means 2^(s - 127).
    """
    if packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(f"weight_packed {packed.shape} and weight_scale {scale.shape} do not fit groups of {GROUP}")
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    factors = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    return VALUES[codes] * np.repeat(factors, GROUP, axis=-1)
