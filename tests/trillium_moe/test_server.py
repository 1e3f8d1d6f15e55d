"""The endpoint over real sockets: answers, refusals, streams, cancellation."""

import asyncio
import threading
import time

import pytest

from benchmarks.serve_load import Client, Load
from tests.trillium_moe.test_engine import CONFIG, SIZES, variables
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.chat import chat_parts
from trillium_moe.infer.engine import Engine
from trillium_moe.infer.sampling import Sampling
from trillium_moe.infer.server import Pieces, ServerConfig, Worker, make_app, make_server

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, *variables()[1:], SIZES)


@pytest.fixture(scope="module")
def client(engine):
    settings = ServerConfig(port=0, waiting=5, body_bytes=5000, body_seconds=0.5)
    worker = Worker(Batcher(engine))
    server = make_server(make_app(worker, TOKENIZER, settings), settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Client("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join()
    worker.close()


def post(client, body, path="/v1/completions"):
    return asyncio.run(client.post(path, body))


def ask(**kw):
    return {"prompt": "abc", "max_tokens": 9, "seed": 3, "temperature": 0.9, **kw}


def direct(engine, **kw):
    """The same request without a server."""
    batcher = Batcher(engine)
    request = batcher.submit(Request(list(b"abc"), 9, Sampling(0.9, seed=3), (TOKENIZER.eos_id,), **kw))
    batcher.run()
    return request


def test_answers(client, engine):
    status, body = post(client, ask(logprobs=True))
    assert status == 200
    choice, want = body["choices"][0], direct(engine)
    assert choice["token_ids"] == want.tokens and choice["finish_reason"] == want.finished
    assert choice["text"] == TOKENIZER.decode([t for t in want.tokens if t != TOKENIZER.eos_id])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(want.logprobs)
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert body["object"] == "text_completion" and body["model"] == "trillium"
    status, ids = post(client, ask(prompt=[97, 98, 99], logprobs=True))
    assert ids["choices"][0]["text"] == choice["text"]

    events = post(client, ask(stream=True, logprobs=True))[1]
    assert len(events) > 2
    assert sum((e["choices"][0]["token_ids"] for e in events), []) == want.tokens
    assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]
    assert [bool(e["choices"][0]["finish_reason"]) for e in events] == [False] * (len(events) - 1) + [True]


def test_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    status, body = post(client, {"messages": messages, "max_tokens": 5, "seed": 1}, "/v1/chat/completions")
    assert status == 200 and body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == len(sum(chat_parts(TOKENIZER, messages), []))
    said = body["choices"][0]["message"]
    events = post(client, {"messages": messages, "max_tokens": 5, "seed": 1, "stream": True}, "/v1/chat/completions")[1]
    assert events[0]["object"] == "chat.completion.chunk" and said["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == said["content"]


@pytest.mark.parametrize("body, status, reason", [
    (b"{", 400, "not JSON"), (b"\xff\xfe", 400, "not JSON"), (b"[" * 2000, 400, "not JSON"),
    (b"[]", 400, "body='list': must be a JSON object"),
    ({"prompt": "a", "max_tokns": 3}, 400, "unknown field; did you mean max_tokens?"), ({}, 400, "prompt='': missing"),
    (ask(prompt=""), 400, "at least one token"), (ask(prompt=[1, 300]), 400, "token ids must lie in [0, 272)"),
    (ask(prompt=["a"]), 400, "list of token ids"), (ask(prompt=3), 400, "must be text or list"),
    (ask(max_tokens=-1), 400, "must be greater than 0"), (ask(max_tokens=126), 400, "leave 125 of 128"),
    (ask(max_tokens="9"), 400, "must be int"), (ask(max_tokens=True), 400, "must be int"),
    (ask(temperature=-1), 400, "temperature=-1.0"), (ask(temperature=float("nan")), 400, "temperature=nan"),
    (ask(top_p=0), 400, "top_p=0.0"), (ask(top_k=1 << 40), 400, "top_k"), (ask(n=2), 400, "only 1 is supported"),
    (ask(stop=["a"] * 5), 400, "up to 4 texts"), (ask(model="gpt"), 404, "'gpt' is not served"),
    (ask(prompt="x" * 6000), 413, "larger than 5000 bytes"),
])  # fmt: skip
def test_refusals_have_a_reason(client, body, status, reason):
    got, answer = post(client, body)
    assert got == status and reason in answer["error"]["message"], answer


def test_other_paths_and_methods(client):
    assert asyncio.run(client.get("/v1/completions"))[0] == 405
    assert asyncio.run(client.get("/v2"))[0] == 404
    assert asyncio.run(client.get("/v1/models"))[1]["data"][0]["id"] == "trillium"


def idle(client):
    for _ in range(200):
        health = asyncio.run(client.get("/health"))[1]
        if health["open"] == 0 and health["free_slots"] == 3:
            return True
        time.sleep(0.02)
    return False


def test_clients_that_leave_free_their_slots(client):
    async def leave(stream):
        reader, writer = await client.send("/v1/completions", ask(max_tokens=120, stream=stream))
        if stream:
            await reader.readline()
        writer.close()

    for stream in (True, False, True):
        asyncio.run(leave(stream))
    assert idle(client)


def test_a_body_that_never_comes_and_too_many_requests(client):
    async def unfinished():
        reader, writer = await client.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        await writer.drain()
        status = (await reader.readline()).split()[1]
        writer.close()
        return status

    async def crowd():
        return [s for s, _ in await asyncio.gather(*(client.post("/v1/completions", ask(max_tokens=60))
                                                     for _ in range(30)))]

    assert asyncio.run(unfinished()) == b"408"
    statuses = asyncio.run(crowd())
    assert set(statuses) == {200, 429} and statuses.count(200) >= 8
    assert idle(client)


def test_stop_texts_are_cut_off():
    pieces = Pieces(TOKENIZER, ("stop", "\n\n"))
    parts = [pieces.add([byte], False) for byte in b"no s, stox st"] + [pieces.add(list(b"op and more"), True)]
    assert "".join(parts) == "no s, stox " and pieces.stopped
    pieces = Pieces(TOKENIZER, ("stop",))
    assert pieces.add(list(b"sto"), False) == "" and pieces.add([], True) == "sto"


def test_load(client, engine):
    """Requests of random lengths, malformed bodies and clients that leave, all at once: none lost, none crossed."""
    load = Load(client, engine, TOKENIZER, n_texts=6, longest=20, seed=1)
    counts = asyncio.run(load.run(60, at_once=7))
    assert sum(counts.values()) == 60 and counts["wrong"] == 0
    assert min(counts[k] for k in ("right", "refused", "left")) > 0
    assert idle(client)
