"""Trains one model through growing windows and shows after each that the window is used.

  python -m experiments.curriculum --config=configs/pretrain.py:scale=tiny,shrink=64 --workdir=runs/ladder
  python -m experiments.curriculum --config=configs/pretrain.py:scale=small,shrink=1 --tokens=100000000 ...
  python -m experiments.curriculum ... --stages=1m            # the last window from the first step: the comparison

The config is the first stage's, its shrink holds for all. Every stage is a run in --workdir/STAGE that starts from the
state the one before ended with; the same command resumes, wherever it stopped. After a stage the model is asked
long-dependency tasks at all windows of the ladder and at 1/4, 1/2, 1 and 2 times its own; a gate says whether it may go
on. Results: ladder.html, table.md.
"""

import sys

from absl.flags import DEFINE_enum, DEFINE_float, DEFINE_integer, DEFINE_list, DEFINE_string

from experiments.common import UsageError, command, config_of, define_config, define_workdir, workdir_of


def define(flags):
    define_config(flags)
    define_workdir(flags, "directory of the ladder; made if missing, resumed if it holds one")
    own = {"flag_values": flags}
    DEFINE_list("stages", ["8k", "64k", "256k", "1m"], "stages of configs/stages.py, in order", **own)
    DEFINE_integer("tokens", 0, "tokens of the whole ladder; by default those of the config's train.steps", **own)
    DEFINE_list("steps", [], "optimizer steps of every stage, instead of --tokens", **own)
    DEFINE_string("mix", "pretrain", "kinds of rows: pretrain or recall (configs/stages.py)", **own)
    DEFINE_string("rate", "continue", "learning rate: continue one schedule, or rewarm at every stage", **own)
    DEFINE_integer("floor", 4, "rows per step at least", lower_bound=1, **own)
    DEFINE_enum("gate", "warn", ["warn", "stop"], "what a failed gate does", **own)
    DEFINE_string("hard", "multi_query", "task whose accuracy must rise from stage to stage", **own)
    DEFINE_list("tasks", [], "tasks to evaluate (trillium_moe/data/synthetic.py); by default as in configs/stages.py",
                **own)
    DEFINE_integer("answers", 100, "answers per task and length, if --eval_tokens allows", lower_bound=1, **own)
    DEFINE_integer("eval_tokens", 1 << 17, "tokens read per task and length at most", lower_bound=1, **own)
    DEFINE_integer("eval_focus", 4, "times as many at a stage's own window", lower_bound=1, **own)
    DEFINE_integer("reach", 0, "evaluate at up to this many times a stage's window, everywhere after the last; 0: "
                   "everywhere", lower_bound=0, **own)
    DEFINE_integer("longest", 0, "longest evaluation, in tokens; 0: twice the last window", lower_bound=0, **own)
    DEFINE_integer("eval_rows", 4, "sequences read side by side", lower_bound=1, **own)
    DEFINE_integer("eval_chunk", 256, "tokens of each read at once", lower_bound=2, **own)
    DEFINE_integer("eval_threads", 1, "such groups read at the same time: 2 use two cores", lower_bound=1, **own)
    DEFINE_integer("generate", 4, "examples per task and length that are also answered freely", lower_bound=0, **own)
    DEFINE_float("needle", 0.99, "needle accuracy that the gate asks for", **own)


def lengths(window: int, windows: list[int], longest: int, reach: int) -> tuple[int, ...]:
    """At which lengths to ask after the stage of a window: all windows, and 1/4, 1/2, 1 and 2 times its own."""
    most = min(longest, reach * window) if reach and window < windows[-1] else longest
    own = [window * k // 4 for k in (1, 2, 4, 8)]
    return tuple(sorted({n for n in [*windows, *own] if 64 <= n <= most}))


def run(flags):
    import jax

    from configs import stages
    from trillium_moe.evals.long import LongConfig
    from trillium_moe.train.ladder import Gate, climb
    from trillium_moe.train.ladder_report import table

    workdir = workdir_of(flags, exists=False)
    try:
        steps = tuple(int(s) for s in flags.steps)
    except ValueError:
        raise UsageError(f"flag --steps={','.join(flags.steps)}: must be whole numbers") from None
    base = config_of(flags)
    ladder = stages.ladder(base, tuple(flags.stages), tokens=flags.tokens, steps=steps, mixtures=flags.mix,
                           rate=flags.rate, floor=flags.floor, devices=jax.device_count())
    windows = [config.data.seq_len for config in ladder.values()]
    longest = flags.longest or 2 * windows[-1]

    def suite(config):
        tasks = tuple(flags.tasks) or stages.EVALUATIONS
        asked = lengths(config.data.seq_len, windows, longest, flags.reach)
        return LongConfig(tasks=tasks, lengths=asked, answers=flags.answers, tokens=flags.eval_tokens,
                          focus=config.data.seq_len, focus_tokens=flags.eval_focus, rows=flags.eval_rows,
                          capacity=max(longest, windows[-1]), generate=flags.generate, chunk=flags.eval_chunk,
                          threads=flags.eval_threads)

    for config in ladder.values():
        suite(config)  # before anything is trained
    gate = Gate(flags.gate, needle=flags.needle, hard=flags.hard)
    say = lambda line: print(line, file=sys.stderr)
    results = climb(ladder, workdir, suite, gate, progress=not flags.json, say=say)
    if not flags.json and results:
        print(table(results))
    return {"workdir": workdir, "finished": len(results) == len(ladder), "stages": list(results.values())}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))
