"""What pictures are worth to captions of pictures that were never seen: all runs in one program.

  python -m benchmarks.captions --config=configs/vision.py:scale=small --config.images.tasks=captions,glyphs:12 \\
      --config.images.path=runs/data/captions.jsonl --seeds=3 --seconds=400

From every seed two runs begin with the same parameters and read the same rows: `joint` sees the pictures, `blind` sees
black ones. All of them are one step, `jax.vmap`ped over the runs: a small model's step is bound by the number of its
kernels, not by what they do.

Every --every steps it prints the loss of every held-out caption's bytes (with its own picture and with that of another)
and what is right of the other tasks; at the end the curves' lowest points, differences seed by seed, and the captions
that the pictures helped or harmed. With --seconds the schedule is laid over that time. Nothing is saved.
"""

import json
import queue
import sys
import threading
import time
from dataclasses import replace

from absl.flags import DEFINE_float, DEFINE_integer, DEFINE_string

from benchmarks.turns import wait_for
from experiments.common import command, config_of, define_config

ARMS = ("joint", "blind")


def define(flags):
    define_config(flags)
    own = {"flag_values": flags}
    DEFINE_integer("seeds", 1, "runs of either arm", lower_bound=1, **own)
    DEFINE_integer("every", 250, "steps between evaluations", lower_bound=1, **own)
    DEFINE_float("seconds", 0.0, "of training; 0: config.train.steps steps", lower_bound=0, **own)
    DEFINE_integer("ahead", 16, "batches of every seed that are drawn ahead", lower_bound=1, **own)
    DEFINE_string("after", "", "file to wait for before the device is used; meanwhile programs compile", **own)


def plain(model):
    """The model with implementations that take a batch of models where it names none: XLA's, and of attention the one
    by definition, as every run would add to another tile of the other's gradients (`keep_slices`)."""
    named = lambda part, **choices: replace(part, **{name: getattr(part, name) or c for name, c in choices.items()})
    return replace(model, kda=named(model.kda, implementation="xla"), mla=named(model.mla, implementation="reference"),
                   moe=named(model.moe, implementation="xla", router_implementation="xla"))


def keep_slices():
    """From now on `jax.vmap` leaves slices at an index that all runs share slices: JAX makes gathers and scatters of
    them. One warp of a GPU writes all of such a scatter, and a layer's gradients are written so: 3 s a step."""
    import jax
    from jax.interpreters import batching

    def rule(primitive, n_arrays):
        def batched(args, dims, **params):
            size = next(x.shape[dim] for x, dim in zip(args, dims) if dim is not None)
            first = lambda x, dim: (
                jax.numpy.broadcast_to(x, (size, *x.shape)) if dim is None else jax.numpy.moveaxis(x, dim, 0))
            if any(dim is not None for dim in dims[n_arrays:]):  # every run slices elsewhere: one after the other
                return jax.lax.map(lambda xs: primitive.bind(*xs, **params), tuple(map(first, args, dims))), 0
            if params:
                params = {"slice_sizes": (size, *params["slice_sizes"])}
            index = args[n_arrays:]
            index = (jax.numpy.zeros_like(index[0]), *index)
            return primitive.bind(*map(first, args[:n_arrays], dims), *index, **params), 0

        batching.primitive_batchers[primitive] = batched

    rule(jax.lax.dynamic_slice_p, 1)
    rule(jax.lax.dynamic_update_slice_p, 2)


class Stream:
    """The batches of a seed, drawn by a thread until `ahead` of them wait."""

    def __init__(self, config, tokenizer, documents, ahead):
        from trillium_moe.data.pipeline import make_pipeline

        self.waiting = queue.Queue(ahead)
        self.batches = iter(make_pipeline(config, "train", tokenizer=tokenizer, documents=documents, threads=0))
        threading.Thread(target=self._draw, daemon=True).start()

    def _draw(self):
        try:
            for batch in self.batches:
                self.waiting.put(batch)
        except Exception as error:  # of this thread; it is raised where the batch is missed
            self.waiting.put(error)

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.waiting.get()
        if isinstance(batch, Exception):
            raise batch
        return batch


class Programs:
    """What runs side by side, compiled for R of them: those of even number see, those of odd number do not."""

    def __init__(self, config, tokenizer, documents, n_seeds):
        import jax
        import jax.numpy as jnp

        from trillium_moe.data.pipeline import make_pipeline
        from trillium_moe.evals.vision import make_predict
        from trillium_moe.train.state import init_state
        from trillium_moe.train.step import make_train_step

        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        pair = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), tree)
        blinded = lambda batch_R: batch_R | {"patches": batch_R["patches"].at[1::2].set(0)}
        keep_slices()
        step, predict, vmapped = make_train_step(config), make_predict(config), jax.vmap

        def init(keys_S):
            return pair(vmapped(lambda key: init_state(config, key))(keys_S))

        def train(state_R, batch_S):
            return vmapped(step)(state_R, blinded(pair(batch_S)))

        def answers(params_R, bias_R, batch):
            every = jax.tree.map(lambda x: jnp.broadcast_to(x, (2 * n_seeds, *x.shape)), batch)
            tokens_RBT, nats_RBT = vmapped(predict)(params_R, bias_R, blinded(every))
            return jnp.moveaxis(tokens_RBT, 0, -1), jnp.moveaxis(nats_RBT, 0, -1)

        batch = next(iter(make_pipeline(config, "heldout", tokenizer=tokenizer, documents=documents, threads=0)))
        batch_S = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n_seeds, *x.shape), x.dtype), batch)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), n_seeds))
        compiled = lambda f, *args, **how: jax.jit(f, compiler_options=options, **how).lower(*args).compile()
        state = jax.eval_shape(init, keys)
        todo = {"init": (init, keys), "answers": (answers, state.params, state.router_bias, batch)}
        found = {}
        threads = [threading.Thread(target=lambda n=n, a=a: found.update({n: compiled(*a)})) for n, a in todo.items()]
        for thread in threads:
            thread.start()
        found["train"] = compiled(train, state, batch_S, donate_argnums=0)
        for thread in threads:
            thread.join()
        self.init, self.train, self.answers = found["init"], found["train"], found["answers"]


def evaluate(programs, state, config, drawer, examples, pad_id):
    """{task: (nats [R, n], right tokens [R, n], tokens [n], exact [R])}, captions also under captions_exchanged."""
    import numpy as np

    from trillium_moe.evals.vision import answers, exchanged

    out = {}
    shown = examples | {"captions_exchanged": exchanged(examples["captions"])}
    for task, members in shown.items():
        found = answers(lambda batch: programs.answers(state.params, state.router_bias, batch),
                        [drawer.encode(e) for e in members], config, pad_id)
        right = [a.predicted == a.expected[:, None] for a in found]
        out[task] = (np.stack([a.nats.sum(0) for a in found], 1), np.stack([r.sum(0) for r in right], 1),
                     np.array([len(a.expected) for a in found]), np.mean([r.all(0) for r in right], 0))
    return out


def summary(found):
    """Of one evaluation, flat: lists hold a figure for every seed."""
    out = {}
    for task, (nats, right, tokens, exact) in found.items():
        for number, arm in enumerate(ARMS):
            rounded = lambda x, number=number: [round(float(v), 4) for v in x[number::2]]
            if task.startswith("captions"):
                out[f"{arm}/{task}"] = rounded(nats.sum(1) / tokens.sum())
                out[f"{arm}/{task}_right"] = rounded(right.sum(1) / tokens.sum())
            else:
                out[f"{arm}/{task}"] = rounded(exact)
    return out


def conclude(steps, nats_ERN, tokens_N, texts):
    """Lines: each arm's lowest evaluation and its last, their differences, and the captions that pictures helped most
    and least where either arm is lowest.

    Args:
      nats_ERN: of every held-out caption, in the evaluations after `steps`.
      tokens_N: bytes of each, with its end.
    """
    import numpy as np

    loss_ER = nats_ERN.sum(-1) / tokens_N.sum()
    by_seed = lambda x: " ".join(f"{v:+.4f}" for v in x)
    runs = np.arange(loss_ER.shape[1])
    for name, at_R in (("lowest", loss_ER.argmin(0)), ("last", np.full(len(runs), len(steps) - 1))):
        loss_R, nats_RN = loss_ER[at_R, runs], nats_ERN[at_R, runs]
        apart, helped_N = loss_R[::2] - loss_R[1::2], (nats_RN[::2] - nats_RN[1::2]).mean(0)
        error = helped_N.std() * len(helped_N) ** 0.5 / tokens_N.sum()
        spread = f", deviation {apart.std(ddof=1):.4f}" if len(apart) > 1 else ""
        yield (f"{name:6} joint {loss_R[::2].mean():.4f}, blind {loss_R[1::2].mean():.4f}: {apart.mean():+.4f} "
               f"by seed {by_seed(apart)}{spread}; standard error over captions {error:.4f}, "
               f"{(helped_N < 0).mean():.0%} of them helped; after steps {' '.join(str(steps[at]) for at in at_R)}")
        if name == "lowest":
            helped, alone = helped_N, nats_RN[1::2].mean(0)
    for step, loss_R in zip(steps, loss_ER):
        yield (f"step {step:6} joint {loss_R[::2].mean():.4f}, blind {loss_R[1::2].mean():.4f}: "
               f"{by_seed(loss_R[::2] - loss_R[1::2])}")
    for i in np.argsort(helped):
        yield f"{helped[i]:+8.2f} nats, blind {alone[i]:7.2f}, {tokens_N[i]:3} tokens: {texts[i][:80]}"


def run(flags):
    config = config_of(flags)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trillium_moe.config import check
    from trillium_moe.data.pictures import Drawer
    from trillium_moe.data.pipeline import load_documents, make_source
    from trillium_moe.data.tokenizer import make_tokenizer
    from trillium_moe.evals.vision import make_suite
    from trillium_moe.train.checkpoint import NonFiniteError

    zero = time.perf_counter()

    def say(text):
        print(f"[{time.perf_counter() - zero:6.1f}s] {text}", flush=True)

    config = replace(config, model=plain(config.model))
    check("captions" in config.images.tasks, "images.tasks", config.images.tasks, "must name captions")
    tokenizer, n_seeds, steps = make_tokenizer(config.data), flags.seeds, config.train.steps
    source = make_source(config.data).split(config.data.heldout)
    train_text, held_text = (load_documents(side, tokenizer) for side in source)
    streams = [Stream(replace(config, seed=seed), tokenizer, train_text, flags.ahead) for seed in range(n_seeds)]
    drawer = Drawer(config, tokenizer)
    examples = make_suite(drawer, config.images.eval_examples)
    programs = Programs(config, tokenizer, held_text, n_seeds)
    say(f"compiled; batches drawn: {[s.waiting.qsize() for s in streams]}")
    wait_for(flags.after)
    state = programs.init(jnp.stack([jax.random.key(seed) for seed in range(n_seeds)]))
    draw = lambda: jax.device_put(jax.tree.map(lambda *x: np.stack(x), *map(next, streams)))
    began, number, curve, nats, batch, last = time.perf_counter(), 0, [], [], draw(), False
    while not last:
        if flags.seconds:  # as far along the schedule as the time, evaluations included
            at = min(steps - 1, int(steps * (time.perf_counter() - began) / flags.seconds))
            rate = state.opt_state["learning_rate"]
            rate = rate._replace(count=jnp.full_like(rate.count, at))
            state = replace(state, opt_state=state.opt_state | {"learning_rate": rate})
        state, metrics = programs.train(state, batch)
        number, batch = number + 1, draw()
        last = time.perf_counter() - began > flags.seconds if flags.seconds else number == steps
        if number <= 2 or number % 50 == 0 or last:
            losses = np.asarray(metrics["train/loss"])  # waits for the step
            if number <= 2 or number % 250 == 0 or last:
                say(f"step {number} loss joint {losses[0::2].mean():.4f} blind {losses[1::2].mean():.4f}, waiting "
                    f"batches {min(s.waiting.qsize() for s in streams)}")
            if not np.isfinite(losses).all():
                raise NonFiniteError(f"losses are {losses} at step {number}; they are read every 50 steps")
        if last or number % flags.every == 0:
            found = evaluate(programs, state, config, drawer, examples, tokenizer.pad_id)
            curve.append({"step": number} | summary(found))
            nats.append(found["captions"][0])
            say(json.dumps(curve[-1]))
    texts = [example.answer for example in examples["captions"]]
    for line in conclude([point["step"] for point in curve], np.stack(nats), found["captions"][2], texts):
        say(line)
    return {"curve": curve, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run, config="configs/vision.py:scale=small"))
