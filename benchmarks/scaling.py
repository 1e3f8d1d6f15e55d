"""The same training run on one device and on meshes of several: loss curves, tokens per second, memory.

  python -m benchmarks.scaling --config=configs/pretrain.py:scale=medium,shrink=1 --devices=1 --out=one.json
  python -m benchmarks.scaling --config=configs/pretrain.py:scale=medium,shrink=1 --config.mesh.expert=2 \\\\
      --against=one.json

  python -m benchmarks.scaling --config=configs/pretrain.py:scale=small,stage=1m,shrink=1 \\
      --config.data.batch_size=1 --config.model.remat=block --devices=1 --steps=2 --whole_rows

Every run sees the same batches of real text, from the same initial parameters. The first step is not timed. With
--against the loss of every step is compared with that of an earlier run, and its speed is given as scaling efficiency:
tokens per second, over those of the earlier run times the ratio of devices. Runs that are given the same --turn file
compile side by side and take their steps one after the other.
"""

import json
import statistics
import sys
import tempfile
import time

from benchmarks.traces import kernel_times
from benchmarks.turns import turn
from experiments.common import UsageError, command, config_of, define_config, define_workdir


def define(flags):
    from absl import flags as absl_flags

    define_config(flags)
    define_workdir(flags, "where the tokenizer and the token cache are kept between runs; a temporary one if not given")
    absl_flags.DEFINE_integer("devices", 0, "devices to use; 0 for all", lower_bound=0, flag_values=flags)
    absl_flags.DEFINE_integer("steps", 20, "optimizer steps", lower_bound=2, flag_values=flags)
    absl_flags.DEFINE_bool("whole_rows", False, "take every row for one document, so that attention reaches over all "
                           "of it; else documents are packed as in training", flag_values=flags)
    absl_flags.DEFINE_integer("trace", 0, "print so many of the kernels by time, of three more steps", lower_bound=0,
                              flag_values=flags)
    absl_flags.DEFINE_string("turn", "", "file whose lock is held during the steps", flag_values=flags)
    absl_flags.DEFINE_string("out", "", "file for the result, as JSON", flag_values=flags)
    absl_flags.DEFINE_string("against", "", "result of an earlier run to compare with", flag_values=flags)


def run(flags):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.data.tokenizer import make_tokenizer
    from trillium_moe.parallel import runtime
    from trillium_moe.parallel.mesh import check_mesh, make_mesh
    from trillium_moe.parallel.sharding import batch_spec, state_shardings
    from trillium_moe.train.state import abstract_state, init_state
    from trillium_moe.train.step import make_train_step

    config, devices = config_of(flags), jax.devices()
    if flags.devices > len(devices):
        raise UsageError(f"flag --devices={flags.devices}: there are {len(devices)}; give at most that many")
    devices = devices[: flags.devices or len(devices)]
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh.shape)
    workdir = flags.workdir or tempfile.mkdtemp()
    tokenizer = make_tokenizer(config.data, workdir)
    batches = iter(make_pipeline(config, "train", workdir, tokenizer=tokenizer))
    layout, rows = NamedSharding(mesh, batch_spec()), config.data.batch_size
    tokens = rows * config.data.seq_len

    began = time.perf_counter()
    state = jax.jit(lambda: init_state(config), out_shardings=state_shardings(abstract_state(config), mesh))()

    def next_batch():
        batch = dict(next(batches))
        if flags.whole_rows:
            batch["segment_ids"] = np.ones_like(batch["segment_ids"])
        return runtime.place(batch, layout, range(rows), rows)

    batch = next_batch()
    step = make_train_step(config, mesh).lower(state, batch).compile()
    compiled = time.perf_counter() - began
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    shown = " x ".join(f"{name} {size}" for name, size in axes.items()) or "one device"
    print(f"{config.name}, {shown}: {tokens:,} tokens a step; ready after {compiled:.0f} s", flush=True)

    losses, seconds = [], []
    with turn(flags.turn):
        for _ in range(flags.steps):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["train/loss"]))  # waits for the step
            seconds.append(time.perf_counter() - began)
            print(f"step {len(losses):3d}  loss {losses[-1]:.4f}  {seconds[-1]:.3f} s", flush=True)
            batch = next_batch()

        def three_more():
            nonlocal state
            for _ in range(3):
                state, metrics = step(state, batch)
            jax.block_until_ready(metrics)

        if flags.trace:
            kernel_times(three_more, 3, flags.trace)
    memory = max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in devices)
    result = {
        "name": config.name, "mesh": axes, "devices": len(devices), "device": devices[0].device_kind,
        "tokens_per_step": tokens, "compile_seconds": compiled, "peak_bytes": memory, "losses": losses,
        "step_seconds": statistics.median(seconds[1:]),
        "dropped": float(metrics.get("router/dropped", 0.0)),
    }  # fmt: skip
    result["tokens_per_second"] = tokens / result["step_seconds"]
    print(f"{result['tokens_per_second']:,.0f} tokens/s, {result['step_seconds']:.3f} s a step (median), peak "
          f"{memory / 2**30:.1f} GiB a device, {result['dropped']:.0f} routed pairs dropped in the last step")
    if flags.against:
        with open(flags.against) as file:
            other = json.load(file)
        ratio = len(devices) / other["devices"]
        result["efficiency"] = result["tokens_per_second"] / other["tokens_per_second"] / ratio
        apart = [abs(a - b) for a, b in zip(losses, other["losses"])]
        print(f"scaling efficiency {result['efficiency']:.0%} of {ratio:g} x {other['tokens_per_second']:,.0f}; losses "
              f"differ by {statistics.mean(apart):.4f} nats on average, {max(apart):.4f} at most, "
              f"{apart[-1]:.4f} at the end")
    if flags.out:
        with open(flags.out, "w") as file:
            json.dump(result, file)
    return result


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))
