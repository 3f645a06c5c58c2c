"""Needs Python only. The client over an engine that lives in the test's own process and dies when told to."""

import asyncio
import gc
import importlib.util
from pathlib import Path

import pytest

from octavo.client.client import EngineClient
from octavo.client.intake import child_seed
from octavo.client.supervisor import EngineState, Supervisor
from octavo.client.transport import EngineEnded
from octavo.config import AsyncEngineArgs
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from octavo.host.channel import ChannelClosed, InlineChannel
from octavo.host.loop import EngineBroken, Loop
from octavo.protocol import EngineCoreRequest, EngineFailed, ToEngine
from octavo.sampling_params import RequestOutputKind, SamplingParams

_spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parents[2] / "e2e" / "fake_engine.py")
fake_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_engine)

POISON = 31_100


class WordTokenizer:
    """Numbers as text: "1 2 3" is [1, 2, 3]."""

    eos_token_ids = (2,)
    bos_token_id = None

    def encode(self, text, add_special_tokens=True, *, param=None):
        return [int(word) for word in text.split()]

    def token_str(self, token_id):
        return f"{token_id} "


class InProcess:
    """A transport whose engine takes its turns on the event loop; `die` ends it as a SIGKILL would, POISON in a plan too."""

    def __init__(self, args, lives):
        self.engine = fake_engine.build(args, "{}")
        self.channel = InlineChannel()
        self.loop = Loop(self.engine.core, self.engine.runner, self.channel)
        self.dead = False
        self.paused = False
        self.sent: list[ToEngine] = []
        self.life = len(lives)
        launch = self.engine.runner.launch

        def launch_or_die(plan):
            if any(POISON in scheduled.token_ids for scheduled in plan.scheduled):
                self.dead = True
                raise ChannelClosed
            return launch(plan)

        self.engine.runner.launch = launch_or_die
        lives.append(self)

    def launch(self):
        pass

    async def start(self):
        return self.engine.ready

    def send(self, message):
        self.sent.append(message)
        if not self.dead:
            self.channel.inbox.append(message)

    async def receive(self):
        while True:
            await asyncio.sleep(0)
            if self.dead:
                raise EngineEnded("the engine was killed")
            if self.channel.outbox:
                return self.channel.outbox.popleft()
            if self.paused:
                continue
            try:
                self.loop.turn()
            except ChannelClosed:
                continue
            except EngineBroken as error:
                raise EngineEnded(str(error), EngineFailed(str(error), False)) from None

    def kill(self):
        self.dead = True

    async def close(self):
        self.dead = True

    def requests(self):
        return [message for message in self.sent if isinstance(message, EngineCoreRequest)]


class World:
    def __init__(self, **args):
        self.args = AsyncEngineArgs(**args)
        self.lives: list[InProcess] = []
        self.supervisor = Supervisor(lambda: InProcess(self.args, self.lives), max_restarts=self.args.max_engine_restarts)
        self.client = EngineClient(self.supervisor, WordTokenizer(), self.args)

    @property
    def engine(self):
        return self.lives[-1]


@pytest.fixture
async def make_world():
    worlds = []

    def make(**args):
        worlds.append(World(**args))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.client.shutdown()


def greedy(max_tokens=8, **changes):
    return SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, **changes)


def sampled(max_tokens=8, **changes):
    return SamplingParams(max_tokens=max_tokens, detokenize=False, **changes)


async def collect(stream):
    """Every token, whatever the output kind."""
    tokens = {}
    async for output in stream:
        for choice in output.outputs:
            tokens[choice.index] = choice.token_ids
    return tokens


async def test_a_prompt_in_each_form_is_generated_from(make_world):
    client = make_world().client
    forms = ["5 6", [5, 6], {"prompt": "5 6"}, {"prompt_token_ids": [5, 6], "prompt": "five six"}]
    for form in forms:
        assert await collect(client.generate(form, greedy())) == {0: fake_engine.expected([5, 6], 8)}


async def test_outputs_carry_the_callers_name_and_the_prompts_text(make_world):
    client = make_world().client
    async for output in client.generate([5, 6], greedy(), "mine", prompt_text="five six"):
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("mine", "five six", [5, 6])
    assert output.finished
    assert output.outputs[0].finish_reason == "length"


async def test_names_need_not_be_unique(make_world):
    client = make_world().client
    results = await asyncio.gather(*(collect(client.generate([i], greedy(), "same")) for i in range(10, 20)))
    assert results == [{0: fake_engine.expected([i], 8)} for i in range(10, 20)]


async def test_deltas_are_merged_when_the_caller_is_slow(make_world):
    client = make_world().client
    tokens, num_outputs = [], 0
    async for output in client.generate([1], greedy(50, output_kind=RequestOutputKind.DELTA)):
        tokens += output.outputs[0].token_ids
        num_outputs += 1
        if num_outputs == 3:
            for _ in range(100):
                await asyncio.sleep(0)
    assert tokens == fake_engine.expected([1], 50)
    assert num_outputs < 40


async def test_a_final_only_stream_has_one_output(make_world):
    client = make_world().client
    outputs = [o async for o in client.generate([1], sampled(6, n=3, seed=7, output_kind=RequestOutputKind.FINAL_ONLY))]
    (output,) = outputs
    assert [choice.index for choice in output.outputs] == [0, 1, 2]


async def test_choices_have_seeds_of_their_own_and_the_first_is_the_one_of_n_1(make_world):
    client = make_world().client
    choices = await collect(client.generate([1], sampled(n=4, seed=7)))
    assert choices == {i: fake_engine.expected([1], 8, child_seed(7, i)) for i in range(4)}
    assert len({tuple(tokens) for tokens in choices.values()}) == 4
    assert await collect(client.generate([1], sampled(seed=7))) == {0: choices[0]}


async def test_a_request_without_a_seed_is_given_one(make_world):
    world = make_world()
    await asyncio.gather(*(collect(world.client.generate([1], sampled())) for _ in range(5)))
    seeds = [request.sampling_params.seed for request in world.engine.requests()]
    assert None not in seeds
    assert len(set(seeds)) == 5


async def test_end_of_sequence_ids_are_sent_unless_ignored(make_world):
    world = make_world()
    await collect(world.client.generate([1], greedy(1, stop_token_ids=[9])))
    await collect(world.client.generate([1], greedy(1, stop_token_ids=[9], ignore_eos=True)))
    sent = [(request.stop_token_ids, request.eos_token_ids) for request in world.engine.requests()]
    assert sent == [([2, 9], [2]), ([9], [])]


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "words"),
    [
        ([], {}, InvalidRequestError, ["at least one token"]),
        ([32_000], {}, InvalidRequestError, ["32000", "31999"]),
        ([-1], {}, InvalidRequestError, ["-1"]),
        ([True], {}, InvalidRequestError, ["integers"]),
        ([1.5], {}, InvalidRequestError, ["integers"]),
        (None, {}, InvalidRequestError, ["string"]),
        ({"prompt_embeds": 1}, {}, InvalidRequestError, ["prompt_embeds"]),
        ([1] * 100, {}, ContextLengthError, ["100", "64"]),
        ([1] * 64, {}, ContextLengthError, ["64"]),
        ([1] * 60, {"max_tokens": 5}, ContextLengthError, ["60", "65", "64"]),
        ([1], {"stop_token_ids": [32_000]}, InvalidRequestError, ["stop_token_ids", "32000"]),
        ([1], {"logit_bias": {40_000: 1.0}}, InvalidRequestError, ["logit_bias", "40000"]),
        ([1], {"logprobs": 6}, InvalidRequestError, ["logprobs", "5"]),
    ],
)
async def test_what_cannot_be_is_refused_before_it_is_sent(make_world, prompt, changes, error, words):
    world = make_world(max_model_len=64, max_logprobs=5)
    with pytest.raises(error) as caught:
        await collect(world.client.generate(prompt, sampled(**{"max_tokens": 1, **changes})))
    assert all(word in str(caught.value) for word in words)
    assert world.engine.requests() == []


async def test_priorities_need_the_policy_and_salts_a_length(make_world):
    client = make_world().client
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        await collect(client.generate([1], greedy(), priority=1))
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        await collect(client.generate([1], greedy(), cache_salt=""))
    assert len(await collect(make_world(scheduling_policy="priority").client.generate([1], greedy(), priority=1))) == 1


async def test_without_max_tokens_the_context_is_filled(make_world):
    client = make_world(max_model_len=64).client
    tokens = await collect(client.generate([1] * 10, SamplingParams(temperature=0, max_tokens=None, detokenize=False)))
    assert len(tokens[0]) == 54
    assert client.validate(10, SamplingParams(max_tokens=None)).max_tokens == 54


async def test_leaving_the_stream_frees_everything(make_world):
    world = make_world()
    async for _ in world.client.generate([1], greedy(1000)):
        break
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not world.engine.engine.core.requests
    assert not world.client._streams
    assert not world.client._labels
    assert not world.client._processor.has_requests()


async def test_cancelling_the_caller_aborts_a_request_that_still_waits(make_world):
    world = make_world(max_num_seqs=1)
    first = asyncio.create_task(collect(world.client.generate([1], greedy(40))))
    second = asyncio.create_task(collect(world.client.generate([2], greedy(1000))))
    for _ in range(20):
        await asyncio.sleep(0)
    second.cancel()
    assert await first == {0: fake_engine.expected([1], 40)}
    for _ in range(5):
        await asyncio.sleep(0)
    assert not world.engine.engine.core.has_work()


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_abort_by_name_ends_the_streams_with_that_reason(make_world, kind):
    client = make_world().client

    async def read():
        return [output async for output in client.generate([1], sampled(2000, n=2, seed=3, output_kind=kind), "mine")]

    task = asyncio.create_task(read())
    for _ in range(50):
        await asyncio.sleep(0)
    await client.abort("nobody")
    await client.abort("mine")
    seen = await task
    assert seen[-1].finished
    assert [choice.finish_reason for choice in seen[-1].outputs] == ["abort", "abort"]
    if kind is RequestOutputKind.CUMULATIVE:
        whole = fake_engine.expected([1], 2000, 3)
        assert seen[-1].outputs[0].token_ids == whole[: len(seen[-1].outputs[0].token_ids)] != []


async def test_the_engines_refusals_are_exceptions(make_world):
    world = make_world(max_num_queued_requests=1, max_num_seqs=1)
    await world.client.start()
    world.engine.paused = True
    tasks = [asyncio.create_task(collect(world.client.generate([i], greedy(20)))) for i in range(4)]
    for _ in range(20):
        await asyncio.sleep(0)
    world.engine.paused = False
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, OverloadedError)]
    assert 1 <= len(refused) <= 3
    assert all(result == {0: fake_engine.expected([i], 20)} for i, result in enumerate(results) if result not in refused)


async def test_a_failed_step_fails_its_requests_only(make_world):
    client = make_world().client
    with pytest.raises(RequestFailedError):
        await collect(client.generate([fake_engine.RAISE], greedy()))
    assert len(await collect(client.generate([1], greedy()))) == 1


# --- the engine dies ---


@pytest.mark.parametrize("deaths", [1, 3])
async def test_streams_go_on_over_deaths_with_the_same_tokens(make_world, deaths):
    world = make_world()
    prompts = [[i] * (i % 5 + 1) for i in range(1, 17)]
    kinds = list(RequestOutputKind)
    params = [
        (greedy if i % 2 else sampled)(60, **({} if i % 2 else {"seed": i}), output_kind=kinds[i % 3]) for i in range(16)
    ]
    seen = [[] for _ in prompts]

    async def read(i):
        async for output in world.client.generate(prompts[i], params[i]):
            tokens = output.outputs[0].token_ids
            seen[i] = seen[i] + tokens if params[i].output_kind is RequestOutputKind.DELTA else tokens

    tasks = [asyncio.create_task(read(i)) for i in range(16)]
    for life in range(deaths):
        while len(seen[1]) < 10 * (life + 1):
            await asyncio.sleep(0)
        world.engine.dead = True
    await asyncio.gather(*tasks)
    assert world.client.num_restarts == deaths
    for i in range(16):
        assert seen[i] == fake_engine.expected(prompts[i], 60, None if i % 2 else i)


async def test_an_idle_engine_that_dies_is_replaced(make_world):
    world = make_world()
    await world.client.start()
    world.engine.dead = True
    assert len(await collect(world.client.generate([1], greedy()))) == 1
    assert world.client.num_restarts == 1


async def test_a_poisonous_request_is_found_and_nobody_else_pays(make_world):
    world = make_world(max_num_seqs=8)
    good = [asyncio.create_task(collect(world.client.generate([i], greedy(200)))) for i in range(1, 13)]
    for _ in range(30):
        await asyncio.sleep(0)
    bad = asyncio.create_task(collect(world.client.generate([7, POISON], greedy(200))))
    late = asyncio.create_task(collect(world.client.generate([99], greedy(20))))
    with pytest.raises(RequestFailedError, match="alone"):
        await bad
    for i, task in enumerate(good, 1):
        assert await task == {0: fake_engine.expected([i], 200)}
    assert await late == {0: fake_engine.expected([99], 20)}
    assert world.client.num_restarts <= 5


async def test_counters_go_on_over_a_death(make_world):
    world = make_world()
    counts = []
    world.client.add_stats_listener(lambda stats: counts.append((stats.generation_tokens, stats.step)))
    task = asyncio.create_task(collect(world.client.generate([1], greedy(40))))
    while not counts or counts[-1][0] < 10:
        await asyncio.sleep(0)
    world.engine.dead = True
    await task
    assert counts == sorted(counts)
    assert world.client.stats.generation_tokens >= 40


async def test_too_many_deaths_are_the_end(make_world):
    world = make_world(max_engine_restarts=2)
    tasks = [asyncio.create_task(collect(world.client.generate([i], greedy(3000)))) for i in range(3)]
    for life in range(3):
        while len(world.lives) <= life or world.supervisor.state is not EngineState.UP or not world.engine.channel.outbox:
            await asyncio.sleep(0.001)
        world.engine.dead = True
        await asyncio.sleep(0.01)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert world.client.errored
    assert not world.client.is_ready()
    with pytest.raises(EngineDeadError):
        await world.client.check_health()
    with pytest.raises(EngineDeadError):
        await collect(world.client.generate([1], greedy()))


async def test_new_requests_wait_for_a_restart_up_to_the_queues_limit(make_world):
    world = make_world(max_num_queued_requests=3)
    await world.client.start()
    gate = asyncio.Event()

    class SlowStart(InProcess):
        async def start(self):
            await gate.wait()
            return await super().start()

    world.supervisor._new_transport = lambda: SlowStart(world.args, world.lives)
    world.engine.dead = True
    while world.supervisor.state is not EngineState.RESTARTING:
        await asyncio.sleep(0.001)
    assert not world.client.is_ready()
    await world.client.check_health()  # alive: it will be back
    tasks = [asyncio.create_task(collect(world.client.generate([i], greedy()))) for i in range(5)]
    await asyncio.sleep(0.01)
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, OverloadedError) for result in results] == [False] * 3 + [True] * 2
    assert results[:3] == [{0: fake_engine.expected([i], 8)} for i in range(3)]


async def test_an_engine_that_goes_silent_is_killed_and_replaced(make_world, monkeypatch):
    monkeypatch.setattr("octavo.client.supervisor.WATCH_SECONDS", 0.01)
    world = make_world()
    world.supervisor._stall_seconds = 0.05
    task = asyncio.create_task(collect(world.client.generate([1], greedy(400))))
    while not world.lives or not world.client.stats:
        await asyncio.sleep(0)
    world.engine.paused = True
    assert await task == {0: fake_engine.expected([1], 400)}
    assert world.client.num_restarts >= 1


# --- the engine's life ---


async def test_a_start_that_the_users_files_prevent_is_a_config_error(make_world):
    world = make_world()

    async def start():
        raise EngineEnded("bad file", EngineFailed("model.gguf: truncated", True))

    world.engine.start = start
    with pytest.raises(ConfigError, match="truncated"):
        await world.client.start()
    with pytest.raises(ConfigError, match="truncated"):
        await world.client.start()
    assert world.client.errored


async def test_draining_refuses_new_requests_and_waits_for_the_others(make_world):
    client = make_world().client
    task = asyncio.create_task(collect(client.generate([1], greedy(100))))
    await asyncio.sleep(0.01)
    assert client.is_ready()
    drain = asyncio.create_task(client.drain(10.0))
    await asyncio.sleep(0)
    assert client.is_draining
    assert not client.is_ready()
    with pytest.raises(OverloadedError):
        await collect(client.generate([1], greedy()))
    assert await drain
    assert await task == {0: fake_engine.expected([1], 100)}


async def test_draining_gives_up_after_its_time(make_world):
    world = make_world()
    task = asyncio.create_task(collect(world.client.generate([1], greedy(100))))
    while not world.lives or not world.client._streams:
        await asyncio.sleep(0)
    world.engine.paused = True
    assert not await world.client.drain(0.05)
    await world.client.shutdown()
    with pytest.raises(EngineDeadError):
        await task


async def test_readiness_needs_a_recent_message(make_world, monkeypatch):
    world = make_world()
    await world.client.start()
    assert world.client.is_ready()
    world.engine.paused = True
    await asyncio.sleep(0)
    now = world.supervisor._clock() + 60
    monkeypatch.setattr(world.supervisor, "_clock", lambda: now)
    assert not world.client.is_ready()
