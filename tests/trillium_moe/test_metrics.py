import jax.numpy as jnp
import numpy as np
import pytest

from trillium_moe.train.metrics import MetricWriter, array_steps, is_timing, read_arrays, read_metrics


def write(workdir, steps, resume_step=0):
    with MetricWriter(workdir, resume_step) as writer:
        for step in steps:
            writer.write(step, {"train/loss": jnp.float32(1 / step), "data/tokens": jnp.int32(step),
                                "router/load_LE": np.full((2, 3), step), "b": jnp.bfloat16(0.1)})


def test_scalars_go_to_lines_and_arrays_to_npz(tmp_path):
    write(tmp_path, [1, 10])
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 10]
    assert np.float32(lines[1]["train/loss"]) == np.float32(0.1)  # every bit of a float32 survives
    assert lines[1]["data/tokens"] == 10 and isinstance(lines[1]["data/tokens"], int)
    assert "router/load_LE" not in lines[0]
    step, arrays = read_arrays(tmp_path)
    assert step == 10 and (arrays["router/load_LE"] == 10).all()
    assert read_arrays(tmp_path, 1)[1]["router/load_LE"].sum() == 6
    assert list((tmp_path / "tensorboard").iterdir())


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, [1, 10, 20, 30])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')  # killed while writing
    write(tmp_path, [30, 40], resume_step=20)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 10, 20, 30, 40]
    assert array_steps(tmp_path) == [1, 10, 20, 30, 40]
    write(tmp_path, [1])  # from scratch
    assert [line["step"] for line in read_metrics(tmp_path)] == array_steps(tmp_path) == [1]


def test_empty_directory_reads_as_nothing(tmp_path):
    assert read_metrics(tmp_path) == [] and read_arrays(tmp_path) == (0, {})


@pytest.mark.parametrize("name, timing", [("time", True), ("perf/tokens_per_second", True), ("train/loss", False)])
def test_timings_are_known_by_name(name, timing):
    assert is_timing(name) == timing
