"""Messages with typed channels, rendered to token ids and parsed from them. Token in, token out.

    prompt       <bos> [open] system [sep] tools, effort [end_of_msg] [open] user [sep] question [end_of_msg] [open]
    assistant    think [sep] ... [close] [open] tools [sep] read_page 17 [end_of_msg]
    observation  [open] result [sep] lemon 73 [end_of_msg] [open]

The [open] before an assistant's turn belongs to what the model is given. Sampled ids are kept as they are: the parser
reads them, nobody encodes them again, so the trainer sees exactly what was sampled. The parser accepts any sequence of
ids and never raises: what is wrong is named in `Turn.error`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trillium_moe.data.tokenizer import Tokenizer

SPOKEN = ("think", "response", "tools")  # channels an assistant may open
GIVEN, THINK, RESPONSE, TOOLS = range(4)  # channel ids of tokens: given to the model, or in one of SPOKEN
PARSE, UNKNOWN_TOOL, ARGUMENTS, AFTER_FINAL = "parse", "unknown_tool", "arguments", "call_after_final"
EFFORTS = ("low", "high", "max")


@dataclass(frozen=True)
class Param:
    """A typed argument: a whole number in [low, high], or one of `choices`."""

    name: str
    low: int = 0
    high: int = 99
    choices: tuple[str, ...] = ()

    def accepts(self, text: str) -> bool:
        if self.choices:
            return text in self.choices
        return text.isascii() and text.isdigit() and len(text) < 10 and self.low <= int(text) <= self.high


@dataclass(frozen=True)
class Tool:
    """A tool as it is declared: arguments are given in the order of `params`."""

    name: str
    params: tuple[Param, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, *(p.name for p in self.params)])


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    tool: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.tool, *self.args])


@dataclass(frozen=True)
class Answer:
    """The final answer, which ends the episode."""

    text: str

    def __str__(self) -> str:
        return self.text


Action = Call | Answer


@dataclass(frozen=True)
class Turn:
    """An assistant's turn as parsed: one action, or an error."""

    action: Action | None
    error: str = ""  # PARSE, UNKNOWN_TOOL, ARGUMENTS or AFTER_FINAL
    think: str = ""


class Protocol:
    """Renders and parses with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        special = tokenizer.specials
        self.bos, self.pad = special["<|bos|>"], special["<|pad|>"]
        self.open, self.sep, self.close = special["[open]"], special["[sep]"], special["[close]"]
        self.end = special["[end_of_msg]"]
        self._structure = set(special.values())
        self._short = functools.lru_cache(1 << 14)(lambda text: tuple(tokenizer.encode(text).tolist()))

    # --- rendering

    def text(self, text: str) -> list[int]:
        """Ids of message content: every word with a space before it."""
        if len(text) > 64:  # long ones do not come again
            return self.tokenizer.encode(f" {text}").tolist()
        return list(self._short(f" {text}")) if text else []

    def _message(self, channel: str, text: str) -> list[int]:
        return [self.open, *self.text(channel), self.sep, *self.text(text), self.end]

    def prompt(self, tools: Sequence[Tool], question: str, effort: str = "") -> list[int]:
        """What an episode begins with; the model continues it."""
        system = " ".join([*map(str, tools), *(["effort", effort] if effort else [])])
        return [self.bos, *self._message("system", system), *self._message("user", question), self.open]

    def observation(self, text: str) -> list[int]:
        """What a tool gave back; the model continues it."""
        return [*self._message("result", text), self.open]

    def turn(self, action: Action, think: str = "") -> list[int]:
        """An assistant's turn, for traces."""
        thought = [*self.text("think"), self.sep, *self.text(think), self.close, self.open] if think else []
        channel = "tools" if isinstance(action, Call) else "response"
        return [*thought, *self.text(channel), self.sep, *self.text(str(action)), self.end]

    # --- parsing

    def channels(self, ids: Sequence[int]) -> list[int]:
        """Channel of every token of a turn: that of the block it stands in; GIVEN where it is none of SPOKEN."""
        out: list[int] = []
        for block in _split(ids, self.close):
            out += [1 + SPOKEN.index(name) if (name := self._channel(block)) else GIVEN] * len(block)
        return out

    def parse(self, ids: Sequence[int], tools: Sequence[Tool]) -> Turn:
        """Any ids to a turn; the first thing that is wrong is its error."""
        ids = [int(i) for i in ids]
        if not ids or ids[-1] != self.end:
            return Turn(None, PARSE)
        blocks = _split(ids[:-1], self.close)
        action, think = None, ""
        for i, block in enumerate(blocks):
            last = i == len(blocks) - 1
            body = block if last else block[:-1]  # without its [close]
            if i:
                if not body or body[0] != self.open:
                    return Turn(None, PARSE, think)
                body = body[1:]
            channel = self._channel(body)
            content = body[body.index(self.sep) + 1 :] if channel else []
            if not channel or any(t in self._structure for t in content):
                return Turn(None, PARSE, think)
            text = self.tokenizer.decode(content).strip()
            if action is not None:
                return Turn(None, AFTER_FINAL if isinstance(action, Answer) else PARSE, think)
            if channel == "think":
                think = text
            elif channel == "response":
                action = Answer(text)
            else:
                action, error = _call(text, tools)
                if error:
                    return Turn(None, error, think)
        return Turn(action, "" if action is not None else PARSE, think)

    def _channel(self, block: Sequence[int]) -> str:
        """Name of the channel that a block opens, or ""."""
        block = list(block)
        block = block[1:] if block[:1] == [self.open] else block
        for name in SPOKEN:
            head = [*self.text(name), self.sep]
            if block[: len(head)] == head:
                return name
        return ""

    def show(self, ids: Sequence[int], mask: Sequence[int] | np.ndarray | None = None) -> str:
        """A trajectory for people: one message a line, what the model wrote marked with ">"."""
        mask = np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
        lines, line, spoken = [], "", False
        for token, own in zip(ids, mask):
            spoken |= bool(own)
            if token == self.end:
                lines.append(("> " if spoken else "  ") + line.strip())
                line, spoken = "", False
            elif token == self.sep:
                line += ":"
            elif token == self.close:
                line += " |"
            elif token not in (self.open, self.bos):
                name = next((n for n, i in self.tokenizer.specials.items() if i == token), None)
                line += f" {name}" if name else self.tokenizer.decode([token])
        return "\n".join([*lines, *([("> " if spoken else "  ") + line.strip()] if line.strip() else [])])


def _split(ids: Sequence[int], close: int) -> list[list[int]]:
    """Cuts after every `close`; there is always one part."""
    parts: list[list[int]] = [[]]
    for i, token in enumerate(ids):
        parts[-1].append(int(token))
        if token == close and i < len(ids) - 1:
            parts.append([])
    return parts


def _call(text: str, tools: Sequence[Tool]) -> tuple[Call | None, str]:
    name, *args = text.split() or [""]
    tool = next((t for t in tools if t.name == name), None)
    if tool is None:
        return None, UNKNOWN_TOOL
    if len(args) != len(tool.params) or not all(p.accepts(a) for p, a in zip(tool.params, args)):
        return None, ARGUMENTS
    return Call(name, tuple(args)), ""
