"""`octavo serve`: the engine process and the HTTP server, started side by side.

Order is speed here: the engine's process is started before anything slow is imported, so that it maps its weights while this
one imports its server and reads the tokenizer. Knows what to start and what to print; the server itself lives in `octavo.server`.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import NOT_OURS, args_from, dataclass_options
from octavo.cli.options import command as make_command
from octavo.config import ITL_MULTIPLE, AsyncEngineArgs, ServerArgs

if TYPE_CHECKING:
    from octavo.client.supervisor import Supervisor
    from octavo.loader.resolve import ModelSource
    from octavo.protocol import EngineReady


@make_command("serve", "Serve MODEL over HTTP, with OpenAI's API: a folder, a .gguf file, a hub id (org/name) or a built-in name.")
@click.argument("model_argument", metavar="[MODEL]", required=False)
@dataclass_options(ServerArgs)
@dataclass_options(AsyncEngineArgs, skip=(NOT_OURS,))
def command(model_argument: str | None, **values: Any) -> None:
    watch = Stopwatch()
    args = args_from(AsyncEngineArgs, values, model_argument)
    server_args = args_from(ServerArgs, values)
    logging.basicConfig(
        level=server_args.log_level.upper(), format="%(levelname)s %(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    if server_args.log_level != "debug":
        logging.getLogger("uvicorn").setLevel("WARNING")  # its greeting is not ours
    from octavo.loader.resolve import resolve_model

    source = resolve_model(args.model, revision=args.revision, download_dir=args.download_dir, load_format=args.load_format)
    watch.lap("find model")
    supervisor = launch(args, source.path)
    try:
        import asyncio

        import uvloop

        watch.lap("start engine process")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(supervisor, source, args, server_args, watch))
    except BaseException:
        supervisor.kill()
        raise


def launch(args: AsyncEngineArgs, model_path: Path) -> Supervisor:
    """A supervisor whose first engine process has begun to start. Needs no event loop yet."""
    from octavo.client.supervisor import Supervisor
    from octavo.client.transport import SocketTransport
    from octavo.protocol import Start

    start = Start(args, str(model_path))
    supervisor = Supervisor(lambda: SocketTransport(start), max_restarts=args.max_engine_restarts)
    supervisor.launch()
    return supervisor


async def run(supervisor: Supervisor, source: ModelSource, args: AsyncEngineArgs, server_args: ServerArgs, watch: Stopwatch) -> None:
    """Serves until told to stop. Raises OctavoError if the engine cannot start, or has died for good."""
    import asyncio

    from octavo.client.client import EngineClient
    from octavo.loader.hf_config import load_generation_config
    from octavo.server.app import create_app
    from octavo.server.serving import open_socket, serve
    from octavo.tokenizer.tokenizer import Tokenizer

    listener = open_socket(server_args.host, server_args.port)
    watch.lap("import server")
    client = EngineClient(supervisor, Tokenizer.load(source.path, args.tokenizer), args)
    watch.lap("read tokenizer")
    suggested = load_generation_config(source).given() if args.generation_config == "auto" else {}
    app = create_app(client, args, server_args, default_sampling=suggested)
    watch.lap("make app")
    serving = asyncio.create_task(serve(app, server_args, listener=listener))
    starting = asyncio.create_task(client.start())
    try:
        await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            ready = starting.result()
            watch.lap("wait for engine")
            host, port = listener.getsockname()[:2]
            click.echo(greeting(ready, args, server_args, host, port, watch))
            gc.freeze()  # a collection then never looks at the modules and the vocabulary: that would hold up all streams
        await serving
    finally:
        starting.cancel()
        serving.cancel()
        await client.shutdown()


@dataclass
class Stopwatch:
    """Phases of this process's start in seconds; the first began when the process did."""

    phases: list[tuple[str, float]] = field(default_factory=list)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.phases.append(("start interpreter", process_age()))

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.phases.append((name, now - self._last))
        self._last = now

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.phases)


def process_age() -> float:
    """Seconds since this process was started, to the hundredth; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / 100)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def greeting(ready: EngineReady, args: AsyncEngineArgs, server_args: ServerArgs, host: str, port: int, watch: Stopwatch) -> str:
    """What the user sees when the server takes requests. The curl line can be pasted as it is."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    body = json.dumps({"model": args.served_name, "prompt": "Once upon a time", "max_tokens": 32}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if server_args.api_key else ""
    lines = [
        f"{args.served_name} is served on {url}",
        f"  engine   {ready.backend}; up to {ready.max_num_seqs} requests and {ready.max_num_batched_tokens} tokens in a step",
        f"  pace     {_pace(args)}",
        f"  drafts   {_drafts(args)}",
        f"  weights  {ready.weights_bytes / 1e6:,.0f} MB, {ready.weights_fp16_bytes / 1e6:,.0f} MB in fp16; context {ready.max_model_len:,} tokens",
        f"  KV cache {ready.kv_cache_bytes / 2**20:,.0f} MiB; holds {ready.kv_cache_tokens:,} tokens in {ready.num_blocks:,} blocks of {ready.block_size}",
        f"  start    {watch.total:.2f} s: {_phases(watch.phases)}",
        f"           engine process: {_phases([(phase.name, phase.seconds) for phase in ready.phases])}",
        f"  try      curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        f"  docs     {url}/docs",
    ]
    if server_args.disable_docs:
        del lines[-1]
    return "\n".join(lines)


def _pace(args: AsyncEngineArgs) -> str:
    """How prompts and streams share a step, in words."""
    if args.itl_target_ms == 0:
        return "prompts in order, in whole steps (--itl-target-ms 0)"
    target = f"{ITL_MULTIPLE:g} times one without" if args.itl_target_ms is None else f"{args.itl_target_ms:g} ms"
    return f"while streams run, a step with prompts is to take at most {target}, by step times learnt on the way"


def _drafts(args: AsyncEngineArgs) -> str:
    """What is guessed ahead, in words."""
    if args.num_speculative_tokens == 0:
        return "none (--num-speculative-tokens 0)"
    return f"where a text repeats itself, up to {args.num_speculative_tokens} tokens more in a step, as long as that saves time; no token depends on it"


def _phases(phases: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases)
