"""Needs the extension and the default model. The command `octavo` as a user meets it: real processes, sockets and signals."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OCTAVO = [sys.executable, "-m", "octavo.cli"]
SMALL = ["--max-model-len", "512", "--kv-cache-memory", "64M"]


def octavo(*words: str, stdin: str | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OCTAVO, *words], input=stdin or "", capture_output=True, text=True, timeout=timeout, cwd=ROOT)


class Server:
    """`octavo serve` in a process of its own; `greeting` is all that it printed when it was ready."""

    def __init__(self, *words: str) -> None:
        env = {**os.environ, "OCTAVO_API_KEY": ""}
        self.process = subprocess.Popen(
            [*OCTAVO, "serve", *SMALL, "--port", "0", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.greeting = self._read_greeting()
        found = re.search(r"http://127\.0\.0\.1:\d+", self.greeting)
        assert found, self.greeting + (self.process.stderr.read() if self.process.stderr else "")
        self.url = found.group()

    def _read_greeting(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        said = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and b"/docs\n" not in said:
            if select.select([stdout], [], [], 0.2)[0]:
                part = os.read(stdout.fileno(), 1 << 16)
                if not part:
                    break
                said += part
        return said.decode()

    def stop(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Exit code and stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    if server.process.poll() is None:
        server.stop()


def post(url: str, body: bytes, headers: dict[str, str]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
        return json.load(response)


def test_the_greeting_says_what_was_chosen(server: Server) -> None:
    for what in ("smollm2-135m is served on", "engine   cpu ", "threads", "KV cache 64 MiB", "tokens in", "start    ", "map weights"):
        assert what in server.greeting, server.greeting


def test_the_curl_line_works_as_it_is_printed(server: Server) -> None:
    line = next(line for line in server.greeting.splitlines() if "curl" in line)
    words = shlex.split(line.partition("curl ")[2])
    header = words[words.index("-H") + 1].partition(": ")
    answer = post(words[0], words[words.index("-d") + 1].encode(), {header[0]: header[2]})
    assert answer["model"] == "smollm2-135m"
    assert answer["choices"][0]["text"]


def test_what_the_readme_says_works(server: Server) -> None:
    """Each Python block, and the curl line, with the test server's address in place of the default one."""
    text = (ROOT / "README.md").read_text().replace("http://127.0.0.1:8000", server.url)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert result.returncode == 0, block + result.stderr
        assert result.stdout.strip(), block
    curl = next(block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if block.startswith("curl "))
    words = shlex.split(curl.replace("\\\n", " "))
    answer = post(words[1], words[words.index("-d") + 1].encode(), {"Content-Type": "application/json"})
    assert answer["choices"][0]["message"]["content"]


def test_a_load_run_and_its_kv_utilisation(server: Server) -> None:
    words = ["bench", "serve", "--url", server.url, "-c", "4", "--num-prompts", "8", "--input-len", "10:90", "--output-len", "16:32"]
    result = octavo(*words, "--json")
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)
    assert summary["num_failed"] == 0
    assert summary["num_output_tokens"] >= 8 * 16
    assert summary["ttft_ms"]["p50"] > 0
    assert summary["kv_usage_peak"] > 0
    # Short requests: half a block is lost on each, so the share is lower here than the one that long runs reach.
    assert 0.8 < summary["kv_slots_used"] <= 1.0


def test_a_chat_with_a_server(server: Server) -> None:
    result = octavo("chat", "--url", server.url, "--temperature", "0", "--max-tokens", "12", stdin="What is 2 + 2?\n/reset\nSay hi.\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip().splitlines()) >= 2


def test_a_second_server_on_the_same_port_is_refused(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    result = octavo("serve", *SMALL, "--port", port)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"port = {port}" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly(number: signal.Signals) -> None:
    server = Server("--log-level", "warning", "--served-model-name", "other")
    assert "other is served on" in server.greeting
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert len(children) == 1
    assert server.stop(number) == (0, "")
    assert not Path(f"/proc/{children[0]}").exists()


def test_a_key_guards_the_server() -> None:
    server = Server("--api-key", "secret")
    try:
        assert "secret" not in server.greeting
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(server.url + "/v1/models", timeout=10)
        result = octavo("bench", "serve", "--url", server.url, "--api-key", "secret", "-c", "1", "--num-prompts", "1", "--output-len", "2")
        assert result.returncode == 0, result.stderr
        assert "output tokens/s" in result.stdout
    finally:
        server.stop()


def test_generate_is_deterministic_when_it_is_told_to_be() -> None:
    words = ["generate", *SMALL, "--prompt", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    first, second = octavo(*words), octavo(*words)
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    assert first.stdout == second.stdout
    assert first.stderr == ""


def test_generate_prints_json_with_everything() -> None:
    result = octavo("generate", *SMALL, "One two", "-", "--n", "2", "--seed", "1", "--max-tokens", "3", "--json", stdin="three")
    assert result.returncode == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == ("One two", "three")
    assert [choice["index"] for choice in first["choices"]] == [0, 1]
    assert all(len(choice["token_ids"]) <= 3 for choice in first["choices"])


def test_a_chat_with_an_engine_of_its_own() -> None:
    result = octavo("chat", *SMALL, "--temperature", "0", "--max-tokens", "10", stdin="Hello!\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_throughput_in_this_process() -> None:
    result = octavo("bench", "throughput", *SMALL, "--num-prompts", "4", "--input-len", "10:50", "--output-len", "4", "--json")
    assert result.returncode == 0, result.stderr
    (summary,) = json.loads(result.stdout)
    assert summary["num_output_tokens"] == 16


def test_kernels_beside_the_machines_limits() -> None:
    result = octavo("bench", "kernels", "--rows", "2", "--rows", "70", "--context", "80", "--seconds", "0.01", "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert all(value > 0 for value in told["peaks"].values() if isinstance(value, float))
    decode, first, later = told["steps"]
    assert [step["name"] for step in told["steps"]] == ["decode of 2, 80 tokens each", "prefill of 70", "prefill of 70 behind 10"]
    ops = {op["name"]: op for op in decode["ops"]}
    assert ops["linear w4 576x576"]["count"] == ops["attention"]["count"] == 30
    assert ops["linear w4 576x576"]["operations"] == 30 * 2 * 2 * 576 * 576
    assert ops["linear w8 49152x576"]["rows"] == ops["sample greedily"]["rows"] == 2
    assert 0 < decode["limit_seconds"] < decode["seconds"]
    assert "sample greedily" not in {op["name"] for op in first["ops"]}
    assert later["length"] == 80


def test_products_of_given_shapes() -> None:
    result = octavo("bench", "kernels", "--shapes", "64x96", "--kinds", "w4", "--rows", "1", "--rows", "5")
    assert result.returncode == 0, result.stderr
    assert [line.split()[:3] for line in result.stdout.splitlines()[-2:]] == [["w4", "64x96", "1"], ["w4", "64x96", "5"]]


def test_pull_prints_where_the_model_is() -> None:
    result = octavo("pull")
    assert result.returncode == 0
    assert Path(result.stdout.strip()).stat().st_size > 90_000_000


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "no/such/place/at all"],
        ["serve", "--block-size", "17"],
        ["serve", "--kv-cache-memory", "1M"],
        ["serve", "--dtype", "int3"],
        ["serve", "--isa", "z80"],
        ["generate", "--prompt", "x", "--temperature", "9"],
        ["generate", *SMALL, "--prompt", "word " * 600],
        ["generate"],
        ["generate", "--model", "LICENSE", "--prompt", "x"],
        ["bench", "serve", "--url", "gopher://x"],
        ["bench", "serve", "--dataset", "file"],
        ["bench", "kernels", "--shapes", "64"],
        ["bench", "kernels", "--shapes", "64x40", "--kinds", "w4"],
        ["bench", "kernels", "--kinds", "w4"],
        ["bench", "kernels", "--isa", "z80"],
        ["bench", "kernels", "--isa", "z80", "--shapes", "64x64"],
        ["chat", "--tokenizer", "nowhere"],
        ["pull", "nowhere"],
    ],
)
def test_a_users_mistake_is_one_line(words: list[str]) -> None:
    result = octavo(*words)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("octavo: error: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 500


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    whole = Path(octavo("pull").stdout.strip()).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    for command in ("serve", "generate"):
        result = octavo(command, "--model", str(cut), *(["--prompt", "x"] if command == "generate" else ["--port", "0"]))
        assert result.returncode == 2, result.stderr
        assert result.stderr.count("\n") == 1
        assert "cut.gguf" in result.stderr


def test_nobody_to_measure() -> None:
    result = octavo("bench", "serve", "--url", "http://127.0.0.1:1")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "no answer from 127.0.0.1:1" in result.stderr
