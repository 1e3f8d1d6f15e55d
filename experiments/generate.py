"""Continues a prompt with a trained model, talks, or serves it over HTTP.

  python -m experiments.generate --workdir=/tmp/run --prompt="def main(" --temperature=0.8 --top_p=0.95
  python -m experiments.generate --workdir=/tmp/run --image=digit.png --prompt="digit? " --temperature=0
  python -m experiments.generate --workdir=/tmp/run --interactive
  python -m experiments.generate --workdir=/tmp/run --serve --port=8000

The endpoint is that of OpenAI: /v1/completions and /v1/chat/completions, whole or streamed (needs the extra `serve`).
"""

import sys

from absl.flags import DEFINE_bool, DEFINE_float, DEFINE_integer, DEFINE_multi_string, DEFINE_string

from experiments.common import UsageError, command, define_step, define_workdir, workdir_of


def define(flags):
    define_workdir(flags, "directory of the run")
    define_step(flags)
    DEFINE_string("prompt", "def ", "text to continue", flag_values=flags)
    DEFINE_multi_string("image", [], "picture before the prompt; may be given several times", flag_values=flags)
    DEFINE_integer("tokens", 256, "tokens to add, at most; the model may end the document before", flag_values=flags)
    DEFINE_float("temperature", 0.8, "0 always takes the most probable token", flag_values=flags)
    DEFINE_integer("top_k", 0, "keep the k most probable tokens; 0: all", flag_values=flags)
    DEFINE_float("top_p", 1.0, "keep the most probable tokens up to this probability; 1: all", flag_values=flags)
    DEFINE_integer("seed", 0, "the same seed gives the same text", flag_values=flags)
    DEFINE_bool("interactive", False, "read prompts from the terminal, one a line, each continuing the text so far",
                flag_values=flags)
    DEFINE_bool("serve", False, "start an HTTP endpoint", flag_values=flags)
    DEFINE_string("host", "127.0.0.1", "address to listen on (serve); there is no password", flag_values=flags)
    DEFINE_integer("port", 8000, "port to listen on (serve)", lower_bound=0, upper_bound=65535, flag_values=flags)
    DEFINE_integer("slots", 8, "sequences decoded side by side (serve)", lower_bound=1, flag_values=flags)
    DEFINE_integer("capacity", 4096, "tokens of a sequence, prompt included (serve, interactive)", lower_bound=1,
                   flag_values=flags)
    DEFINE_string("latents", "", "dtype of the cached latents: float32, bfloat16, int8; default: the compute dtype "
                  "(serve, interactive)", flag_values=flags)
    DEFINE_integer("prefix_mb", 0, "device memory for reusing prompts, and as much of the host's (serve); 0: off",
                   lower_bound=0, flag_values=flags)


def run(flags):
    from trillium_moe.data.images import read_image
    from trillium_moe.infer.generate import load_model, stream_text
    from trillium_moe.infer.sampling import Sampling

    workdir = workdir_of(flags, exists=True)
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
    if flags.serve and flags.interactive:
        raise UsageError("flags --serve and --interactive exclude each other; give one")
    if flags.image and (flags.serve or flags.interactive):
        raise UsageError("flag --image goes with --prompt; requests to --serve bring their own pictures")
    images = [read_image(path) for path in flags.image]
    model = load_model(workdir, flags.step)
    if flags.serve:
        return serve(flags, model)
    if flags.interactive:
        return talk(flags, model, sampling)
    shown = (lambda piece: None) if flags.json else lambda piece: print(piece, end="", flush=True)
    shown(flags.prompt)
    text = ""
    for piece in stream_text(model, flags.prompt, flags.tokens, sampling, images):
        shown(piece)
        text += piece
    shown("\n")
    return {"workdir": workdir, "step": model.step, "prompt": flags.prompt, "text": text, "seed": flags.seed}


def engine_of(flags, model, slots):
    from trillium_moe.infer.engine import Engine, EngineConfig

    # few steps a call: text appears sooner
    sizes = EngineConfig(slots=slots, capacity=flags.capacity, steps=4, latents=flags.latents,
                         prefix_bytes=flags.prefix_mb << 20, prefix_host_bytes=flags.prefix_mb << 20)
    return Engine(model.config.model, model.params, model.router_bias, sizes)


def talk(flags, model, sampling):
    """A line is appended to the text, the model continues it, and so on until the input ends."""
    from trillium_moe.infer.generate import TextStream

    engine = engine_of(flags, model, 1)
    slot, turns = engine.open(), 0
    for line in sys.stdin:
        ids = model.tokenizer.encode(line if turns else line.rstrip("\n")).tolist()
        if not ids:
            continue
        engine.extend(slot, ids)
        engine.start(slot, flags.tokens, sampling, (model.tokenizer.eos_id,))
        text = TextStream(model.tokenizer)
        while engine.running:
            new = [int(t) for t in engine.decode().tokens[slot] if t >= 0]
            print(text.add([t for t in new if t != model.tokenizer.eos_id]), end="", flush=True)
        print(text.end(), flush=True)
        turns += 1
    return {"turns": turns}


def serve(flags, model):
    try:
        from trillium_moe.infer.server import ServerConfig, Worker, make_app, make_server
    except ModuleNotFoundError as error:
        raise UsageError(f"flag --serve needs {error.name}; install the extra `serve`: make setup") from error
    from trillium_moe.infer.batching import Batcher
    from trillium_moe.model.cache import nbytes, token_bytes

    engine = engine_of(flags, model, flags.slots)
    print(f"cache: {nbytes(engine.cache) / 2**20:.1f} MiB, {token_bytes(engine.cache):.0f} bytes per token of context",
          flush=True)
    # a body with pictures holds them in base64
    body_bytes = 1 << 20 if not model.config.model.vision.n_layers else 1 << 25
    config = ServerConfig(flags.host, flags.port, model.config.name, body_bytes)
    worker = Worker(Batcher(engine))
    print(f"http://{flags.host}:{flags.port}/v1 serves {config.name!r}, step {model.step}; Ctrl-C ends it", flush=True)
    make_server(make_app(worker, model.tokenizer, config, model.config), config).run()
    worker.close()
    return {"served": config.name}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))
