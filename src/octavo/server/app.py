"""The app: its table of routes, and the ASGI door in front of them.

Knows which function answers which route, and nothing of what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import jinja2

from octavo import __version__
from octavo.config import AsyncEngineArgs, ServerArgs
from octavo.server import health, models, tokenize
from octavo.server.asgi import Receive, Route, Router, Send
from octavo.server.auth import KeyRing
from octavo.server.chat import create_chat_completion
from octavo.server.completions import create_completion
from octavo.server.docs import Documents
from octavo.server.exchange import Exchange, Stop
from octavo.server.metrics import Metrics
from octavo.server.state import ServerState, fingerprint
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE

if TYPE_CHECKING:
    from octavo.client.client import EngineClient

DRAIN_POLL = 0.02  # seconds
LAST_WORDS = 1.0  # seconds for the error events of streams that a shutdown cut off


def routes(documents: Documents, *, with_docs: bool) -> list[Route]:
    """Every route of the server."""
    table = [
        Route("POST", "/v1/chat/completions", create_chat_completion, generates=True),
        Route("POST", "/v1/completions", create_completion, generates=True),
        Route("GET", "/v1/models", models.list_models),
        Route("GET", "/v1/models/{id}", models.show_model),
        Route("POST", "/tokenize", tokenize.tokenize),
        Route("POST", "/detokenize", tokenize.detokenize),
        Route("GET", "/health", health.health, public=True),
        Route("GET", "/ready", health.ready, public=True),
        Route("GET", "/ping", health.health, public=True),
        Route("POST", "/ping", health.health, public=True),
        Route("GET", "/metrics", health.metrics),
        Route("GET", "/version", health.version),
        Route("GET", "/", documents.home),
    ]
    if with_docs:
        table += [Route("GET", "/docs", documents.docs), Route("GET", "/openapi.json", documents.openapi)]
    documents.routes = table
    return table


class App:
    """An ASGI application. `state` is what its routes share."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._router = Router(routes(Documents(), with_docs=not state.server_args.disable_docs))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Exchange(self.state, self._router, scope, receive, send).run()
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)

    async def warm(self) -> None:
        """Does once what the first chat request would otherwise wait for. A template that is wrong is told to who uses it."""
        template = self.state.chat_template
        if template is not None and DEFAULT_TEMPLATE in template.templates:
            with contextlib.suppress(jinja2.TemplateError, RecursionError):
                await asyncio.to_thread(template.compiled, DEFAULT_TEMPLATE)

    async def drain(self, timeout: float) -> bool:
        """Refuses new work from now on and lets running requests end for `timeout` seconds; those left then get an error.

        Returns whether all ended by themselves.
        """
        self.state.draining = True
        clean = await self._wait(timeout)
        if not clean:
            for exchange in list(self.state.active):
                exchange.stop(Stop.SHUTDOWN)
            await self._wait(LAST_WORDS)
        return clean

    async def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.state.active and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL)
        return not self.state.active


def create_app(
    client: EngineClient,
    engine_args: AsyncEngineArgs,
    server_args: ServerArgs,
    *,
    default_sampling: dict[str, Any] | None = None,
) -> App:
    """The app for one engine. Routes answer 503 until `client.start()` has finished elsewhere.

    `default_sampling`: SamplingParams fields from the model's generation_config; a request's own values win. Raises ConfigError
    for a chat template that cannot be used.
    """
    state = ServerState(
        client=client,
        engine_args=engine_args,
        server_args=server_args,
        metrics=Metrics(client, engine_args),
        keys=KeyRing(server_args.api_key),
        version=__version__,
        fingerprint=fingerprint(engine_args, __version__),
        default_sampling=default_sampling or {},
        chat_template=ChatTemplate.load(client.tokenizer, server_args.chat_template),
    )
    return App(state)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing starts or ends with the app: the engine's life is its owner's."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
