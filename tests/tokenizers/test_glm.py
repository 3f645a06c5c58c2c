"""ChatGLM2 and ChatGLM3 folders against what the models' own code does, written here from its description.

That code keeps special tokens behind the pieces and never reads them out of text: it builds a conversation from ids. A text is
`[gMASK] sop` and the pieces. A turn of ChatGLM3 is the role's id, the pieces of "{tool}\\n", the pieces of the words.
"""

import json
import re

import pytest
import sentencepiece
from line_corpus import LINES
from spm_models import original, trained

from octavo.errors import InvalidRequestError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.detokenizer import make_detokenizer
from octavo.tokenizer.tokenizer import Tokenizer

NAMES = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
SPECIAL = re.compile("|".join(map(re.escape, ["<s>", "</s>", "<unk>", "[gMASK]", *NAMES[5:]])))
PLAIN = [line for line in LINES if not SPECIAL.search(line)]
MODEL = "llama"


class TheirCode:
    """The part of the models' own tokenizer that makes ids."""

    def __init__(self, pieces: sentencepiece.SentencePieceProcessor) -> None:
        self.pieces = pieces
        self.special = {name: len(pieces) + i for i, name in enumerate(NAMES)}

    def text(self, text: str) -> list[int]:
        return [self.special["[gMASK]"], self.special["sop"], *self.pieces.encode(text)]

    def turn(self, role: str, metadata: str, words: str) -> list[int]:
        return [self.special[f"<|{role}|>"], *self.pieces.encode(f"{metadata}\n"), *self.pieces.encode(words)]

    def conversation(self, turns: list[tuple[str, str, str]]) -> list[int]:
        ids = [self.special["[gMASK]"], self.special["sop"]]
        for turn in turns:
            ids += self.turn(*turn)
        return [*ids, self.special["<|assistant|>"]]

    def rounds(self, history: list[tuple[str, str]], query: str) -> list[int]:
        prompt = "".join(f"[Round {i + 1}]\n\n问：{asked}\n\n答：{said}\n\n" for i, (asked, said) in enumerate(history))
        return self.text(f"{prompt}[Round {len(history) + 1}]\n\n问：{query}\n\n答：")


def folder(tmp_path, generation: int | None, by: str = "name") -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(trained(MODEL))
    config: dict = {"tokenizer_class": "ChatGLMTokenizer"}
    if by == "name" and generation:
        config["name_or_path"] = f"THUDM/chatglm{generation}-6b"
    if by == "roles" and generation == 3:
        count = len(original(trained(MODEL)))
        config["added_tokens_decoder"] = {
            str(count + i): {"content": name, "special": True} for i, name in enumerate(NAMES) if i in (1, 3, 6, 7)
        }
    if by == "code":
        roles = repr(NAMES[5:]) if generation == 3 else ""
        (tmp_path / "tokenization_chatglm.py").write_text(
            f"special_tokens = {NAMES[:5]} + {roles or '[]'}\nraise SystemExit  # never run"
        )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "chatglm", "eos_token_id": 2, "pad_token_id": 0}')
    return Tokenizer.load(tmp_path)


@pytest.fixture
def theirs() -> TheirCode:
    return TheirCode(original(trained(MODEL)))


@pytest.mark.parametrize("generation", [2, 3, None])
def test_ids_of_text(generation, tmp_path, theirs):
    tokenizer = folder(tmp_path, generation)
    assert len(PLAIN) > 5000
    assert tokenizer.encode_batch(PLAIN) == [theirs.text(line) for line in PLAIN]
    for text in ("sop", "a sop eop", "sophisticated developers", "[MASK]x"[6:]):
        assert tokenizer.encode(text) == theirs.text(text)
    assert [tokenizer.token_id(name) for name in NAMES[:5]] == [theirs.special[name] for name in NAMES[:5]]


@pytest.mark.parametrize(
    ("generation", "by"), [(2, "name"), (3, "name"), (3, "roles"), (2, "code"), (3, "code"), (None, "nothing")]
)
def test_which_model_it_is(generation, by, tmp_path, theirs):
    tokenizer = folder(tmp_path, generation, by)
    count = len(theirs.pieces)
    assert tokenizer.vocab_size == count + (5 if generation == 2 else 9)
    assert tokenizer.special_ids >= set(range(count, tokenizer.vocab_size))
    assert (tokenizer.chat_template is None) == (generation is None)
    ends = [2] if generation == 2 else [2, count + 6, count + 8]
    assert tokenizer.eos_token_ids == ends


def test_rounds(tmp_path, theirs):
    template = ChatTemplate.load(tokenizer := folder(tmp_path, 2))
    history = [("你好", "你好👋！我是人工智能助手。"), ("1+1=?", " 2 \n\n")]
    messages = [
        {"role": role, "content": words}
        for turn in history
        for role, words in zip(("user", "assistant"), turn, strict=True)
    ]
    messages.append({"role": "user", "content": "晚上睡不着怎么办"})
    assert tokenizer.encode(template.render(messages), False) == theirs.rounds(history, "晚上睡不着怎么办")
    with_system = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.encode(template.render(with_system), False) == theirs.rounds(
        [("Be brief.\n\n你好", history[0][1]), history[1]], "晚上睡不着怎么办"
    )
    with pytest.raises(InvalidRequestError, match="no turns of role tool"):
        template.render([*messages, {"role": "tool", "content": "x"}])


def test_roles(tmp_path, theirs):
    template = ChatTemplate.load(tokenizer := folder(tmp_path, 3))
    turns = [
        ("system", "", "You are ChatGLM3."),
        ("user", "", "Weather in 北京?"),
        ("assistant", "", "Let me see.\n"),
        ("user", "", "well?"),
    ]
    messages = [{"role": role, "content": words} for role, _, words in turns]
    assert tokenizer.encode(template.render(messages), False) == theirs.conversation(turns)
    assert template.render(messages, add_generation_prompt=False) + "<|assistant|>" == template.render(messages)
    continued = template.render(
        [*messages, {"role": "assistant", "content": "It is"}], add_generation_prompt=False, continue_final_message=True
    )
    assert tokenizer.encode(continued, False) == [
        *theirs.conversation(turns)[:-1],
        *theirs.turn("assistant", "", "It is"),
    ]


def test_tools(tmp_path, theirs):
    template = ChatTemplate.load(tokenizer := folder(tmp_path, 3))
    function = {
        "name": "get_weather",
        "description": "Weather of a 城市",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "北京", "days": 2}}}
    messages = [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"celsius": 12}'},
    ]  # fmt: skip
    told = "Answer the following questions as best as you can. You have access to the following tools:\n" + json.dumps(
        [function], indent=4, ensure_ascii=False
    )
    expected = [
        ("system", "", told), ("user", "", "Weather?"), ("assistant", "get_weather", '```python\ntool_call(city="北京", days=2)\n```'),
        ("observation", "", '{"celsius": 12}'),
    ]  # fmt: skip
    rendered = template.render(messages, tools=[{"type": "function", "function": function}])
    assert tokenizer.encode(rendered, False) == theirs.conversation(expected)


def test_special_tokens_are_no_text(tmp_path, theirs):
    tokenizer = folder(tmp_path, 3)
    ids = [*theirs.conversation([("user", "", "a b")]), theirs.special["eop"]]
    assert tokenizer.decode(ids).strip() == "a b"
    assert tokenizer.decode(ids, False).startswith("[gMASK]sop<|user|>")
    assert tokenizer.decode(ids, False).endswith("eop")
    detokenizer = make_detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, [[i] for i in ids])) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_template_of_the_files_comes_first(tmp_path):
    folder(tmp_path, 3)
    (tmp_path / "chat_template.jinja").write_text("[gMASK]sop<|{{ messages[0].role }}|>")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_template.startswith("[gMASK]sop<|")
    assert [tokenizer.token_str(i) for i in tokenizer.encode("[gMASK]sop<|user|>", False)] == [
        "[gMASK]",
        "sop",
        "<|user|>",
    ]
