"""Trains with pictures and measures what was read from them, for the figures of docs/results.md.

  python -m benchmarks.vision --config=configs/vision.py:scale=small --label=joint
  python -m benchmarks.vision --config=configs/vision.py:scale=small --label=text --text_only
  python -m benchmarks.vision --config=configs/vision.py:scale=small --label=blind --config.images.blind=true

--text_only drops the rows with pictures and the tower: the same rows of text in the same order, nothing else. Every
--every steps it prints the held-out loss of text and the suite of `trillium_moe.evals.vision`. Nothing is saved.
"""

import json
import sys
import time
from dataclasses import replace

from absl.flags import DEFINE_bool, DEFINE_float, DEFINE_integer, DEFINE_string

from experiments.common import command, config_of, define_config


def define(flags):
    define_config(flags)
    DEFINE_string("label", "run", "name of the run in what is printed", flag_values=flags)
    DEFINE_bool("text_only", False, "the text rows alone, without vision", flag_values=flags)
    DEFINE_integer("every", 250, "steps between evaluations", lower_bound=1, flag_values=flags)
    DEFINE_integer("batches", 8, "held-out batches of text", lower_bound=1, flag_values=flags)
    DEFINE_float("seconds", 0.0, "stop after so long, whatever train.steps says; 0: never", flag_values=flags)


def text_only(config):
    """The config without pictures: as many rows of text a step, and no tower."""
    rows = config.data.batch_size
    text_rows = rows - int(rows * config.images.share)
    return replace(config, model=replace(config.model, vision=replace(config.model.vision, n_layers=0)),
                   data=replace(config.data, batch_size=text_rows), images=replace(config.images, share=0.0))


def run(flags):
    import jax

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.data.tokenizer import make_tokenizer
    from trillium_moe.evals import vision
    from trillium_moe.evals.heldout import heldout
    from trillium_moe.train.state import init_state
    from trillium_moe.train.step import make_eval_step, make_train_step

    config, began = config_of(flags), time.perf_counter()
    config = text_only(config) if flags.text_only else config
    tokenizer = make_tokenizer(config.data)
    batches = make_pipeline(config, "train", tokenizer=tokenizer)
    held = make_pipeline(config, "heldout", tokenizer=tokenizer, threads=0)
    step, eval_step = make_train_step(config), make_eval_step(config)
    suite = None if flags.text_only else vision.Suite(config, tokenizer)
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    state = jax.jit(lambda: init_state(config), compiler_options=options)()

    def say(text):
        print(f"[{flags.label} {time.perf_counter() - began:6.1f}s] {text}", flush=True)

    def evaluate(number, loss):
        out = {"step": number, "train_loss": float(loss)}
        out |= heldout(eval_step, state.params, state.router_bias, iter(held), tokenizer.token_bytes, flags.batches)
        say(json.dumps(out))
        if suite:
            scores = suite(state.params, state.router_bias)
            for line in vision.table(scores):
                say(line)
            out |= vision.as_metrics(scores)
        return out

    result = {}
    for number, batch in enumerate(iter(batches), 1):
        state, metrics = step(state, batch)
        late = flags.seconds and time.perf_counter() - began > flags.seconds
        if number <= 2 or number % 50 == 0:
            say(f"step {number} loss {float(metrics['train/loss']):.4f}")
        if number % flags.every == 0 or number == config.train.steps or late:
            result = evaluate(number, metrics["train/loss"])
        if number == config.train.steps or late:
            break
    say(json.dumps({"label": flags.label, "compilations": step._cache_size(), **result}))
    return {"label": flags.label, **result}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))
