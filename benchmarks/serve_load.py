"""Thousands of requests against the endpoint on a toy model: python -m benchmarks.serve_load --requests=10000

Requests have random lengths and settings; some clients leave before or while they are answered, some send bodies that
cannot be served. Every answer is compared with what the engine gives the same request alone: `wrong` counts answers of
another request, cut answers and bodies that were not refused as they should be. Memory is that of this process, server
and clients together.
"""

import argparse
import asyncio
import collections
import json
import resource
import sys
import threading
import time

import jax
import numpy as np

from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.data.tokenizer import ByteTokenizer, Tokenizer
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.sampling import Sampling
from trillium_moe.train.state import model_def

MALFORMED = (
    b"", b"{", b"null", b"[1, 2]", b"\xff\x00", b'{"prompt": "a", "max_tokens": 1e9}', b'{"prompt": "a", "promt": 1}',
    b'{"prompt": {}, "max_tokens": 4}', b'{"prompt": "a", "temperature": -3}', b'{"prompt": "a", "max_tokens": 99999}',
    b'{"prompt": [5, -5]}', b'{"prompt": "a", "n": 7}', b'{"prompt": "a", "stop": [""]}',
)  # fmt: skip


def malformed(i: int) -> bytes:
    """A body that must be refused."""
    return MALFORMED[i % len(MALFORMED)]


class Client:
    """Just enough of HTTP/1.1, one connection per request."""

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port

    async def connect(self):
        return await asyncio.open_connection(self.host, self.port)

    async def send(self, path: str, body: dict | bytes):
        """Sends a POST; returns (reader, writer)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def post(self, path: str, body: dict | bytes):
        """(status, JSON object), or (status, list of events) for a stream, whose end is checked."""
        reader, writer = await self.send(path, body)
        return await self._answer(reader, writer)

    async def get(self, path: str):
        reader, writer = await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
        return await self._answer(reader, writer)

    async def _answer(self, reader, writer):
        raw = await reader.read()
        writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        if b"text/event-stream" not in head:
            return status, json.loads(body) if body.startswith((b"{", b"[")) else body.decode()
        events = [e.removeprefix("data: ") for e in body.decode().split("\n\n") if e]
        assert events[-1] == "[DONE]", events[-1:]
        return status, [json.loads(e) for e in events[:-1]]


def _unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        n = int(size, 16)
        out, body = out + body[:n], body[n + 2 :]
        if n == 0:
            break
    return out


class Load:
    """Random requests, each with the answer that it must get."""

    def __init__(self, client: Client, engine: Engine, tokenizer: Tokenizer, n_texts: int, longest: int, seed: int = 0):
        self.client, self.rng = client, np.random.default_rng(seed)
        self.asks = []
        batcher = Batcher(engine)  # the server is idle yet
        for _ in range(n_texts):
            prompt = bytes(self.rng.integers(97, 123, self.rng.integers(1, longest + 1)).astype(np.uint8)).decode()
            sampling = Sampling(float(self.rng.choice([0.0, 0.8, 1.0])), int(self.rng.choice([0, 5])),
                                float(self.rng.choice([1.0, 0.9])), int(self.rng.integers(1 << 30)))
            n = int(self.rng.integers(1, longest + 1))
            request = Request(tokenizer.encode(prompt).tolist(), n, sampling, (tokenizer.eos_id,))
            batcher.submit(request)
            batcher.run()
            body = {"prompt": prompt, "max_tokens": n, "temperature": sampling.temperature, "top_k": sampling.top_k,
                    "top_p": sampling.top_p, "seed": sampling.seed, "logprobs": True}
            self.asks.append((body, request.tokens))

    async def run(self, n: int, at_once: int, every=lambda done: None) -> collections.Counter:
        """Counts of right, refused, left (the client went away) and wrong."""
        counts, numbers = collections.Counter(), iter(range(n))
        kinds = self.rng.choice(["ask", "stream", "leave", "malformed"], n, p=[0.4, 0.35, 0.15, 0.1])
        picks = self.rng.integers(len(self.asks), size=n)

        async def worker():
            for i in numbers:
                counts[await self.one(kinds[i], *self.asks[picks[i]], i)] += 1
                every(sum(counts.values()))

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return counts

    async def one(self, kind: str, body: dict, want: list[int], i: int) -> str:
        if kind == "malformed":
            status, answer = await self.client.post("/v1/completions", malformed(i))
            return "refused" if status == 400 and answer["error"]["message"] else "wrong"
        if kind == "leave":
            reader, writer = await self.client.send("/v1/completions", body | {"stream": bool(i % 2)})
            if i % 4 == 1:
                await reader.readline()
            writer.close()
            return "left"
        while True:
            status, answer = await self.client.post("/v1/completions", body | {"stream": kind == "stream"})
            if status != 429:
                break
            await asyncio.sleep(0.05)
        parts = answer if kind == "stream" else [answer]
        got = sum((p["choices"][0]["token_ids"] for p in parts), []) if status == 200 else None
        return "right" if got == want else "wrong"


def toy() -> ModelConfig:
    return ModelConfig(
        d_model=32, n_layers=3, kda_per_mla=2, ffn_dim=64, block_size=2, dtypes=DtypeConfig(compute="float32"),
        kda=KDAConfig(n_heads=2, head_dim=16), mla=MLAConfig(q_lora_rank=16, kv_lora_rank=16, nope_dim=16, rope_dim=8,
                                                             v_dim=16),
        moe=MoEConfig(n_experts=8, k=2, expert_dim=16, latent_dim=16, n_shared=1), init_std=0.3,
    )  # fmt: skip


def random_variables(config: ModelConfig, seed: int = 0):
    """Parameters and router bias from numpy: compiling jax.random for every shape would take longer than the load."""
    rng = np.random.default_rng(seed)

    def fill(path, x):
        name = jax.tree_util.keystr(path)
        value = np.ones(x.shape) if "norm" in name else rng.normal(size=x.shape) * 0.3
        return jax.numpy.asarray(value - 4.6 if "dt_bias" in name else value, x.dtype)

    return jax.tree.map_with_path(fill, model_def(config)[1:])


def memory_mb() -> float:
    """Resident memory now (Linux), or at its peak elsewhere."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize() / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main(argv=None):
    from trillium_moe.infer.server import ServerConfig, Worker, make_app, make_server
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at_once", type=int, default=48)
    parser.add_argument("--slots", type=int, default=16)
    args = parser.parse_args(argv)
    config, tokenizer = toy(), ByteTokenizer()
    sizes = EngineConfig(args.slots, 128, chunks=(32,), steps=4, prefix_block=16, prefix_bytes=1 << 20,
                         prefix_host_bytes=1 << 20)
    engine = Engine(config, *random_variables(config), sizes)
    settings = ServerConfig(port=0, waiting=16)
    worker = Worker(Batcher(engine))
    server = make_server(make_app(worker, tokenizer, settings), settings)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    client = Client(settings.host, server.servers[0].sockets[0].getsockname()[1])
    load = Load(client, engine, tokenizer, n_texts=100, longest=40)
    print(f"{len(load.asks)} requests answered alone", flush=True)
    memory, start = {}, time.perf_counter()

    def every(done):
        if done % (args.requests // 10) == 0:
            memory[done] = memory_mb()
            print(f"{done} requests, {time.perf_counter() - start:.0f} s, {memory[done]:.0f} MB", flush=True)

    counts = asyncio.run(load.run(args.requests, args.at_once, every))
    while asyncio.run(client.get("/health"))[1]["open"] or worker.batcher.busy:
        time.sleep(0.05)
    out = {
        "requests": args.requests, **counts, "seconds": round(time.perf_counter() - start, 1),
        "free_slots": len(engine.free), "slots": args.slots, "memory_mb": [round(m) for m in memory.values()],
    }  # fmt: skip
    print(json.dumps(out))
    server.should_exit = True
    worker.close()
    return int(counts["wrong"] > 0 or sum(counts.values()) != args.requests or len(engine.free) != args.slots)


if __name__ == "__main__":
    sys.exit(main())
