"""Released checkpoints as run directories and back, so that training, evaluation and generation start from them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding

from trillium_moe.config import Config, check
from trillium_moe.config_files import load_config, save_config
from trillium_moe.data.pipeline import make_pipeline
from trillium_moe.data.tokenizer import Tokenizer, make_tokenizer
from trillium_moe.interop import configs, hf
from trillium_moe.interop.export import export
from trillium_moe.model.params import RouterBias
from trillium_moe.parallel import runtime
from trillium_moe.parallel.mesh import check_mesh, make_mesh
from trillium_moe.parallel.sharding import batch_spec, state_shardings
from trillium_moe.train import checkpoint
from trillium_moe.train.state import TrainState, abstract_state, model_def, optimizer

TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_format.json")


def import_run(directory: str | Path, config: Config, workdir: epath.PathLike) -> Config:
    """Makes a run directory of a checkpoint: its weights are those of step 0, and the optimizer starts anew.

    Args:
      config: the run. Of its model only what is not architecture counts; data.tokenizer="checkpoint" is the tokenizer
        beside the weights, which is copied into the run.

    Returns:
      The run's config.

    Raises:
      ConfigError: as `hf.load`, or the directory holds a run.
    """
    directory, workdir = Path(directory).expanduser(), epath.Path(workdir)
    check(not (workdir / "config.json").exists(), "workdir", str(workdir), "holds a run; name a new directory")
    model = configs.merge(hf.read_config(directory, config.model.dtypes), config.model)
    data = config.data
    if data.tokenizer == "checkpoint":
        found = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
        check(bool({"tokenizer.json", "tiktoken.model"} & {*found}), "data.tokenizer", "checkpoint",
              f"{directory} has no tokenizer.json or tiktoken.model; name another tokenizer")
        own = workdir / "tokenizer"
        data = dataclasses.replace(data, tokenizer=str(own))
        if runtime.is_main():
            own.mkdir(parents=True, exist_ok=True)
            for name in found:
                shutil.copyfile(directory / name, own / name)
        runtime.barrier("tokenizer copied")
    config = dataclasses.replace(config, model=model, data=data)
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh.shape)
    _, params, bias = nnx.split(hf.load(directory, model.dtypes, mesh=mesh)[1], nnx.Param, RouterBias)
    abstract, shardings = abstract_state(config), state_shardings(abstract_state(config), mesh)
    # what a checkpoint keeps in float32 is as the run's policy says
    cast = lambda tree, like: jax.tree.map(lambda x, a: x.astype(a.dtype), tree, like)
    params, bias = cast(params, abstract.params), cast(bias, abstract.router_bias)
    opt_state = jax.jit(optimizer(config).init, out_shardings=shardings.opt_state)(params)
    state = TrainState(jnp.zeros((), jnp.int32), params, bias, opt_state)
    rows = config.data.batch_size
    workdir.mkdir(parents=True, exist_ok=True)
    with runtime.main_first("data"):
        tokenizer = make_tokenizer(config.data, workdir)
        own_rows = runtime.local_rows(NamedSharding(mesh, batch_spec()), rows)
        batches = iter(make_pipeline(config, "train", workdir, tokenizer=tokenizer, local=own_rows))
        if runtime.is_main():
            save_config(config, workdir)
    with checkpoint.open_checkpoints(workdir, config.train.keep) as checkpoints:
        checkpoint.save(checkpoints, 0, state, batches.get_state())
    return config


def export_run(workdir: epath.PathLike, out: str | Path, step: int | None = None, **how: Any) -> tuple[int, list[Path]]:
    """Writes the model of a run, and its tokenizer, as a released checkpoint; see `export`. Returns step and files.

    Raises:
      ConfigError, CheckpointError: as `load_config`, `checkpoint.restore` and `export`.
    """
    config = load_config(workdir)
    _, params, bias = model_def(config.model)
    restored = checkpoint.restore(workdir, {"params": params, "router_bias": bias}, step=step, partial=True)
    extra, source = token_ids(make_tokenizer(config.data, workdir)), None
    if config.data.tokenizer != "byte":
        source = epath.Path(workdir) / "tokenizer.json" if config.data.tokenizer == "bpe" else config.data.tokenizer
    files = export(out, config.model, **restored.state, extra=extra, **how)
    if source is not None and runtime.is_main():
        copy_tokenizer(epath.Path(source), Path(out))
    return restored.step, files


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The fields of config.json that name special tokens."""
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}


def copy_tokenizer(source: epath.Path, directory: Path) -> None:
    """The files of a tokenizer, which is one file or a directory."""
    names = TOKENIZER_FILES if source.is_dir() else (source.name,)
    for name in names:
        path = source / name if source.is_dir() else source
        if path.exists():
            (directory / name).write_bytes(path.read_bytes())
