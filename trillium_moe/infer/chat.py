"""Chat messages, with pictures, as the parts of a prompt."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from PIL import Image

from trillium_moe.config import ConfigError, check, check_choice
from trillium_moe.data.chat import ROLES
from trillium_moe.data.images import read_image
from trillium_moe.data.tokenizer import Tokenizer

KNOWN = {"detail"}  # fields beside the address of a picture that clients send; every picture is read whole


def chat_parts(tokenizer: Tokenizer, messages: Sequence[Any]) -> list[list[int] | Image.Image]:
    """Every message as the tokenizer's `ChatFormat` has it, then the opening of the assistant's.

    A content is a text, or a list of {"type": "text", "text": ...} and {"type": "image_url", "image_url": {"url": ...}}
    with the picture itself in the address: data:image/png;base64,... Nothing is fetched.
    """
    chat = tokenizer.chat
    text = lambda s: tokenizer.encode(s).tolist()
    check(len(messages) > 0, "messages", [], "must hold at least one message")
    parts: list[list[int] | Image.Image] = [chat.begin_ids(tokenizer)]
    for i, message in enumerate(messages):
        ok = isinstance(message, dict) and set(message) == {"role", "content"}
        ok = ok and isinstance(message["content"], (str, list))
        check(ok, f"messages[{i}]", str(message)[:64], "must be an object of role and content, both texts; a content "
              "may be a list of text and image_url parts")
        check_choice(f"messages[{i}].role", str(message["role"])[:64], ROLES)
        before, after = chat.around(tokenizer, message["role"])
        parts.append(before)
        content = message["content"]
        for j, part in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
            shown = _content_part(f"messages[{i}].content[{j}]", part)
            parts.append(text(shown) if isinstance(shown, str) else shown)
        parts.append(after)
    return [*parts, chat.answer_ids(tokenizer)]


def _content_part(name: str, part: Any) -> str | Image.Image:
    """The text or the decoded picture of one part of a message."""
    match part:
        case {"type": "text", "text": str(text), **rest} if not rest:
            return text
        case {"type": "image_url", "image_url": {"url": str(url), **more}, **rest} if not rest and more.keys() <= KNOWN:
            head, comma, data = url.partition(",")
            check(comma != "" and head.startswith("data:") and head.endswith(";base64"), name, url[:32],
                  "must be a data: address with the picture in base64; addresses are not fetched")
            try:
                return read_image(base64.b64decode(data, validate=True), name)
            except ValueError as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(f"config {name}={url[:32]!r}: not base64 ({error})") from None
    raise ConfigError(f'config {name}={str(part)[:64]!r}: must be {{"type": "text", "text": ...}} or '
                      '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}')
