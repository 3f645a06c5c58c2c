"""Needs sockets and processes, no model. Two real processes, the engine's with a hash in place of a model: killed at any moment, wedged,
orphaned, and told that its files are wrong."""

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from octavo.client.client import EngineClient
from octavo.client.supervisor import Supervisor
from octavo.client.transport import EngineEnded, SocketTransport
from octavo.config import AsyncEngineArgs
from octavo.errors import ConfigError, EngineDeadError, RequestFailedError
from octavo.protocol import EngineReady, Start
from octavo.sampling_params import RequestOutputKind, SamplingParams

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
_spec = importlib.util.spec_from_file_location("fake_engine", FAKE_ENGINE)
fake_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_engine)

COMMAND = (sys.executable, str(FAKE_ENGINE))


class Numbers:
    eos_token_ids = (2,)


class World:
    def __init__(self, options=None, stall_seconds=60.0, **args):
        self.args = AsyncEngineArgs(**args)
        start = Start(self.args, json.dumps(options or {"step_seconds": 0.001}))
        self.transports = []

        def new_transport():
            self.transports.append(SocketTransport(start, COMMAND))
            return self.transports[-1]

        self.supervisor = Supervisor(new_transport, stall_seconds=stall_seconds, max_restarts=self.args.max_engine_restarts)
        self.client = EngineClient(self.supervisor, Numbers(), self.args)

    @property
    def pid(self):
        return self.transports[-1].pid

    def pids(self):
        return [transport.pid for transport in self.transports if transport.pid]


@pytest.fixture
async def make_world():
    worlds = []

    def make(*args, **kwargs):
        worlds.append(World(*args, **kwargs))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.client.shutdown()
        assert not any(is_alive(pid) for pid in world.pids())


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


class Reader:
    """Reads one stream of deltas and keeps every token."""

    def __init__(self, client, i, max_tokens):
        self.prompt = [i] * (1 + 13 * i % 70)
        self.seed = None if i % 2 else i
        sampling = {"temperature": 0} if i % 2 else {"seed": i}
        params = SamplingParams(max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling)
        self.expected = fake_engine.expected(self.prompt, max_tokens, self.seed)
        self.tokens = []
        self.task = asyncio.create_task(self.read(client.generate(self.prompt, params)))

    async def read(self, stream):
        async for output in stream:
            self.tokens += output.outputs[0].token_ids


async def read_all(readers):
    await asyncio.gather(*(reader.task for reader in readers))
    for reader in readers:
        assert reader.tokens == reader.expected


async def test_streams_survive_sigkill_at_random_moments_token_for_token(make_world):
    world = make_world()
    rng = random.Random(7)
    readers = [Reader(world.client, i, 150) for i in range(16)]
    for kill in range(5):
        while min(len(reader.tokens) for reader in readers) < 20 * (kill + 1):
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.random() * 0.01)
        os.kill(world.pid, signal.SIGKILL)
    await read_all(readers)
    assert world.client.num_restarts == 5


async def test_killed_while_prompts_are_computed_and_again_while_it_starts(make_world):
    world = make_world(max_num_batched_tokens=16, max_num_seqs=8)
    readers = [Reader(world.client, i, 30) for i in range(16)]
    await world.client.start()
    await asyncio.sleep(0.005)
    os.kill(world.pid, signal.SIGKILL)
    while len(world.pids()) < 2:
        await asyncio.sleep(0.001)
    os.kill(world.pid, signal.SIGKILL)  # this one has not even begun
    await read_all(readers)


async def test_an_idle_engine_that_is_killed_comes_back(make_world):
    world = make_world()
    await world.client.start()
    os.kill(world.pid, signal.SIGKILL)
    while world.client.num_restarts == 0:
        await asyncio.sleep(0.01)
    assert world.client.is_ready()
    await read_all([Reader(world.client, 3, 20)])


async def test_an_engine_that_is_wedged_is_replaced_and_the_request_that_wedges_it_given_up(make_world):
    world = make_world(stall_seconds=1.0)
    readers = [Reader(world.client, i, 100) for i in range(4)]
    with pytest.raises(RequestFailedError):
        async for _ in world.client.generate([fake_engine.HANG], SamplingParams(detokenize=False)):
            pass
    await read_all(readers)


async def test_a_stopped_engine_is_not_ready(make_world, monkeypatch):
    monkeypatch.setattr("octavo.client.supervisor.READY_SECONDS", 1.0)
    world = make_world()
    await world.client.start()
    os.kill(world.pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)
    assert not world.client.is_ready()
    os.kill(world.pid, signal.SIGCONT)
    await asyncio.sleep(0.7)
    assert world.client.is_ready()
    assert world.client.num_restarts == 0


async def test_signals_for_the_whole_group_leave_the_engine_to_its_parent(make_world):
    world = make_world()
    await world.client.start()
    os.kill(world.pid, signal.SIGTERM)
    os.kill(world.pid, signal.SIGINT)
    await read_all([Reader(world.client, 3, 20)])
    assert world.client.num_restarts == 0


async def test_a_request_that_kills_the_engine_is_given_up_alone(make_world):
    world = make_world()
    readers = [Reader(world.client, i, 300) for i in range(8)]
    with pytest.raises(RequestFailedError, match="alone"):
        async for _ in world.client.generate([fake_engine.CRASH], SamplingParams(detokenize=False)):
            pass
    await read_all(readers)


async def test_the_engines_last_words_reach_the_user(make_world):
    world = make_world({"refuse": "model.gguf: tensor 'a.b' lies beyond the end of the file"})
    with pytest.raises(ConfigError, match=r"model\.gguf: tensor 'a\.b' lies beyond"):
        await world.client.start()
    assert not is_alive(world.pid)


async def test_an_engine_that_cannot_even_start_is_an_error_not_a_loop(make_world):
    world = make_world()
    world.supervisor._transport = SocketTransport(Start(world.args, ""), (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(EngineDeadError, match="exit code 7"):
        await world.client.start()


async def test_a_command_that_is_not_there_is_named(make_world):
    transport = SocketTransport(Start(AsyncEngineArgs(), ""), ("/no/such/command",))
    with pytest.raises(EngineEnded, match="/no/such/command"):
        transport.launch()


async def test_an_engine_that_sends_rubbish_loses_its_connection(make_world):
    rubbish = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'\\x03\\0\\0\\0abc'); time.sleep(60)"
    transport = SocketTransport(Start(AsyncEngineArgs(), ""), (sys.executable, "-c", rubbish))
    with pytest.raises(EngineEnded, match="cannot be read"):
        await transport.start()
    assert not is_alive(transport.pid)


async def test_options_reach_the_engine(make_world):
    world = make_world(max_model_len=123, max_num_seqs=5)
    ready = await world.client.start()
    assert isinstance(ready, EngineReady)
    assert (ready.max_model_len, ready.max_num_seqs) == (123, 5)
    assert ready.pid == world.pid
    command_line = " ".join(psutil.Process(world.pid).cmdline())
    assert "123" not in command_line


PARENT = """
import asyncio, sys
from octavo.client.transport import SocketTransport
from octavo.config import EngineArgs
from octavo.protocol import Start

async def main():
    transport = SocketTransport(Start(EngineArgs(), '{"step_seconds": 0.5}'), (sys.executable, sys.argv[1]))
    await transport.start()
    print(transport.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_engine_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(FAKE_ENGINE)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    assert gone_within(pid, 5)


async def test_shutdown_leaves_nothing_behind(make_world):
    before = len(psutil.Process().open_files()) + psutil.Process().num_fds()
    for _ in range(3):
        world = World()
        reader = Reader(world.client, 1, 1500)
        while not reader.tokens and not reader.task.done():
            await asyncio.sleep(0.001)
        await world.client.shutdown()
        with pytest.raises(EngineDeadError):
            await reader.task
        assert not is_alive(world.pid)
    await asyncio.sleep(0.01)
    assert len(psutil.Process().open_files()) + psutil.Process().num_fds() <= before + 1


def test_the_api_process_stays_light():
    code = "import sys, octavo.client.client; print(sorted(m for m in ('numpy', 'octavo.engine', 'octavo.host', 'octavo.ops') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
