"""The jinja2 environment of chat templates: transformers' own names and filters, a sandbox, and limits.

jinja2's sandbox keeps a template from Python's objects. On top of it the number of passes through loops and macros, the size of every text
and list that a template builds, and the numbers that it computes with are bounded, so that neither a slip nor a simple bomb takes the
server's time or memory. It is no jail for an author who is bent on it. Knows no messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
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

MAX_OUTPUT_CHARS = 1 << 25
MAX_STEPS = 100_000
MAX_NUMBER = 100_000
MAX_WIDTH = 1_000
MAX_BITS = 4096

# Filters that _Instrument puts into templates; names that no template can write.
BOUNDED, STEP, JOINED = "bounded text", "count a step", "join with bound"

_LONG_NUMBER = re.compile(r"\d{6}|\*")
_steps: ContextVar[list[int]] = ContextVar("steps")


@contextmanager
def counted_steps() -> Iterator[None]:
    """Around one rendering: its steps are counted from zero."""
    token = _steps.set([0])
    try:
        yield
    finally:
        _steps.reset(token)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own interface

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
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
