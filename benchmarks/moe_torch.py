"""The rival of benchmarks.moe: torch._grouped_mm in a process of its own, which takes one sample whenever it is asked.

Its tensors stay on the card beside ours, so that both sides are measured in turn: a card at its power limit slows down
within seconds, and whoever is measured after a pause looks faster.
"""

import functools
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

PRODUCTS = ("forward", "dgrad", "wgrad")


def group_sizes(G: int, M: int) -> np.ndarray:
    return (8 * np.random.default_rng(0).multinomial(M // 8, np.full(G, 1 / G))).astype(np.int32)


def sample_ms(call: Callable, wait: Callable, repeats: int = 8) -> float:
    """Of one of `repeats` calls in a row; both sides are timed like this, as hard on the card's power limit."""
    start = time.perf_counter()
    for _ in range(repeats):
        last = call()
    wait(last)
    return (time.perf_counter() - start) / repeats * 1e3


class Torch:
    """The process. `why` says why there is none; `names` what it can be asked for."""

    def __init__(self, what: str, *shape: int):
        self.why, self.names, self.process = "", [], None
        if importlib.util.find_spec("torch") is None:
            self.why = "not run: torch cannot be imported"
            return
        command = [sys.executable, "-m", "benchmarks.moe_torch", what, *map(str, shape)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.names = self._answer() or []

    def _answer(self):
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.why = "failed: " + (self.process.stderr.read().strip().splitlines() or ["no message"])[-1]

    def sample(self, name: str) -> float | None:
        """Milliseconds, or None: see `why`."""
        if self.why:
            return None
        print(name, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        if self.process:
            self.process.stdin.close()
            self.process.wait()


def products(G: int, M: int, K: int, N: int) -> dict[str, Callable]:
    import torch

    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, d, w = normal(M, K), normal(M, N), normal(G, K, N) * K**-0.5
    offs = torch.tensor(np.cumsum(group_sizes(G, M)), device="cuda", dtype=torch.int32)
    return {
        "forward": lambda: torch._grouped_mm(x, w, offs=offs),
        "dgrad": lambda: torch._grouped_mm(d, w.transpose(1, 2), offs=offs),
        "wgrad": lambda: torch._grouped_mm(x.t(), d, offs=offs),
    }


def ffn(G: int, M: int, D: int, F: int) -> dict[str, Callable]:
    """Two products with the activation between them, by torch.compile: one kernel that reads and writes it once."""
    import torch

    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, d_y = normal(M, D), normal(M, D)
    w_in, w_out, p = normal(G, D, 2 * F) * D**-0.5, normal(G, F, D) * F**-0.5, torch.rand(M, 1, device="cuda")
    offs = torch.tensor(np.cumsum(group_sizes(G, M)), device="cuda", dtype=torch.int32)
    inputs = [t.requires_grad_() for t in (x, p, w_in, w_out)]

    def activation(h, p):
        gate, up = h.float().chunk(2, -1)
        return (p * 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)).bfloat16()

    def op(act):
        return torch._grouped_mm(act(torch._grouped_mm(x, w_in, offs=offs), p), w_out, offs=offs)

    def without_graph(act):
        with torch.no_grad():
            return op(act)

    calls = {}
    for how, act in (("", torch.compile(activation)), (" eager", activation)):
        calls["forward" + how] = functools.partial(without_graph, act)
        calls["forward+backward" + how] = lambda act=act: torch.autograd.grad(op(act), inputs, d_y)
    return calls


def main() -> None:
    import torch

    what, *shape = sys.argv[1:]
    calls = {"product": products, "ffn": ffn}[what](*map(int, shape))
    wait = lambda _: torch.cuda.synchronize()
    for call in calls.values():
        wait(call())
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        print(json.dumps(sample_ms(calls[line.strip()], wait)), flush=True)


if __name__ == "__main__":
    main()
