"""Compiles the train step for a pod that need not be there: does it fit, what does it send, how fast can it be.

  python -m experiments.compile --config=configs/pretrain.py:scale=small,shrink=1 --topology=v5p:2x2x2
  python -m experiments.compile --config=configs/pretrain.py:scale=medium,shrink=1 --topology=h200:8
  python -m experiments.compile --config=configs/pretrain.py:scale=trillium_2t8,shrink=1 --topology=v5p:8x16x16 \\
      --config.data.batch_size=2048 --config.mesh.expert=128 --config.mesh.replica=2 \\
      --config.model.moe.capacity=1.25

It needs the compilers of the extra `aot` (make setup EXTRAS=aot) and no accelerator. Times are a roofline at the chip's
peak rates: the step takes at least the longest of compute, memory and network, and at most their sum if nothing
overlaps. The MFU counts the model's FLOPs only (trillium_moe/train/flops.py), without recomputation.
"""

import sys

from experiments.common import UsageError, command, config_of, define_config


def define(flags):
    from absl import flags as absl_flags

    define_config(flags)
    absl_flags.DEFINE_string("topology", None, "chip and shape of a slice, such as v5p:8x16x16 or h200:8",
                             flag_values=flags)
    absl_flags.DEFINE_integer("num_slices", 1, "slices joined by the data-centre network", lower_bound=1,
                              flag_values=flags)
    absl_flags.DEFINE_string("hlo", "", "file to write the compiled program's text to", flag_values=flags)


def run(flags):
    from trillium_moe.parallel.chips import EXAMPLES, prepare_environment, topology_devices

    if not flags.topology:
        raise UsageError(f"flag --topology is missing; name a chip and the shape of a slice, such as {EXAMPLES}")
    prepare_environment()
    from trillium_moe.train.aot import compile_step

    config = config_of(flags)
    devices, chip = topology_devices(flags.topology, flags.num_slices)
    done = compile_step(config, devices, chip, flags.num_slices)
    if flags.hlo:
        with open(flags.hlo, "w") as file:
            file.write(done.hlo)
    times = done.times(chip)
    best, worst = max(times.values()), sum(times.values())
    tokens = config.data.batch_size * config.data.seq_len
    result = {
        "name": config.name, "topology": flags.topology, "num_slices": flags.num_slices, "devices": len(devices),
        "mesh": done.mesh, "tokens_per_step": tokens,
        "bytes": {"parameters": done.parameters, "optimizer": done.optimizer, "arguments": done.arguments,
                  "temporaries": done.temporaries, "peak": done.peak, "hbm": chip.hbm, "code": done.code},
        "collectives": {f"{kind}{' between slices' if spans else ''}": {"count": t.count, "bytes": t.bytes}
                        for (kind, spans), t in sorted(done.traffic.items())},
        "seconds": {"lower": done.lower_seconds, "compile": done.compile_seconds, **times, "step_at_least": best,
                    "step_at_most": worst},
        "mfu_at_most": done.mfu(best, chip), "mfu_at_least": done.mfu(worst, chip), "host_bytes": done.host_bytes,
    }  # fmt: skip
    if not flags.json:
        show(result)
    return result


def show(result):
    """The result as text."""
    gb = lambda size: f"{size / 1e9:9.2f} GB"
    mesh = " x ".join(f"{name} {size}" for name, size in result["mesh"].items() if size > 1) or "1 device"
    slices = f" x {result['num_slices']} slices" if result["num_slices"] > 1 else ""
    print(f"{result['name']} on {result['topology']}{slices}: {result['devices']} devices, {mesh}; "
          f"{result['tokens_per_step']:,} tokens a step\n")
    size = result["bytes"]
    print("bytes of one device")
    for name in ("parameters", "optimizer", "temporaries", "peak", "hbm"):
        share = f"  {size[name] / size['hbm']:.0%} of HBM" if name == "peak" else ""
        print(f"  {name:12}{gb(size[name])}{share}")
    print("\nsent by one device in a step")
    for name, t in result["collectives"].items():
        print(f"  {name:36}{t['count']:10,.0f} times{gb(t['bytes'])}")
    seconds = result["seconds"]
    print("\nseconds at peak rates")
    for name in ("compute", "hbm", "network"):
        print(f"  {name:12}{seconds[name]:9.3f}")
    print(f"\nstep {seconds['step_at_least']:.3f} s (all overlapped) to {seconds['step_at_most']:.3f} s (nothing "
          f"overlapped): MFU {result['mfu_at_most']:.1%} to {result['mfu_at_least']:.1%}")
    print(f"lowered in {seconds['lower']:.1f} s, compiled in {seconds['compile']:.1f} s, "
          f"{result['host_bytes'] / 1e9:.1f} GB of host memory")


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))
