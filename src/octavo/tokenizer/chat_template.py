"""Chat templates: a conversation to the text that the model was trained on.

Renders Hugging Face's jinja2 templates as transformers does. The template is the operator's, the conversation is the user's; what either
of them does wrong is one request's error. The environment that templates run in is `template_sandbox`. Knows no tokens and no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from octavo.errors import ConfigError, InvalidRequestError
from octavo.tokenizer.template_sandbox import MAX_OUTPUT_CHARS, TemplateEnvironment, counted_steps
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE

MAX_TEMPLATE_CHARS = 1 << 20
MAX_SHOWN_CHARS = 200
TOOL_TEMPLATE = "tool_use"
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# The trailing space tells whether the template trims a message's end; see _cut_behind_mark.
_MARK = "<<the message goes on from here>> "


class ChatTemplate:
    """A checkpoint's templates, compiled when first used. Thread-safe.

    Args:
        templates: by name; "default", and "tool_use" where tools need another one.
        special_tokens: `bos_token` etc., which templates may write.
        source: where they come from, for messages.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str = "chat template"
    ) -> None:
        self.templates = dict(templates)
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @staticmethod
    def load(tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate | None:
        """The template of `--chat-template` (a file or the text itself), else the tokenizer's own; None if there is neither.

        An override is compiled at once: ConfigError tells the operator what is wrong with it.
        """
        if override is None:
            if not tokenizer.chat_templates:
                return None
            return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens, tokenizer.source)
        template = ChatTemplate({DEFAULT_TEMPLATE: _read_override(override)}, tokenizer.special_tokens, "chat_template")
        try:
            template.compiled(DEFAULT_TEMPLATE)
        except (jinja2.TemplateError, RecursionError) as e:
            raise ConfigError(f"chat_template: {_shown(e)}") from None
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`, as `normalise_messages` gives them.

        `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last message open instead, and must be
        alone. `kwargs` are further variables of the template. Raises InvalidRequestError with the template's own words.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true: the one leaves the last message open, "
                "the other opens a new one",
                "continue_final_message",
            )
        if shadowed := RESERVED & kwargs.keys():
            raise InvalidRequestError(f"{min(shadowed)} is set by the request itself", "chat_template_kwargs")
        source, template = self._choose(bool(tools))
        chat = [dict(message) for message in messages]
        if "developer" not in source:  # OpenAI's newer word for system, which older templates do not know
            chat = [
                {**message, "role": "system"} if message.get("role") == "developer" else message for message in chat
            ]
        if continue_final_message:
            chat = _mark_final(chat)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(template, variables)
        return _cut_behind_mark(text) if continue_final_message else text

    def compiled(self, name: str) -> jinja2.Template:
        """The template of that name; jinja2.TemplateError if it is no valid template."""
        if name not in self._compiled:
            source = self.templates[name]
            if len(source) > MAX_TEMPLATE_CHARS:
                raise jinja2.TemplateError(f"the template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
            self._compiled[name] = self._environment.from_string(source)
        return self._compiled[name]

    @cached_property
    def _environment(self) -> TemplateEnvironment:
        return TemplateEnvironment()

    def _choose(self, with_tools: bool) -> tuple[str, jinja2.Template]:
        name = TOOL_TEMPLATE if with_tools and TOOL_TEMPLATE in self.templates else DEFAULT_TEMPLATE
        if name not in self.templates:
            raise InvalidRequestError(
                f"the model has no default chat template, only {', '.join(self.templates)}", "messages"
            )
        try:
            return self.templates[name], self.compiled(name)
        except (jinja2.TemplateError, RecursionError) as e:
            raise InvalidRequestError(f"the model's chat template does not compile: {_shown(e)}", "messages") from None


def _read_override(override: str) -> str:
    """A file's text, or the argument itself where it looks like a template."""
    if "{%" in override or "{{" in override or "\n" in override:
        return override
    path = Path(override).expanduser()
    try:
        if path.stat().st_size <= 4 * MAX_TEMPLATE_CHARS:
            return path.read_text(encoding="utf-8")
        why = f"larger than {4 * MAX_TEMPLATE_CHARS >> 20} MiB"
    except OSError as e:
        why = f"neither a template nor a file that can be read: {e.strerror}"
    except UnicodeDecodeError:
        why = "not valid UTF-8"
    raise ConfigError(f"chat_template = {override[:200]!r}: {why}")


# Rendering


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The rendered text. Whatever a template does wrong is told as the request's fault: another conversation may well render."""
    parts, size = [], 0
    try:
        with counted_steps():
            for part in template.generate(**variables):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT_CHARS:
                    raise InvalidRequestError(
                        f"the conversation renders to more than {MAX_OUTPUT_CHARS} characters", "messages"
                    )
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError("the chat template nests too deeply", "messages") from None
    except jinja2.TemplateError as e:
        raise InvalidRequestError(_shown(e), "messages") from None
    except (
        Exception
    ) as e:  # the template is a program: anything may come out of it, and it must never be a server's error
        raise InvalidRequestError(f"the chat template failed: {type(e).__name__}: {_shown(e)}", "messages") from None
    return "".join(parts)


def _shown(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _mark_final(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy whose last message ends with a mark; where the mark comes out, the message's text ended."""
    if not chat:
        raise InvalidRequestError("there is no final message to continue", "messages", "empty_array")
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise InvalidRequestError("the final message has no text to continue", "messages")
    if chat[-1].get("tool_calls"):
        raise InvalidRequestError("a final message with tool calls cannot be continued", "messages")
    return [*chat[:-1], {**chat[-1], "content": content + _MARK}]


def _cut_behind_mark(text: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise InvalidRequestError(
            "the chat template leaves out the final message or changes it: it cannot be continued", "messages"
        )
    # A template that trims the message's end took the mark's space; it would have taken the message's own as well.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
