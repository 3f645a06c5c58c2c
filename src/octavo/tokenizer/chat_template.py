"""Chat templates: a conversation to the text that the model was trained on.

Renders Hugging Face's jinja2 templates as transformers does, in jinja2's sandbox. The template is the operator's, the conversation is
the user's: the sandbox keeps both from Python, and `_Environment` bounds loops and text, so that neither a slip nor a simple bomb can
take the server's time or memory. It is no jail for an author who is bent on it. Knows no tokens and no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from octavo.errors import ConfigError, InvalidRequestError
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 25
MAX_STEPS = 100_000
MAX_NUMBER = 100_000
MAX_WIDTH = 1_000
MAX_BITS = 4096
TOOL_TEMPLATE = "tool_use"

# Filters that _Instrument puts into templates; names that no template can write.
BOUNDED, STEP, JOINED = "bounded text", "count a step", "join with bound"
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# The trailing space tells whether the template trims a message's end; see _cut_behind_mark.
_MARK = "<<the message goes on from here>> "
_LONG_NUMBER = re.compile(r"\d{6}|\*")


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
        except jinja2.TemplateError as e:
            raise ConfigError(f"chat_template: {e}") from None
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
    def _environment(self) -> _Environment:
        return _Environment()

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
    token = _steps.set([0])
    parts, size = [], 0
    try:
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
    finally:
        _steps.reset(token)
    return "".join(parts)


def _shown(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 500 else text[:500] + "..."


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


# The sandbox

_steps: ContextVar[list[int]] = ContextVar("steps")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own interface

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment with limits: steps of all loops and macros, and the size of whatever a template builds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters.update({BOUNDED: _bounded, STEP: _step, JOINED: _joined})
        for name in ("center", "indent"):
            self.filters[name] = _with_checked_width(self.filters[name])
        self.filters["format"] = _format
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # named as in jinja2
        _check_numbers(args, kwargs)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _check_size(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str) and _LONG_NUMBER.search(left):
                raise SecurityError("a format in the chat template asks for too wide a field")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(sequence) * count)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)


class _Instrument(NodeTransformer):
    """Puts the limits into a template's tree: a step into each loop and macro, a bound on captured and joined text."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._count(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._count(node)

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.Node:
        self.generic_visit(node)
        # A filter without a node filters the block.
        node.filter = _filter(node.filter, BOUNDED, node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), JOINED, node.lineno)

    def _count(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        step = _filter(jinja2.nodes.Const(None, lineno=node.lineno), STEP, node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        counted: jinja2.nodes.Node = node
        return counted


def _filter(node: jinja2.nodes.Expr | None, name: str, lineno: int) -> jinja2.nodes.Filter:
    """A filter is called directly where a function would go through the sandbox, at ten times the cost."""
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=lineno)


@jinja2.pass_context  # also keeps the compiler from running it once and for all
def _step(_context: Context, _value: object) -> None:
    """Runs once in every pass of every loop and every call of a macro."""
    steps = _steps.get()
    steps[0] += 1
    if steps[0] > MAX_STEPS:
        raise SecurityError(f"the chat template takes more than {MAX_STEPS} steps")


def _joined(parts: Sequence[Any]) -> str:
    """`~` of a template."""
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _bounded(value: Any) -> Any:
    """`value`, refused if it is a text or a list beyond the limit."""
    if isinstance(value, (str, list, tuple)):
        _check_size(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise SecurityError(f"the chat template builds a value of more than {MAX_OUTPUT_CHARS} items")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"the chat template builds a number of more than {MAX_BITS} bits")


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths, counts and steps of calls and filters: what a template means is far below the limit."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"a number in a call of the chat template exceeds {MAX_NUMBER}")


def _with_checked_width(function: Callable[..., str]) -> Callable[..., str]:
    def checked(text: str, *args: Any, **kwargs: Any) -> str:
        for width in (*args, *kwargs.values()):
            if isinstance(width, int) and abs(width) > MAX_WIDTH:
                raise SecurityError(f"a width in the chat template exceeds {MAX_WIDTH}")
        return function(text, *args, **kwargs)

    return checked


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    if _LONG_NUMBER.search(str(text)):
        raise SecurityError("a format in the chat template asks for too wide a field")
    return do_format(text, *args, **kwargs)


class _Namespace(Namespace):
    """jinja2's, without names that could reach into Python's objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(
            f"a chat template's namespace cannot hold {str(name)[:40]!r}: names must not begin with an underscore"
        )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, as templates were written for."""
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise SecurityError(f"an indent in the chat template exceeds {MAX_WIDTH}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
