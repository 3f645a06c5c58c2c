"""Needs Python only. Options on the command line: their spellings, types and errors, and how commands end."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.cli import __main__ as main
from octavo.cli.options import (
    NO_SAMPLING_FLAG,
    SAMPLING_HELP,
    args_from,
    command,
    dataclass_options,
    sampling_options,
    sampling_values,
)
from octavo.cli.serve import Stopwatch, greeting, process_age
from octavo.config import AsyncEngineArgs, EngineArgs, ServerArgs
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelFileError
from octavo.protocol import EngineReady, Phase
from octavo.sampling_params import SamplingParams


def parse(cls: Any, *words: str) -> Any:
    """The option dataclass that a command line gives."""
    seen: list[Any] = []

    @command("probe", "")
    @dataclass_options(cls)
    def probe(**values: Any) -> None:
        seen.append(args_from(cls, values))

    probe.main(list(words), standalone_mode=False)
    return seen[0]


def parse_sampling(*words: str) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []

    @command("probe", "")
    @sampling_options
    def probe(**values: Any) -> None:
        seen.append(sampling_values(values))

    probe.main(list(words), standalone_mode=False)
    return seen[0]


@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs, ServerArgs])
def test_no_option_changes_anything_by_itself(cls: Any) -> None:
    assert parse(cls) == cls()


@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs, ServerArgs])
def test_every_field_is_an_option_with_its_default_restated(cls: Any) -> None:
    for field in dataclasses.fields(cls):
        value = getattr(cls(), field.name)
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words = [flag if value else f"--no-{flag[2:]}"]
        elif isinstance(value, list):
            words = [word for item in value for word in (flag, item)]
        else:
            words = [] if value is None else [flag, str(value)]
        assert parse(cls, *words) == cls(), field.name


def test_dashes_and_underscores_are_the_same() -> None:
    assert parse(EngineArgs, "--max-num-seqs", "7").max_num_seqs == 7
    assert parse(EngineArgs, "--max_num_seqs", "7").max_num_seqs == 7
    assert parse(EngineArgs, "--max_num_seqs=7").max_num_seqs == 7
    assert parse(EngineArgs, "--no_enable_prefix_caching").enable_prefix_caching is False
    assert parse(EngineArgs, "--no-enable-prefix-caching").enable_prefix_caching is False


def test_values_keep_their_underscores() -> None:
    assert parse(EngineArgs, "--served-model-name", "my_model").served_model_name == "my_model"
    assert parse(ServerArgs, "--api-key", "a_b", "--api-key", "c-d").api_key == ["a_b", "c-d"]


def test_further_spellings() -> None:
    assert parse(EngineArgs, "-q", "gguf").quantization == "gguf"
    assert parse(EngineArgs, "--kv-cache-memory-bytes", "64M").kv_cache_memory == "64M"
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2"):
        parse(EngineArgs, "-tp", "2")


def test_a_model_behind_the_command_wins() -> None:
    assert args_from(EngineArgs, {"model": "a"}, "b").model == "b"


def test_an_option_that_two_things_have_can_be_left_out() -> None:
    assert args_from(EngineArgs, {"seed": None, "max_num_seqs": 3}, skip=("seed",)) == EngineArgs(max_num_seqs=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--block-size", "17"], "block_size = 17: choose from 16, 32, 64, 128"),
        (["--max-num-seqs", "0"], "max_num_seqs = 0: must be at least 1"),
        (["--dtype", "int4"], "dtype = 'int4'"),
        (["--kv-cache-memory", "lots"], "kv_cache_memory = 'lots'"),
    ],
)
def test_limits_are_those_of_the_dataclass(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        parse(EngineArgs, *words)


def test_every_sampling_field_has_a_flag_or_a_reason() -> None:
    assert set(SAMPLING_HELP) == set(SamplingParams.__struct_fields__) - NO_SAMPLING_FLAG


def test_only_what_was_said_is_passed_on() -> None:
    assert parse_sampling() == {}
    assert parse_sampling("--temperature", "0", "--ignore-eos", "--stop", "a", "--stop", "b") == {
        "temperature": 0.0,
        "ignore_eos": True,
        "stop": ["a", "b"],
    }
    assert parse_sampling("--stop_token_ids", "1", "--logit-bias", "5:-100") == {"stop_token_ids": [1], "logit_bias": {5: -100.0}}
    assert parse_sampling("--no-skip-special-tokens") == {"skip_special_tokens": False}


def test_a_bias_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"logit_bias = 'x:y'.*ID:BIAS"):
        parse_sampling("--logit-bias", "x:y")


# --- how commands end ---


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("dtype = 'x': no"), 2),
        (ModelFileError("a.gguf: tensor b: cut off"), 2),
        (InvalidRequestError("prompt: empty"), 2),
        (EngineDeadError("the engine is gone"), 1),
        (click.UsageError("no such option: --x"), 2),
    ],
)
def test_a_foreseen_error_is_one_line(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(main.group, "main", fail)
    assert main.run([]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.group, "main", interrupt)
    assert main.run([]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main.group, "main", fail)
    with pytest.raises(ZeroDivisionError):
        main.run([])


@pytest.mark.parametrize("words", [["nonsense"], ["serve", "--no-such-option"], ["serve", "--port", "x"], ["pull", "a", "b"]])
def test_a_wrong_word_is_one_line(words: list[str], capsys: Any) -> None:
    assert main.run(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(main.group, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output


@pytest.mark.parametrize("words", [["version"], ["--help"], ["serve", "--help"], ["bench", "serve", "--help"]])
def test_words_that_compute_nothing_load_nothing(words: list[str]) -> None:
    code = (
        "import sys\nfrom octavo.cli.__main__ import run\n"
        f"assert run({words!r}) == 0\n"
        "print([m for m in ('numpy', 'asyncio', 'uvicorn', 'tokenizers', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


# --- the greeting ---


def ready() -> EngineReady:
    return EngineReady(2048, 49152, 16, 100, 4 << 20, 1600, 90_000_000, 256, 512, 2, "cpu avx2, 2 threads", [Phase("map weights", 0.01)], 1)


def test_the_greeting_has_an_address_and_a_line_to_try() -> None:
    watch = Stopwatch()
    watch.phases.append(("find model", 0.02))
    text = greeting(ready(), AsyncEngineArgs(served_model_name="it's"), ServerArgs(host="0.0.0.0"), "0.0.0.0", 8123, watch)
    assert "http://127.0.0.1:8123" in text
    assert "1,600 tokens in 100 blocks of 16" in text
    assert "cpu avx2, 2 threads" in text
    assert "map weights 0.01" in text
    assert "find model 0.02" in text
    words = shlex.split(next(line for line in text.splitlines() if "curl" in line).partition("curl ")[2])
    assert words[0] == "http://127.0.0.1:8123/v1/completions"
    assert '"model": "it\'s"' in words[words.index("-d") + 1]


def test_the_greeting_never_shows_a_key() -> None:
    text = greeting(ready(), AsyncEngineArgs(), ServerArgs(api_key=["secret"], disable_docs=True), "::1", 80, Stopwatch())
    assert "secret" not in text
    assert "Authorization: Bearer $OCTAVO_API_KEY" in text
    assert "http://[::1]:80/v1/completions" in text
    assert "/docs" not in text


@pytest.mark.parametrize(("target", "told"), [(None, "2.5 times one without"), (40.0, "at most 40 ms"), (0, "prompts in order")])
def test_the_greeting_tells_the_pace(target: float | None, told: str) -> None:
    assert told in greeting(ready(), AsyncEngineArgs(itl_target_ms=target), ServerArgs(), "127.0.0.1", 80, Stopwatch())


@pytest.mark.parametrize(("most", "told"), [(8, "up to 8 tokens more"), (0, "none (--num-speculative-tokens 0)")])
def test_the_greeting_tells_of_drafts(most: int, told: str) -> None:
    assert told in greeting(ready(), AsyncEngineArgs(num_speculative_tokens=most), ServerArgs(), "127.0.0.1", 80, Stopwatch())


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = "import time; time.sleep(0.2); from octavo.cli.serve import process_age; print(process_age())"
    began = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 0.2 <= float(result.stdout) <= time.monotonic() - began + 0.02
    assert process_age() > 0
