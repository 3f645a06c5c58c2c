"""GET / (a page for people), /docs and /openapi.json, generated from the routes and the bodies' types. No scripts from elsewhere.

Knows no model but its name.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.server import answers, errors, schema
from octavo.server.asgi import Answer, Request, Response, Route
from octavo.server.state import ServerState

HTML = (b"content-type", b"text/html; charset=utf-8")

# What each route takes and gives, for the document; routes that are not here take nothing and give plain text or JSON.
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
}
ANSWERS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": answers.CompletionAnswer,
    "/v1/chat/completions": answers.ChatAnswer,
    "/v1/models": answers.ModelList,
    "/v1/models/{id}": answers.ModelCard,
    "/tokenize": answers.TokenizeAnswer,
    "/detokenize": answers.DetokenizeAnswer,
}

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:3rem auto;padding:0 1rem;color-scheme:light dark}"
    "pre{padding:1rem;white-space:pre-wrap;overflow-wrap:anywhere;background:#8882;border-radius:6px}code{font-size:.9em}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top}"
)


def example(path: str, model: str) -> dict[str, Any] | None:
    """A body for `path` that works as it stands."""
    match path:
        case "/v1/completions":
            return {"model": model, "prompt": "The capital of France is", "max_tokens": 16}
        case "/v1/chat/completions":
            return {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64}
        case "/tokenize":
            return {"model": model, "prompt": "Hello there"}
        case "/detokenize":
            return {"model": model, "tokens": [1, 2, 3]}
    return None


def openapi(routes: Sequence[Route], state: ServerState) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [*dict.fromkeys([*BODIES.values(), *ANSWERS.values(), errors.ErrorBody])]
    refs, components = msgspec.json.schema_components(
        types, schema_hook=_raw_schema, ref_template="#/components/schemas/{name}"
    )
    ref = dict(zip(types, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "operationId": f"{route.method} {route.path}",
            "summary": _summary(route),
            "responses": {
                "200": {"description": "The answer", **_json(ref.get(ANSWERS.get(route.path, type)))},
                "default": {"description": "An error", **_json(ref[errors.ErrorBody])},
            },
        }
        if route.path in BODIES:
            body = _json(ref[BODIES[route.path]])
            body["content"]["application/json"]["example"] = example(route.path, state.model_name)
            operation["requestBody"] = {"required": True, **body}
        if route.path.endswith("{id}"):
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if not route.public and state.server_args.api_key:
            operation["security"] = [{"key": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": state.version,
            "description": f"OpenAI-compatible server of {state.model_name}",
        },
        "servers": [{"url": state.server_args.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _raw_schema(kind: type) -> dict[str, Any]:
    if kind is msgspec.Raw:  # only `prompt`
        ids = {"type": "array", "items": {"type": "integer"}}
        return {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                ids,
                {"type": "array", "items": ids},
            ]
        }
    raise NotImplementedError


def _json(ref: dict[str, Any] | None) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": ref}}} if ref else {}


def _summary(route: Route) -> str:
    text = (route.endpoint.__doc__ or route.endpoint.__name__).strip().splitlines()[0]
    return text.rstrip(".")


class Documents:
    """The three pages of one app; made when first asked for."""

    def __init__(self) -> None:
        self.routes: Sequence[Route] = ()
        self._openapi = b""

    async def openapi(self, state: ServerState, _: Request) -> Answer:
        """The OpenAPI document."""
        if not self._openapi:
            self._openapi = msgspec.json.encode(openapi(self.routes, state))
        return Response(self._openapi)

    async def docs(self, state: ServerState, _: Request) -> Answer:
        """The routes and their fields, for people."""
        return Response(_page("Octavo: routes", _routes_html(self.routes, state)).encode(), headers=[HTML])

    async def home(self, state: ServerState, request: Request) -> Answer:
        """What this server is, and a line to try."""
        return Response(_page("Octavo", _home_html(state, request)).encode(), headers=[HTML])


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{body}</html>"
    )


def _home_html(state: ServerState, request: Request) -> str:
    host = (request.header(b"host") or b"127.0.0.1:8000").decode("latin-1")
    base = f"http://{host}{state.server_args.root_path}"
    key = " -H 'Authorization: Bearer KEY'" if state.server_args.api_key else ""
    body = msgspec.json.encode(example("/v1/chat/completions", state.model_name)).decode()
    curl = f"curl {base}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    links = ["/v1/models", "/health", "/ready", "/metrics", "/version"]
    if not state.server_args.disable_docs:
        links = ["/docs", "/openapi.json", *links]
    items = "".join(
        f'<li><a href="{html.escape(state.server_args.root_path + link)}">{link}</a></li>' for link in links
    )
    return (
        f"<p>Octavo {html.escape(state.version)} serves <code>{html.escape(state.model_name)}</code> with OpenAI's API.</p>"
        f"<pre>{html.escape(curl)}</pre><ul>{items}</ul>"
    )


def _routes_html(routes: Sequence[Route], state: ServerState) -> str:
    parts = []
    for route in routes:
        parts.append(
            f"<h3><code>{route.method} {html.escape(route.path)}</code></h3><p>{html.escape(_summary(route))}.</p>"
        )
        body = BODIES.get(route.path)
        if body is None:
            continue
        rows = "".join(
            f"<tr><td><code>{field.encode_name}</code></td><td>{html.escape(_type_name(field.type))}</td>"
            f"<td>{'required' if field.required else ''}</td></tr>"
            for field in msgspec.structs.fields(body)
        )
        sample = html.escape(
            msgspec.json.format(msgspec.json.encode(example(route.path, state.model_name)), indent=2).decode()
        )
        parts.append(f"<pre>{sample}</pre><table>{rows}</table>")
    return "".join(parts)


def _type_name(kind: Any) -> str:
    if kind is msgspec.Raw:
        return "str | list[str] | list[int] | list[list[int]]"
    name = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", None) else str(kind)
    return name.replace("typing.", "").replace("octavo.server.schema.", "").replace(" | None", "")
