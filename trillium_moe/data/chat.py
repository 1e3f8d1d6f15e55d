"""How messages become token ids: special tokens around roles and contents, as data. No template language is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trillium_moe.config import check, check_choice

if TYPE_CHECKING:
    from trillium_moe.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatFormat:
    """Parts of a conversation. A part is "{role}", "{content}", "{mark}", a special token, or other text as it stands.

    Attributes:
      begin: before the first message.
      message: of every message.
      answer: what opens the assistant's turn.
      stops: special tokens that end it.
      marks: (role, special token) for "{mark}"; the first for roles that are not named.
    """

    begin: tuple[str, ...] = ("<|bos|>",)
    message: tuple[str, ...] = ("[open]", "{role}", "[sep]", "{content}", "[end_of_msg]")
    answer: tuple[str, ...] = ("[open]", "assistant", "[sep]")
    stops: tuple[str, ...] = ("[end_of_msg]",)
    marks: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        check(self.message.count("{content}") == 1, "message", self.message, "must hold {content} once")

    def begin_ids(self, tokenizer: Tokenizer) -> list[int]:
        return self._ids(tokenizer, self.begin, {})

    def answer_ids(self, tokenizer: Tokenizer) -> list[int]:
        return self._ids(tokenizer, self.answer, {})

    def around(self, tokenizer: Tokenizer, role: str) -> tuple[list[int], list[int]]:
        """What stands before and after the content of a message."""
        mark = dict(self.marks).get(role, self.marks[0][1] if self.marks else "")
        at, values = self.message.index("{content}"), {"{role}": role, "{mark}": mark}
        return tuple(self._ids(tokenizer, part, values) for part in (self.message[:at], self.message[at + 1 :]))

    def stop_ids(self, tokenizer: Tokenizer) -> list[int]:
        return [tokenizer.special_ids[name] for name in self.stops]

    def _ids(self, tokenizer, parts, values) -> list[int]:
        ids: list[int] = []
        for part in parts:
            text = values.get(part, part)
            special = text in tokenizer.special_ids
            ids += [tokenizer.special_ids[text]] if special else tokenizer.encode(text).tolist()
        return ids


KIMI_LINEAR = ChatFormat(
    begin=(),
    message=("{mark}", "{role}", "<|im_middle|>", "{content}", "<|im_end|>"),
    answer=("<|im_assistant|>", "assistant", "<|im_middle|>"),
    stops=("<|im_end|>",),
    marks=(("system", "<|im_system|>"), ("user", "<|im_user|>"), ("assistant", "<|im_assistant|>")),
)


def chat_format(where: str, special_ids: Mapping[str, int], given: Mapping[str, Any] | None = None) -> ChatFormat:
    """The format of a tokenizer: the one given as JSON, or else that of the release whose special tokens it has.

    Raises:
      ConfigError: an unknown field, a part that is not text, or a special token that the tokenizer lacks.
    """
    if given is None:
        return KIMI_LINEAR if "<|im_middle|>" in special_ids else ChatFormat()
    names = tuple(f.name for f in fields(ChatFormat))
    for name, value in given.items():
        check_choice(f"{where} field", name, names)
        ok = isinstance(value, dict) if name == "marks" else isinstance(value, list)
        parts = list(value.values() if name == "marks" else value) if ok else []
        check(ok and all(isinstance(x, str) for x in parts), f"{where} {name}", value,
              "must be a list of texts, or for marks an object of them")
        for part in parts if name in ("stops", "marks") else ():
            check(part in special_ids, f"{where} {name}", part, "is not a special token of the tokenizer")
    values = {n: tuple(v.items()) if n == "marks" else tuple(v) for n, v in given.items()}
    return ChatFormat(**values)
