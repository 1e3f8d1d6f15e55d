"""Host memory of an import at the released dimensions: python -m benchmarks.import_memory [--shard_gb=16] [--hosts=8]

Writes a checkpoint of one KDA and one MLA layer with the released widths, the second with 896 MXFP4 experts, as sparse
files (a few tensors hold random numbers, the rest zeros, which take no disk), imports it with experts kept packed, and
compares the growth of this process's peak resident memory with the largest shard. On a GPU parameters are not in it; on
a CPU they are, so --hosts=8 does what one of eight hosts does that share the experts, and counts its parameters apart.
"""

import argparse
import dataclasses
import json
import resource
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from configs import scales
from trillium_moe.config import DtypeConfig, MeshConfig
from trillium_moe.interop import configs, hf, layout
from trillium_moe.interop.export import plan
from trillium_moe.interop.safetensors import DTYPES, INDEX, header_bytes, index_of, shard_names, split
from trillium_moe.parallel.mesh import make_mesh


def released_layers(vocab_size: int):
    """Two layers of the released model: KDA with a dense FFN, MLA with the mixture."""
    return dataclasses.replace(scales.trillium_2t8(), n_layers=2, mla_layers=(1,), vocab_size=vocab_size)


def write_sparse(directory: Path, config, shard_bytes: int, every: int) -> dict[str, np.ndarray]:
    """The checkpoint; of every so many tensors one has random contents, which are returned."""
    directory.mkdir()
    raw = configs.describe(config, layout.K3, mxfp4=True)
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = [t for s in layout.tensors(config, layout.K3) for t in plan(s, "BF16", True)]
    shards = split(tensors, shard_bytes)
    (directory / INDEX).write_text(json.dumps(index_of(shards)))
    rng, filled, i = np.random.default_rng(0), {}, 0
    for name, shard in zip(shard_names(len(shards)), shards):
        head = header_bytes(shard)
        with (directory / name).open("wb") as file:
            file.write(head)
            at = len(head)
            for tensor in shard:
                i += 1
                if i % every == 0 and "A_log" not in tensor.name:
                    value = rng.integers(0, 100, tensor.shape, np.uint8)
                    value = value if tensor.dtype == "U8" else value.astype(DTYPES[tensor.dtype])
                    filled[tensor.name] = value
                    file.seek(at)
                    file.write(value.tobytes())
                at += tensor.nbytes
            file.truncate(at)
    return filled


def check(filled: dict[str, np.ndarray], config, model) -> int:
    """How many of the filled tensors arrived; raises if one is wrong."""
    seen = 0
    for stored in layout.tensors(config, layout.K3):
        for part in stored.parts:
            if stored.routed:
                for name, suffix in (("codes", "packed"), ("scales", "scale")):
                    value = filled.get(f"{stored.name}_{suffix}")
                    if value is not None:
                        got = np.asarray(getattr(model.moe, f"{part.path[-1]}_{name}")[part.at])
                        np.testing.assert_array_equal(got if name == "codes" else got.T, value)
                        seen += 1
            elif stored.name in filled:
                owner = model
                for key in part.path[:-1]:
                    owner = getattr(owner, key)
                value = filled[stored.name].reshape(part.view)
                value = (value[part.take] if part.take else value).transpose(part.perm)
                np.testing.assert_array_equal(np.asarray(getattr(owner, part.path[-1])[part.at]), value)
                seen += 1
    return seen


def one_host(path: Path, dtypes: DtypeConfig, hosts: int) -> list[jax.Array]:
    """What the first of several hosts, of one device each, fills of a mesh that cuts the experts."""
    mesh = make_mesh(MeshConfig(data=1, expert=hosts))
    config, _, sources = hf.open_checkpoint(path, dtypes, "mxfp4")
    mine = mesh.devices.reshape(-1)[:1]
    place = {at: hf.Placed(p, p.dtype, mesh, mine) for at, p in layout.parameters(config).items()}
    for source in sources:
        hf.fill(place, source)
    return [x for p in place.values() for x in p.buffers.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard_gb", type=float, default=16, help="size of a shard")
    parser.add_argument("--vocab", type=int, default=163_840)
    parser.add_argument("--hosts", type=int, default=1, help="needs that many devices, real or simulated")
    parser.add_argument("--dir", default=None, help="where to put the sparse files")
    args = parser.parse_args()
    config = released_layers(args.vocab)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        path = Path(directory) / "checkpoint"
        filled = write_sparse(path, config, int(args.shard_gb * 1e9), every=97)
        files = [f.stat().st_size for f in path.glob("*.safetensors")]
        print(f"{len(files)} shards, the largest {max(files) / 1e9:.2f} GB, {sum(files) / 1e9:.2f} GB", flush=True)
        jax.block_until_ready(jax.numpy.zeros(1))
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before, began = peak(), time.perf_counter()
        dtypes = DtypeConfig(param="bfloat16")
        if args.hosts == 1:
            loaded, model = hf.load(path, dtypes, experts_format="mxfp4")
            own = jax.tree.leaves(model)
        else:
            own = jax.tree.leaves(one_host(path, dtypes, args.hosts))
        jax.block_until_ready(own)
        seconds, grown = time.perf_counter() - began, peak() - before
        held = sum(x.nbytes for x in own)
        print(f"import: {seconds:.1f} s, {held / 1e9:.2f} GB of parameters; peak resident memory grew by "
              f"{grown / 1e9:.2f} GB, {grown / max(files):.3f} of the largest shard", flush=True)
        if args.hosts > 1:
            return
        print(f"{check(filled, loaded, model)} of {len(filled)} filled tensors arrived bit for bit", flush=True)


if __name__ == "__main__":
    main()
