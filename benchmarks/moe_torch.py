"""The rival of benchmarks.moe: torch._grouped_mm in a process of its own, which takes one sample whenever it is asked.

Its tensors stay on the card beside ours, so that both sides are measured in turn: a card at its power limit slows down
within seconds, and whoever is measured after a pause looks faster.
"""

import contextlib
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
    """The process, for all of a run: it imports torch while ours compile, so that no pause lets the card cool."""

    def __init__(self):
        self.why, self.names, self.process = "not run: torch cannot be imported", [], None
        if importlib.util.find_spec("torch"):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.process = subprocess.Popen([sys.executable, "-m", "benchmarks.moe_torch"], text=True, **pipes)

    def _ask(self, *question):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)
        if line := self.process.stdout.readline():
            return json.loads(line)
        return "failed: " + (self.process.stderr.read().strip().splitlines() or ["its process ended"])[-1]

    def start(self, what: str, *shape: int) -> None:
        """Makes the operands of "product" or "ffn" and calls everything once; `names` says what can be sampled."""
        if self.process:
            answer = self._ask(what, *shape)
            self.names, self.why = ([], answer) if isinstance(answer, str) else (answer, "")

    def sample(self, name: str) -> float:
        """Milliseconds."""
        return self._ask("sample", name)

    def stop(self) -> None:
        """Gives the operands' memory back."""
        if self.process:
            self._ask("stop")


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

    wait = lambda _: torch.cuda.synchronize()
    calls = {}
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer = None
        if what == "sample":
            answer = sample_ms(calls[arguments[0]], wait)
        elif what == "stop":
            calls.clear()
            torch.cuda.empty_cache()
        else:
            try:
                calls = {"product": products, "ffn": ffn}[what](*arguments)
                for call in calls.values():
                    wait(call())
                answer = list(calls)
            except Exception as error:  # this shape's, say of memory: the next one may do
                answer = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
