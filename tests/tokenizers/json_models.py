"""Small tokenizers of transformers' own classes, which save themselves as tokenizer.json."""

from byte_ranks import GPT2, QWEN, as_characters, ranks
from spm_models import trained
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from octavo.tokenizer.merges import all_merges
from octavo.tokenizer.sentencepiece_file import parse_sentencepiece
from octavo.tokenizer.vocabulary import PieceType


def pieces(name: str) -> dict:
    model = parse_sentencepiece(trained(name), name)
    normal = [i for i, kind in enumerate(model.types) if kind == PieceType.NORMAL]
    ranked = [model.pieces[i] for i in sorted(normal, key=lambda i: -model.scores[i])]
    return {"vocab": {piece: i for i, piece in enumerate(model.pieces)}, "merges": all_merges(ranked)}


def byte_level(pattern: str) -> dict:
    found = ranks(pattern)
    tokens = [as_characters(token) for token in sorted(found, key=found.get)]
    return {"vocab": {token: i for i, token in enumerate([*tokens, "<|endoftext|>"])}, "merges": all_merges(tokens)}


MAKERS = {
    "llama": lambda: LlamaTokenizer(**pieces("llama")),
    "llama, no prefix": lambda: LlamaTokenizer(**pieces("llama"), add_prefix_space=False),
    "gemma": lambda: GemmaTokenizer(
        **pieces("gemma"), bos_token="<s>", eos_token="</s>", pad_token="</s>", mask_token="<unk>"
    ),
    "gpt2": lambda: GPT2Tokenizer(**byte_level(GPT2)),
    "qwen2": lambda: Qwen2Tokenizer(**byte_level(QWEN), additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
}
