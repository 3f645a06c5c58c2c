"""`octavo bench`: choose requests, run them against a server or the engine in this process, print the figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.options import args_from, dataclass_options, normalise
from octavo.cli.options import command as make_command
from octavo.config import EngineArgs
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.bench.datasets import BenchRequest
    from octavo.bench.load import Record
    from octavo.bench.report import Summary
    from octavo.bench.throughput import Generate
    from octavo.llm import LLM

F = TypeVar("F", bound=Callable[..., Any])

# The steps that are measured decide these.
SET_BY_KERNELS = ("max_model_len", "kv_cache_memory", "max_num_seqs", "max_num_batched_tokens", "backend")
ROWS = (1, 8, 32, 512)
MOST_SIDE = 1 << 20

DATASETS = ("random", "shared-prefix", "sharegpt", "file")


def dataset_options(function: F) -> F:
    for option in reversed(
        (
            click.option("--dataset", type=click.Choice(DATASETS), default="random", show_default=True, help="which requests to send"),
            click.option("--dataset-path", type=click.Path(path_type=Path), help="file of sharegpt or file"),
            click.option("--dataset-key", help="which list of the file, if it holds several"),
            click.option("--num-prompts", type=click.IntRange(1), help="number of requests; default: 96, or all of the file"),
            click.option("--input-len", default="10:1024", show_default=True, metavar="N|LOW:HIGH", help="prompt tokens, about"),
            click.option("--output-len", metavar="N|LOW:HIGH", help="output tokens; default: 16:256, or as long as ShareGPT's answers"),
            click.option("--prefix-len", type=click.IntRange(1), default=512, show_default=True, help="tokens that prompts share"),
            click.option("--num-prefixes", type=click.IntRange(1), default=4, show_default=True, help="different shared prefixes"),
            click.option("--dataset-seed", type=int, default=0, show_default=True, help="the same seed gives the same requests"),
            click.option("--json", "as_json", is_flag=True, help="print JSON instead of the table"),
        )
    ):
        function = option(function)
    return function


@click.group("bench", context_settings={"token_normalize_func": normalise})
def command() -> None:
    """Measure a server, or the engine in this process."""


@make_command("serve", "Load an OpenAI-compatible server and print throughput, latencies and KV utilisation.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="where the server is")
@click.option("--api-key", help="sent as a bearer token")
@click.option("--model", help="the model's name; default: the first that the server lists")
@click.option("--concurrency", "-c", multiple=True, type=click.IntRange(1), help="requests at once; repeatable [default: 1, 8, 32]")
@click.option("--rate", multiple=True, type=click.FloatRange(0, min_open=True), help="requests per second instead; repeatable")
@click.option("--slo", multiple=True, metavar="NAME:MS", help="also count requests that keep ttft:MS, itl:MS, tpot:MS, e2e:MS; repeatable")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="draw latency over throughput, and batch and KV pool over time")
@dataset_options
def serve(
    url: str,
    api_key: str | None,
    model: str | None,
    concurrency: tuple[int, ...],
    rate: tuple[float, ...],
    slo: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **values: Any,
) -> int:
    import asyncio

    from octavo.bench.http import HttpError, Target
    from octavo.bench.load import Run, closed_loop, model_of, open_loop
    from octavo.bench.plot import draw
    from octavo.bench.report import Slo, summarise

    target, limits = Target.parse(url, api_key), Slo.parse(slo)
    levels: list[tuple[str, float | None, int]] = [(f"rate {each:g}/s", each, 0) for each in rate]
    levels += [(f"concurrency {each}", None, each) for each in concurrency or (() if rate else (1, 8, 32))]

    # Other text at each level: the prefix cache must not know it yet.
    work = [_requests({**values, "dataset_seed": values["dataset_seed"] + index}) for index in range(len(levels))]
    warm = _requests({**values, "num_prompts": 2, "dataset_seed": -1})

    async def measure() -> list[tuple[Summary, Run]]:
        name = model or await model_of(target)
        await closed_loop(target, name, warm, 1)
        measured = []
        for (label, per_second, at_once), requests in zip(levels, work, strict=True):
            with _progress(label, len(requests)) as bar:

                def tick(_: Record, bar: Any = bar) -> None:
                    bar.update(1)

                run: Run
                if per_second is not None:
                    run = await open_loop(target, name, requests, per_second, values["dataset_seed"], tick)
                else:
                    run = await closed_loop(target, name, requests, at_once, tick)
            measured.append((summarise(label, run, limits), run))
        return measured

    try:
        measured = asyncio.run(measure())
    except HttpError as error:
        raise OctavoError(str(error)) from None
    if plot is not None:
        draw(plot, measured)
    return _print([summary for summary, _ in measured], as_json)


@make_command("throughput", "Run requests through the engine in this process, all at once, and print the throughput.")
@dataset_options
@dataclass_options(EngineArgs)
def throughput(as_json: bool, **values: Any) -> int:
    from octavo.bench.throughput import measure

    args, requests = args_from(EngineArgs, values), _requests(values)
    generate = _generator(_llm(args), bar=not as_json)
    generate([" warm"], [2])
    return _print([measure(requests, generate)], as_json)


@make_command("static", "Run requests in static batches, padded, on the engine in this process: what continuous batching is compared with.")
@click.option("--batch-size", type=click.IntRange(1), multiple=True, help="requests in a batch; repeatable [default: 32]")
@click.option("--continuous/--no-continuous", default=True, show_default=True, help="then the same requests with continuous batching")
@dataset_options
@dataclass_options(EngineArgs)
def static(batch_size: tuple[int, ...], continuous: bool, as_json: bool, **values: Any) -> int:
    from octavo.bench.static import measure_static
    from octavo.bench.throughput import measure

    # A prefix that is computed once would flatter whoever comes second, and drafts live on the repetitions that padding makes.
    alike = {"enable_prefix_caching": False, "num_speculative_tokens": 0, "speculative_config": None}
    args, requests = args_from(EngineArgs, {**values, **alike}), _requests(values)
    llm = _llm(args)
    generate, tokenizer = _generator(llm, bar=False), llm.get_tokenizer()
    generate([" warm"], [2])
    summaries = []
    for size in batch_size or (32,):
        with _progress(f"batches of {size}", len(requests)) as bar:
            summaries.append(
                measure_static(requests, generate, lambda p: tokenizer.encode(p) if isinstance(p, str) else p, size, bar.update)
            )
    if continuous:
        summaries.append(measure(requests, _generator(llm, bar=not as_json)))
    return _print(summaries, as_json)


@make_command("latency", "Run one batch of equal requests several times on the engine in this process, and print its latencies.")
@click.option("--batch-size", type=click.IntRange(1), multiple=True, help="requests in the batch; repeatable [default: 1]")
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True, help="prompt tokens")
@click.option("--output-len", type=click.IntRange(1), default=32, show_default=True, help="output tokens")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="times that the batch is run")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of the table")
@dataclass_options(EngineArgs)
def latency(batch_size: tuple[int, ...], input_len: int, output_len: int, repeats: int, as_json: bool, **values: Any) -> int:
    import random

    from octavo.bench.latency import measure_latency

    args = args_from(EngineArgs, {**values, "enable_prefix_caching": False})
    llm = _llm(args)
    generate, rng = _generator(llm, bar=False), random.Random(0)
    generate([" warm"], [2])
    summaries = []
    for size in batch_size or (1,):
        prompts = [[rng.randrange(llm.engine_info.vocab_size) for _ in range(input_len)] for _ in range(size)]
        with _progress(f"batch of {size}", repeats) as bar:
            summaries.append(measure_latency(prompts, output_len, generate, repeats, bar.update))
    return _print(summaries, as_json)


@make_command("kernels", "Measure each instruction of a model's steps beside what this machine could do at best, measured on the spot.")
@click.option("--rows", multiple=True, type=click.IntRange(1), help="tokens of a step: up to 64 are decoded, more are a prompt's; repeatable [default: 1, 8, 32, 512]")
@click.option("--context", type=click.IntRange(1), default=2048, show_default=True, help="tokens of each sequence, or the model's context if that is less")
@click.option("--seconds", type=click.FloatRange(0, 60, min_open=True), default=1.0, show_default=True, help="aim for each measurement of a step")
@click.option("--shapes", multiple=True, metavar="NxK", help="no model: products with random weights of N outputs and K inputs; repeatable")
@click.option("--kinds", multiple=True, help="of those weights: w4, w8, bf16 and so on; repeatable [default: w4, w8, bf16]")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="draw what is measured beside its limit")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of the tables")
@dataclass_options(EngineArgs, skip=SET_BY_KERNELS)
def kernels(
    rows: tuple[int, ...], context: int, seconds: float, shapes: tuple[str, ...], kinds: tuple[str, ...], plot: Path | None, as_json: bool,
    **values: Any,
) -> int:  # fmt: skip
    args = args_from(EngineArgs, values)
    if shapes:
        return _products([_shape(text) for text in shapes], kinds, rows, args, plot, as_json)
    if kinds:
        raise ConfigError("kinds: goes with --shapes; a model's weights have kinds of their own")
    return _steps(rows, context, seconds, args, plot, as_json)


for _each in (serve, throughput, latency, static, kernels):
    command.add_command(_each)


def _steps(rows: tuple[int, ...], context: int, seconds: float, args: EngineArgs, plot: Path | None, as_json: bool) -> int:
    from octavo.bench.kernel_report import as_json as json_of
    from octavo.bench.kernel_report import draw_steps, peaks_text, step_text
    from octavo.bench.kernels import StepBench, works_of
    from octavo.bench.programs import build_program
    from octavo.ops.cpu.measure import measure_peaks

    program, longest = build_program(args, rows or ROWS, context)
    peaks = measure_peaks(program.isa)
    bench, steps = StepBench(program, peaks, seconds), []
    works = works_of(rows or ROWS, longest)
    with _progress("steps", len(works), "step") as bar:
        for work in works:
            steps.append(bench.measure(work))
            bar.update(1)
    if plot is not None:
        draw_steps(plot, steps)
    text = json.dumps(json_of(peaks, steps), indent=1) if as_json else "\n\n".join([peaks_text(peaks), *map(step_text, steps)])
    click.echo(text)
    return 0


def _products(
    shapes: list[tuple[int, int]], kinds: tuple[str, ...], rows: tuple[int, ...], args: EngineArgs, plot: Path | None, as_json: bool
) -> int:
    from octavo.bench.kernel_report import as_json as json_of
    from octavo.bench.kernel_report import draw_products, peaks_text, products_text
    from octavo.bench.kernels import measure_products
    from octavo.bench.weights import kind_of
    from octavo.ops.cpu.measure import measure_peaks
    from octavo.ops.cpu.threads import available_cpus, set_num_threads

    kinds, rows = kinds or ("w4", "w8", "bf16"), rows or ROWS
    for kind in kinds:
        for n, k in shapes:
            kind_of(kind, n, k)  # a mistake is told before anything is measured
    set_num_threads(args.num_threads or available_cpus(), args.pin_threads)
    peaks, figures = measure_peaks(args.isa), []
    with _progress("products", len(kinds) * len(shapes) * len(rows), "product") as bar:
        for figure in measure_products(kinds, shapes, rows, peaks, args.isa):
            figures.append(figure)
            bar.update(1)
    if plot is not None:
        draw_products(plot, figures)
    text = json.dumps(json_of(peaks, products=figures), indent=1) if as_json else f"{peaks_text(peaks)}\n\n{products_text(figures)}"
    click.echo(text)
    return 0


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and 0 < int(n) <= MOST_SIDE and 0 < int(k) <= MOST_SIDE):
        raise ConfigError(f"shapes = {text!r}: must be NxK, such as 576x1536: outputs and inputs, each at most {MOST_SIDE}")
    return int(n), int(k)


def _llm(args: EngineArgs) -> LLM:
    import dataclasses

    from octavo.llm import LLM

    return LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})


def _generator(llm: LLM, bar: bool) -> Generate:
    """A function that completes prompts at once, each with so many tokens."""
    from octavo.client.intake import PromptType
    from octavo.sampling_params import SamplingParams

    def generate(prompts: Sequence[Any], lengths: Sequence[int]) -> Sequence[tuple[int, int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True) for n in lengths]
        asked: list[PromptType] = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=bar)
        return [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]

    return generate


def _requests(values: dict[str, Any]) -> list[BenchRequest]:
    """The requests that the dataset options describe. Raises ConfigError."""
    from octavo.bench import datasets

    kind, path, count, seed = values["dataset"], values["dataset_path"], values["num_prompts"], values["dataset_seed"]
    prompt = datasets.Lengths.parse("input_len", values["input_len"])
    output = datasets.Lengths.parse("output_len", values["output_len"] or "16:256")
    if kind in ("sharegpt", "file") and path is None:
        raise ConfigError(f"dataset = {kind!r}: needs --dataset-path")
    if kind == "file":
        return datasets.file_requests(path, count, values["dataset_key"])
    if kind == "sharegpt":
        return datasets.sharegpt_requests(path, count or 96, output if values["output_len"] else None, seed)
    if kind == "shared-prefix":
        return datasets.shared_prefix_requests(count or 96, values["prefix_len"], values["num_prefixes"], prompt, output, seed)
    return datasets.random_requests(count or 96, prompt, output, seed)


def _progress(label: str, total: int, unit: str = "request") -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True, leave=False)


def _print(summaries: list[Summary], as_json: bool) -> int:
    from octavo.bench.report import table

    click.echo(json.dumps([summary.as_dict() for summary in summaries], indent=1) if as_json else table(summaries))
    return 1 if any(summary.num_failed for summary in summaries) else 0
