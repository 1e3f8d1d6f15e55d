"""Grouped matmul on TPUs: interpreted on the CPU against numpy, and compiled ahead of time for four kinds of chip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.pallas_tpu import TpuProducts, groups_product, rows_product, visits
from pallas_kernels.grouped_matmul.products import grouped
from tests.pallas_kernels.test_grouped_matmul import by_hand

SIZES = {
    "zeros": [8, 0, 8, 0],
    "one": [0, 304, 0, 0],
    "odd": [72, 1, 130, 5],
    "none": [0, 0, 0, 0],
}


def operands(sizes, M, K, N, dtype):
    rng = np.random.default_rng(0)
    lhs, rhs, d = (rng.normal(size=s) for s in ((M, K), (len(sizes), K, N), (M, N)))
    lhs[sum(sizes) :], d[sum(sizes) :] = np.nan, np.nan
    return [jnp.asarray(x, dtype) for x in (lhs, rhs, d)]


@jax.jit
def interpreted(lhs, rhs, d, sizes):
    out, vjp = jax.vjp(lambda x, w: grouped(TpuProducts(interpret=True), x, w, sizes), lhs, rhs)
    return out, *vjp(d)


@pytest.mark.parametrize("name", SIZES)
def test_parity(name):
    sizes = SIZES[name]
    lhs, rhs, d = operands(sizes, 310, 128, 256, jnp.float32)
    for got, want in zip(interpreted(lhs, rhs, d, jnp.asarray(sizes)), by_hand(*map(np.asarray, (lhs, rhs, d)), sizes)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(got)[want == 0], 0)


@pytest.mark.slow
def test_fewer_rows_than_groups_in_bfloat16():
    sizes = ([8, 0, 0, 3, 16, 0, 0] * 128)[:896]
    lhs, rhs, d = operands(sizes, sum(sizes) + 7, 128, 128, jnp.bfloat16)
    out, d_lhs, d_rhs = by_hand(*(np.asarray(x, np.float32) for x in (lhs, rhs, d)), sizes)
    s = jnp.asarray(sizes)
    got = (
        rows_product([lhs], [rhs], s, interpret=True),
        rows_product([d, d], [rhs, rhs], s, transposed=True, interpret=True),
        groups_product(lhs, d, s, jnp.float32, interpret=True),
    )
    for a, b, bound in zip(got, (out, 2 * d_lhs, d_rhs), (3e-3, 3e-3, 1e-5)):
        a = np.asarray(a, np.float64)
        np.testing.assert_array_equal(a[b == 0], 0)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


@pytest.mark.parametrize("every_group", [True, False])
def test_visits(every_group):
    sizes, M, block = np.array([5, 0, 20, 0, 3, 0]), 40, 8
    count, work = visits(jnp.asarray(sizes), M, block, every_group)
    ends = np.cumsum([*sizes, M - sizes.sum()][: 6 + (not every_group)])
    want = set()
    for g, (start, end) in enumerate(zip([0, *ends], ends)):
        want |= {(g, b) for b in range(M // block) if max(start, b * block) < min(end, (b + 1) * block)}
    got = [tuple(x) for x in np.asarray(work)[:2, : count[0]].T]
    assert len(got) == len(set(got)) and got == sorted(got)
    if every_group:
        assert {g for g, _ in got} == set(range(6))
        got = [(g, b) for g, b in got if sizes[g]]
    assert set(got) == want


def test_refuses_what_it_cannot_serve():
    operands = jnp.ones((8, 128)), jnp.ones((1, 128, 128)), jnp.array([8])
    with pytest.raises(NotImplementedError, match="a TPU is needed"):
        grouped_matmul(*operands, align=8, implementation="pallas_tpu")


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_for_tpus(chip, monkeypatch):
    topologies = pytest.importorskip("jax.experimental.topologies")
    for name, value in (("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("TPU_SKIP_MDS_QUERY", "1")):
        monkeypatch.setenv(name, value)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    except Exception as error:  # whatever the missing library raises
        pytest.skip(f"no libtpu: {error}")
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    where = jax.sharding.NamedSharding(mesh, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    M, G, D, F = 16384, 56, 3584, 3072
    x, p, s = shape(jnp.bfloat16, M, D), shape(jnp.float32, M), shape(jnp.int32, G)
    w_in, w_out = shape(jnp.bfloat16, G, D, F), shape(jnp.bfloat16, G, F, D)

    def both(d_y, s, *inputs):
        op = lambda x, p, *w: expert_ffn(x, p, s, *w, align=16, implementation="pallas_tpu")
        y, vjp = jax.vjp(op, *inputs)
        return y, vjp(d_y)

    with jax.set_mesh(mesh):
        text = jax.jit(both).lower(x, s, x, p, w_in, w_in, w_out).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') >= 8
