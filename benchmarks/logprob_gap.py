"""Log-probabilities of sampled tokens: as sampled from the cache, against the forward pass of training.

  python -m benchmarks.logprob_gap --workdir=runs/a,runs/b [--requests=16 --tokens=128] [--mixers=float32] [--exact]

Both in the run's own dtypes, or with activations in --compute, or with KDA and MLA inside in --mixers. What differs is
the order of sums and, in bfloat16, where it rounds. Quantised experts (model.moe.quantise) pass differences on
enlarged: benchmarks/gap_causes.py. --exact samples from training's own forward pass (trillium_moe/infer/exact.py).
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.engine import EngineConfig
from trillium_moe.infer.exact import make_engine
from trillium_moe.infer.generate import load_model
from trillium_moe.infer.sampling import Sampling
from trillium_moe.train.state import model_def

PROMPT = "def main(arguments):\n    "


def gap(workdir: str, n: int, tokens: int, compute: str = "", mixers: str = "", exact: bool = False) -> np.ndarray:
    """|sampled - trained| log-probability of every sampled token."""
    model = load_model(workdir)
    config = model.config.model
    if compute:
        config = dataclasses.replace(config, dtypes=dataclasses.replace(config.dtypes, compute=compute))
    if mixers:
        inside = lambda c: dataclasses.replace(c, compute=mixers)
        config = dataclasses.replace(config, kda=inside(config.kda), mla=inside(config.mla))
    prompt = model.tokenizer.encode(PROMPT).tolist()
    length = -(-(len(prompt) + tokens) // 64) * 64
    sizes = EngineConfig(slots=n, capacity=length, exact=exact)
    batcher = Batcher(make_engine(config, model.params, model.router_bias, sizes))
    requests = [batcher.submit(Request(prompt, tokens, Sampling(1.0, seed=i))) for i in range(n)]
    batcher.run()
    graphdef = model_def(config)[0]

    @jax.jit
    def forward(params, bias, tokens_BT):
        logits, _ = nnx.merge(graphdef, params, bias)(tokens_BT)
        return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens_BT[:, 1:, None], axis=-1)[..., 0]

    text = np.zeros((n, length), np.int32)
    for row, request in zip(text, requests):
        row[: len(prompt) + tokens] = [*prompt, *request.tokens]
    trained = np.asarray(forward(model.params, model.router_bias, text))[:, len(prompt) - 1 :][:, :tokens]
    return np.abs(trained - np.array([request.logprobs for request in requests]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, help="run directories, comma separated")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--compute", default="", help="bfloat16 or float32, instead of the run's own activations")
    parser.add_argument("--mixers", default="", help="float32: model.kda.compute and model.mla.compute")
    parser.add_argument("--exact", action="store_true", help="sample from training's own forward pass")
    args = parser.parse_args()
    for workdir in args.workdir.split(","):
        found = gap(workdir, args.requests, args.tokens, args.compute, args.mixers, args.exact)
        print(f"{workdir}: {found.size} tokens, |difference| mean {found.mean():.2e}, 99th percentile "
              f"{np.quantile(found, 0.99):.2e}, largest {found.max():.2e} nats", flush=True)


if __name__ == "__main__":
    main()
