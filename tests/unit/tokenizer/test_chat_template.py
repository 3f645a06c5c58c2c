"""Chat templates against transformers' rendering, the template's own errors, and the limits of the sandbox."""

import copy
import time

import pytest

from octavo.errors import ConfigError, InvalidRequestError
from octavo.tokenizer import template_sandbox
from octavo.tokenizer.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from octavo.tokenizer.gguf_vocab import build_vocabulary
from octavo.tokenizer.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""
HEADERS = """{{- bos_token }}
{%- set today = date_string if date_string is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today: " + today + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("Only single tool-calls are supported") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- macro turn(role, text) -%}<|im_start|>{{ role }}\n{{ text }}<|im_end|>\n{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- generation %}{{- turn(message.role, content ~ ns.last ~ loop.index0) }}{% endgeneration %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {{- '<tool_call>{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}{{ tool_call.function.arguments | tojson(indent=1) }}</tool_call>
            {%- endfor %}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {%- set block %}{{ message.content }}{% endset %}
    {{- turn(message.role, block) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
CHATS = {
    "one": [{"role": "user", "content": "hi"}],
    "system": [
        {"role": "system", "content": " Be brief. \n"},
        {"role": "user", "content": "hi  "},
        {"role": "assistant", "content": "yes "},
    ],
    "two users": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ],
    "tools": [
        {"role": "user", "content": "1+1? 'quoted' & <b>"},
        {"role": "assistant", "content": "<think>\nhm</think>\n\nok", "tool_calls": [CALL]},
        {"role": "tool", "content": "2\n漢字"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "😀"},
    ],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds 'things'", "parameters": {"type": "object", "properties": {}}},
}


def theirs(template, messages, **options) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": False, **options}
    rendered, _ = render_jinja_template([copy.deepcopy(messages)], chat_template=template, **SPECIAL, **options)
    return rendered[0]


def ours(template, messages, **options) -> str:
    return ChatTemplate({"default": template}, SPECIAL).render(messages, **{"add_generation_prompt": False, **options})


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
class TestAgainstTransformers:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"add_generation_prompt": True},
            {"tools": [TOOL], "add_generation_prompt": True},
            {"enable_thinking": False, "date_string": "today", "add_generation_prompt": True},
        ],
    )
    def test_renders_the_same(self, template, chat, options):
        assert ours(TEMPLATES[template], CHATS[chat], **options) == theirs(TEMPLATES[template], CHATS[chat], **options)

    def test_continues_the_same(self, template, chat):
        for content in ("This is a song about", " spaced on both ends  ", "x", "double  \n"):
            messages = [*CHATS[chat], {"role": "assistant", "content": content}]
            text = ours(TEMPLATES[template], messages, continue_final_message=True)
            assert text == theirs(TEMPLATES[template], messages, continue_final_message=True)
            assert text.endswith(content.strip() if template == "headers" else content.lstrip("\n"))


def test_the_models_own_template(smollm2):
    template = ChatTemplate.load(smollm2)
    for messages in CHATS.values():
        for add in (True, False):
            expected = theirs(smollm2.chat_template, messages, add_generation_prompt=add)
            assert template.render(messages, add_generation_prompt=add) == expected
    text = template.render(CHATS["one"])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.encode(text, add_special_tokens=False)[0] == 1


class TestRefusals:
    def test_the_templates_own_message(self):
        template = (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
        )
        with pytest.raises(InvalidRequestError, match="^System role not supported$") as caught:
            ours(template, CHATS["system"])
        assert caught.value.param == "messages"
        assert ours(template, CHATS["one"]) == "ok"

    @pytest.mark.parametrize(
        "template",
        [
            "{{ 1 / 0 }}",
            "{{ nothing.at.all }}",
            "{{ messages[7]['content'] + 'x' }}",
            "{{ messages[0].content + 3 }}",
            "{% if %}",
            "{{ 'x' | unknown }}",
        ],
    )
    def test_faults_of_the_template_are_one_requests_errors(self, template):
        with pytest.raises(InvalidRequestError) as caught:
            ours(template, CHATS["one"])
        assert caught.value.param == "messages"

    def test_both_flags(self):
        with pytest.raises(InvalidRequestError) as caught:
            ours(CHATML, CHATS["one"], add_generation_prompt=True, continue_final_message=True)
        assert caught.value.param == "continue_final_message"

    def test_kwargs_cannot_shadow(self):
        template = ChatTemplate({"default": CHATML}, SPECIAL)
        with pytest.raises(InvalidRequestError) as caught:
            template.render(CHATS["one"], messages=[])
        assert caught.value.param == "chat_template_kwargs"

    def test_kwargs_may_set_special_tokens(self):
        assert ours("{{ bos_token }}", CHATS["one"], bos_token="B") == "B"

    @pytest.mark.parametrize(
        "messages", [[], [{"role": "assistant", "content": "", "tool_calls": [CALL]}], [{"role": "assistant"}]]
    )
    def test_nothing_to_continue(self, messages):
        with pytest.raises(InvalidRequestError):
            ours("{{ messages[0].content }}", messages, continue_final_message=True)

    def test_a_template_that_drops_the_final_message(self):
        with pytest.raises(InvalidRequestError, match="cannot be continued"):
            ours("nothing of it", CHATS["one"], continue_final_message=True)

    def test_no_default_template(self):
        with pytest.raises(InvalidRequestError, match="no default chat template"):
            ChatTemplate({"rag": "x"}, {}).render(CHATS["one"])


class TestChoice:
    def test_tools_have_their_own(self):
        template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
        assert template.render(CHATS["one"]) == "plain"
        assert template.render(CHATS["one"], tools=[TOOL]) == "with tools"
        assert template.render(CHATS["one"], tools=[]) == "plain"

    def test_developer_is_system_where_the_template_does_not_know_it(self):
        messages = [{"role": "developer", "content": "x"}]
        assert ours("{{ messages[0].role }}", messages) == "system"
        assert ours("{# developer #}{{ messages[0].role }}", messages) == "developer"
        assert messages[0]["role"] == "developer"

    def test_override(self, gguf_metadata, tmp_path):
        metadata = gguf_metadata(**{"tokenizer.chat_template": "own"})
        tokenizer = Tokenizer(build_vocabulary(metadata, "x"))
        assert ChatTemplate.load(tokenizer).render(CHATS["one"]) == "own"
        assert ChatTemplate.load(tokenizer, "{{ bos_token }}!").render(CHATS["one"]) == "<s>!"
        (tmp_path / "t.jinja").write_text("from a file{{ eos_token }}")
        assert ChatTemplate.load(tokenizer, str(tmp_path / "t.jinja")).render(CHATS["one"]) == "from a file</s>"
        for wrong in ("nowhere.jinja", str(tmp_path), "{% if %}", "{{ 1 | nofilter }}"):
            with pytest.raises(ConfigError, match="chat_template"):
                ChatTemplate.load(tokenizer, wrong)
        (tmp_path / "b.jinja").write_bytes(b"\xff")
        with pytest.raises(ConfigError, match="UTF-8"):
            ChatTemplate.load(tokenizer, str(tmp_path / "b.jinja"))

    def test_none(self, gguf_metadata):
        assert ChatTemplate.load(Tokenizer(build_vocabulary(gguf_metadata(), "x"))) is None

    def test_compiled_once_and_late(self, monkeypatch):
        template = ChatTemplate({"default": "{% if %}"}, {})  # nothing happens until it is used
        assert template.source
        template = ChatTemplate({"default": CHATML}, {})
        first = template.compiled("default")
        template.render(CHATS["one"])
        assert template.compiled("default") is first

    def test_time(self):
        assert ours("{{ strftime_now('%Y') }}", CHATS["one"]) == time.strftime("%Y")


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10000000) %}{% endfor %}",
    "much output": "{% for a in range(99999) %}{{ big }}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 12 }}",
    "list repetition": "{{ ([0] * 10 ** 12) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{% set ns = namespace(x=9) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "wide format": "{{ '%99999999999d' % 1 }}",
    "wide format filter": "{{ '%99999999999d' | format(1) }}",
    "wide format argument": "{{ '%*d' % (999999999, 1) }}",
    "padding": "{{ 'a'.ljust(10 ** 12) }}",
    "centre": "{{ 'a' | center(999999999) }}",
    "indent": "{{ ('a\\n' * 1000) | indent(99999999) }}",
    "doubling by ~": "{% set ns = namespace(x='aaaa') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='aaaa') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by block": "{% set ns = namespace(x='aaaa') %}{% for a in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "call block": "{% macro f(n) %}{{ caller(n) }}{% endmacro %}{% for a in range(99999) %}{% for b in range(9) %}{% call(n) f(1) %}{% endcall %}{% endfor %}{% endfor %}",
}  # fmt: skip


class TestLimits:
    @pytest.mark.parametrize("bomb", BOMBS)
    def test_bombs_are_refused(self, bomb):
        with pytest.raises(InvalidRequestError) as caught:
            ours(BOMBS[bomb], CHATS["one"], big="x" * 4096)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.append(1) }}",
            "{{ messages[0].update(a=1) }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
            "{{ '{0.__class__.__mro__[1].__subclasses__}'.format(1) }}",
            "{{ namespace(__class__=1) }}",
            "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
            "{{ (strftime_now | attr('__globals__')).x }}",
            "{% include 'x' %}",
            "{% import '/etc/passwd' as x %}",
        ],
    )
    def test_the_sandbox_holds(self, template):
        messages = copy.deepcopy(CHATS["one"])
        with pytest.raises(InvalidRequestError):
            ours(template, messages)
        assert messages == CHATS["one"]

    def test_too_large_a_template(self, monkeypatch):
        with pytest.raises(InvalidRequestError, match="characters"):
            ours("x" * (MAX_TEMPLATE_CHARS + 1), CHATS["one"])

    def test_long_conversations_are_within_the_limits(self):
        messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 50} for i in range(8192)]
        assert ours(TOOLS, messages).count("<|im_start|>") == 8192

    def test_steps_are_counted_for_each_rendering(self, monkeypatch):
        monkeypatch.setattr(template_sandbox, "MAX_STEPS", 100)
        template = ChatTemplate({"default": "{% for i in range(60) %}{{ i }}{% endfor %}"}, {})
        for _ in range(5):
            template.render(CHATS["one"])
