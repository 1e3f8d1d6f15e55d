"""Released checkpoints in and out, and what an import would take.

  python -m experiments.convert --hf=DIR --plan --devices=64 --mesh=data=8,expert=8     headers only, nothing is loaded
  python -m experiments.convert --hf=DIR --workdir=runs/a --config=configs/pretrain.py:scale=small
  python -m experiments.convert --workdir=runs/a --out=DIR [--experts=mxfp4]
  python -m experiments.convert --hf=DIR --out=DIR2 [--naming=transformers]

An import makes a run of step 0, which experiments.train, eval and generate continue from; of --config its model's
architecture does not count, and --config.data.tokenizer=checkpoint takes the tokenizer beside the weights. The layouts
read and written: Kimi-K3 and Kimi-Linear as released (bfloat16, float32 or MXFP4 experts), Kimi-Linear as in the
transformers library.
"""

from __future__ import annotations

import os
import sys

from absl.flags import DEFINE_bool, DEFINE_enum, DEFINE_float, DEFINE_integer, DEFINE_string

from experiments.common import (
    UsageError,
    command,
    config_of,
    define_config,
    define_step,
    define_workdir,
    workdir_of,
)

NAMINGS = ["", "kimi_k3", "kimi_linear", "transformers"]


def define(flags):
    define_config(flags)
    define_workdir(flags, "run to make (with --hf) or to export (with --out)")
    define_step(flags)
    DEFINE_string("hf", None, "directory with config.json and *.safetensors", flag_values=flags)
    DEFINE_string("out", None, "new directory for the exported checkpoint", flag_values=flags)
    DEFINE_enum("naming", "", NAMINGS, "names of exported tensors; default: the release of this architecture",
                flag_values=flags)
    DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of exported weights", flag_values=flags)
    DEFINE_enum("experts", "", ["", "dense", "mxfp4"], "routed experts of the export, or in memory (--plan); default: "
                "dense", flag_values=flags)
    DEFINE_float("shard_gb", 5.0, "largest size of an exported file", lower_bound=1e-6, flag_values=flags)
    DEFINE_bool("plan", False, "print what an import of --hf would load where", flag_values=flags)
    DEFINE_integer("devices", 1, "devices of the plan", lower_bound=1, flag_values=flags)
    DEFINE_string("mesh", "data=-1", "mesh of the plan, such as data=16,expert=128", flag_values=flags)
    DEFINE_enum("param", "bfloat16", ["bfloat16", "float32"], "dtype of parameters in the plan", flag_values=flags)


def run(flags):
    given = {name for name in ("hf", "out", "workdir") if getattr(flags, name)}
    if flags.plan:
        if given != {"hf"}:
            raise UsageError("flag --plan needs --hf, and neither --out nor --workdir")
        return show_plan(flags)
    if len(given) != 2:
        raise UsageError("two of the flags --hf, --workdir and --out say what becomes what; see --help")
    if given == {"hf", "workdir"}:
        return import_run(flags)
    how = {"naming": flags.naming, "dtype": flags.dtype, "experts": flags.experts.replace("dense", ""),
           "shard_bytes": int(flags.shard_gb * 1e9)}
    if "workdir" in given:
        from trillium_moe.interop.runs import export_run

        step, files = export_run(workdir_of(flags, exists=True), flags.out, flags.step, **how)
        done = {"step": step}
    else:
        files, done = export_again(flags, how), {}
    print(f"{flags.out}: config.json and {len(files)} file{'s' * (len(files) > 1)}")
    return {"out": flags.out, "files": [f.name for f in files], **done}


def import_run(flags):
    from trillium_moe.interop.runs import import_run

    workdir = workdir_of(flags, exists=False)
    config = import_run(flags.hf, config_of(flags), workdir)
    print(f"{workdir}: {config.model.n_layers} layers as step 0; continue with experiments.train "
          f"--config=configs/from_run.py:{workdir} --workdir={workdir}")
    return {"workdir": workdir, "step": 0}


def export_again(flags, how):
    from pathlib import Path

    from etils import epath
    from flax import nnx

    from trillium_moe.config import DtypeConfig
    from trillium_moe.interop import hf
    from trillium_moe.interop.export import export
    from trillium_moe.interop.runs import copy_tokenizer
    from trillium_moe.interop.safetensors import read_json
    from trillium_moe.model.params import RouterBias

    # exact whatever the files hold; MXFP4 experts are kept packed if they will be written so
    packed = how["experts"] == "mxfp4" and hf.is_packed(flags.hf)
    config, model = hf.load(flags.hf, DtypeConfig(), experts_format="mxfp4" if packed else "dense")
    raw = read_json(Path(flags.hf).expanduser() / "config.json")
    extra = {name: raw[name] for name in raw if name.endswith("_token_id")}
    files = export(flags.out, config, *nnx.split(model, nnx.Param, RouterBias)[1:], extra=extra, **how)
    copy_tokenizer(epath.Path(flags.hf).expanduser(), Path(flags.out).expanduser())
    return files


def parse_mesh(text):
    """`data=16,expert=128`. Raises UsageError."""
    from trillium_moe.config import MeshConfig
    from trillium_moe.parallel.mesh import AXES

    sizes = {}
    for item in filter(None, text.split(",")):
        name, _, size = item.partition("=")
        if name not in AXES or not size.removeprefix("-").isdecimal():
            raise UsageError(f"flag --mesh={text}: {item!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}")
        sizes[name] = int(size)
    return MeshConfig(**sizes)


def show_plan(flags):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import dataclasses

    from trillium_moe.config import DtypeConfig
    from trillium_moe.interop.plan import plan
    from trillium_moe.train.counts import human

    found = plan(flags.hf, DtypeConfig(param=flags.param), parse_mesh(flags.mesh), flags.devices,
                 flags.experts or "dense")
    total = found.total
    if not flags.json:
        print(f"{flags.hf}: {found.naming}, {human(total.parameters)} parameters in {total.tensors:,} tensors and "
              f"{len(found.files)} files, {total.stored / 1e9:.2f} GB\n")
        print(f"{'part':34}{'tensors':>10}{'stored GB':>12}{'parameters':>13}{'GB a device':>14}")
        for name, row in [*found.rows.items(), ("all", total)]:
            print(f"{name:34}{row.tensors:>10,}{row.stored / 1e9:>12.3f}{human(row.parameters):>13}"
                  f"{row.device / 1e9:>14.4f}")
        shape = " x ".join(f"{name} {size}" for name, size in found.mesh.items() if size > 1) or "1 device"
        print(f"\nmesh: {shape}; parameters {flags.param}, routed experts {flags.experts or 'dense'}\n")
        for name, (n, nbytes, parts) in list(found.files.items())[:200]:
            print(f"{name:40}{n:>10,}{nbytes / 1e9:>12.3f}  {', '.join(parts)}")
    return {"naming": found.naming, "mesh": found.mesh, "rows": {n: dataclasses.asdict(r) for n, r in
            found.rows.items()}, "bytes_per_device": total.device, "files": len(found.files)}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))
