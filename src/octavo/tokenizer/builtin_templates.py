"""Chat formats of models whose files bring no template of their own: their authors' code builds the prompt instead.

Each gives the text whose tokens are those that the model's own code makes. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Turns are numbered from one; there is no role of a system, so its words go in front of the user's next ones.
CHATGLM2 = """
{{- '[gMASK]sop' }}
{%- set ns = namespace(turn=0, before='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.before = ns.before ~ message.content ~ '\\n\\n' %}
    {%- elif message.role == 'user' %}
        {%- set ns.turn = ns.turn + 1 %}
        {{- '[Round ' ~ ns.turn ~ ']\\n\\n问：' ~ ns.before ~ message.content ~ '\\n\\n答：' }}
        {%- set ns.before = '' %}
    {%- elif message.role == 'assistant' %}
        {{- message.content ~ '\\n\\n' }}
    {%- else %}
        {{- raise_exception('this model has no turns of role ' ~ message.role) }}
    {%- endif %}
{%- endfor %}"""

# A role, the tool's name where a turn calls one, a line's end, the words. The space is the mark of a word's begin, which the model's own
# code gets by encoding the words apart. Tools are told to the model as JSON in the system's turn.
CHATGLM3 = """
{{- '[gMASK]sop' }}
{%- if tools %}
    {%- set told = namespace(tools=[]) %}
    {%- for tool in tools %}
        {%- set told.tools = told.tools + [tool.function if tool.function is defined else tool] %}
    {%- endfor %}
    {%- if messages and messages[0].role == 'system' %}
        {%- set words, messages = messages[0].content, messages[1:] %}
    {%- else %}
        {%- set words = 'Answer the following questions as best as you can. You have access to the following tools:' %}
    {%- endif %}
    {{- '<|system|>\\n ' ~ words ~ '\\n' ~ (told.tools | tojson(indent=4)) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<|assistant|>' ~ call.function.name ~ '\\n ```python\\ntool_call(' }}
            {%- if call.function.arguments is mapping %}
                {%- for name, value in call.function.arguments.items() %}
                    {{- name ~ '=' ~ (value | tojson) ~ (', ' if not loop.last else '') }}
                {%- endfor %}
            {%- else %}
                {{- call.function.arguments }}
            {%- endif %}
            {{- ')\\n```' }}
        {%- endfor %}
    {%- else %}
        {%- set role = 'observation' if message.role in ('tool', 'function') else message.role %}
        {{- '<|' ~ role ~ '|>' ~ (message.metadata if message.metadata is defined else '') ~ '\\n ' ~ message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

GLM4 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {%- if messages and messages[0].role == 'system' %}
        {%- set words, messages = messages[0].content ~ '\\n\\n', messages[1:] %}
    {%- else %}
        {%- set words = '' %}
    {%- endif %}
    {{- '<|system|>\\n' ~ words ~ '# 可用工具' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {{- '\\n\\n## ' ~ function.name ~ '\\n\\n' ~ (function | tojson(indent=4)) }}
        {{- '\\n在调用上述函数时，请使用 Json 格式表示调用的参数。' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set given = call.function.arguments %}
            {{- '<|assistant|>' ~ call.function.name ~ '\\n' ~ (given if given is string else given | tojson) }}
        {%- endfor %}
    {%- else %}
        {%- set role = 'observation' if message.role in ('tool', 'function') else message.role %}
        {{- '<|' ~ role ~ '|>' ~ (message.metadata if message.metadata is defined else '') ~ '\\n' ~ message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

# Qwen's first chat models: a conversation without a system's turn gets one.
QWEN_CHATML = """
{%- if not messages or messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# GGUF files may name a format where its template would stand.
BY_NAME: Mapping[str, str] = MappingProxyType({"chatglm3": CHATGLM3, "chatglm4": GLM4})
