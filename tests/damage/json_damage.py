"""Damage of the JSON files around the weights, and of what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cases import Case, Must
from healthy import CONFIG, EOS, GENERATION, INDEX, SHARDS, TOKENIZER, as_json, folder_files, shard_files, weight_map

NAN, INFINITY = float("nan"), float("inf")
DEEP = b"[" * 100_000 + b"]" * 100_000


def cases() -> Iterator[Case]:
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        whole = folder_files()[file]
        assert isinstance(whole, bytes)
        for name, data in broken_text(whole):
            # The tokenizers' package, which reads this one, lets the last of two keys count.
            must = Must.LOAD if file == "tokenizer.json" and name == "its first key twice" else Must.REFUSE
            yield Case(f"{file}: {name}", "folder", folder_files() | {file: data}, "", must, (file,))
    for name, data in broken_text(as_json({"metadata": {}, "weight_map": weight_map()})):
        yield Case(f"index: {name}", "shards", shard_files() | {INDEX: data}, "", words=(INDEX,))
    yield from configurations()
    yield from quantisations()
    yield from generations()
    yield from tokenizers()
    yield from indices()


def broken_text(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """What no JSON object is."""
    yield "empty", b""
    for cut in (1, len(whole) // 2, len(whole) - 1):
        yield f"cut at {cut}", whole[:cut]
    yield "a list", b"[1, 2]"
    yield "a text", b'"x"'
    yield "a number", b"7"
    yield "null", b"null"
    yield "not UTF-8", whole[:-1] + b', "\xff": 1}'
    yield "UTF-16", whole.decode().encode("utf-16")
    yield "a mark of byte order", b"\xef\xbb\xbf" + whole
    yield "something after the end", whole + b"}"
    yield "a comma too many", whole[:-1] + b",}"
    yield "single quotes", whole.replace(b'"', b"'")
    yield "lists 100,000 deep", whole[:-1] + b', "deep": ' + DEEP + b"}"
    yield "objects 100,000 deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield "a number of 20,000 digits", whole[:-1] + b', "n": ' + b"9" * 20_000 + b"}"
    yield "zeros", bytes(len(whole))
    many = b", ".join(b'"k%d": 1' % i for i in range(100_000))
    yield "the last of 100,000 keys twice", whole[:-1] + b", " + many + b', "k99999": 1}'
    first = json.loads(whole)
    key, value = next(iter(first.items()))
    yield "its first key twice", b"{" + json.dumps(key).encode() + b": " + json.dumps(value).encode() + b", " + whole[1:]


def config(name: str, changes: dict[str, object], must: Must = Must.REFUSE, *words: str) -> Case:
    files = folder_files() | {"config.json": as_json({key: value for key, value in (dict(CONFIG) | changes).items() if value is not Ellipsis})}
    return Case(f"config.json: {name}", "folder", files, "", must, words)


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")


def configurations() -> Iterator[Case]:
    for key in (*SIZES, "num_key_value_heads", "head_dim"):
        for value in (0, -1, 1.5, "64", [64], {}, True, 2**24 + 1, 2**63, 10**400, INFINITY, NAN):
            label = "10^400" if isinstance(value, int) and value > 2**64 else json.dumps(value)
            yield config(f"{key} = {label}", {key: value}, Must.REFUSE, "config.json", key)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"):
        yield config(f"{key} is as large as can be", {key: 2**24})
    for family in ("qwen3_moe", "mixtral"):
        experts = {"num_experts": 2**24, "num_local_experts": 2**24, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        yield config(f"experts without end: {family}", {"model_type": family, **experts}, Must.REFUSE, "config.json")
    for key in SIZES:
        if key != "max_position_embeddings":
            yield config(f"{key} is missing", {key: ...}, Must.REFUSE, "config.json", key)
        wrong = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 95, "vocab_size": 41}
        if key in wrong:
            yield config(f"{key} at odds with the tensors", {key: wrong[key]}, Must.REFUSE, "model.safetensors" if "layers" not in key else "", "tensor")
    for key in ("rms_norm_eps", "rope_theta"):
        for value in (NAN, INFINITY, -1.0, "x", [1], True, 10**400, 1e39):
            label = "10^400" if isinstance(value, int) and value > 2**64 else json.dumps(value)
            yield config(f"{key} = {label}", {key: value}, Must.REFUSE, "config.json", key)
    yield config("rope_theta = 0", {"rope_theta": 0.0}, Must.REFUSE, "config.json", "rope_theta")
    for value in (7, "no-such", "", ["llama"], {}, None, "../llama", "llama\n", "x" * 5000, "__init__"):
        yield config(f"model_type = {str(value)[:20]!r}", {"model_type": value}, Must.REFUSE, "config.json", "model_type")
    for value in ("yes", 1, []):
        yield config(f"tie_word_embeddings = {value!r}", {"tie_word_embeddings": value}, Must.REFUSE, "config.json", "tie_word_embeddings")
    for key, values in {
        "attention_bias": (True, "x"), "mlp_bias": (True, 3), "hidden_act": ("no-such", 7),
        "rope_scaling": (7, [1], "x", {"rope_type": "no-such"}, {"rope_type": 7}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": 0},
                         {"rope_type": "linear", "factor": NAN}, {"rope_type": "linear", "factor": "2"}, {"rope_type": "llama3", "factor": 8.0},
                         {"rope_type": "yarn", "factor": -1.0}, {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        "rope_parameters": (7, "x", [1], {"rope_type": "no-such"}), "eos_token_id": ("x", [EOS, "x"], 1.5, -7, {}, [[EOS]], True, 2**40),
    }.items():  # fmt: skip
        for value in values:
            yield config(f"{key} = {json.dumps(value)[:60]}", {key: value})
    yield config("a key that nobody reads is NaN", {"nobody": NAN}, Must.LOAD)
    yield config("a key that nobody reads has 400 digits", {"nobody": 10**400}, Must.LOAD)
    yield config("a key that nobody reads is 100 deep", {"nobody": json.loads("[" * 100 + "]" * 100)}, Must.LOAD)
    yield config("remote code is asked for", {"auto_map": {"AutoModel": "../../evil.py--Evil"}, "trust_remote_code": True}, Must.LOAD)


def quantisations() -> Iterator[Case]:
    """The files say that the tensors are quantised; the tensors are not."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    compressed = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    values: dict[str, object] = {
        "a text": "gptq", "a list": [gptq], "a number": 4, "empty": {}, "method unknown": {"quant_method": "no-such"}, "method a number": {"quant_method": 7},
        "method null": {"quant_method": None}, "method a path": {"quant_method": "../gguf"}, "method gguf": {"quant_method": "gguf"},
        "gptq over plain tensors": gptq, "awq over plain tensors": awq, "compressed over plain tensors": compressed, "fp8 over plain tensors": fp8,
        "compressed without groups": {"quant_method": "compressed-tensors"}, "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }  # fmt: skip
    for bits in (0, 3, 5, 16, -4, 4.0, "4", NAN, 2**70, None):
        values[f"gptq of {bits} bits"] = gptq | {"bits": bits}
        values[f"awq of {bits} bits"] = awq | {"bits": bits}
    for group in (0, 31, -2, 2**40, "32", 1.5):
        values[f"gptq in groups of {group}"] = gptq | {"group_size": group}
        values[f"awq in groups of {group}"] = awq | {"group_size": group}
    for name, value in values.items():
        yield config(f"quantization_config {name}", {"quantization_config": value})
    for file, section in (("quantize_config.json", gptq), ("quant_config.json", awq)):
        files = folder_files() | {file: as_json(section)}
        yield Case(f"{file} beside plain tensors", "folder", files, "", Must.REFUSE, ("model.safetensors", "no tensor is quantised"))
        for name, data in broken_text(as_json(section)):
            yield Case(f"{file}: {name}", "folder", folder_files() | {file: data}, "", Must.REFUSE, (file,))


def generations() -> Iterator[Case]:
    for key, values in {
        "temperature": (-1, 2.5, "x", [1], True, NAN, INFINITY, 10**400), "top_p": (0, 1.5, "1", NAN), "top_k": (1.5, -7, "x", 2**40, NAN, True),
        "min_p": (-0.1, 2, NAN), "repetition_penalty": (0, -1, NAN, INFINITY, "x"), "max_new_tokens": (0, -1, 1.5, 2**40),
        "eos_token_id": ("x", [EOS, "x"], 1.5, -7, {}, [[EOS]], True, 2**40, [NAN]),
    }.items():  # fmt: skip
        for value in values:
            label = "10^400" if isinstance(value, int) and value > 2**64 else json.dumps(value)
            files = folder_files() | {"generation_config.json": as_json(dict(GENERATION) | {key: value})}
            yield Case(f"generation_config.json: {key} = {label}", "folder", files, "", Must.REFUSE, ("generation_config.json", key))
    files = folder_files() | {"generation_config.json": as_json(dict(GENERATION) | {"nobody": NAN, "pad_token_id": "x"})}
    yield Case("generation_config.json: keys that nobody reads", "folder", files, "", Must.LOAD)


def tokenizers() -> Iterator[Case]:
    def case(name: str, value: dict[str, object], must: Must = Must.REFUSE) -> Case:
        files = folder_files() | {"tokenizer.json": as_json(value)}
        return Case(f"tokenizer.json: {name}", "folder", files, "", must, ("tokenizer.json",) if must is Must.REFUSE else ())

    whole = dict(TOKENIZER)
    model = dict(whole["model"])  # type: ignore[call-overload]
    vocab = dict(model["vocab"])
    for key in ("model",):
        yield case(f"no {key}", {k: v for k, v in whole.items() if k != key})
    for key, value in whole.items():
        yield case(f"{key} a number", whole | {key: 7})
        if isinstance(value, dict):
            yield case(f"{key} of an unknown type", whole | {key: value | {"type": "NoSuch"}})
    for name, value in {"empty": {}, "a list": [1], "ids as texts": {k: str(v) for k, v in vocab.items()}, "an id of -1": vocab | {"a": -1},
                        "an id of 2^31": vocab | {"ab": 2**31}, "an id of 2^32 - 1": vocab | {"ab": 2**32 - 1}, "an id of 2^64": vocab | {"a": 2**64},
                        "an id beyond the model's": vocab | {"ab": 40}, "an id of 1.5": vocab | {"a": 1.5}}.items():  # fmt: skip
        # Tokens that the model has no row for are usual, and refused where a prompt has one: this prompt does.
        words = ("token id",) if name in ("an id of 2^31", "an id of 2^32 - 1", "an id beyond the model's") else ("tokenizer.json",)
        yield Case(f"tokenizer.json: vocabulary: {name}", "folder", folder_files() | {"tokenizer.json": as_json(whole | {"model": model | {"vocab": value}})}, "", Must.REFUSE, words)
    for name, merges in {"of unknown tokens": [["?", "!"]], "without a result": [["y", "z"]], "of three": [["a", "b", "c"]], "of numbers": [1], "a text": "a b",
                         "one text": ["ab"]}.items():  # fmt: skip
        yield case(f"merges {name}", whole | {"model": model | {"merges": merges}})
    token = dict(whole["added_tokens"][0])  # type: ignore[index]
    for name, added in {"an id of 2^31": [token | {"id": 2**31}], "an id of -1": [token | {"id": -1}], "no id": [{"content": "x"}],
                        "no list": token, "no text": [token | {"content": 7}]}.items():  # fmt: skip
        must = Must.LOAD if name == "an id of 2^31" else Must.REFUSE  # the vocabulary's own id counts
        yield case(f"added tokens: {name}", whole | {"added_tokens": added}, must)
    broken = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    yield case("an expression that is none", whole | {"pre_tokenizer": broken})
    yield case("a precompiled normaliser of junk", whole | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})
    yield case("a post-processor that names no token", whole | {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "no", "type_id": 0}}], "pair": [], "special_tokens": {}}})
    yield case("settings of its training", whole | {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}}, Must.LOAD)
    yield case("a key that nobody knows", whole | {"nobody": [1]})
    template = {"eos_token": "<eos>", "chat_template": "{% for x in %}"}
    for name, value in {"a template that is none": template, "an end that is no token": {"eos_token": "<none>"}, "an end that is a number": {"eos_token": 7}, "nothing": {}}.items():
        files = folder_files() | {"tokenizer_config.json": as_json(value)}
        yield Case(f"tokenizer_config.json: {name}", "folder", files, "", Must.LOAD)


def shard_names(shard: str) -> list[str]:
    return [name for name, place in weight_map().items() if place == shard]


def indices() -> Iterator[Case]:
    def case(name: str, value: object, *words: str) -> Case:
        return Case(f"index: {name}", "shards", shard_files() | {INDEX: as_json(value)}, "", Must.REFUSE, words)

    places = weight_map()
    first = next(iter(places))
    yield case("no map", {"metadata": {}}, INDEX, "weight_map")
    for value in ({}, [], "x", 7, None):
        yield case(f"map = {value!r}", {"weight_map": value}, INDEX, "weight_map")
    for shard in ("../../x.safetensors", "../model-00001-of-00003.safetensors", "/etc/passwd", "/etc/x.safetensors", "a/b.safetensors", "./model-00001-of-00003.safetensors",
                  "..", "", "model.bin", INDEX, "config.json", "a\0.safetensors", "a\nb.safetensors", "x" * 5000 + ".safetensors", "\ud800.safetensors",
                  "no-such.safetensors", 7, None, [SHARDS[0]], {"a": 1}):  # fmt: skip
        yield case(f"a shard called {str(shard)[:40]!r}", {"weight_map": places | {first: shard}}, first if not isinstance(shard, str) or shard != "no-such.safetensors" else shard)
    yield case("a tensor in the wrong shard", {"weight_map": places | {first: SHARDS[2]}}, SHARDS[2], first)
    yield case("a tensor that is nowhere", {"weight_map": places | {"nowhere": SHARDS[0]}}, SHARDS[0], "nowhere")
    yield case("all tensors in one shard", {"weight_map": dict.fromkeys(places, SHARDS[0])}, SHARDS[0])
    fewer = as_json({"weight_map": {k: v for k, v in places.items() if k != first}})
    yield Case("index: a tensor left out that a shard holds", "shards", shard_files() | {INDEX: fewer}, "", Must.LOAD)
    none_of = as_json({"weight_map": {k: v for k, v in places.items() if v != SHARDS[1]}})
    yield Case("index: a shard left out", "shards", shard_files() | {INDEX: none_of}, "", Must.REFUSE, (shard_names(SHARDS[1])[0],))
    text = as_json({"weight_map": places}).replace(b'"weight_map": {', b'"weight_map": {"' + first.encode() + b'": "' + SHARDS[1].encode() + b'", ')
    yield Case("index: a tensor twice", "shards", shard_files() | {INDEX: text}, "", Must.REFUSE, (INDEX, first))
