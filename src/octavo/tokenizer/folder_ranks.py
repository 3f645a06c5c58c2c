"""A tokenizer from a folder with tiktoken ranks: Qwen's `qwen.tiktoken`, GLM-4's and Llama 3's `tokenizer.model`.

A rank file holds tokens only. How words are cut, which special tokens follow the ranks and what opens a text is known for each class of
tokenizers, or else refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken

from octavo.errors import ModelFileError
from octavo.tokenizer.builtin_templates import GLM4, QWEN_CHATML
from octavo.tokenizer.folder_files import FolderFiles, place
from octavo.tokenizer.folder_spm import GENERIC_CLASSES, GLM_TURN_ENDS
from octavo.tokenizer.tiktoken_file import rank_backend, read_ranks
from octavo.tokenizer.vocabulary import DEFAULT_TEMPLATE, Vocabulary
from octavo.tokenizer.word_rules import LLAMA3, QWEN2, WordRule

QWEN_FILE = "qwen.tiktoken"
_LLAMA3_NAMED = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 5: "<|step_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip


def _llama3_special() -> tuple[str, ...]:
    """256 names: those in use, and numbered ones between and behind them."""
    reserved = iter(range(256))
    return tuple(_LLAMA3_NAMED.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """What a class of tokenizers does with its ranks.

    `special` follow the ranks in this order, unless the folder's files name them. `opens` go in front of a text, `ends` end a generation.
    `template` is the chat format of a model whose files bring none.
    """

    what: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    rule: WordRule
    special: tuple[str, ...]
    opens: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    template: str | None = None


QWEN = RankRules(
    what="Qwen",
    classes=("QWenTokenizer",),
    model_types=("qwen",),
    rule=WordRule(splits=(QWEN2,), nfc=True),
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    ends=("<|endoftext|>",),
    names={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    template=QWEN_CHATML,
)
GLM = RankRules(
    what="GLM-4",
    classes=("ChatGLM4Tokenizer", "ChatGLMTokenizer"),
    model_types=("chatglm", "glm", "glm4"),
    rule=WordRule(splits=(LLAMA3,)),
    special=(
        "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    ),
    opens=("[gMASK]", "<sop>"),
    ends=("<|endoftext|>", *GLM_TURN_ENDS),
    names={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    template=GLM4,
)  # fmt: skip
LLAMA = RankRules(
    what="Llama 3",
    classes=("LlamaTokenizer", "LlamaTokenizerFast"),
    model_types=("llama",),
    rule=WordRule(splits=(LLAMA3,)),
    special=_llama3_special(),
    opens=("<|begin_of_text|>",),
    ends=("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    names={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
)
RULES = (QWEN, GLM, LLAMA)


def read_rank_folder(path: Path, data: bytes, files: FolderFiles) -> Vocabulary:
    """The vocabulary of the rank file `data`, read from `path`, and of the files beside it."""
    rules = _rules(path, files)
    ranks = read_ranks(data, str(path))
    count = max(ranks.values()) + 1
    extra = _extra(files, rules, ranks, count)
    _check_ids(path, extra, ranks)
    ids = {token.content: i for i, token in extra}
    backend = rank_backend(ranks, ids, rules.rule)
    backend.add_special_tokens([token for _, token in extra if token.special])
    backend.add_tokens([token for _, token in extra if not token.special])
    if lacking := [name for name in rules.opens if name not in ids]:
        raise ModelFileError(f"{path}: {rules.what} needs the special token {lacking[0]}")
    special = {name: content for name, content in rules.names.items() if content in ids} | files.special_tokens
    return Vocabulary(
        source=str(path),
        backend=backend,
        vocab_size=max([count, *(i + 1 for i, _ in extra)]),
        bos_token_id=ids.get(special.get("bos_token", "")),
        eos_token_ids=[ids[name] for name in rules.ends if name in ids],
        prefix_ids=[ids[name] for name in rules.opens],
        special_tokens=special,
        chat_templates=_templates(files, rules),
    )


def _rules(path: Path, files: FolderFiles) -> RankRules:
    kind = files.tokenizer_class if files.tokenizer_class not in GENERIC_CLASSES else ""
    for rules in RULES:
        if kind in rules.classes or (not kind and files.model_type in rules.model_types):
            return rules
    if not kind and not files.model_type and path.name == QWEN_FILE:
        return QWEN
    found = f"tokenizer_class {kind!r}" if kind else f"model_type {files.model_type!r}"
    known = "; ".join(f"{rules.what} ({', '.join((*rules.classes, *rules.model_types))})" for rules in RULES)
    raise ModelFileError(f"{path}: tiktoken ranks for {found} are not supported; supported are {known}")


def _extra(files: FolderFiles, rules: RankRules, ranks: dict[str, int], count: int) -> list[tuple[int, AddedToken]]:
    """The special tokens that the class has, where the files do not put another one in the place of one; then the files' others."""
    added = files.added_tokens()
    named = {token.token.content for token in added if token.token_id is not None}
    usual = ((count + i, name) for i, name in enumerate(rules.special) if name not in named)
    by_id = {i: AddedToken(name, special=True, normalized=False) for i, name in usual}
    by_id |= {token.token_id: token.token for token in added if token.token_id is not None}
    extra = sorted(by_id.items())
    known = {token.content for _, token in extra}
    rest = [token for token in added if token.token.content not in known]
    return extra + place(rest, ranks, max([count, *(i + 1 for i, _ in extra)]))


def _check_ids(path: Path, extra: list[tuple[int, AddedToken]], ranks: dict[str, int]) -> None:
    taken = set(ranks.values())
    for token_id, token in extra:
        if token_id in taken:
            raise ModelFileError(f"{path}: id {token_id} of {token.content[:40]!r} is taken by another token")
        taken.add(token_id)


def _templates(files: FolderFiles, rules: RankRules) -> dict[str, str]:
    """Those of the files; a built-in one if there are none, but not for Qwen's base models, which have no chat format."""
    templates = files.templates()
    is_base = rules is QWEN and files.text("generation_config.json", "chat_format") != "chatml"
    if rules.template is not None and DEFAULT_TEMPLATE not in templates and not is_base:
        templates[DEFAULT_TEMPLATE] = rules.template
    return templates
