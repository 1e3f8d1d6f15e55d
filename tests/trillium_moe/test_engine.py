"""Slots, batching and prefixes: a sequence's tokens are its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import random_variables
from tests.trillium_moe.test_cache import close, config
from trillium_moe.config import ConfigError, KDAConfig
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.sampling import Sampling

# the recurrence compiles in a fraction of the time of its chunked form, which test_cache checks
CONFIG = config(n_layers=2, vocab_size=272, kda=KDAConfig(n_heads=2, head_dim=8, implementation="reference"))
SIZES = EngineConfig(slots=3, capacity=128, chunks=(8,), steps=4, prefix_block=8)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 40, n).tolist() for n in (1, 9, 20, 13, 30, 2, 17)]


@functools.cache
def variables():
    return random_variables(CONFIG, std=0.3, noise=0.1)


def engine(**kw):
    return Engine(CONFIG, *variables()[1:], EngineConfig(**{**vars(SIZES), **kw}))


@functools.cache
def forward():
    graphdef = variables()[0]
    return jax.jit(lambda t: jax.nn.log_softmax(nnx.merge(graphdef, *variables()[1:])(t)[0][0]))


def full(tokens):
    """Log-probabilities of every next token by one forward over all tokens, as training runs it."""
    padded = np.zeros(64, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(forward()(jnp.asarray(padded)[None]))[: len(tokens)]


def settings(i):
    return Sampling(**[{"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 5}, {"top_p": 0.7}][i % 4], seed=i)


def requests():
    return [Request(p, 5 + 3 * i, settings(i), stops=(7, 11)) for i, p in enumerate(PROMPTS)]


@functools.cache
def alone():
    """Every request in an engine that serves nothing else, in the slot that `open` gives."""
    e, out = engine(), []
    for request in requests():
        b = Batcher(e)
        b.submit(request)
        b.run()
        out.append(request)
    return out


def test_greedy_tokens_and_all_logprobs_are_the_full_forwards():
    for request in alone():
        text = [*request.prompt, *request.tokens]
        logp = full(text[:-1])[len(request.prompt) - 1 :]
        if request.sampling.temperature == 0:
            assert request.tokens == logp.argmax(-1).tolist()
        close(request.logprobs, logp[np.arange(len(logp)), request.tokens])
        ended = request.tokens[-1] in (7, 11)
        assert request.finished == ("stop" if ended else "length")
        assert ended or len(request.tokens) == request.max_tokens
        assert not set(request.tokens[:-1]) & {7, 11}


def test_company_and_order_change_no_token():
    """Seven requests over three slots, some cancelled on the way, in two orders: the tokens of each are as alone."""
    for order in (range(7), (6, 2, 4, 0, 1, 5, 3)):
        b, mine = Batcher(engine()), requests()
        for i in order:
            b.submit(mine[i])
        extra = [b.submit(Request([3] * 20, 30, Sampling(1.0, seed=9))) for _ in range(2)]
        for _ in range(3):
            b.step()
        for request in extra:
            b.cancel(request)
        b.run()
        assert [r.tokens for r in mine] == [r.tokens for r in alone()]
        assert [r.finished for r in mine] == [r.finished for r in alone()]
        assert all(r.finished == "cancelled" for r in extra)
        assert sorted(b.engine.free) == [0, 1, 2]


def test_fork_and_extend_equal_a_new_prefill():
    e, history, seen = engine(), PROMPTS[4], PROMPTS[3]
    slot = e.open()
    e.extend(slot, history)
    e.start(slot, 3, Sampling(0.0))
    said = e.decode().tokens[slot, :3].tolist()
    (fork,) = e.fork(slot, 1)
    before = e.prefilled
    e.extend(fork, seen)
    assert e.prefilled - before == len(seen)  # nothing of the history is computed again
    fresh = e.open()
    e.extend(fresh, [*history, *said, *seen])
    n = len(history) + len(said) + len(seen) - 1
    assert e.length[fork] == e.length[fresh] == n and e.length[slot] == len(history) + 2
    for x in e.cache.mla:
        close(x.values[fork, :n], x.values[fresh, :n])
    jax.tree.map(lambda x: close(x[fork], x[fresh]), e.cache.kda)
    for s in (fork, fresh):
        e.start(s, 4, Sampling(0.8, seed=1))
    out = e.decode()
    assert out.tokens[fork].tolist() == out.tokens[fresh].tolist()
    with pytest.raises(ConfigError, match="infer.slots=3: 1 forks were asked for and 0 slots are free"):
        e.fork(slot, 1)


def test_snapshots_survive_their_slot():
    e = engine()
    slot = e.open()
    e.extend(slot, PROMPTS[2])
    kept = e.snapshot(slot)
    e.start(slot, 4, Sampling(0.7, seed=3))
    first = e.decode().tokens[slot].tolist()
    e.close(slot)
    e.open(), e.extend(slot, PROMPTS[4])
    e.restore(slot, kept)
    e.start(slot, 4, Sampling(0.7, seed=3))
    assert e.decode().tokens[slot].tolist() == first


def test_scores_equal_the_full_forwards():
    text = PROMPTS[4]
    logp = full(text[:-1])
    close(engine().score(text), logp[np.arange(len(logp)), text[1:]])


def test_prefix_store_reuses_evicts_and_restores():
    size = 700  # bytes of a state and a few blocks: more than one prefix does not fit
    e = engine(prefix_bytes=1 << 20, prefix_host_bytes=1 << 20)
    system = PROMPTS[4][:17]
    texts = [[*system, *PROMPTS[i]] for i in (1, 2, 3)]
    plain = engine()

    def greedy(e, tokens):
        slot = e.open()
        before = e.prefilled
        e.extend(slot, tokens)
        e.start(slot, 4, Sampling(0.0))
        out = e.decode().tokens[slot].tolist()
        e.close(slot)
        return out, e.prefilled - before

    want = [greedy(plain, t)[0] for t in texts]
    first = [greedy(e, t) for t in texts]
    again = [greedy(e, t) for t in texts]
    assert [t for t, _ in first] == [t for t, _ in again] == want
    # the second prompt finds latents of the common blocks but no state there; the third finds both
    assert [n for _, n in first] == [len(texts[0]) - 1, len(texts[1]) - 1, len(texts[2]) - 1 - 16]
    assert [n for _, n in again] == [(len(t) - 1) % 8 for t in texts]
    device, host = e.store.usage()
    assert host == 0 and device > size

    e.store.device_bytes = device // 2  # now some entries must move to host memory, whole
    assert [greedy(e, t)[0] for t in texts] == want
    device_after, host_after = e.store.usage()
    assert device_after <= device // 2 and device_after + host_after >= device
    for entry in e.store._entries.values():
        kinds = {isinstance(x, np.ndarray) for x in jax.tree.leaves((entry.latents, entry.state))}
        assert kinds == {not entry.on_device}
    e.store.host_bytes = 0
    assert [greedy(e, t)[0] for t in texts] == want
    assert e.store.usage()[1] == 0


@pytest.mark.parametrize("good", [False, True])
def test_speculation_changes_no_token(good):
    """With a multi-token-prediction layer: the same tokens and log-probabilities, whether or not it is right."""
    c = dataclasses.replace(CONFIG, n_mtp=1)
    graphdef, params, bias = random_variables(c, std=0.3, noise=0.1)
    if good:
        # sublayers add nothing, so the next token is a function of the last one; the layer hands the next token's
        # embedding through, so it computes the same function of that
        def change(path, v):
            x = v[...] * 0 if path[-1] in ("out", "down", "up") else v[...]
            return v.replace(jnp.eye(32, 16, -16) if path[-1] == "fuse" else x)

        params = nnx.map_state(change, params)
    plain, fast = (Engine(c, params, bias, dataclasses.replace(SIZES, speculate=on)) for on in (False, True))
    made = []
    for e in (plain, fast):
        batcher = Batcher(e)
        mine = [Request(p, 5 + 3 * i, Sampling((i % 3) / 5, seed=i)) for i, p in enumerate(PROMPTS)]
        made.append([batcher.submit(r) for r in mine])
        batcher.run()
    for a, b in zip(*made):
        assert a.tokens == b.tokens and a.finished == b.finished
        close(a.logprobs, b.logprobs)
    assert fast.proposed > 20 and (fast.accepted > fast.proposed / 4 if good else fast.accepted < fast.proposed / 4)
    # the state is that of the tokens alone, whatever was tried in between
    for e in (plain, fast):
        e.slot = e.open()
        e.extend(e.slot, PROMPTS[4])
        e.start(e.slot, 8, Sampling(0.0))
        while e.running:
            e.decode()
    n = plain.length[plain.slot]
    assert n == fast.length[fast.slot] == len(PROMPTS[4]) + 7
    jax.tree.map(lambda x, y: close(x[fast.slot], y[plain.slot]), fast.cache.kda, plain.cache.kda)
    for x, y in zip(fast.cache.mla, plain.cache.mla):
        close(x.values[fast.slot, :n], y.values[plain.slot, :n])


@pytest.mark.parametrize("call, message", [
    (lambda e: e.extend(e.open(), []), "config prompt=''"),
    (lambda e: e.extend(e.open(), [272]), r"config prompt=272: token ids must lie in \[0, 272\)"),
    (lambda e: e.extend(e.open(), [1] * 129), "infer.capacity=128: 129 more tokens do not fit"),
    (lambda e: e.start(e.open(), 3), "prompt"),
    (lambda e: Batcher(e).submit(Request([1], 128)), "max_tokens=128: 1 tokens of prompt leave 127 of 128"),
    (lambda e: Batcher(e).submit(Request([1, -1], 4)), "prompt"),
])  # fmt: skip
def test_impossible_calls_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call(engine())
