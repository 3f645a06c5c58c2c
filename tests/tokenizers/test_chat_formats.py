"""Rendered conversations against transformers: `render_jinja_template` for templates of many manners, `apply_chat_template` for folders."""

import copy
import json

import pytest
from chat_formats import FORMATS
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.errors import InvalidRequestError
from octavo.tokenizer.builtin_templates import BY_NAME, CHATGLM2, CHATGLM3, GLM4, QWEN_CHATML
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.messages import normalise_messages
from octavo.tokenizer.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
BUILT_IN = {"chatglm2": CHATGLM2, "chatglm3": CHATGLM3, "glm4": GLM4, "qwen": QWEN_CHATML}
ALL = FORMATS | BUILT_IN
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "北京", "days": [1, 2], "ok": true}'},
}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": " Be <brief>. /no_think \n"}, {"role": "user", "content": "  hi 😀 "}],
    "turns": [
        {"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "\n yes "}, {"role": "user", "content": "é 'q' \"d\" & {{ x }}"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    "tools": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"celsius": 3}'}, {"role": "assistant", "content": "cold"}, {"role": "user", "content": "thanks"},
    ],
    "wrong order": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "again"}],
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "the weather's «state»", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {}, "return": {"type": "string"}}},
]  # fmt: skip
OPTIONS = {
    "plain": {}, "generation": {"add_generation_prompt": True}, "tools": {"tools": TOOLS, "add_generation_prompt": True},
    "documents": {"documents": [{"title": "A", "text": "first"}, {"title": "B", "text": "second 漢字"}], "add_generation_prompt": True},
    "variables": {"enable_thinking": False, "date_string": "1 Jan 2026", "date": "1 Jan 2026", "add_generation_prompt": True},
}  # fmt: skip


def theirs(template: str, messages: list, **options) -> str | None:
    """None where the template refuses the conversation."""
    try:
        return render_jinja_template([copy.deepcopy(messages)], chat_template=template, **SPECIAL, **options)[0][0]
    except Exception:
        return None


def ours(template: str, messages: list, **options) -> str | None:
    try:
        return ChatTemplate({"default": template}, SPECIAL).render(
            messages, **{"add_generation_prompt": False, **options}
        )
    except InvalidRequestError:
        return None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
class TestRendering:
    @pytest.mark.parametrize("option", OPTIONS)
    def test_is_transformers(self, name, conversation, option):
        messages = normalise_messages(CONVERSATIONS[conversation])
        options = {"add_generation_prompt": False, **OPTIONS[option]}
        expected = theirs(ALL[name], messages, **options)
        assert ours(ALL[name], messages, **options) == expected
        if conversation in ("one", "system"):
            assert expected

    def test_continues_as_transformers(self, name, conversation):
        for words in ("Once upon", " a time ", "there\n was", "\n\n"):
            messages = [*normalise_messages(CONVERSATIONS[conversation]), {"role": "assistant", "content": words}]
            expected = theirs(ALL[name], messages, continue_final_message=True, add_generation_prompt=False)
            if words.strip():  # what a continuation of nothing is, the two may see differently
                assert ours(ALL[name], messages, continue_final_message=True) == expected


def test_every_built_in_name_is_a_template():
    assert set(BY_NAME.values()) <= set(BUILT_IN.values())


@pytest.fixture
def folder(json_folder, tmp_path):
    for path in json_folder("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "one {{ messages[0].content }}"}, {}),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "plain"},
                    {"name": "tool_use", "template": "tools {{ tools | length }}"},
                ]
            },
            {},
        ),
        ({}, {"chat_template.jinja": "file {{ bos_token }}{{ messages[0].content }}"}),
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}),
        (
            {},
            {
                "chat_template.jinja": "file",
                "additional_chat_templates/tool_use.jinja": "tools {{ tools[0].function.name }}",
            },
        ),
        ({}, {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "rag"}),
    ],
)
def test_folders_choose_as_transformers(config, files, folder):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config})
    )
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    original = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate.load(Tokenizer.load(folder))
    messages = [{"role": "user", "content": "hi"}]
    for tools in (None, TOOLS):
        expected = original.apply_chat_template(messages, tools=tools, tokenize=False)
        assert template.render(messages, tools=tools, add_generation_prompt=False) == expected
