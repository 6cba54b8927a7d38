"""Chats as one text, by the template that came with the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specter.errors import SpecterError
from specter.text.tokenizer import read_tokenizer_config, special_tokens

Message = Mapping[str, Any]  # "role" and "content"


class ChatTemplate:
    """A Jinja template; transformers renders it in an immutable sandbox, so a checkpoint runs no code of its own.

    Args:
        source: Jinja.
        tokens: variables such as `bos_token`.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = source
        self._tokens = dict(tokens)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a checkpoint: chat_template.jinja, or the one in tokenizer_config.json.
        Raises SpecterError if it has none, or a damaged one."""
        config = read_tokenizer_config(directory)
        path = directory / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecterError(f"{path} cannot be read: {error}", "use the file of the checkpoint") from None
        if isinstance(source, list):  # several, by name
            source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
        if not isinstance(source, str):
            raise SpecterError(
                f"{directory} has no chat template", "use a chat checkpoint, or give a text instead of a chat"
            )
        return cls(source, special_tokens(config))

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as a text that ends where the assistant's answer begins; encode it with `Tokenizer.encode_bare`.

        Raises:
            SpecterError: no messages, or the template refuses them, with its reason.
        """
        # Imports a second of modules, and a text without a chat does without.
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its annotations are not those of what it returns
        if not messages:
            raise SpecterError("the chat has no messages", "give at least one")
        try:
            [text], _ = render(
                conversations=[list(messages)], chat_template=self._source, add_generation_prompt=True, **self._tokens
            )
        except Exception as error:  # a template can raise anything
            raise SpecterError(
                f"the checkpoint's chat template refuses the chat: {error}", "check the roles and their order"
            ) from None
        return str(text)
