"""One optimizer step: gradients over micro-batches, Muon/AdamW, QK-Clip, the next router bias. One jitted program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trillium_moe.config import Config, ModelConfig
from trillium_moe.evals.churn import PROBE
from trillium_moe.model.context import Context
from trillium_moe.model.router import next_bias
from trillium_moe.model.vision import images_of
from trillium_moe.optim.qk_clip import qk_clip
from trillium_moe.parallel import sharding
from trillium_moe.parallel.expert import reduce_stats
from trillium_moe.shapes import Array, Int, PyTree
from trillium_moe.train.load import load_metrics
from trillium_moe.train.loss import loss_sum, nll_sum
from trillium_moe.train.schedule import make_schedule
from trillium_moe.train.state import TrainState, abstract_state, model_def, optimizer

Batch = dict[str, Array]

# How aux of micro-batches combines, by the name of the entry: the rest adds up, and means are divided at the end.
REDUCE = {"max_logit": jnp.maximum, "log_decay_min": jnp.minimum}
MEANS = ("log_decay_mean", "attn_res", "aux_loss")


def by_name(f: Callable, *trees: PyTree) -> PyTree:
    """Maps f(name of the innermost dict key, *leaves) over aux trees."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: f(path[-1].key, *leaves), *trees)


def value_and_grad(config: ModelConfig, n_micro: int) -> Callable:
    """f(params, router_bias, batch) -> ((nats per token, aux), gradients), summed over n_micro parts of the batch.

    Both are means over the weighted tokens of the whole batch, so that n_micro changes rounding only.
    """
    graphdef = model_def(config)[0]

    def objective(params, bias, batch, total):
        total_loss, (nll, aux) = loss_sum(nnx.merge(graphdef, params, bias), batch, 1 / n_micro)
        return total_loss / total, (nll / total, aux)

    gradient = jax.grad(objective, has_aux=True)

    def run(params: nnx.State, bias: nnx.State, batch: Batch):
        total = jnp.maximum(batch["weights"].sum(), 1)
        if n_micro == 1:
            grads, (nll, aux) = gradient(params, bias, batch, total)
            return (nll, reduce_stats(aux)), grads
        split = lambda x: x.reshape(n_micro, -1, *x.shape[1:])
        spec = P(None, *sharding.batch_spec())  # every part over all devices: only token ids move
        parts = jax.tree.map(lambda x: sharding.constrain(split(x), spec), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradient, params, bias, first, total)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        start = {jnp.maximum: -jnp.inf, jnp.minimum: jnp.inf}
        grads, (nll, aux) = zeros
        aux = by_name(lambda name, a: a + start[REDUCE[name]] if name in REDUCE else a, aux)

        def body(carry, part):
            grads, nll, aux = carry
            new_grads, (new_nll, new_aux) = gradient(params, bias, part, total)
            aux = by_name(lambda name, a, b: REDUCE.get(name, jnp.add)(a, b), aux, new_aux)
            return (jax.tree.map(jnp.add, grads, new_grads), nll + new_nll, aux), None

        grads = sharding.stored(grads)
        (grads, nll, aux), _ = jax.lax.scan(body, (grads, nll, aux), parts)
        aux = by_name(lambda name, a: a / n_micro if name in MEANS else a, aux)
        return (nll, reduce_stats(aux)), grads

    return run


def balance(config: ModelConfig, router_bias: nnx.State, aux: dict) -> nnx.State:
    """The router bias of the next step."""
    def update(path, bias):
        stats = aux["mtp"]["moe"] if path[0] == "mtp" else aux["moe"]
        return bias.replace(next_bias(config.moe, bias[...], stats))

    return nnx.from_flat_state([(path, update(path, v)) for path, v in nnx.to_flat_state(router_bias)])


def clip_logits(config: Config, params: nnx.State, aux: dict) -> nnx.State:
    """QK-Clip on every MLA layer."""
    tau, nope_dim = config.optim.qk_clip, config.model.mla.nope_dim
    for tree, own in ((params, aux), (params.get("mtp", {}), aux.get("mtp", {}))):
        if tau and "mla" in own:
            tree["mla"] = qk_clip(tree["mla"], own["mla"]["max_logit"], tau, nope_dim)
    return params


def summarise(config: ModelConfig, aux: dict, router_bias: nnx.State, n_tokens: Int[Array, ""]) -> dict[str, Array]:
    """Router, decay and attention statistics of a step as flat metrics."""
    out = {}
    if "moe" in aux:
        load, bias = aux["moe"]["load"], router_bias["moe"]["bias"][...]
        q = n_tokens * config.moe.k / config.moe.n_experts
        floor = jnp.sqrt(2 * jnp.log(config.moe.n_experts) / q)
        out |= load_metrics(load, bias, jax.sharding.get_abstract_mesh().shape.get("expert", 1), floor)
        out["router/load_LE"], out["router/bias_LE"] = load, bias
        if "dropped" in aux["moe"]:
            out["router/dropped"] = aux["moe"]["dropped"].sum()
        if "aux_loss" in aux["moe"]:
            out["router/aux_loss"] = aux["moe"]["aux_loss"].mean()
    if "kda" in aux:
        out["kda/min_log_decay"] = aux["kda"]["log_decay_min"].min()
        out["kda/log_decay_LHK"] = aux["kda"]["log_decay_mean"]
    if "mla" in aux:
        out["mla/max_logit"] = aux["mla"]["max_logit"].max()
    if "attn_res" in aux:
        out["attn_res/weights_SN"] = aux["attn_res"]
    return out


def make_train_step(
    config: Config, mesh: Mesh | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """The jitted step. The state is donated; metrics stay on the device until somebody reads them.

    Args:
      mesh: of a run over several devices; the state then comes and goes as `state_shardings` says, and every device
        (hence every process) holds the metrics. None: whatever device the arguments are on.
    """
    tx, schedule = optimizer(config), make_schedule(config.optim, config.train.steps)
    gradients = value_and_grad(config.model, config.train.micro_batches)

    placed = {}
    if mesh is not None:
        placed = {"out_shardings": (sharding.state_shardings(abstract_state(config), mesh), NamedSharding(mesh, P()))}

    @functools.partial(jax.jit, donate_argnums=0, **placed)
    @in_mesh(mesh)
    def train_step(state: TrainState, batch: Batch):
        (nll, aux), grads = gradients(state.params, state.router_bias, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = clip_logits(config, optax.apply_updates(state.params, updates), aux)
        metrics = {
            "train/loss": nll,
            "train/grad_norm": optax.global_norm(grads),
            "optim/lr": jnp.asarray(schedule(state.step)),
            "data/tokens": batch["weights"].sum(),
            **summarise(config.model, aux, state.router_bias, (batch["segment_ids"] > 0).sum()),
        }
        if "features" in batch:
            metrics["data/image_tokens"] = (batch["features"] > 0).sum()
        bias = balance(config.model, state.router_bias, aux)
        return replace(state, step=state.step + 1, params=params, router_bias=bias, opt_state=opt_state), metrics

    return train_step


def in_mesh(mesh: Mesh | None) -> Callable[[Callable], Callable]:
    """Decorates a function to be jitted: it is traced with the mesh in context, whoever calls it."""
    def decorate(f):
        @functools.wraps(f)
        def run(*args):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return f(*args)

        return run if mesh is not None else f

    return decorate


def make_eval_step(
    config: Config, mesh: Mesh | None = None
) -> Callable[[nnx.State, nnx.State, Batch], dict[str, Array]]:
    """f(params, router_bias, batch) -> {"nll": summed nats, "weight": summed weights}, jitted. Nothing is updated.

    With routed experts it also gives "experts" [L, PROBE, k], those of the batch's first tokens, for `evals.churn`.
    """
    recording = replace(config.model, moe=replace(config.model.moe, record=PROBE))
    graphdef = model_def(recording)[0]
    placed = {} if mesh is None else {"out_shardings": NamedSharding(mesh, P())}

    @functools.partial(jax.jit, **placed)
    @in_mesh(mesh)
    def eval_step(params: nnx.State, router_bias: nnx.State, batch: Batch):
        model = nnx.merge(graphdef, params, router_bias)
        h, aux = model.hidden(batch["tokens"], Context(batch["segment_ids"]), images_of(batch))
        nll = nll_sum(model, h, batch["targets"], batch["weights"])
        out = {"nll": nll, "weight": batch["weights"].sum()}
        if "experts" in aux.get("moe", {}):
            out["experts"] = aux["moe"]["experts"]
        return out

    return eval_step
