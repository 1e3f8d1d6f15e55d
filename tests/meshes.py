"""Meshes of simulated devices."""

import math

import jax
from jax.sharding import AxisType, Mesh

AXES = ("replica", "data", "context", "expert", "model")


def mesh(**sizes: int) -> Mesh:
    """A mesh of the named sizes; every other axis has one device."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
