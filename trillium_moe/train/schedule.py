"""The learning rate as a function of the step."""

from dataclasses import replace

import jax.numpy as jnp
import optax

from trillium_moe.config import OptimConfig


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of each of `steps` optimizer steps, counted from 0.

    Warm-up: w = max(1, round(warmup * steps)) steps of lr * (step + 1) / (w + 1), so that step w is the first
    at the peak and no step is wasted on a rate of zero. Then
      cosine: half a cosine from lr to final_lr * lr (Kimi K3: chosen over wsd after separate searches);
      wsd: lr until the last round(decay * steps) steps, which fall linearly to final_lr * lr.
    Both reach final_lr * lr at `steps`, one past the last step, and stay there.

    A stage of a longer schedule sets config.horizon to the ladder's last step; one with a schedule of its own sets
    config.begin to its first.
    """
    if config.begin:
        later = make_schedule(replace(config, begin=0, horizon=0), (config.horizon or steps) - config.begin)
        return lambda step: later(jnp.maximum(step - config.begin, 0))
    steps = config.horizon or steps
    warmup = max(1, round(config.warmup * steps))
    rise = optax.linear_schedule(config.lr / (warmup + 1), config.lr, warmup)
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(config.lr, max(1, steps - warmup), config.final_lr)
        return optax.join_schedules([rise, fall], [warmup])
    start = max(warmup, steps - round(config.decay * steps))
    fall = optax.linear_schedule(config.lr, config.final_lr * config.lr, max(1, steps - start))
    return optax.join_schedules([rise, optax.constant_schedule(config.lr), fall], [warmup, start])
