"""Command-line options from the fields of the option dataclasses in config.py, and of SamplingParams.

Knows how a field becomes a flag: its spellings (dashes and underscores both), its type, its help. Limits and choices are shown in the
help but checked by the dataclasses themselves, so that a wrong value reads the same from the command line and from Python.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import click

from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")

SAMPLING_HELP = {
    "n": "sequences to generate for each prompt",
    "presence_penalty": "-2 to 2, on each token that was generated before",
    "frequency_penalty": "-2 to 2, times how often it was generated",
    "repetition_penalty": "above 1 discourages tokens of prompt and output",
    "temperature": "0 is greedy, up to 2",
    "top_p": "sample from the smallest set of tokens with this probability",
    "top_k": "sample from this many best tokens; 0: all",
    "min_p": "drop tokens below this share of the best one's probability",
    "seed": "the same seed gives the same text",
    "stop": "end before this text; repeatable",
    "stop_token_ids": "end after this token id; repeatable",
    "ignore_eos": "go on after the end-of-sequence token",
    "max_tokens": "most tokens to generate",
    "min_tokens": "no end before so many tokens",
    "logprobs": "best tokens to report per position, 0 to 20",
    "prompt_logprobs": "the same for the prompt's positions",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "put spaces between special tokens of the text",
    "include_stop_str_in_output": "keep the text that ended the output",
    "logit_bias": "ID:BIAS, -100 to 100, added to a token's logit; repeatable",
    "allowed_token_ids": "sample no other token than this id; repeatable",
}

# Set by the commands themselves: how they print decides them.
NO_SAMPLING_FLAG = {"detokenize", "output_kind"}

# A checkpoint's generation_config.json may set these.
FROM_MODEL = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}

# The engine's own seed serves the class LLM; on a command line, `--seed` is the request's.
NOT_OURS = "seed"

_ATOMS = {int: click.INT, float: click.FLOAT, str: click.STRING}


def normalise(token: str) -> str:
    """`--max_num_seqs` is `--max-num-seqs`; values are not touched (click normalises names and choices only)."""
    return token.replace("_", "-") if token.startswith("-") or "_" in token else token


def command(name: str, help: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A click command that takes both spellings of its options."""
    return click.command(name, help=help, context_settings={"token_normalize_func": normalise, "max_content_width": 120})


def dataclass_options(cls: type, skip: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorator that adds one option for each field of an option dataclass such as EngineArgs."""
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if "help" in f.metadata and f.name not in set(skip)]

    def decorate(function: F) -> F:
        for f in reversed(fields):
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            text = f.metadata["help"] + _limits(f.metadata) + (f" [${f.metadata['env']}]" if f.metadata["env"] else "")
            choices = f.metadata["choices"]
            metavar = "[" + "|".join(map(str, choices)) + "]" if choices else None
            _add(function, f.name, hints[f.name], default, text, metavar=metavar, flags=f.metadata["flags"])
        return function

    return decorate


def sampling_options(function: F) -> F:
    """Adds one option for each field of SamplingParams that makes sense on a command line; what is not given stays None."""
    hints = typing.get_type_hints(SamplingParams)
    defaults = SamplingParams()
    for name in reversed(SamplingParams.__struct_fields__):
        if name not in NO_SAMPLING_FLAG:
            default = getattr(defaults, name)
            shown = "the model's, else " + str(default) if name in FROM_MODEL else default or None
            hint = str if name == "stop" else hints[name]
            _add(function, name, hint, None, SAMPLING_HELP[name], shown=shown, many=name == "stop")
    return function


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of click's values for `sampling_options`, those that the user gave, as fields of SamplingParams. Raises ConfigError."""
    chosen: dict[str, Any] = {}
    for name in SAMPLING_HELP:
        value = values[name]
        if value is None or value == ():
            continue
        if name == "logit_bias":
            value = dict(map(_bias, value))
        chosen[name] = list(value) if isinstance(value, tuple) else value
    return chosen


def args_from(cls: Callable[..., A], values: Mapping[str, Any], model: str | None = None, skip: Iterable[str] = ()) -> A:
    """The option dataclass filled from click's values, but for the fields in `skip`; a positional MODEL wins. Raises ConfigError."""
    names = {f.name for f in dataclasses.fields(cast(Any, cls))} - set(skip)
    chosen = {name: value for name, value in values.items() if name in names}
    for name, value in chosen.items():
        if isinstance(value, tuple):
            chosen[name] = list(value)
    if model is not None:
        chosen["model"] = model
    return cls(**chosen)


def _add(
    function: Callable[..., Any],
    name: str,
    hint: Any,
    default: Any,
    text: str,
    *,
    shown: object = None,
    metavar: str | None = None,
    flags: tuple[str, ...] = (),
    many: bool = False,
) -> None:
    """Adds the option of one field to a function that will become a command. `shown` is the default as the help tells it."""
    flag = "--" + name.replace("_", "-")
    kinds = _kinds(hint)
    told: bool | str = default not in (None, "", [], ()) if shown is None else str(shown)
    if bool in kinds:
        click.option(f"{flag}/--no-{flag[2:]}", name, default=default, show_default=told, help=text)(function)
        return
    many = many or bool(kinds & {list, dict})
    atom = str if dict in kinds else next((kind for kind in (int, float, str) if kind in kinds), str)
    click.option(
        *flags, flag, name, type=_ATOMS[atom], default=default, multiple=many, metavar=metavar, show_default=told, help=text
    )(function)


def _kinds(hint: Any) -> set[type]:
    """The plain types in a hint: `list[int] | None` holds list and int."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return set().union(*(_kinds(part) for part in typing.get_args(hint)))
    origin = typing.get_origin(hint)
    if origin is not None:
        return {origin}.union(*(_kinds(part) for part in typing.get_args(hint)))
    return {hint}


def _limits(meta: Mapping[str, Any]) -> str:
    low, high = meta["low"], meta["high"]
    if low is None and high is None:
        return ""
    if high is None:
        return f" (at least {low:g})"
    return f" (at most {high:g})" if low is None else f" ({low:,.12g} to {high:,.12g})"


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ConfigError(f"logit_bias = {text!r}: must be ID:BIAS, for example 198:-100") from None


def describe(cls: type, f: dataclasses.Field[Any]) -> tuple[str, str, str, str]:
    """An option for the options page: spellings, values, default, help, as Markdown."""
    kinds = _kinds(typing.get_type_hints(cls)[f.name])
    meta = f.metadata
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    names = " ".join(f"`{name}`" for name in (f"--{f.name.replace('_', '-')}", *meta["flags"]))
    if meta["choices"]:
        values = ", ".join(f"`{choice}`" for choice in meta["choices"])
    else:
        kind = "switch" if bool in kinds else next(k.__name__ for k in (int, float, str) if k in kinds)
        values = {"str": "text", "int": "integer", "float": "number"}.get(kind, kind) + _limits(meta)
    env = f" Also from `${meta['env']}`." if meta["env"] else ""
    return names, values, "" if default in (None, "", []) else f"`{default}`", meta["help"] + "." * bool(env) + env
