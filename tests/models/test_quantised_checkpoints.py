"""Needs the extension, torch and transformers. Small random checkpoints in every quantised format, served whole.

Logits are near those of the same numbers in float32; the kernels agree with the definition; and a request has the same bits alone, in a batch and
in chunks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "quantization"))
from quantised_tensors import Matrix, Store, e4m3, put_awq, put_compressed, put_gptq, rounded, rounded_e4m3

from octavo import LLM, SamplingParams
from octavo.errors import ModelFileError
from octavo.loader.hf_config import load_hf_config
from octavo.loader.load import load_weights, open_checkpoint
from octavo.loader.resolve import source_at
from octavo.models import build_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT = 320, 128
SHAPE = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None, pad_token_id=None)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()

Put = Callable[[Store, str, np.ndarray], np.ndarray]  # stores a matrix under a name, and returns the numbers that it then holds


def gptq(bits: int, group: int, sym: bool, version: int = 1, ordered: bool = False) -> tuple[dict, Put]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": ordered}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"

    def put(store: Store, name: str, values: np.ndarray) -> np.ndarray:
        m = rounded(values, bits, group, sym=sym, ordered=ordered)
        put_gptq(store, name, m, version=version)
        return m.numbers

    return config, put


def awq(group: int) -> tuple[dict, Put]:
    def put(store: Store, name: str, values: np.ndarray) -> np.ndarray:
        m = rounded(values, 4, group, sym=False)
        put_awq(store, name, m)
        return m.numbers

    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, put


def compressed(layout: str, bits: int, strategy: str, group: int, sym: bool, inputs: dict | None = None, ordered: bool = False) -> tuple[dict, Put]:
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "group_size": group if group > 0 else None}
    weights["actorder"] = "group" if ordered else None
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}

    def put(store: Store, name: str, values: np.ndarray) -> np.ndarray:
        m = rounded(values, bits, group, sym=sym, ordered=ordered, scale_dtype=np.float32)
        put_compressed(store, name, m, packed=layout == "pack-quantized", sym=sym, ordered=ordered)
        if inputs and not inputs["dynamic"]:
            store.put(f"{name}.input_scale", np.full(1, 0.1, np.float32))
        return m.numbers

    return config, put


def fp8(block: int | None) -> tuple[dict, Put]:
    def put(store: Store, name: str, values: np.ndarray) -> np.ndarray:
        side = block or max(values.shape)
        rows, columns = (-(-size // side) for size in values.shape)
        scales = np.array([[np.abs(values[i * side :, j * side :][:side, :side]).max() / 448 for j in range(columns)] for i in range(rows)], np.float32)
        full = np.repeat(np.repeat(scales, side, 0), side, 1)[: values.shape[0], : values.shape[1]]
        codes = rounded_e4m3(values, full)
        store.put(f"{name}.weight", codes, "F8_E4M3")
        store.put(f"{name}.weight_scale_inv" if block else f"{name}.weight_scale", scales if block else scales.reshape(()))
        return e4m3(codes) * full

    return {"quant_method": "fp8", "activation_scheme": "dynamic", **({"weight_block_size": [block, block]} if block else {})}, put


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[dict, Put]] = {
    "gptq 4 bits, 32": gptq(4, 32, True),
    "gptq 4 bits, 64, zero points": gptq(4, 64, False, 2),
    "gptq 4 bits, 128, in order of activation": gptq(4, 128, True, 1, True),
    "gptq 8 bits, per channel, zero points": gptq(8, -1, False),
    "awq 64": awq(64),
    "compressed W4A16 128": compressed("pack-quantized", 4, "group", 128, True),
    "compressed W8A16 32, in order of activation": compressed("pack-quantized", 8, "group", 32, False, None, True),
    "compressed W8A8 dynamic": compressed("int-quantized", 8, "channel", -1, True, DYNAMIC),
    "compressed W8A8 static, zero points": compressed("int-quantized", 8, "channel", -1, False, {**DYNAMIC, "dynamic": False, "strategy": "tensor"}),
    "fp8 blocks": fp8(128),
    "fp8 per tensor": fp8(None),
}


def write(folder: Path, tensors: dict, config: dict) -> None:
    """A model folder: safetensors by hand, for numpy's have no 8-bit floats; and a tokenizer with a token for each id."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.data.nbytes]}
        data += tensor.data.tobytes()
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))


@pytest.fixture(scope="module")
def plain() -> tuple[dict, dict[str, np.ndarray]]:
    """Configuration and float32 tensors of a random Llama."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    return {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, {name: t.numpy() for name, t in model.state_dict().items()}


@pytest.fixture(scope="module", params=list(FORMATS))
def folders(request, tmp_path_factory, plain) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the same numbers in float32."""
    path = tmp_path_factory.mktemp("formats")
    config, tensors = plain
    scheme, put = FORMATS[request.param]
    quantised, dense = Store(), Store()
    for name, values in tensors.items():
        if values.ndim == 2 and ".layers." in name:
            dense.put(name, put(quantised, name.removesuffix(".weight"), values).astype(np.float32))
        else:
            quantised.put(name, values)
            dense.put(name, values)
    write(path / "quantised", quantised.tensors, {**config, "quantization_config": scheme})
    write(path / "dense", dense.tensors, config)
    return path / "quantised", path / "dense"


def test_numbers(folders, logits_of) -> None:
    quantised, dense = folders
    exact = logits_of(dense, IDS, "cpu")
    ours = logits_of(quantised, IDS, "cpu")
    # The rounding of activations: 8 bits of 32 inputs, or bf16.
    assert np.abs(ours - exact).mean() < 0.03 * exact.std()
    definition = logits_of(quantised, IDS, "reference")
    assert np.abs(ours - definition).mean() < 0.004 * exact.std()  # a code that falls the other way now and then
    assert np.array_equal(ours, logits_of(quantised, IDS, "cpu", chunk=7))


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(7)
    ways = ({"temperature": 0}, {"seed": 5}, {"seed": 6, "temperature": 0.7, "top_p": 0.9})
    return [
        ([rng.randrange(VOCAB) for _ in range(length)], SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, **ways[i % 3]))
        for i, length in enumerate([1, 2, 15, 17, 33, 64, 65, 100])
    ]


def run(folder: Path, requests: list, **options: object) -> list:
    llm = LLM(str(folder), max_model_len=CONTEXT, kv_cache_memory="16M", enable_prefix_caching=False, **options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    return [(o.outputs[0].token_ids, [sorted((i, lp.logprob) for i, lp in p.items()) for p in o.outputs[0].logprobs]) for o in outputs]


def test_a_request_has_the_same_bits_in_any_company(folders, requests) -> None:
    quantised, _ = folders
    together = run(quantised, requests)
    assert len({tuple(tokens) for tokens, _ in together}) >= len(requests) - 1
    assert run(quantised, requests, max_num_batched_tokens=9, max_num_seqs=3, num_threads=3) == together
    for i in (0, 4, 7):
        assert run(quantised, requests[i : i + 1]) == together[i : i + 1]


@pytest.mark.parametrize("scheme", ["w4", "w8"])
def test_rounding_while_loading(tmp_path, plain, requests, scheme: str) -> None:
    config, tensors = plain
    store = Store()
    for name, values in tensors.items():
        store.put(name, values)
    write(tmp_path / "plain", store.tensors, config)
    together = run(tmp_path / "plain", requests, quantization=scheme)
    assert run(tmp_path / "plain", requests[3:5], quantization=scheme) == together[3:5]
    assert together != run(tmp_path / "plain", requests)
    exact, ours = (load(tmp_path / "plain", asked) for asked in (None, scheme))
    assert ours.fp16_bytes == exact.fp16_bytes == exact.weights_bytes // 2
    assert ours.weights_bytes < (0.45 if scheme == "w4" else 0.6) * ours.fp16_bytes


def load(folder: Path, quantization: str | None = None):
    source = source_at(folder, str(folder), "auto")
    hf = load_hf_config(source)
    return load_weights(build_model(hf), open_checkpoint(source, hf, "auto", quantization), 2)


def test_memory_is_that_of_the_stored_integers(folders) -> None:
    """No dequantised copy: what the model holds is as large as the file's tensors, the groups' indices and fp32 scales apart."""
    quantised, _ = folders
    report = load(quantised)
    assert report.weights_bytes < 1.05 * (quantised / "model.safetensors").stat().st_size
    assert report.weights_bytes < report.fp16_bytes


def test_a_tensor_that_no_layer_asks_for_is_named(folders, tmp_path) -> None:
    quantised, _ = folders
    raw = (quantised / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["model.layers.0.self_attn.q_proj.weight_extra"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(raw) - 8 - size, len(raw) - 4 - size]}
    text = json.dumps(header).encode()
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_bytes((quantised / "config.json").read_bytes())
    (bad / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :] + bytes(4))
    with pytest.raises(ModelFileError, match="weight_extra"):
        load(bad)


def test_older_files_of_configuration(tmp_path, plain) -> None:
    """GPTQ's settings beside config.json, as its first tools wrote them."""
    config, tensors = plain
    scheme, put = FORMATS["gptq 4 bits, 32"]
    store = Store()
    for name, values in tensors.items():
        if values.ndim == 2 and ".layers." in name:
            put(store, name.removesuffix(".weight"), values)
        else:
            store.put(name, values)
    write(tmp_path / "model", store.tensors, config)
    with pytest.raises(ModelFileError, match="q_proj"):
        load(tmp_path / "model")
    (tmp_path / "model" / "quantize_config.json").write_text(json.dumps({k: v for k, v in scheme.items() if k != "quant_method"}))
    assert load(tmp_path / "model").weights_bytes < load(tmp_path / "model").fp16_bytes


def test_the_writer_rounds_to_nearest() -> None:
    """What the comparisons above rest on."""
    values = np.random.default_rng(0).standard_normal((8, 64))
    m: Matrix = rounded(values, 8, 32, sym=True, scale_dtype=np.float32)
    assert (np.abs(m.numbers - values) <= m.scales[:, m.groups] / 2 * (1 + 1e-6)).all()
    codes = rounded_e4m3(values, np.full_like(values, 0.01))
    assert np.abs(e4m3(codes) * 0.01 - values).max() <= np.abs(values).max() / 16
