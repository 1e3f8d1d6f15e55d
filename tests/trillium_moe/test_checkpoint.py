import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillium_moe.train import checkpoint
from trillium_moe.train.checkpoint import CheckpointError, NonFiniteError, TornCheckpointError

from .toy import toy_task

DATA_STATE = {"position": 7, "nested": {"seen": [1, 2], "last": None}}


@pytest.fixture(scope="module")
def state():
    return jax.jit(toy_task().init)()


@pytest.fixture(scope="module")
def abstract():
    return jax.eval_shape(toy_task().init)


def write(workdir, state, *at, keep=2):
    with checkpoint.open_checkpoints(workdir, keep) as checkpoints:
        for step in at:
            checkpoint.save(checkpoints, step, shifted(state, step), DATA_STATE | {"position": step})


def shifted(state, by):
    return jax.tree.map(lambda x: x + by if jnp.issubdtype(x.dtype, jnp.floating) else x, state)


def equal(a, b):
    leaves = jax.tree.map(lambda x, y: x.dtype == y.dtype and (np.asarray(x) == np.asarray(y)).all(), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(leaves))


def data_file(workdir, step):
    """The file with the arrays' chunks."""
    files = [p for p in (Path(workdir) / "checkpoints" / str(step) / "state").rglob("*") if p.parent.name == "d"]
    return max(files, key=lambda p: p.stat().st_size)


def test_round_trip_is_exact_and_keeps_the_newest(tmp_path, state, abstract):
    write(tmp_path, state, 1, 2, 3)
    assert checkpoint.steps(tmp_path) == [2, 3]
    restored = checkpoint.restore(tmp_path, abstract)
    assert restored.step == 3 and restored.data_state == DATA_STATE | {"position": 3}
    assert equal(restored.state, shifted(state, 3))
    assert equal(checkpoint.restore(tmp_path, abstract, step=2).state, shifted(state, 2))


def test_a_relative_workdir_works_like_any_other(tmp_path, monkeypatch, state, abstract):
    monkeypatch.chdir(tmp_path)
    write("runs/here", state, 1)
    assert checkpoint.steps("runs/here") == [1] and (tmp_path / "runs/here/checkpoints/1").is_dir()
    assert equal(checkpoint.restore("runs/here", abstract).state, shifted(state, 1))


def test_dtypes_survive(tmp_path):
    tree = {"bf16": jnp.arange(5, dtype=jnp.bfloat16), "odd": jnp.ones((0, 3)), "bool": jnp.array([True, False]),
            "int8": jnp.int8(-3), "scalar": jnp.float32(jnp.pi), "list": [jnp.uint32(2**32 - 1)]}
    write(tmp_path, tree, 0)
    assert equal(checkpoint.restore(tmp_path, jax.eval_shape(lambda: tree)).state, shifted(tree, 0))


def test_donating_right_after_a_save_does_not_change_it(tmp_path, abstract):
    tree = {"w": jnp.arange(4e6, dtype=jnp.float32)}
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    expected = np.asarray(tree["w"]).copy()
    with checkpoint.open_checkpoints(tmp_path, 1) as checkpoints:
        checkpoint.save(checkpoints, 1, tree, {})
        for _ in range(3):
            tree = overwrite(tree)
    restored = checkpoint.restore(tmp_path, jax.eval_shape(lambda: tree))
    np.testing.assert_array_equal(restored.state["w"], expected)


def test_restored_arrays_are_donatable(tmp_path, state, abstract):
    write(tmp_path, state, 1)
    restored = checkpoint.restore(tmp_path, abstract).state
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(restored)}
    after = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(restored)
    assert all(x.is_deleted() for x in jax.tree.leaves(restored))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)} == before  # aliased, not silently copied


def remove(name):
    return lambda workdir, step: (workdir / "checkpoints" / str(step) / name).unlink()


def truncate(workdir, step):
    path = data_file(workdir, step)
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(workdir, step):
    path = data_file(workdir, step)
    content = bytearray(path.read_bytes())
    at = content.find(FLIPPED.tobytes())
    assert at >= 0
    content[at] ^= 1
    path.write_bytes(content)


FLIPPED = np.uint32(0x12345678)
DAMAGE = {"commit marker": remove("commit_success.txt"), "metadata": remove("_CHECKPOINT_METADATA"),
          "tree metadata": remove("state/_METADATA"), "manifest": remove("state/manifest.ocdbt"),
          "data position": remove("host/data.json"), "truncated": truncate, "flipped bit": flip_a_bit}


@pytest.mark.parametrize("damage", DAMAGE)
def test_torn_newest_is_skipped_with_a_warning(damage, tmp_path, caplog, capfd):
    # Random bits do not compress, so the known value among them is stored literally and one of its bits can be flipped.
    tree = {"bits": jax.random.bits(jax.random.key(0), (1000,)).at[500].set(FLIPPED), "w": jnp.ones(3)}
    shape = jax.eval_shape(lambda: tree)
    write(tmp_path, tree, 10, 20)
    DAMAGE[damage](tmp_path, 20)
    restored = checkpoint.restore(tmp_path, shape)
    assert restored.step == 10 and equal(restored.state, shifted(tree, 10))
    assert "skipping a torn checkpoint" in caplog.text and "/20" in caplog.text
    assert "Traceback" not in capfd.readouterr().err

    with pytest.raises(TornCheckpointError) as error:  # asked for by name: no fallback
        checkpoint.restore(tmp_path, shape, step=20)
    assert "\n" not in str(error.value)


def test_only_checkpoint_torn_is_an_error_and_loses_nothing(tmp_path, state, abstract):
    write(tmp_path, state, 5)
    remove("commit_success.txt")(tmp_path, 5)
    with pytest.raises(TornCheckpointError, match="5 has no commit_success.txt: the save never finished"):
        checkpoint.restore(tmp_path, abstract)
    assert checkpoint.steps(tmp_path) == [5]


def test_set_aside_renames_what_is_newer(tmp_path, state):
    write(tmp_path, state, 1, 2)
    checkpoint.set_aside(tmp_path, after=1)
    assert checkpoint.steps(tmp_path) == [1] and (tmp_path / "checkpoints" / "torn-2").exists()
    write(tmp_path, state, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_leaf_that_does_not_fit_is_named(tmp_path, state, abstract):
    write(tmp_path, state, 1, 2)
    kernel = "params/kernel"

    def with_kernel(shape, dtype):
        leaf = jax.ShapeDtypeStruct(shape, dtype)
        return dataclasses.replace(abstract, params=jax.tree.map(lambda x: leaf if x.ndim == 2 else x, abstract.params))

    for shape, dtype, message in [((5, 1), jnp.float32, r"float32\[4, 1\], the config asks for float32\[5, 1\]"),
                                  ((4, 1), jnp.bfloat16, r"float32\[4, 1\], the config asks for bfloat16\[4, 1\]")]:
        with pytest.raises(CheckpointError, match=rf"leaf {kernel} is {message}") as error:
            checkpoint.restore(tmp_path, with_kernel(shape, dtype))
        assert "\n" not in str(error.value) and not isinstance(error.value, TornCheckpointError)

    tree = {"step": abstract.step, "params": abstract.params, "extra": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    with pytest.raises(CheckpointError, match=r"has no leaf extra/w float32\[3\]"):
        checkpoint.restore(tmp_path, tree, partial=True)
    with pytest.raises(CheckpointError, match=r"holds leaf opt_state.*which the config does not have"):
        checkpoint.restore(tmp_path, {"step": abstract.step, "params": abstract.params})


def test_partial_restore_reads_parameters_only(tmp_path, state, abstract):
    write(tmp_path, state, 1)
    restored = checkpoint.restore(tmp_path, {"params": abstract.params}, partial=True)
    assert equal(restored.state["params"], shifted(state.params, 1))


def test_no_checkpoint_is_one_clear_error(tmp_path, state, abstract):
    with pytest.raises(CheckpointError, match="holds no checkpoint; train first"):
        checkpoint.restore(tmp_path, abstract)
    write(tmp_path, state, 1)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 9; it has steps \[1\]"):
        checkpoint.restore(tmp_path, abstract, step=9)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_non_finite_state_is_refused_and_the_good_one_stays(value, tmp_path, state, abstract):
    write(tmp_path, state, 1, keep=1)
    bad = dataclasses.replace(state, params=jax.tree.map(lambda x: x.at[0].set(value), state.params))
    with checkpoint.open_checkpoints(tmp_path, 1) as checkpoints:
        with pytest.raises(NonFiniteError, match="^step 2: params/bias holds nan or inf"):
            checkpoint.save(checkpoints, 2, bad, DATA_STATE)
    assert checkpoint.steps(tmp_path) == [1]


def test_an_unfinished_save_is_not_a_checkpoint(tmp_path, state, abstract):
    write(tmp_path, state, 1)
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp-1234"
    leftover.mkdir()
    assert checkpoint.steps(tmp_path) == [1]
    write(tmp_path, state, 3)
    assert not leftover.exists()
