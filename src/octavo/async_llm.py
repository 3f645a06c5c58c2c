"""AsyncLLMEngine: the asynchronous engine under vLLM's name, from options alone.

Finds the model's files and its tokenizer, then is an EngineClient like the server's. Knows nothing that the client does not, but where
models are found.
"""

from __future__ import annotations

from typing import Self

from octavo.client.client import EngineClient
from octavo.config import EngineArgs
from octavo.loader.resolve import resolve_model


class AsyncLLMEngine(EngineClient):
    """An engine in a process of its own, for many concurrent callers on one event loop.

        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="smollm2-135m"))
        async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=20), request_id="a"):
            print(output.outputs[0].text)
    """

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """An engine for these options. Its process begins to start at once; `start`, or the first `generate`, waits for it.

        Call it from the thread whose event loop will use the engine. Raises ConfigError, ModelFileError.
        """
        source = resolve_model(args.model, revision=args.revision, download_dir=args.download_dir, load_format=args.load_format)
        return cls.for_model(args, source.path)
