"""Speculative decoding of a trained model against plain decoding: python -m benchmarks.speculative --workdir=runs/mtp

The model needs a multi-token-prediction layer: train one with --config.model.n_mtp=1. Prompts are held-out text; both
engines get the same requests and must give the same tokens.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time

import jax

from trillium_moe.data.pipeline import make_source
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.generate import load_model
from trillium_moe.infer.sampling import Sampling


def measure(model, config, speculate: bool, prompts, n_tokens: int, temperature: float, repeats: int):
    sizes = EngineConfig(len(prompts), len(prompts[0]) + n_tokens, chunks=(64,), steps=8, speculate=speculate)
    engine = Engine(config, model.params, model.router_bias, sizes)
    seconds, out = [], None
    for _ in range(repeats + 1):
        slots = [engine.open() for _ in prompts]
        engine.proposed = engine.accepted = 0
        for slot, prompt in zip(slots, prompts):
            engine.extend(slot, prompt)
            engine.start(slot, n_tokens, Sampling(temperature, seed=slot))
        jax.block_until_ready(engine.cache)
        out, start = [[] for _ in prompts], time.perf_counter()
        while engine.running:
            tokens = engine.decode().tokens
            for i, slot in enumerate(slots):
                out[i] += tokens[slot][tokens[slot] >= 0].tolist()
        seconds.append(time.perf_counter() - start)
        for slot in slots:
            engine.close(slot)
    rate = sum(map(len, out)) / statistics.median(seconds[1:])
    return out, rate, engine.accepted / max(engine.proposed, 1)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compute", default="", help="dtype to serve in; by default that of the run")
    args = parser.parse_args(argv)
    model = load_model(args.workdir)
    config = model.config
    served = config.model
    if args.compute:
        served = dataclasses.replace(served, dtypes=dataclasses.replace(served.dtypes, compute=args.compute))
    texts = make_source(config.data).split(config.data.heldout)[1]
    for n in args.sequences:
        prompts = [model.tokenizer.encode(texts[i])[:64].tolist() for i in range(n)]
        prompts = [p for p in prompts if len(p) == 64]
        for temperature in args.temperatures:
            run = (prompts, args.tokens, temperature, args.repeats)
            a, slow, _ = measure(model, served, False, *run)
            b, fast, accepted = measure(model, served, True, *run)
            row = {"sequences": len(prompts), "compute": served.dtypes.compute, "temperature": temperature,
                   "same_tokens": a == b, "accepted": round(accepted, 3), "tokens_per_s": round(slow, 1),
                   "speculative_tokens_per_s": round(fast, 1), "speed_up": round(fast / slow, 2)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
