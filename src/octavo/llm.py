"""LLM: the engine in this process, for scripts. vLLM's class, its options and its methods.

The same core, runner and output processor as the server's, driven in turns by whoever calls `generate`. Knows no event loop.
"""

from __future__ import annotations

import dataclasses
import difflib
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tqdm import tqdm

from octavo.client.intake import Asked, Family, Intake, PromptType
from octavo.client.outputs import OutputProcessor, RequestOutput
from octavo.client.transport import InlineTransport
from octavo.config import DEFAULT_MODEL, EngineArgs
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, OctavoError
from octavo.host.build import build_engine
from octavo.host.channel import InlineChannel
from octavo.host.loop import EngineBroken, Loop
from octavo.loader.hf_config import load_generation_config
from octavo.loader.resolve import resolve_model
from octavo.protocol import Abort, EngineReady, ResetPrefixCache, StepStats
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.messages import normalise_messages
from octavo.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]

# Options of vLLM's that Octavo has no counterpart of: accepted with the values under which they change nothing, refused with others.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "task": (None, "auto", "generate"),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "tokenizer_mode": ("auto", "fast"),
    "tokenizer_revision": (None,),
    "skip_tokenizer_init": (False,),
    "enable_chunked_prefill": (None, True),
    "enable_lora": (None, False),
    "enable_prompt_embeds": (False,),
    "hf_overrides": (None, {}),
    "pooler_config": (None,),
    "override_pooler_config": (None,),
    "logits_processors": (None, []),
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_config": (None,),
    "data_parallel_size": (1,),
}

# Options that tell a GPU how to do the same thing, whatever their value.
WITHOUT_EFFECT = frozenset(
    {
        "async_scheduling",
        "compilation_config",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "distributed_executor_backend",
        "max_seq_len_to_capture",
        "num_scheduler_steps",
        "use_v2_block_manager",
    }
)


class LLM:
    """A model and its engine in this process.

        llm = LLM("smollm2-135m", max_model_len=2048)
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    `options` are EngineArgs' fields, and vLLM's where they change nothing. `seed` seeds the requests that bring none, so that a script repeats
    itself. Raises ConfigError, ModelFileError; TypeError for an option that nobody knows.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        tokenizer: str | None = None,
        seed: int = 0,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        args = engine_args({"model": model, "tokenizer": tokenizer, "seed": seed, **options})
        source = resolve_model(model, revision=args.revision, download_dir=args.download_dir, load_format=args.load_format)
        built = build_engine(args, str(source.path))
        channel = InlineChannel()
        self._args = args
        self._suggested = load_generation_config(source).given() if args.generation_config == "auto" else {}
        self._transport = InlineTransport(channel, Loop(built.core, built.runner, channel).turn, built.ready)
        self._tokenizer = Tokenizer.load(source.path, tokenizer)
        self._template = ChatTemplate.load(self._tokenizer, chat_template)
        self._processor = OutputProcessor(self._tokenizer)
        self._num_live = 0  # engine requests that were sent and have not ended
        seeds = random.Random(seed)
        self._intake = Intake(
            self._tokenizer,
            built.ready,
            max_logprobs=args.max_logprobs,
            allow_priority=args.scheduling_policy == "priority",
            clip=True,
            next_seed=lambda: seeds.getrandbits(63),
        )
        self._num_requests = 0
        self._stats: StepStats | None = None

    @property
    def stats(self) -> StepStats | None:
        """The engine's books after its last step: blocks, prefix hits, preemptions, tokens; None before the first."""
        return self._stats

    @property
    def engine_info(self) -> EngineReady:
        """The engine's figures: context, vocabulary, blocks, phases of the start."""
        return self._transport.ready

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completions of the prompts, in their order.

        One SamplingParams holds for all, a list has one for each prompt, None means the model's defaults. A max_tokens beyond the context's end is
        cut there, and finish_reason is then "length". Raises InvalidRequestError before anything runs, RequestFailedError if the engine
        fails on one of them.
        """
        if lora_request is not None:
            raise InvalidRequestError("lora_request: this engine was built without adapters", "lora_request", "unsupported_value")
        items = cast(list[PromptType], [prompts] if _is_one(prompts) else list(prompts))
        params = self._params_for(len(items), sampling_params)
        if priority is not None and len(priority) != len(items):
            raise InvalidRequestError(f"priority: {len(priority)} values for {len(items)} prompts", "priority")
        asked = self._parse(items, params)
        for one, rank in zip(asked, priority or (), strict=False):
            one.priority = rank
        families = [self._intake.admit(one) for one in asked]
        return self._run(families, use_tqdm)

    def chat(  # noqa: PLR0913 - vLLM's
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them, in their order; otherwise as `generate`.

        Raises InvalidRequestError when there is no chat template, or it refuses the messages.
        """
        template = self._template if chat_template is None else ChatTemplate.load(self._tokenizer, chat_template)
        if template is None:
            raise InvalidRequestError("messages: this model has no chat template; pass chat_template", "messages")
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts: list[PromptType] = []
        for conversation in conversations:
            text = template.render(
                normalise_messages(list(conversation)),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            # The template writes the special tokens itself.
            prompts.append({"prompt_token_ids": self._tokenizer.encode(text, False, param="messages"), "prompt": text})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config suggests, on top of SamplingParams' defaults."""
        return SamplingParams().clone(**self._suggested)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        self._transport.send(ResetPrefixCache())
        self._transport.step()
        return True

    def encode(self, *_: object, **__: object) -> None:
        raise NotImplementedError("encode: this engine generates text; pooling models are not supported")

    def embed(self, *_: object, **__: object) -> None:
        raise NotImplementedError("embed: this engine generates text; embedding models are not supported")

    def score(self, *_: object, **__: object) -> None:
        raise NotImplementedError("score: this engine generates text; scoring models are not supported")

    # --- inside ---

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(each) != count:
            raise InvalidRequestError(f"sampling_params: {len(each)} for {count} prompts", "sampling_params")
        return each

    def _parse(self, prompts: Sequence[PromptType], params: Sequence[SamplingParams]) -> list[Asked]:
        """Prompts as token ids; all texts are encoded in one parallel call."""
        parsed = [self._intake.parse(prompt) for prompt in prompts]
        texts = [text for ids, text, _ in parsed if ids is None and text is not None]
        encoded = iter(self._tokenizer.encode_batch(texts, param="prompt"))
        now = time.monotonic()
        return [
            Asked(next(encoded) if ids is None else ids, text, each.clone(output_kind=RequestOutputKind.FINAL_ONLY), salt, 0, now)
            for (ids, text, salt), each in zip(parsed, params, strict=True)
        ]

    def _run(self, families: list[Family], use_tqdm: bool) -> list[RequestOutput]:
        """Runs the families to their ends; on an error or an interrupt, nothing of them is left behind."""
        results: dict[str, RequestOutput] = {}
        todo = deque(sorted(families, key=lambda family: family.requests[0].priority))
        try:
            with _Progress(len(families), use_tqdm) as progress, _InterruptsBetweenSteps() as interrupts:
                while len(results) < len(families):
                    self._submit(todo)
                    for output in self._step():
                        results[output.request_id] = output
                        progress.add(output)
                    interrupts.check()
        except BaseException:
            self._abort(families)
            raise
        for family in families:
            results[family.id].request_id = str(self._num_requests)
            self._num_requests += 1
        return [results[family.id] for family in families]

    def _submit(self, todo: deque[Family]) -> None:
        """Gives the engine as many requests as its queue takes."""
        limit = self._args.max_num_queued_requests
        while todo and (self._num_live == 0 or self._num_live + len(todo[0].requests) <= limit):
            family = todo.popleft()
            self._num_live += len(family.requests)
            for index, request in enumerate(family.requests):
                self._processor.add(
                    request, family=family.id, index=index, n=family.params.n, prompt=family.text, params=family.params
                )
                self._transport.send(request)

    def _step(self) -> list[RequestOutput]:
        """One turn of the engine; the requests that it finished. Raises the error of one that failed."""
        finished: list[RequestOutput] = []
        try:
            messages = self._transport.step()
        except EngineBroken as error:
            raise EngineDeadError(str(error)) from error
        for outputs in messages:
            self._stats = outputs.stats
            processed = self._processor.process(outputs)
            self._num_live -= sum(output.finish_reason is not None for output in outputs.outputs) + len(processed.aborts)
            if processed.aborts:
                self._transport.send(Abort(processed.aborts))
            for _, item in processed.outputs:
                if isinstance(item, OctavoError):
                    raise item
                finished.append(item)
        return finished

    def _abort(self, families: list[Family]) -> None:
        """Ends whatever of these still runs."""
        for family in families:
            if request_ids := self._processor.abort(family.id):
                self._transport.send(Abort(request_ids))
        self._num_live = 0
        self._transport.step()


class _InterruptsBetweenSteps:
    """Keeps Ctrl-C out of the engine's books: it is answered when the step is over. Only the main thread gets signals."""

    def __init__(self) -> None:
        self._interrupted = False
        self._before: Any = None

    def __enter__(self) -> _InterruptsBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was one."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        self._interrupted = True


class _Progress:
    """vLLM's progress bar: prompts done, and tokens per second in and out."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not shown, dynamic_ncols=True, unit="prompt")
        self._began = time.perf_counter()
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, output: RequestOutput) -> None:
        self._tokens_in += len(output.prompt_token_ids or ())
        self._tokens_out += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = time.perf_counter() - self._began
        self._bar.postfix = f"input: {self._tokens_in / seconds:.1f} tok/s, output: {self._tokens_out / seconds:.1f} tok/s"
        self._bar.update(1)


def engine_args(options: Mapping[str, Any]) -> EngineArgs:
    """EngineArgs from the keyword options of LLM.

    Raises ConfigError for a value that would be a promise Octavo does not keep, TypeError for a name that nobody knows.
    """
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name == "kv_cache_memory_bytes":
            if value is not None:
                own["kv_cache_memory"] = str(value)
        elif name in known:
            own[name] = value
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                allowed = " or ".join(repr(neutral) for neutral in NEUTRAL[name])
                raise ConfigError(f"{name} = {value!r}: Octavo does not do this; it must be {allowed}")
        elif name not in WITHOUT_EFFECT:
            close = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"LLM() has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return EngineArgs(**own)


def _is_one(prompts: PromptType | Sequence[PromptType]) -> bool:
    """Whether this is a single prompt: a text, a dict, or a list of token ids."""
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
