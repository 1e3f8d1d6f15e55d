"""Kernels of the Trillium architecture, usable on their own: nothing here imports `trillium_moe`.

One folder per op, each with the same files (see `dispatch` for the contract): `api` holds the one public function,
`reference` the obvious jax.numpy version, `xla` the fast portable one, `pallas_*` the device kernels.
"""
