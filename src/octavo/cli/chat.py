"""`octavo chat`: a conversation in the terminal, streamed, with an engine of its own or with a running server.

Knows how to read lines, print deltas and keep the history. Where the deltas come from is a `Partner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import click

from octavo.cli.options import NOT_OURS, args_from, dataclass_options, sampling_options, sampling_values
from octavo.cli.options import command as make_command
from octavo.config import AsyncEngineArgs
from octavo.errors import InvalidRequestError, OctavoError

if TYPE_CHECKING:
    from octavo.bench.http import Target
    from octavo.client.client import EngineClient

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"

# What a conversation may say at least: completions stop after 16 tokens unless told otherwise, an answer should not.
ANSWER_TOKENS = 512

Message = dict[str, str]


class Partner(Protocol):
    """Answers a conversation."""

    def answer(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[str]:
        """The answer's text in pieces. Raises OctavoError."""


@make_command("chat", "Talk with a model in the terminal. Without --url the engine runs beside this command.")
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.option("--url", help="a running server instead of an engine of our own, for example http://127.0.0.1:8000")
@click.option("--api-key", help="sent to that server as a bearer token")
@click.option("--system", help="a system message to begin with")
@sampling_options
@dataclass_options(AsyncEngineArgs, skip=(NOT_OURS,))
def command(model_argument: str | None, url: str | None, api_key: str | None, system: str | None, **values: Any) -> None:
    sampling = {"max_tokens": ANSWER_TOKENS, **sampling_values(values)}
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    if url is not None:
        from octavo.bench.http import Target

        asyncio.run(_with_server(Target.parse(url, api_key), model_argument, history, sampling))
        return
    args = args_from(AsyncEngineArgs, values, model_argument, skip=(NOT_OURS,))
    asyncio.run(_with_engine(args, history, sampling))


async def _with_engine(args: AsyncEngineArgs, history: list[Message], sampling: dict[str, Any]) -> None:
    from octavo.async_llm import AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        await engine.start()
        await converse(EnginePartner(engine, args), history, sampling)
    finally:
        await engine.shutdown()


async def _with_server(target: Target, model: str | None, history: list[Message], sampling: dict[str, Any]) -> None:
    from octavo.bench.http import HttpError
    from octavo.bench.load import model_of

    try:
        name = model or await model_of(target)
        await converse(ServerPartner(target, name), history, sampling)
    except HttpError as error:
        raise OctavoError(str(error)) from None


class EnginePartner:
    """An engine that this process started. Raises InvalidRequestError where the model has no chat template."""

    def __init__(self, engine: EngineClient, args: AsyncEngineArgs) -> None:
        from octavo.tokenizer.chat_template import ChatTemplate

        self._engine = engine
        template = ChatTemplate.load(engine.tokenizer)
        if template is None:
            raise InvalidRequestError(f"{args.model} has no chat template; octavo generate completes plain text")
        self._template = template

    async def answer(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[str]:
        from octavo.sampling_params import RequestOutputKind, SamplingParams

        ids = self._engine.tokenizer.encode(self._template.render(messages), False)
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
        async for output in self._engine.generate({"prompt_token_ids": ids}, params):
            yield output.outputs[0].text


class ServerPartner:
    """A server with OpenAI's chat completions."""

    def __init__(self, target: Target, model: str) -> None:
        self._target = target
        self._model = model

    async def answer(self, messages: list[Message], sampling: dict[str, Any]) -> AsyncIterator[str]:
        from octavo.bench.http import Exchange

        body = json.dumps({"model": self._model, "messages": messages, "stream": True, **sampling}).encode()
        async with Exchange(self._target, "POST", "/v1/chat/completions", body) as response:
            if response.status != 200:
                raise OctavoError(f"status {response.status}: {(await response.read())[:300].decode(errors='replace')}")
            async for line in response.lines():
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data) if line.startswith(b"data:") else {}
                if event.get("error"):
                    raise OctavoError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""


async def converse(partner: Partner, history: list[Message], sampling: dict[str, Any]) -> None:
    """Reads lines and prints answers until the input ends."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its editing keys
        click.echo(HELP, err=True)
    first = list(history)
    with _Interrupts() as interrupts, _terminal_kept():
        while (line := await _read_line(interactive, interrupts)) is not None:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text == "/reset":
                history[:] = first
            elif text:
                history.append({"role": "user", "content": text})
                answer = await _print_answer(partner, history, sampling, interrupts)
                history.append({"role": "assistant", "content": answer})


class _Interrupts:
    """Ctrl-C cancels what is being waited for: the line or the answer."""

    def __init__(self) -> None:
        self.waited_for: asyncio.Future[Any] | None = None

    def __enter__(self) -> _Interrupts:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _interrupt(self) -> None:
        if self.waited_for is not None:
            self.waited_for.cancel()


@contextlib.contextmanager
def _terminal_kept() -> Iterator[None]:
    """Leaves the terminal as it was found: a line that is given up leaves its reader, and the terminal without echo, behind."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    state = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, state)


async def _read_line(interactive: bool, interrupts: _Interrupts) -> str | None:
    """A line from the terminal or a pipe; None at its end or on Ctrl-C."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def deliver(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        try:
            text = input("> ") if interactive else sys.stdin.readline() or None
        except EOFError:
            text = None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, text)

    # A daemon: nothing can end a thread that waits for a key, so the process must be able to leave without it.
    threading.Thread(target=read, daemon=True).start()
    interrupts.waited_for = line
    try:
        return await line
    except asyncio.CancelledError:
        click.echo()
        return None


async def _print_answer(partner: Partner, history: list[Message], sampling: dict[str, Any], interrupts: _Interrupts) -> str:
    """Prints the answer as it comes and returns it; Ctrl-C ends it early, and what was said stays in the history."""
    parts: list[str] = []

    async def speak() -> None:
        async for text in partner.answer(history, sampling):
            parts.append(text)
            click.echo(text, nl=False)

    interrupts.waited_for = task = asyncio.ensure_future(speak())
    try:
        await task
    except asyncio.CancelledError:
        click.echo(" ...", nl=False)
    except InvalidRequestError as error:  # a conversation that grew too long: say so, and let the user go on with /reset
        click.echo(f"octavo: error: {error}", err=True)
    click.echo()
    return "".join(parts)
