"""Whole runs on small checkpoints: what is written, what is left alone, how a run goes on after it was broken off, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import independent
import numpy as np
import pytest
from plain_models import FAMILIES, write_model, write_texts

from octavo.compress import Settings, quantize
from octavo.compress import stored as stored_module
from octavo.compress.source import SourceModel
from octavo.errors import ConfigError, ModelFileError, OctavoError
from octavo.loader.resolve import source_at
from octavo.ops.batch import Batch
from octavo.runner.reference import ReferenceProgram

KINDS: dict[str, dict[str, Any]] = {
    "w4 rtn": dict(scheme="w4"),
    "w4 rtn, zero points": dict(scheme="w4", symmetric=False),
    "w4 gptq": dict(scheme="w4", method="gptq"),
    "w4 gptq, by importance": dict(scheme="w4", method="gptq", act_order=True),
    "w4 awq": dict(scheme="w4", method="awq"),
    "w8 rtn": dict(scheme="w8"),
    "w8 gptq, groups": dict(scheme="w8", method="gptq", group_size=32),
    "w8a8 rtn": dict(scheme="w8a8"),
    "w8a8 smoothquant": dict(scheme="w8a8", method="smoothquant"),
}


def run(model: Path, out: Path, texts: Path | None = None, progress: Callable[[int, int], None] = lambda d, t: None, **asked: Any) -> Path:
    calibrated = asked.get("method", "rtn") != "rtn"
    settings = Settings(**{"samples": 12, "sample_len": 40, "calibrated": calibrated, **asked})
    quantize(source_at(model, "m", "auto"), out, settings, texts if calibrated else None, progress)
    return out


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl")


def logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Of a plain folder, by the definition."""
    model = SourceModel.open(source_at(folder, "m", "auto")).model
    groups, n = len(model.kv_layout.windows), len(ids)
    per = -(-n // 16)
    program = ReferenceProgram(model, num_blocks=groups * per, block_size=16, kv_dtype="float32", max_rows=n, max_positions=n)
    positions = np.arange(n, dtype=np.int32)
    table_GSB = np.arange(groups * per, dtype=np.int32).reshape(groups, 1, per)
    slots_GT = table_GSB[:, 0, positions // 16] * 16 + positions % 16
    program.forward(Batch(np.array(ids, np.int32), positions, slots_GT, np.array([0, n], np.int32), np.array([n], np.int32), table_GSB))
    return program.logits(positions)


def off_by(model: Path, written: Path, scratch: Path, family: str) -> float:
    """Relative error of the logits of what was written, read independently, on a text like those of the calibration."""
    ids = np.minimum(np.random.default_rng(11).geometric(0.05, 60), 95).tolist()
    plain = independent.as_plain(written, scratch, turned=family == "gpt2")
    ours, exact = logits(plain, ids), logits(model, ids)
    return float(np.sqrt(np.square(ours - exact).mean() / np.square(exact).mean()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_nearly_the_model(tmp_path: Path, texts: Path, family: str, kind: str) -> None:
    """In each format, for each family; names, shapes and all else as in the source, or the model would not open."""
    model = write_model(tmp_path / "m", family)
    asked = KINDS[kind]
    if family == "gpt2" and asked["scheme"] == "w8a8":
        with pytest.raises(ConfigError, match=r"transformer\.h\.0\.attn\.c_attn: is stored turned"):
            run(model, tmp_path / "q", texts, **asked)
        return
    written = run(model, tmp_path / "q", texts, **asked)
    # Random weights make the most of rounding errors, and a token may change its expert; a factor in the wrong place would give 1 and more.
    error = off_by(model, written, tmp_path / "plain", family)
    assert error < (0.12 if asked["scheme"] != "w4" else 0.8)
    assert not (tmp_path / "q.partial").exists()


@pytest.mark.parametrize("family", ["llama", "phi3", "starcoder2", "gemma2"])
def test_calibrated_methods_are_better(tmp_path: Path, texts: Path, family: str) -> None:
    model = write_model(tmp_path / "m", family, "BF16")
    errors = {
        kind: off_by(model, run(model, tmp_path / str(i), texts, **KINDS[kind]), tmp_path / f"plain{i}", family)
        for i, kind in enumerate(("w4 rtn", "w4 gptq", "w4 gptq, by importance", "w4 rtn, zero points", "w4 awq"))
    }
    assert errors["w4 gptq"] < 0.85 * errors["w4 rtn"]
    assert errors["w4 gptq, by importance"] < 0.85 * errors["w4 rtn"]
    assert errors["w4 awq"] < errors["w4 rtn, zero points"]


def test_what_is_not_rounded_is_copied(tmp_path: Path) -> None:
    """Bit for bit: embeddings, norms, head and biases; and the files beside the weights, but no code."""
    model = write_model(tmp_path / "m", "llama", "BF16")
    written = run(model, tmp_path / "q", scheme="w4")
    before, after = independent.read(model), independent.read(written)
    rounded = {name for name in before if name.startswith("model.layers") and name.endswith("proj.weight")}
    assert len(rounded) == 3 * 7
    for name in set(before) - rounded:
        assert np.array_equal(before[name], after[name]), name
    ends = ("qweight", "qzeros", "scales", "g_idx")
    assert set(after) == (set(before) - rounded) | {f"{name.removesuffix('weight')}{end}" for name in rounded for end in ends}
    files = {"config.json", "generation_config.json", "model.safetensors", "quantize_config.json", "tokenizer.json"}
    assert {path.name for path in written.iterdir()} == files
    assert (written / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_configurations_say_what_was_done(tmp_path: Path, texts: Path) -> None:
    model = write_model(tmp_path / "m", "llama", "BF16")
    before = json.loads((model / "config.json").read_text())

    def config(number: int, **asked: Any) -> dict[str, Any]:
        written = json.loads((run(model, tmp_path / str(number), texts, **asked) / "config.json").read_text())
        said: dict[str, Any] = written.pop("quantization_config")
        assert written == before
        return said

    said = config(0, scheme="w4", symmetric=False)
    assert (said["quant_method"], said["bits"], said["group_size"], said["sym"], said["desc_act"]) == ("gptq", 4, 32, False, False)
    assert json.loads((tmp_path / "0" / "quantize_config.json").read_text()) == said
    assert config(1, scheme="w4", method="gptq", act_order=True, group_size=32)["desc_act"] is True
    said = config(2, scheme="w4", method="awq")
    assert (said["quant_method"], said["bits"], said["zero_point"], said["version"]) == ("awq", 4, True, "gemm")
    said = config(3, scheme="w8", group_size=32)
    scheme = said["config_groups"]["group_0"]
    assert (said["format"], scheme["weights"]["strategy"], scheme["weights"]["group_size"]) == ("pack-quantized", "group", 32)
    assert scheme["input_activations"] is None
    said = config(4, scheme="w8a8")
    scheme = said["config_groups"]["group_0"]
    assert (said["format"], scheme["weights"]["strategy"], scheme["weights"]["group_size"]) == ("int-quantized", "channel", None)
    assert (scheme["input_activations"]["dynamic"], scheme["input_activations"]["strategy"]) == (True, "token")


def test_routers_and_gates_are_not_rounded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "qwen2_moe")
    written = run(model, tmp_path / "q", scheme="w8")
    before, after = independent.read(model), independent.read(written)
    kept = [name for name in before if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))]
    assert len(kept) == 4
    assert all(np.array_equal(before[name], after[name]) for name in kept)
    assert "model.layers.0.mlp.experts.3.down_proj.weight_packed" in after
    ignored = json.loads((written / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {"lm_head", *(name.removesuffix(".weight") for name in kept)}


def test_names_are_those_of_the_files(tmp_path: Path) -> None:
    """Mixtral's files call experts otherwise than we do; experts stacked in one tensor are taken apart."""
    model = write_model(tmp_path / "m", "mixtral")
    tensors = independent.read(model)
    renamed = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    own: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        parts = name.replace(".mlp.", ".block_sparse_moe.").split(".")
        own[".".join(renamed.get(part, part) if "experts" in parts else part for part in parts)] = values
    (model / "model.safetensors").unlink()
    independent.save(model / "model.safetensors", own, "F32")
    after = independent.read(run(model, tmp_path / "q", scheme="w4"))
    assert "model.layers.1.block_sparse_moe.experts.2.w3.qweight" in after
    assert "model.layers.1.block_sparse_moe.gate.weight" in after
    stack = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(3):
        for part in ("gate_proj", "up_proj", "down_proj"):
            experts = [tensors[f"model.layers.{layer}.mlp.experts.{i}.{part}.weight"] for i in range(4)]
            stack[f"model.layers.{layer}.mlp.experts.{part}"] = np.stack(experts)
    (model / "model.safetensors").unlink()
    independent.save(model / "model.safetensors", stack, "F32")
    apart = independent.read(run(model, tmp_path / "s", scheme="w4"))
    assert "model.layers.1.mlp.experts.up_proj" not in apart
    for ours, theirs in (("mlp.experts.2.up_proj", "block_sparse_moe.experts.2.w3"), ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2")):
        assert np.array_equal(apart[f"model.layers.1.{ours}.qweight"], after[f"model.layers.1.{theirs}.qweight"])


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m", "llama")
    whole = independent.read(run(model, tmp_path / "whole", scheme="w8"))
    monkeypatch.setattr(stored_module.write_model, "__defaults__", (20_000,))
    written = run(model, tmp_path / "q", scheme="w8")
    shards = sorted(path.name for path in written.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in whole.values())
    parts = independent.read(written)
    assert parts.keys() == whole.keys() == index["weight_map"].keys()
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)


# Broken off


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["w4 rtn", "w4 gptq", "w4 awq", "w8a8 smoothquant"])
def test_a_run_that_was_broken_off_gives_the_same_bytes(tmp_path: Path, texts: Path, kind: str) -> None:
    """After each layer, one after the other; finished layers are not computed again."""
    model, asked = write_model(tmp_path / "m", "llama", "BF16"), KINDS[kind]
    whole, out, seen = run(model, tmp_path / "whole", texts, **asked), tmp_path / "q", []

    def stop_after_one(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) % 2 == 0:
            raise Stop

    for layer in range(1, 4):
        with pytest.raises(Stop):
            run(model, out, texts, stop_after_one, **asked)
        assert seen[-2:] == [layer - 1, layer]
        assert not out.exists()
    run(model, out, texts, lambda done, total: seen.append(done), **asked)
    assert seen[-1] == 3
    assert contents(out) == contents(whole)
    assert not (tmp_path / "q.partial").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["state.json", "layer-00000.safetensors", "into-00001.f32", "model.safetensors", "tokenizer.json"])
def test_a_disk_that_fills_up(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One line; the output is not there; with room again the run goes on and gives the same bytes."""
    model, asked, out = write_model(tmp_path / "m", "llama", "BF16"), KINDS["w4 gptq"], tmp_path / "q"
    whole = run(model, tmp_path / "whole", texts, **asked)
    opened, copied, times = Path.open, shutil.copyfile, []

    def full(path: Path) -> None:
        if path.name.removesuffix(".tmp") == name and len(times) < (2 if name == "state.json" else 1):
            times.append(path)
            if name != "state.json" or len(times) == 2:
                raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode="r", **more: (full(self) if "w" in mode else None, opened(self, mode, **more))[1])
        patch.setattr(shutil, "copyfile", lambda source, target: (full(target), copied(source, target))[1])
        with pytest.raises(ConfigError, match="No space left on device"):
            run(model, out, texts, **asked)
    assert not out.exists()
    assert contents(run(model, out, texts, **asked)) == contents(whole)


def test_another_run_is_not_gone_on_with(tmp_path: Path, texts: Path) -> None:
    model, out = write_model(tmp_path / "m", "llama"), tmp_path / "q"

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    with pytest.raises(Stop):
        run(model, out, texts, stop, **KINDS["w4 gptq"])
    other = write_texts(tmp_path / "other.jsonl", 7)
    for texts_of, asked in ((texts, KINDS["w4 awq"]), (texts, {**KINDS["w4 gptq"], "samples": 5}), (other, KINDS["w4 gptq"])):
        with pytest.raises(ConfigError, match=r"q\.partial holds an interrupted run of another model or with other settings"):
            run(model, out, texts_of, **asked)
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match="another model"):
        run(write_model(tmp_path / "m", "llama", rms_norm_eps=1e-5), out, texts, **KINDS["w4 gptq"])


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "m", "llama"), tmp_path / "q"

    def second(done: int, total: int) -> None:
        with pytest.raises(ConfigError, match="another run is writing it"):
            run(model, out, scheme="w4")

    run(model, out, None, second, scheme="w4")
    assert out.exists()


def test_a_damaged_state_is_told(tmp_path: Path, texts: Path) -> None:
    model, out, asked = write_model(tmp_path / "m", "llama"), tmp_path / "q", KINDS["w4 gptq"]

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    with pytest.raises(Stop):
        run(model, out, texts, stop, **asked)
    partial = tmp_path / "q.partial"
    hidden = (partial / "into-00001.f32").read_bytes()
    (partial / "into-00001.f32").write_bytes(hidden[:-4])
    with pytest.raises(ConfigError, match=r"into-00001\.f32: has 30719 numbers instead of 30720"):
        run(model, out, texts, **asked)
    (partial / "into-00001.f32").unlink()
    with pytest.raises(ConfigError, match=r"into-00001\.f32: No such file"):
        run(model, out, texts, **asked)
    (partial / "state.json").write_text("{")
    with pytest.raises(OctavoError, match=r"state\.json: is not valid JSON"):
        run(model, out, texts, **asked)


# Refused


def test_an_output_that_is_there(tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "m", "llama"), tmp_path / "q"
    out.mkdir()
    (out / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="is there already"):
        run(model, out, scheme="w4")
    assert contents(out) == {"mine.txt": b"x"}
    (out / "mine.txt").unlink()
    run(model, out, scheme="w4")
    assert (out / "model.safetensors").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for link in (tmp_path / "link", tmp_path / "broken"):
        if not link.is_symlink():
            link.symlink_to(tmp_path / "nothing")
        with pytest.raises(ConfigError, match="is there already"):
            run(model, link, scheme="w4")
    with pytest.raises(ConfigError, match="there is no folder"):
        run(model, tmp_path / "no" / "q", scheme="w4")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(scheme="w5"), "scheme = 'w5': must be one of w4, w8, w8a8"),
        (dict(scheme="w8", method="awq", calibrated=True), "method = 'awq': scheme w8 has rtn, gptq"),
        (dict(scheme="w4", method="gptq", calibrated=False), "needs texts; give --calibration FILE"),
        (dict(scheme="w4", method="rtn", calibrated=True), "takes no texts"),
        (dict(scheme="w4", group_size=20), "group_size = 20: must be -1 .* or a multiple of 32"),
        (dict(scheme="w4", group_size=64), "group_size = 64: does not divide the 96 inputs"),
        (dict(scheme="w8a8", group_size=32), "one scale per output channel"),
        (dict(scheme="w4", act_order=True), "act_order: is of scheme w4 with method gptq"),
        (dict(scheme="w4", method="awq", symmetric=True), "the AWQ format has zero points"),
        (dict(scheme="w8", symmetric=False), "symmetric: scheme w8 is symmetric"),
        (dict(scheme="w4", samples=0), "samples = 0: must be in 1"),
        (dict(scheme="w4", sample_len=1), "sample_len = 1: must be in 8"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, texts: Path, asked: dict[str, Any], message: str) -> None:
    model = write_model(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=message):
        run(model, tmp_path / "q", texts, **asked)
    assert not (tmp_path / "q").exists()
    assert not (tmp_path / "q.partial").exists()


def test_models_that_cannot_be_quantised(tmp_path: Path, texts: Path) -> None:
    model = write_model(tmp_path / "m", "llama", intermediate_size=104)
    with pytest.raises(ConfigError, match="matrices of 104 inputs have no groups of 32"):
        run(model, tmp_path / "q", scheme="w4")
    run(model, tmp_path / "rows", scheme="w4", group_size=-1)
    with pytest.raises(ConfigError, match=r"is quantised already \(gptq\)"):
        run(tmp_path / "rows", tmp_path / "q", scheme="w4")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a GGUF file"):
        run(tmp_path / "x.gguf", tmp_path / "q", scheme="w4")
    unknown = write_model(tmp_path / "unknown", "llama")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "rwkv", "architectures": ["Rwkv"]}))
    with pytest.raises(ConfigError, match="supported are"):
        run(unknown, tmp_path / "q", scheme="w4")


def test_numbers_that_are_not_finite(tmp_path: Path, texts: Path) -> None:
    model = write_model(tmp_path / "m", "llama")
    tensors = {name: values.copy() for name, values in independent.read(model).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = np.nan
    (model / "model.safetensors").unlink()
    independent.save(model / "model.safetensors", tensors, "F32")
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.down_proj: holds numbers that are not finite"):
        run(model, tmp_path / "q", scheme="w4")


def test_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "llama")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["w95"] = 200
    (model / "tokenizer.json").write_text(json.dumps(content))
    texts = tmp_path / "t.txt"
    texts.write_text(" ".join(["w95"] * 30))
    with pytest.raises(OctavoError, match="token 200"):
        run(model, tmp_path / "q", texts, scheme="w4", method="gptq")
