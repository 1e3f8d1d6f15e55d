"""Long-dependency tasks whose answers can be checked, as training data and as evaluation (`training.md` B.3)."""

from __future__ import annotations

from collections.abc import Callable

from trillium_moe.config import check, check_choice
from trillium_moe.data import tasks_long, tasks_recall
from trillium_moe.data.examples import Draw, Example, Kit

# f(draw, n tokens, kit) -> Example of at most n tokens
TASKS: dict[str, Callable[..., Example]] = {
    f.__name__: f
    for f in (
        tasks_recall.needle, tasks_recall.multi_key, tasks_recall.multi_query, tasks_recall.multi_value,
        tasks_recall.needles, tasks_recall.variable, tasks_recall.mqar, tasks_recall.palindrome, tasks_recall.stack,
        tasks_long.common_words, tasks_long.frequent_words, tasks_long.ordinal, tasks_long.graph,
        tasks_long.document_qa, tasks_long.count, tasks_long.total, tasks_long.join, tasks_long.chunk_order,
    )
}  # fmt: skip
WITH_DEPTH = ("needle",)  # take depth=, a place for their evidence


def make(name: str, kit: Kit, n: int, *key: int, depth: float | None = None) -> Example:
    """An example of a task: at most n tokens, a pure function of the arguments.

    Raises:
      ConfigError: for an unknown task, one that cannot place its evidence at a depth, or a window too small for it.
    """
    check_choice("task", name, tuple(TASKS))
    check(depth is None or name in WITH_DEPTH, "task", name, f"takes no depth; {', '.join(WITH_DEPTH)} does")
    more = {} if depth is None else {"depth": depth}
    return TASKS[name](Draw(n, *name.encode(), *key), n, kit, **more)  # not hash(name), which Python salts
