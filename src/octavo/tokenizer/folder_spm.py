"""A tokenizer from a folder with a SentencePiece model (`tokenizer.model`) and no tokenizer.json.

The model's file tells how text becomes pieces; which special tokens go around a text, and where the dummy prefix goes when special tokens
stand inside, is a matter of the tokenizer's class, so an unknown class is refused. ChatGLM2 and ChatGLM3 keep their special tokens behind
the pieces, in code; here they are data.

Ids are SentencePiece's own. transformers' current classes leave out the dummy prefix of a text that begins with a space; its file says
otherwise, and the models were trained as it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from octavo.errors import ModelFileError
from octavo.tokenizer.builtin_templates import CHATGLM2, CHATGLM3
from octavo.tokenizer.folder_files import FolderFiles, place
from octavo.tokenizer.pieces import Prefix, build_backend, piece_lead
from octavo.tokenizer.sentencepiece_file import SentencePieceModel, parse_sentencepiece
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary

# Classes that say nothing of the kind: the model's type decides.
GENERIC_CLASSES = ("", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
GLM_CLASS, GLM_TYPE = "ChatGLMTokenizer", "chatglm"
GLM_SPECIAL = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_CODE = "tokenization_chatglm.py"
GLM_TURN_ENDS = ("<|user|>", "<|observation|>")
# Far above any row of a model: an id that only says "these two".
PAIR_ID = 1 << 30


@dataclass(frozen=True, slots=True)
class SpmRules:
    """What a class of tokenizers does around the pieces."""

    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    adds_bos: bool = True


LLAMA = SpmRules(
    classes=("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"),
    model_types=("llama", "mistral", "mixtral", "phi3"),
)
GEMMA = SpmRules(
    classes=("GemmaTokenizer", "GemmaTokenizerFast"), model_types=("gemma", "gemma2", "gemma3", "gemma3_text")
)
RULES = (LLAMA, GEMMA)


def read_spm(path: Path, data: bytes, files: FolderFiles) -> Vocabulary:
    """The vocabulary of the SentencePiece model `data`, read from `path`, and of the files beside it."""
    model = parse_sentencepiece(data, str(path))
    kind = files.tokenizer_class if files.tokenizer_class not in GENERIC_CLASSES else ""
    if kind == GLM_CLASS or (not kind and files.model_type == GLM_TYPE):
        return _glm(model, files)
    return _with_rules(model, files, _rules(path, kind, files.model_type))


def _rules(path: Path, kind: str, model_type: str) -> SpmRules:
    if not kind and not model_type:  # the file by itself: text is encoded as it says
        return LLAMA
    for rules in RULES:
        if kind in rules.classes or (not kind and model_type in rules.model_types):
            return rules
    found = f"tokenizer_class {kind!r}" if kind else f"model_type {model_type!r}"
    classes = ", ".join([rules.classes[0] for rules in RULES] + [GLM_CLASS])
    types = ", ".join([name for rules in RULES for name in rules.model_types] + [GLM_TYPE])
    raise ModelFileError(
        f"{path}: a SentencePiece model for {found} is not supported; supported are the classes {classes} and the model types {types}"
    )


def _with_rules(model: SentencePieceModel, files: FolderFiles, rules: SpmRules) -> Vocabulary:
    special = dict(files.special_tokens)
    for name, token_id in model.special_ids.items():
        special.setdefault(name, model.pieces[token_id])
    special.setdefault("unk_token", model.pieces[model.unk_id])
    if not files.flag("add_prefix_space", True):
        model.normalizer.add_dummy_prefix = False
    names = {piece: i for i, piece in enumerate(model.pieces)}
    extra = place(files.added_tokens(), names, len(model.pieces))
    prefix = Prefix.EVERY_STRETCH if files.flag("legacy", False) else Prefix.OPENING
    built = build_backend(model, prefix, extra)
    bos, eos = (
        built.backend.token_to_id(special[name]) if name in special else None for name in ("bos_token", "eos_token")
    )
    return Vocabulary(
        source=model.source,
        backend=built.backend,
        vocab_size=max([len(model.pieces), *(i + 1 for i, _ in extra)]),
        bos_token_id=bos,
        eos_token_ids=[eos] if eos is not None else [],
        prefix_ids=[bos] if bos is not None and files.flag("add_bos_token", rules.adds_bos) else [],
        suffix_ids=[eos] if eos is not None and files.flag("add_eos_token", False) else [],
        special_tokens=special,
        chat_templates=files.templates(),
        opening=built.opening,
        piece_lead=piece_lead(model.normalizer),
    )


def _glm(model: SentencePieceModel, files: FolderFiles) -> Vocabulary:
    """ChatGLM2 and ChatGLM3: words like `sop` are special by their ids only, but `[gMASK]sop` in a template means both."""
    count = len(model.pieces)
    generation = _glm_generation(files)
    names = GLM_SPECIAL if generation == 2 else (*GLM_SPECIAL, *GLM_ROLES)
    ids = {name: count + i for i, name in enumerate(names)}
    pair = GLM_SPECIAL[1] + GLM_SPECIAL[3]
    unwritten = {name: i for name, i in ids.items() if name.isalpha()}
    extra = [(i, AddedToken(name, special=True, normalized=False)) for name, i in ids.items() if name not in unwritten]
    extra.append((PAIR_ID, AddedToken(pair, special=True, normalized=False)))
    built = build_backend(model, Prefix.EVERY_STRETCH, extra, unwritten)
    opening_ids = [ids["[gMASK]"], ids["sop"]]
    special = {name: model.pieces[i] for name, i in model.special_ids.items()} | {
        "unk_token": model.pieces[model.unk_id]
    }
    special |= {"pad_token": special["unk_token"]}
    templates = files.templates()
    if DEFAULT_TEMPLATE not in templates and generation is not None:
        templates[DEFAULT_TEMPLATE] = CHATGLM2 if generation == 2 else CHATGLM3
    ends = [model.special_ids["eos_token"]] if "eos_token" in model.special_ids else []
    return Vocabulary(
        source=model.source,
        backend=built.backend,
        vocab_size=count + len(ids),
        bos_token_id=model.special_ids.get("bos_token"),
        eos_token_ids=ends + [ids[name] for name in GLM_TURN_ENDS if name in ids],
        prefix_ids=opening_ids,
        special_tokens=special,
        chat_templates=templates,
        expansions={PAIR_ID: opening_ids},
        unwritten_ids=list(unwritten.values()),
        piece_lead=piece_lead(model.normalizer),
    )


def _glm_generation(files: FolderFiles) -> int | None:
    """2 or 3, by what the files say; None if they do not. Both share all ids of text: only roles and the chat format differ.

    The code that comes with the model is looked at as text and never run.
    """
    if any(added.token.content in GLM_ROLES for added in files.added_tokens()):
        return 3
    code = files.folder / GLM_CODE
    try:
        text = code.read_text(encoding="utf-8", errors="replace")[: 1 << 20] if code.is_file() else ""
    except OSError:
        text = ""
    if text:
        return 3 if GLM_ROLES[3] in text else 2
    named = (files.text("tokenizer_config.json", "name_or_path") + files.text("config.json", "_name_or_path")).lower()
    return 3 if "chatglm3" in named else 2 if "chatglm2" in named else None
