"""An HTTP endpoint in the shape of OpenAI's: completions and chat completions, whole or streamed.

One thread owns the engine and runs `Batcher.step`; the event loop hands it requests and receives tokens. A client that
goes away frees its slot. Everything that a client can get wrong is answered with a reason: 400 for a body that cannot
be served, 413 for one that is too large, 408 for one that does not arrive, 429 when too many are waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trillium_moe.config import Config, ConfigError, check
from trillium_moe.data.tokenizer import Tokenizer
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.chat import chat_parts
from trillium_moe.infer.generate import TextStream
from trillium_moe.infer.pictures import show
from trillium_moe.infer.sampling import Sampling

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerConfig:
    """Limits of the endpoint."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    name: str = "trillium"  # the model's name in answers
    body_bytes: int = 1 << 20
    body_seconds: float = 10.0  # a body that takes longer is given up
    waiting: int = 64  # requests beyond those that the engine has slots for
    default_tokens: int = 256  # max_tokens of a request that names none


# --- the engine's thread


class Worker:
    """Runs a batcher in a thread of its own. `submit` and `cancel` may be called from any thread."""

    def __init__(self, batcher: Batcher):
        self.batcher, self.inbox = batcher, queue.SimpleQueue()
        self.failed = ""
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self.inbox.put((self._submit, request))

    def cancel(self, request: Request) -> None:
        self.inbox.put((self.batcher.cancel, request))

    def close(self) -> None:
        """Ends the thread after the step it is in."""
        self._stop = True
        self.inbox.put((lambda _: None, None))
        self._thread.join()

    def _submit(self, request: Request) -> None:
        if self.failed:
            request.finished = "error"
            request.on_tokens(request)
        else:
            self.batcher.submit(request)

    def _run(self) -> None:
        while not self._stop:
            try:
                while not self.inbox.empty() or not self.batcher.busy:
                    action, request = self.inbox.get()
                    action(request)
                    if self._stop:
                        return
                self.batcher.step()
            except Exception as error:  # what the engine cannot do for one it can do for nobody
                _log.exception("the engine failed")
                self.failed = str(error).split("\n")[0]
                self.batcher.abandon("error")


class Progress(NamedTuple):
    """Tokens that a request got in one step."""

    tokens: list[int]
    logprobs: list[float]
    finished: str


async def progress(worker: Worker, request: Request) -> AsyncIterator[Progress]:
    """Submits a request and yields what it gets; cancels it if the consumer stops early."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue()
    sent = 0

    def on_tokens(r: Request) -> None:
        nonlocal sent
        step = Progress(r.tokens[sent:], r.logprobs[sent:], r.finished)
        sent = len(r.tokens)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(steps.put_nowait, step)

    request.on_tokens = on_tokens
    worker.submit(request)
    finished = ""
    try:
        while not finished:
            step = await steps.get()
            finished = step.finished
            yield step
    finally:
        if not finished:
            worker.cancel(request)


# --- bodies


class Refused(Exception):
    """A request that is not served: HTTP status and reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Ask:
    """What a body asks for."""

    request: Request
    stream: bool
    logprobs: bool
    stop: tuple[str, ...]


_number = (int, float)
# name -> (types, default); a field that only has one possible value has it as a third entry
_FIELDS: dict[str, tuple] = {
    "model": (str, ""), "max_tokens": (int, 0), "temperature": (_number, 1.0), "top_p": (_number, 1.0),
    "top_k": (int, 0), "seed": (int, -1), "stream": (bool, False), "stop": ((str, list), []), "user": (str, ""),
    "n": (int, 1, 1), "presence_penalty": (_number, 0, 0), "frequency_penalty": (_number, 0, 0),
    "logit_bias": (dict, {}, {}),
}  # fmt: skip
COMPLETION = _FIELDS | {"prompt": ((str, list), None), "logprobs": ((int, bool), False), "echo": (bool, False, False),
                        "best_of": (int, 1, 1), "suffix": (str, "", "")}
CHAT = _FIELDS | {"messages": (list, None), "logprobs": (bool, False), "max_completion_tokens": (int, 0)}


def parse(
    body: bytes, fields: dict[str, tuple], tokenizer: Tokenizer, config: ServerConfig, model: Config | None = None
) -> Ask:
    """Reads a body. Raises Refused or ConfigError, which names the field, the value and the mend.

    Args:
      model: what the served model was trained with; None: it is not shown pictures.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    check(isinstance(given, dict), "body", type(given).__name__, "must be a JSON object")
    for name in given:
        near = difflib.get_close_matches(name, fields, n=1)
        check(name in fields, name[:64], "", f"unknown field{f'; did you mean {near[0]}?' if near else ''}")
    values = {name: _field(name, given.get(name), *rest) for name, rest in fields.items()}
    if values["model"] not in ("", config.name):
        raise Refused(404, f"model {values['model'][:64]!r} is not served; there is {config.name!r}")
    stops = [tokenizer.eos_id]
    if "messages" in fields:
        prompt, pictures = show(model, tokenizer.specials["<|image|>"], chat_parts(tokenizer, values["messages"]))
        stops += tokenizer.chat.stop_ids(tokenizer)
    else:
        prompt, pictures = values["prompt"], None
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt).tolist()
        check(all(type(i) is int for i in prompt), "prompt", prompt[:3], "must be a text or a list of token ids")
    stop = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
    check(len(stop) <= 4 and all(isinstance(s, str) and s for s in stop), "stop", stop[:5],
          "must be up to 4 texts that are not empty")
    seed = values["seed"] if values["seed"] >= 0 else secrets.randbits(32)
    sampling = Sampling(float(values["temperature"]), values["top_k"], float(values["top_p"]), seed)
    n = values["max_tokens"] or values.get("max_completion_tokens") or config.default_tokens
    request = Request(prompt, n, sampling, stops, pictures=pictures)
    return Ask(request, values["stream"], values["logprobs"] is not False, tuple(stop))


def _field(name: str, value: Any, types: Any, default: Any, *only: Any) -> Any:
    check(value is not None or default is not None, name, "", "missing")
    if value is None:
        return default
    types = types if isinstance(types, tuple) else (types,)
    right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    shown = value if isinstance(value, (int, float)) else str(value)[:64]
    check(right, name, shown, f"must be {' or '.join({'str': 'text'}.get(t.__name__, t.__name__) for t in types)}")
    check(not only or value == only[0], name, shown, f"only {only[0] if only else ''!r} is supported")
    return value


class Pieces:
    """Text of a request as it comes, cut before a stop text; what may be the beginning of one is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self.text, self.stop, self.held, self.stopped = TextStream(tokenizer), stop, "", False

    def add(self, ids: Sequence[int], last: bool) -> str:
        if self.stopped:
            return ""
        self.held += self.text.add(list(ids)) + (self.text.end() if last else "")
        found = [at for s in self.stop if (at := self.held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self.held[: min(found)]
        back = 0 if last else max(
            (n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0
        )  # fmt: skip
        out, self.held = self.held[: len(self.held) - back], self.held[len(self.held) - back :]
        return out


# --- the application


class Stream(StreamingResponse):
    """Server-sent events. `released` is called once the response is over, even if it never began."""

    def __init__(self, events: AsyncGenerator[str], released: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self.events, self.released = events, released

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.released()
            await self.events.aclose()


def make_app(
    worker: Worker, tokenizer: Tokenizer, config: ServerConfig = ServerConfig(), model: Config | None = None
) -> Starlette:
    """The ASGI application: /v1/completions, /v1/chat/completions, /v1/models, /health.

    Args:
      model: the config of the served model, if it may be shown pictures.
    """
    open_requests = 0
    most = worker.batcher.engine.config.slots + config.waiting

    async def read(http: HTTPRequest) -> bytes:
        too_large = Refused(413, f"the body is larger than {config.body_bytes} bytes")
        declared = http.headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > config.body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(config.body_seconds):
                async for part in http.stream():
                    body += part
                    if len(body) > config.body_bytes:
                        raise too_large
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {config.body_seconds:g} seconds") from None
        return bytes(body)

    def released() -> None:
        nonlocal open_requests
        open_requests -= 1

    def endpoint(kind: str, fields: dict[str, tuple]):
        chat = kind == "chat.completion"

        def answer(id: str, text: str, tokens: list, logprobs: list, finish: str | None, ask: Ask, part: bool) -> dict:
            reason = {"stop": "stop", "length": "length", "cancelled": "stop", "error": "error"}.get(finish or "")
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            if chat:
                choice["delta" if part else "message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            if ask.logprobs:
                names = [tokenizer.decode([t]) for t in tokens]
                choice["logprobs"] = (
                    {"content": [{"token": t, "logprob": p} for t, p in zip(names, logprobs)]} if chat
                    else {"tokens": names, "token_logprobs": logprobs}
                )  # fmt: skip
                choice["token_ids"] = tokens
            suffix = ".chunk" if part and chat else ""
            return {"id": id, "object": kind + suffix,
                    "created": int(time.time()), "model": config.name, "choices": [choice]}

        async def pieces(ask: Ask):
            """(text, tokens, logprobs, finish) of every step that has something to say."""
            text = Pieces(tokenizer, ask.stop)
            async with contextlib.aclosing(progress(worker, ask.request)) as steps:
                async for step in steps:
                    shown = [t for t in step.tokens if t not in ask.request.stops]
                    piece = text.add(shown, bool(step.finished))
                    finish = "stop" if text.stopped else step.finished
                    if piece or finish or step.tokens:
                        yield piece, step.tokens, step.logprobs, finish
                    if finish:
                        return

        async def stream(id: str, ask: Ask):
            async with contextlib.aclosing(pieces(ask)) as parts:
                async for piece, tokens, logprobs, finish in parts:
                    yield f"data: {json.dumps(answer(id, piece, tokens, logprobs, finish, ask, True))}\n\n"
            yield "data: [DONE]\n\n"

        async def whole(id: str, ask: Ask) -> dict:
            text, all_tokens, all_logprobs, end = "", [], [], ""
            async with contextlib.aclosing(pieces(ask)) as parts:
                async for piece, tokens, logprobs, finish in parts:
                    text, end = text + piece, finish
                    all_tokens += tokens
                    all_logprobs += logprobs
            if end == "error":
                raise Refused(500, f"the engine failed: {worker.failed}")
            body = answer(id, text, all_tokens, all_logprobs, end, ask, False)
            n, m = len(ask.request.prompt), len(all_tokens)
            return body | {"usage": {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}}

        async def gone(http: HTTPRequest) -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        async def serve(http: HTTPRequest) -> Response:
            nonlocal open_requests
            try:
                body = await read(http)
                # decoding a picture takes a while: not in the loop that serves everybody
                ask = await asyncio.to_thread(parse, body, fields, tokenizer, config, model)
                worker.batcher.check(ask.request)
                if worker.failed:
                    raise Refused(500, f"the engine failed: {worker.failed}")
                if open_requests >= most:
                    raise Refused(429, f"{open_requests} requests are being served or waiting; try again later")
            except Refused as error:
                return _error(error.status, str(error))
            except ConfigError as error:
                return _error(400, str(error).removeprefix("config "))
            id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
            open_requests += 1
            if ask.stream:
                return Stream(stream(id, ask), released)
            try:
                work, left = asyncio.ensure_future(whole(id, ask)), asyncio.ensure_future(gone(http))
                await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
                done = work.done()
                for task in (work, left):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                return JSONResponse(work.result()) if done else Response(status_code=499)
            except Refused as error:
                return _error(error.status, str(error))
            finally:
                released()

        return serve

    async def models(_: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": config.name, "object": "model", "owned_by": "local"}]})

    async def health(_: HTTPRequest) -> Response:
        free, failed = len(worker.batcher.engine.free), worker.failed
        status = {"status": "failed" if failed else "ok", "open": open_requests, "free_slots": free}
        return JSONResponse(status, status_code=500 if failed else 200)

    return Starlette(routes=[
        Route("/v1/completions", endpoint("text_completion", COMPLETION), methods=["POST"]),
        Route("/v1/chat/completions", endpoint("chat.completion", CHAT), methods=["POST"]),
        Route("/v1/models", models), Route("/health", health),
    ])  # fmt: skip


def _error(status: int, reason: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": reason, "type": kind, "code": status}}, status_code=status)


def make_server(app: Starlette, config: ServerConfig) -> uvicorn.Server:
    """A server that `run()` starts; it listens on config.host and config.port alone."""
    return uvicorn.Server(uvicorn.Config(app, host=config.host, port=config.port, log_level="warning",
                                         access_log=False, lifespan="off", timeout_graceful_shutdown=2))
