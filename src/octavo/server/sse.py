"""The bytes of a stream: templates made once per stream, so that a chunk costs one JSON string and a few joins.

Knows the shapes of OpenAI's chunks and nothing of where text comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"

# Before the first output a refusal can still be a status. Longer than this a client waits for nothing it would learn.
HEADERS_AFTER = 10.0  # seconds
COMMENT_EVERY = 10.0  # seconds; keeps proxies from closing a stream that is queued

_NULL = b"null"

encode_json = msgspec.json.Encoder().encode


class ChunkHead(msgspec.Struct):
    """What every chunk of a stream says of it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChunkTemplates:
    """Chunks of one stream of completions or chat completions.

    `field` is what opens a choice's text: `b'"text":'` or `b'"delta":{"content":'`; `close` ends it (`b""` or `b"}"`).
    `usage` is what stands at the end of ordinary chunks: `b""`, or `b',"usage":null'` when a usage chunk will come.
    """

    def __init__(self, head: ChunkHead, *, field: bytes, close: bytes, num_choices: int) -> None:
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._openings = [self._head + b'{"index":%d,%s' % (index, field) for index in range(num_choices)]
        self._close = close
        self._plain_end = close + b',"logprobs":null,"finish_reason":null}]'

    def text(self, index: int, text: str, usage: bytes) -> bytes:
        """A chunk that carries text and nothing else: the common one."""
        return self._openings[index] + encode_json(text) + self._plain_end + usage + b"}\n\n"

    def choice(
        self, index: int, text: str, usage: bytes, *, logprobs: object, finish: tuple[str, object] | None, extra: bytes
    ) -> bytes:
        """Any chunk: `logprobs` is encoded as it is, `finish` is (finish_reason, stop_reason), `extra` more fields of the choice."""
        reason = _NULL if finish is None else encode_json(finish[0]) + b',"stop_reason":' + encode_json(finish[1])
        return b"".join(
            (self._openings[index], encode_json(text), self._close, b',"logprobs":', _NULL if logprobs is None else encode_json(logprobs),
             b',"finish_reason":', reason, extra, b"}]", usage, b"}\n\n")
        )  # fmt: skip

    def role(self, index: int, role: str, usage: bytes, extra: bytes = b"") -> bytes:
        """A chat stream's first chunk."""
        delta = b'{"index":%d,"delta":{"role":%s,"content":""},"logprobs":null,"finish_reason":null}]' % (
            index,
            encode_json(role),
        )
        return self._head + delta + extra + usage + b"}\n\n"

    def usage(self, usage: object) -> bytes:
        """The last chunk before [DONE], when the client asked for it."""
        return self._head + b'],"usage":' + encode_json(usage) + b"}\n\n"


async def primed(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Waits for the first chunk, so that a refusal is still raised to the caller and becomes a status; then a stream of them all.

    After HEADERS_AFTER seconds it stops waiting and lets the stream begin with comments.
    """
    first = asyncio.ensure_future(_first(chunks))
    try:
        await asyncio.wait({first}, timeout=HEADERS_AFTER)
    except asyncio.CancelledError:
        await _drop(first, chunks)
        raise
    if first.done():
        first.result()  # raises the refusal
    return _continued(first, chunks)


async def _first(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


async def _continued(first: asyncio.Future[bytes], chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        while not first.done():
            yield COMMENT
            await asyncio.wait({first}, timeout=COMMENT_EVERY)
        yield first.result()
        async for chunk in chunks:
            yield chunk
    finally:
        await _drop(first, chunks)


async def _drop(first: asyncio.Future[bytes], chunks: AsyncGenerator[bytes, None]) -> None:
    """Ends the work behind a stream, whoever is waiting for it."""
    if not first.done():
        first.cancel()
        await asyncio.wait({first})
    await chunks.aclose()
