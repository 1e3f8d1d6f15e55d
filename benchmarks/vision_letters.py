"""What varied text is worth: letters in fonts that were never seen, read by a tower alone.

  python -m benchmarks.vision_letters --text=varied --seconds=240
  python -m benchmarks.vision_letters --text=plain --seconds=240

The tower of the config (tiny by default) with a linear classifier on its one feature, a letter a picture of 28 x 28
pixels, every picture new: its accuracy in training is that on unseen pictures. --text says how training letters are
made: `varied`, as `trillium_moe.data.picture_text` makes them for the tasks letters, words and lines, or `plain`, set
by Pillow in the training fonts. 1,024 test letters are set by Pillow in the held-out fonts. The schedule is laid over
the time.
"""

import sys
import time

from absl.flags import DEFINE_enum, DEFINE_float, DEFINE_integer

from experiments.common import command, config_of, define_config

BATCH = 128


def define(flags):
    define_config(flags)
    own = {"flag_values": flags}
    DEFINE_enum("text", "varied", ["varied", "plain"], "training letters", **own)
    DEFINE_float("seconds", 240, "of training, drawing included", lower_bound=1, **own)
    DEFINE_integer("every", 200, "steps between lines", lower_bound=1, **own)


def draw(rng, fonts, text, held):
    """(patches, number of the letter)."""
    import numpy as np

    from trillium_moe.data.images import patches_of
    from trillium_moe.data.picture_text import some_letters, varied, written

    while True:
        letter = some_letters(rng, 1, 1)
        if held or text == "plain":
            image = written(rng, [letter], fonts.draw(rng, held, 14, 20))
        else:
            image = varied(rng, [letter], fonts, 13, 21)
        if image.size == (28, 28):
            return patches_of(np.asarray(image)[None]), ord(letter) - ord("a")


def run(flags):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from trillium_moe.data.images import places_of
    from trillium_moe.data.picture_text import Fonts
    from trillium_moe.model.params import normal, param
    from trillium_moe.model.vision import Vision
    from trillium_moe.optim import make_optimizer
    from trillium_moe.train.loss import cross_entropy

    config = config_of(flags)
    model, fonts = config.model, Fonts(config.images.fonts)
    place = jnp.asarray(np.repeat(places_of(1, 2, 2)[None], BATCH, 0))

    class Reader(nnx.Module):
        def __init__(self, rngs):
            self.vision = Vision(model, rngs=rngs)
            self.head = param(rngs, (model.d_model, 26), ("embed", "vocab"), jnp.float32, normal(0.1), decay=True)

        def __call__(self, patches):  # features begin as large as embeddings
            return self.vision(patches, place)[:, 0] / model.init_std @ self.head[...]

    graphdef, params = nnx.split(Reader(nnx.Rngs(params=jax.random.key(config.seed))), nnx.Param)
    tx = make_optimizer(config.optim, 1000, params)
    opt = tx.init(params)

    def loss(params, patches, letters):
        logits = nnx.merge(graphdef, params)(patches)
        return cross_entropy(logits, letters).mean(), (logits.argmax(-1) == letters).mean()

    @jax.jit
    def step(params, opt, patches, letters):
        (_, right), grads = jax.value_and_grad(loss, has_aux=True)(params, patches, letters)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, right

    test = jax.jit(lambda *args: loss(*args)[1])

    def batch(rng, held):
        drawn = [draw(rng, fonts, flags.text, held) for _ in range(BATCH)]
        return np.stack([patches for patches, _ in drawn]), np.array([letter for _, letter in drawn], np.int32)

    held_rng, rng = np.random.default_rng(9), np.random.default_rng(config.seed)
    tests = [batch(held_rng, True) for _ in range(8)]
    began, number, rights, result = None, 0, [], {}
    while not result:
        drawn = batch(rng, False)
        began = began or time.perf_counter()
        at = jnp.int32(min(999, 1000 * (time.perf_counter() - began) / flags.seconds))
        opt = opt | {"learning_rate": opt["learning_rate"]._replace(count=at)}
        params, opt, right = step(params, opt, *drawn)
        number, rights = number + 1, [*rights[1 - flags.every :], float(right)]
        last = time.perf_counter() - began > flags.seconds
        if last or number % flags.every == 0:
            found = {"letters": number * BATCH, "training fonts": float(np.mean(rights)),
                     "unseen fonts": float(np.mean([float(test(params, *t)) for t in tests]))}
            print(f"{time.perf_counter() - began:5.0f}s", *(f"{k} {v:,.4g}" for k, v in found.items()), flush=True)
            result = found if last else {}
    return result


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run, config="configs/vision.py:scale=tiny"))
