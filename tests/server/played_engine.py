"""The real app over the real client and tokenizer; only the engine is played, in this process, without a model."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.client.client import EngineClient
from octavo.client.supervisor import Supervisor
from octavo.client.transport import EngineEnded
from octavo.config import AsyncEngineArgs, ServerArgs
from octavo.protocol import (
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    ErrorKind,
    FinishReason,
    OutputError,
    Phase,
    StepStats,
    TokenLogprobs,
)
from octavo.server.app import App, create_app
from octavo.server.serving import run_server
from octavo.tokenizer import tokenizer as tokenizer_module
from octavo.tokenizer.vocabulary import Vocabulary

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB = 260
CONTEXT = 2048
MODEL = "test-model"

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix }}"
)


@lru_cache
def byte_tokenizer(bos: int | None = BOS, template: str | None = TEMPLATE) -> tokenizer_module.Tokenizer:
    """One token per byte, in the byte-level alphabet of GPT-2, and four special ones."""
    alphabet = {byte: char for char, byte in tokenizer_module.BYTE_OF_CHARACTER.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
    return tokenizer_module.Tokenizer(
        Vocabulary(
            source="test",
            backend=backend,
            vocab_size=VOCAB,
            bos_token_id=bos,
            eos_token_ids=[EOS],
            special_tokens={"eos_token": "<eos>"},
            chat_templates={} if template is None else {"default": template},
        )
    )


@dataclass
class Running:
    request: EngineCoreRequest
    script: list[int] | None  # what it says before the end of sequence; None: letters by hash
    output: list[int] = field(default_factory=list)

    def next_token(self) -> int:
        at = len(self.output)
        if self.script is not None:
            return self.script[at] if at < len(self.script) else EOS
        params = self.request.sampling_params
        seed = 0 if params.greedy else params.seed
        text = f"{self.request.prompt_token_ids}{seed}{at}".encode()
        return ord("a") + hashlib.sha256(text).digest()[0] % 26


class FakeEngine:
    """A Transport whose engine is this object. What a prompt says decides what happens to it:

    `#say TEXT#` answers TEXT and the end of sequence; `#fail N#` fails after N tokens; `#full#` is refused as overloaded, `#pool#` as too long;
    `#hold#` waits until `release()`. Everything else answers letters that depend on prompt, seed and position.
    """

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}
        self.aborted: list[str] = []
        self.seen: list[EngineCoreRequest] = []
        self.held = True
        self.step_seconds = 0.0
        self.tokens_per_step = 1
        self.dead = False
        self.step = 0
        self._refused: list[EngineCoreOutput] = []
        self._wake = asyncio.Event()
        self._totals = {"prompt": 0, "generation": 0}

    def launch(self) -> None: ...

    async def start(self) -> EngineReady:
        return EngineReady(
            max_model_len=CONTEXT, vocab_size=VOCAB, block_size=16, num_blocks=512, kv_cache_bytes=1, kv_cache_tokens=8192, weights_bytes=1, max_num_seqs=64,
            max_num_batched_tokens=512, num_threads=1, backend="played", phases=[Phase("load", 0.0)], pid=1,
        )  # fmt: skip

    def send(self, message: Any) -> None:
        if isinstance(message, Abort):
            self.aborted.extend(i for i in message.request_ids if self.running.pop(i, None))
        elif isinstance(message, EngineCoreRequest):
            self.seen.append(message)
            self._take(message)
        self._wake.set()

    def release(self) -> None:
        self.held = False
        self._wake.set()

    def kill(self) -> None:
        self.dead = True
        self._wake.set()

    async def close(self) -> None:
        self.kill()

    def _take(self, request: EngineCoreRequest) -> None:
        text = self.text_of(request)
        if "#full#" in text or "#pool#" in text:
            full = OutputError(ErrorKind.OVERLOADED, "the queue is full")
            error = full if "#full#" in text else OutputError(ErrorKind.CONTEXT_LENGTH, "needs 900 blocks of 512")
            self._refused.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=error))
            return
        said = text.partition("#say ")[2].partition("#")[0] if "#say " in text else None
        self.running[request.request_id] = Running(request, None if said is None else list(said.encode()))
        self._totals["prompt"] += len(request.prompt_token_ids)

    @staticmethod
    def text_of(request: EngineCoreRequest) -> str:
        return bytes(i for i in request.prompt_token_ids if i < 256).decode(errors="replace")

    def _can_run(self, running: Running) -> bool:
        return not (self.held and "#hold#" in self.text_of(running.request))

    async def receive(self) -> EngineCoreOutputs:
        while not self._refused and not any(map(self._can_run, self.running.values())) and not self.dead:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), 0.2)
            except TimeoutError:
                break
        await asyncio.sleep(self.step_seconds)
        if self.dead:
            raise EngineEnded("the engine was killed")
        outputs, self._refused = self._refused, []
        outputs += [self._advance(r) for r in list(self.running.values()) if self._can_run(r)]
        self.step += 1
        return EngineCoreOutputs(outputs, self.stats(len(outputs)), 0.0)

    def stats(self, batch_tokens: int) -> StepStats:
        used = 4 * len(self.running)
        return StepStats(
            self.step, len(self.running), 0, 512, used, 3, 16 * used, 100, 25, 2, self._totals["prompt"], self._totals["generation"],
            batch_tokens, 0.001, 0.05, [0.003, 0.001, 0.002, 0.0007, 0.0006], 9, 30, 21,
        )  # fmt: skip

    def _advance(self, running: Running) -> EngineCoreOutput:
        request, params = running.request, running.request.sampling_params
        first = not running.output
        output = EngineCoreOutput(request.request_id, [], num_cached_tokens=len(request.prompt_token_ids) // 16 * 16)
        text = self.text_of(request)
        if "#fail" in text and len(running.output) >= int(text.partition("#fail ")[2].partition("#")[0]):
            del self.running[request.request_id]
            output.error = OutputError(ErrorKind.INTERNAL, "NaN in /secret/path")
            return output
        if first and params.prompt_logprobs is not None:
            ids = request.prompt_token_ids
            output.prompt_logprobs = [self._logprobs(i, params.prompt_logprobs, running) for i in ids[1:]]
        rows = []
        for _ in range(self.tokens_per_step):
            token = running.next_token()
            running.output.append(token)
            output.new_token_ids.append(token)
            if params.logprobs is not None:
                rows.append(self._logprobs(token, params.logprobs, running))
            if token in request.stop_token_ids and len(running.output) > params.min_tokens:
                output.finish_reason = FinishReason.STOP
                output.stop_reason = None if token in request.eos_token_ids else token
            elif len(running.output) >= (params.max_tokens or 0):
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                del self.running[request.request_id]
                break
        output.logprobs = rows or None
        self._totals["generation"] += len(output.new_token_ids)
        return output

    @staticmethod
    def _logprobs(token: int, top: int, running: Running) -> TokenLogprobs:
        """The token is the second best; the last of the best has no probability at all."""
        others = [(token + 1 + i) % 256 for i in range(top)]
        if top >= 2:
            others[1] = token
        best = [-0.1 * (i + 1) for i in range(top)]
        if top > 2:
            best[-1] = -3.0e38
        return TokenLogprobs([token, *others], [-0.2, *best], 2)


@dataclass
class Served:
    """An app, its engine and an HTTP client that calls it in this process."""

    app: App
    engine: FakeEngine
    client: EngineClient
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)


def make_client(engine: FakeEngine, args: AsyncEngineArgs, **tokenizer: Any) -> EngineClient:
    return EngineClient(Supervisor(lambda: engine, max_restarts=0), byte_tokenizer(**tokenizer), args)


class Server:
    """Makes served apps and ends them."""

    def __init__(self) -> None:
        self._open: list[Served] = []

    async def __call__(
        self, *, engine: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None, start: bool = True,
        default_sampling: dict[str, Any] | None = None, **server: Any,
    ) -> Served:  # fmt: skip
        args = AsyncEngineArgs(model="/secret/path", served_model_name=MODEL, **(engine or {}))
        fake = FakeEngine()
        client = make_client(fake, args, **(tokenizer or {}))
        if start:
            await client.start()
        app = create_app(client, args, ServerArgs(**server), default_sampling=default_sampling)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://octavo.test")
        served = Served(app, fake, client, http)
        self._open.append(served)
        return served

    async def close(self) -> None:
        for served in self._open:
            await served.http.aclose()
            await served.client.shutdown()


def main() -> None:
    """A server process of its own; says where it listens and when it is ready."""
    args = AsyncEngineArgs(model="/secret/path", served_model_name=MODEL)
    server_args = ServerArgs(port=0)
    app = create_app(make_client(FakeEngine(), args), args, server_args)
    run_server(
        app,
        server_args,
        on_listening=lambda host, port: print(f"listening http://{host}:{port}", flush=True),
        on_ready=lambda ready: print("ready", ready.max_model_len, flush=True),
    )


if __name__ == "__main__":
    main()
