"""Every option, once: its name, default, help and limits; and the frozen sections that the rooms receive.

`EngineArgs` and `ServerArgs` are what the user typed ("auto" and None allowed). The command line and the options page are generated
from their fields. `EngineConfig.resolve` turns arguments, the model's own configuration and the machine into sections without any
"auto" left; a room receives its section, never the whole.

The only module that reads the environment. Knows nothing of models' weights, sockets or kernels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import ConfigError

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float32")
LEAST_NUM_ROWS = 32  # of logits, however few the requests: drafts need them
ITL_MULTIPLE = 2.5  # of a step of decodes alone, that a step may take while streams decode


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    flags: tuple[str, ...] = (),
    env: str | None = None,
) -> Any:
    """A dataclass field that is an option: `flags` are further spellings, `env` a variable that stands in for the flag."""
    meta = {"help": help, "low": low, "high": high, "choices": choices, "flags": flags, "env": env}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


def check_options(args: Any) -> None:
    """Raises ConfigError for the first field whose value is not of its type or outside its limits."""
    hints = typing.get_type_hints(type(args))
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if value is None or "help" not in f.metadata:
            continue
        wanted = [t for t in (typing.get_args(hints[f.name]) or (hints[f.name],)) if isinstance(t, type)]
        if float in wanted and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
            object.__setattr__(args, f.name, value)
        fits = any(isinstance(value, t) for t in wanted) and not (isinstance(value, bool) and bool not in wanted)
        if wanted and not fits and not isinstance(value, list):
            names = " or ".join(t.__name__ for t in wanted if t is not type(None))
            raise ConfigError(f"{f.name} = {value!r}: must be {names}")
        if isinstance(value, float) and value != value:
            raise ConfigError(f"{f.name} = {value!r}: must be a number")
        low, high, choices = f.metadata["low"], f.metadata["high"], f.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{f.name} = {value!r}: choose from {', '.join(map(str, choices))}")
        if isinstance(value, (int, float)) and low is not None and value < low:
            raise ConfigError(f"{f.name} = {value!r}: must be at least {low:g}")
        if isinstance(value, (int, float)) and high is not None and value > high:
            raise ConfigError(f"{f.name} = {value!r}: must be at most {high:g}")


@dataclass(kw_only=True)
class EngineArgs:
    """Options of the engine, under vLLM's names. Raises ConfigError, naming option, value and what is allowed."""

    model: str = option(DEFAULT_MODEL, "a folder, a .gguf file, a hub id (org/name) or a built-in name")
    served_model_name: str | None = option(None, "the name that clients use; default: MODEL as given")
    tokenizer: str | None = option(None, "folder or file with the tokenizer, if it is not the model's")
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    download_dir: str | None = option(None, "where hub downloads are kept; default: the cache folder")
    load_format: str = option("auto", "which files to read", choices=("auto", "safetensors", "gguf"))
    dtype: str = option("auto", "arithmetic of unquantised weights; auto: as stored", choices=DTYPES)
    quantization: str | None = option(None, "the checkpoint's format, checked against what its files say; w4 or w8: round a plain one while it is loaded", flags=("-q",))
    quantize_embeddings: bool = option(True, "hold embedding and output head in 8 bits where a checkpoint of 4-bit layers has them in 16")
    trust_remote_code: bool = option(False, "accepted for models that Octavo implements itself; no remote code is ever run")
    max_model_len: int | None = option(None, "longest prompt plus output in tokens; default: the model's context", low=1)
    block_size: int = option(16, "tokens in a KV block", choices=BLOCK_SIZES)
    kv_cache_memory: str = option("auto", "bytes for KV blocks (512M, 4G), or auto: half of free memory, at most 4G",
                                  flags=("--kv-cache-memory-bytes",))
    kv_cache_dtype: str = option("auto", "auto: float32 for float32 models, else bfloat16", choices=KV_DTYPES)
    gpu_memory_utilization: float = option(0.9, "on a CPU it has no say: see --kv-cache-memory", low=0.0, high=1.0)
    max_num_seqs: int = option(256, "most requests in a step", low=1, high=4096)
    max_num_batched_tokens: int | None = option(None, "most tokens in a step; default 512 on a CPU, and fewer while streams decode: see --itl-target-ms", low=1, high=1 << 20)
    itl_target_ms: float | None = option(None, f"longest gap between tokens of a stream while prompts are computed, in ms; default: {ITL_MULTIPLE} times the gap without prompts; 0: none, and prompts strictly in order", low=0, high=1e6)
    num_speculative_tokens: int = option(8, "most tokens of a request that are guessed from its own text and checked in one step, where that saves time; no token ever depends on it; 0: none", low=0, high=64)
    speculative_config: str | None = option(None, 'the same as JSON, as in vLLM: {"method": "ngram", "num_speculative_tokens": 5}')
    max_num_queued_requests: int = option(1024, "waiting requests beyond which new ones get 503", low=1)
    enable_prefix_caching: bool = option(True, "share the KV blocks of equal prefixes")
    scheduling_policy: str = option("fcfs", "order of the waiting queue", choices=("fcfs", "priority"))
    seed: int = option(0, "seeds the seeds of requests that bring none (class LLM only)", low=0)
    max_logprobs: int = option(20, "most logprobs a request may ask for", low=0, high=20)
    generation_config: str = option("auto", "auto: sampling defaults of the model's files; vllm: none", choices=("auto", "vllm"))
    num_threads: int | None = option(None, "threads of the kernels; default: the CPUs of the affinity mask and cgroup quota", low=1, high=1024)
    pin_threads: bool = option(False, "bind each kernel thread to one CPU")
    isa: str = option("", "instruction set of the kernels; default: the best that runs here", env="OCTAVO_ISA")
    backend: str = option("cpu", "cpu, or reference (numpy, the definition; slow)", choices=("cpu", "reference"))
    device: str = option("auto", "where the model runs", choices=("auto", "cpu"))
    tensor_parallel_size: int = option(1, "shards of the model; 1 on a CPU", low=1, flags=("-tp",))
    pipeline_parallel_size: int = option(1, "stages of the model; 1 on a CPU", low=1, flags=("-pp",))
    enforce_eager: bool = option(False, "accepted; a CPU has no graphs to capture")
    swap_space: float = option(0, "accepted and without effect: preempted requests are recomputed")
    cpu_offload_gb: float = option(0, "must be 0: the weights are in CPU memory", low=0)
    disable_log_stats: bool = option(False, "no line of statistics every ten seconds")
    max_engine_restarts: int = option(16, "restarts of a crashed engine within ten minutes before giving up", low=0)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            env = f.metadata.get("env")
            if env and getattr(self, f.name) == f.default and os.environ.get(env):
                setattr(self, f.name, os.environ[env])
        if isinstance(self.speculative_config, dict):
            self.speculative_config = json.dumps(self.speculative_config)
        check_options(self)
        if self.speculative_config is not None:
            self.num_speculative_tokens = speculative_tokens(self.speculative_config)
        if self.tensor_parallel_size != 1:
            raise ConfigError(f"tensor_parallel_size = {self.tensor_parallel_size}: a CPU runs one shard; must be 1")
        if self.pipeline_parallel_size != 1:
            raise ConfigError(f"pipeline_parallel_size = {self.pipeline_parallel_size}: a CPU runs one stage; must be 1")
        if self.cpu_offload_gb:
            raise ConfigError(f"cpu_offload_gb = {self.cpu_offload_gb}: the weights are in CPU memory already; must be 0")
        if self.kv_cache_memory != "auto":
            parse_bytes("kv_cache_memory", self.kv_cache_memory)

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model


# Of vLLM's keys. What n-grams are looked for is learnt on the way: the bounds are taken and have no effect.
SPECULATIVE_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def speculative_tokens(text: str) -> int:
    """`num_speculative_tokens` of a `speculative_config`. Raises ConfigError for what is not prompt lookup."""
    name = "speculative_config"
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} = {shortened(text)}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} = {shortened(text)}: must be a JSON object")
    for key, value in values.items():
        if key not in SPECULATIVE_KEYS:
            raise ConfigError(f"{name}: {key} = {shortened(value)}: Octavo does not do this; choose from {', '.join(SPECULATIVE_KEYS)}")
        if key in ("method", "model") and value not in ("ngram", "[ngram]"):
            raise ConfigError(f"{name}: {key} = {shortened(value)}: only ngram, drafts from the request's own text, is supported")
        if key not in ("method", "model") and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64):
            raise ConfigError(f"{name}: {key} = {shortened(value)}: must be an integer in 1..64")
    if "num_speculative_tokens" not in values:
        raise ConfigError(f"{name} = {shortened(text)}: num_speculative_tokens is missing; it must be an integer in 1..64")
    count: int = values["num_speculative_tokens"]
    return count


@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """EngineArgs for AsyncLLMEngine, as in vLLM."""

    enable_log_requests: bool = option(False, "log every request's id, lengths and parameters, never its text")


@dataclass(kw_only=True)
class ServerArgs:
    """Options of the HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one, printed", low=0, high=65535)
    api_key: list[str] = option([], "a key that clients must send; repeatable", env="OCTAVO_API_KEY")
    allowed_origins: list[str] = option(["*"], "origins that browsers may call from; repeatable")
    root_path: str = option("", "path prefix that a proxy strips")
    chat_template: str | None = option(None, "file or text of a jinja2 chat template")
    response_role: str = option("assistant", "role of generated messages")
    max_body_bytes: int = option(8 << 20, "largest request body", low=1024)
    max_prompts: int = option(128, "prompts in one completions request", low=1)
    body_timeout: float = option(30.0, "seconds that a client has to send its request", low=0.1)
    shutdown_timeout: float = option(30.0, "seconds to finish running requests after SIGTERM", low=0)
    strict: bool = option(False, "refuse unknown request fields instead of reporting them in a header")
    enable_force_include_usage: bool = option(False, "usage in every stream")
    return_tokens_as_token_ids: bool = option(False, "logprobs name tokens as token_id:N")
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    disable_docs: bool = option(False, "no /docs and /openapi.json", flags=("--disable-fastapi-docs",))

    def __post_init__(self) -> None:
        if not self.api_key and os.environ.get("OCTAVO_API_KEY"):
            self.api_key = [key for key in os.environ["OCTAVO_API_KEY"].split(",") if key]
        check_options(self)


MOST_FLOAT = 3.4e38


def shortened(value: object) -> str:
    """A value out of a file, fit for a line of a message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


class HFConfig:
    """A checkpoint's configuration under Hugging Face's keys, read with a type check at the point of use.

    A GGUF file's metadata is translated to the same keys by the loader, so that models know one vocabulary. `source` is the file, for messages.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def read(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; ConfigError if it is absent without a default, or not of `kind` (ints pass as floats, which must be finite)."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: key {key!r} is missing; it must be {kind.__name__}")
            return default
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is float and number:
            if not abs(value) < MOST_FLOAT:
                raise ConfigError(f"{self.source}: {key} = {shortened(value)}: must be a finite number that float32 holds")
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.source}: {key} = {shortened(value)}: must be {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None, high: int = 1 << 24) -> int:
        """A count or width: an integer in 1..high."""
        value = self.read(key, int, default)
        if not 1 <= value <= high:
            raise ConfigError(f"{self.source}: {key} = {shortened(value)}: must be in 1..{high}")
        return value

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.size("hidden_size") // self.size("num_attention_heads"))


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs: limits in requests and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_queued_requests: int
    policy: str = "fcfs"
    itl_target_ms: float | None = 0.0  # None: ITL_MULTIPLE times what decodes alone take; 0: none
    num_speculative_tokens: int = 0  # drafts of one request in a step, at most

    @property
    def max_num_rows(self) -> int:
        """Rows of a step whose logits are computed at once, at most: one for each request, and drafts' where there is room."""
        return max(self.max_num_seqs, LEAST_NUM_ROWS)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV pool: `num_blocks` blocks of `block_size` tokens.

    windows: of each group of layers, how many positions it sees, 0 for all. A sequence takes blocks for each group, all from this one pool.
    """

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    windows: tuple[int, ...] = (0,)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that one sequence of `num_tokens` holds at most at any moment, over all groups, in steps of at most `chunk` tokens."""
        whole = -(-num_tokens // self.block_size)
        chunk = min(chunk, num_tokens)
        return sum(min(whole, window_blocks(w, chunk, self.block_size)) if w else whole for w in self.windows)

    def longest_sequence(self, chunk: int, most: int) -> int:
        """Tokens of the longest sequence that the pool can hold, at most `most`."""
        low, high = 0, -(-most // self.block_size)  # in blocks: `low` fit
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle * self.block_size, chunk) <= self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return min(low * self.block_size, most)

    def num_kv_tokens(self, num_tokens: int, chunk: int) -> int:
        """Tokens that the pool holds in sequences of `num_tokens`: a window's group holds only the last of them."""
        whole = -(-num_tokens // self.block_size) * self.block_size
        return self.num_blocks * whole // self.most_blocks(whole, chunk)


def window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Blocks that a group holds at most for one sequence in a step of `chunk` tokens.

    The first of them sees `window` - 1 tokens before it, and one more is kept for a fork that computes the token before it again. These
    window + chunk tokens may begin at any place in a block.
    """
    return (window + chunk - 2) // block_size + 2


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where and how the kernels run."""

    backend: str
    isa: str
    num_threads: int
    pin_threads: bool


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All sections of an engine, resolved."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    device: DeviceConfig
    kv_dtype: str

    @staticmethod
    def resolve(
        args: EngineArgs, *, context_length: int, kv_bytes_per_token: int, kv_dtype: str, num_cpus: int, windows: tuple[int, ...] = (0,)
    ) -> EngineConfig:
        """Sections from arguments, the model's numbers and the machine.

        `context_length` in tokens is the model's; `kv_bytes_per_token` over the layers of one block, K and V; `windows`: see CacheConfig. Raises
        ConfigError when max_model_len exceeds the context, or when the KV memory cannot hold even one request of max_model_len.
        """
        max_model_len = args.max_model_len or context_length
        if max_model_len > context_length:
            raise ConfigError(f"max_model_len = {max_model_len}: the model's context is {context_length} tokens")
        block_bytes = kv_bytes_per_token * args.block_size
        cache = CacheConfig(
            block_size=args.block_size,
            num_blocks=kv_memory(args.kv_cache_memory) // block_bytes,
            enable_prefix_caching=args.enable_prefix_caching,
            windows=windows,
        )
        budget = args.max_num_batched_tokens or 512
        longest = cache.longest_sequence(budget, max_model_len)
        if longest < max_model_len:
            if args.max_model_len is not None or args.kv_cache_memory != "auto":
                raise ConfigError(
                    f"kv_cache_memory = {args.kv_cache_memory}: holds {longest} tokens, but max_model_len = {max_model_len} "
                    f"needs {cache.most_blocks(max_model_len, budget) * block_bytes} bytes; raise it or lower max_model_len"
                )
            max_model_len = max(longest, args.block_size)
        return EngineConfig(
            scheduler=SchedulerConfig(
                max_num_seqs=min(args.max_num_seqs, budget),
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                max_num_queued_requests=args.max_num_queued_requests,
                policy=args.scheduling_policy,
                itl_target_ms=args.itl_target_ms,
                num_speculative_tokens=args.num_speculative_tokens,
            ),
            cache=cache,
            device=DeviceConfig(
                backend=args.backend, isa=args.isa, num_threads=args.num_threads or num_cpus, pin_threads=args.pin_threads
            ),
            kv_dtype=kv_dtype,
        )


AUTO_KV_SHARE = 0.5
AUTO_KV_MOST = 4 << 30


def kv_memory(text: str) -> int:
    """Bytes for KV blocks: as given, or half of the free memory (of the cgroup if it is less) and at most 4 GiB."""
    if text != "auto":
        return parse_bytes("kv_cache_memory", text)
    return int(min(free_memory() * AUTO_KV_SHARE, AUTO_KV_MOST))


def parse_bytes(name: str, text: str) -> int:
    """`512M`, `4G`, `1073741824` as bytes (K, M, G are powers of 1024)."""
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(cleaned[-1:], 1)
    digits = cleaned[:-1] if scale > 1 else cleaned
    try:
        value = int(float(digits) * scale)
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} = {text!r}: must be a size such as 512M, 4G or a number of bytes") from None
    if not 0 < value < 1 << 50:
        raise ConfigError(f"{name} = {text!r}: must be above 0 and below 1024T")
    return value


def free_memory() -> int:
    """Bytes that a new allocation may take: MemAvailable, capped by what the cgroup (v1 or v2) has left."""
    free = 4 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(limit_file).read_text()) - int(Path(used_file).read_text())
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
        free = min(free, max(left, 0))
    return free


def cache_dir() -> Path:
    """Where fetched models are kept: $OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "octavo"
