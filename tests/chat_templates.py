"""The shapes of published chat templates, written anew from the prompt formats their makers document.

Each has the constructs that make its family hard to render (tool macros, reversed searches, namespaces, date
helpers, refusals), shortened to what a test needs. `control` is what `bmoe.chat.thinking.probe` must find.
"""

# ruff: noqa: E501 (a template's line breaks are part of it)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bmoe.chat.thinking import ThinkControl


@dataclass(frozen=True, kw_only=True)
class Published:
    """One template and what it is known to do.

    Args:
        source: The template.
        bos: Its beginning-of-sequence token.
        eos: Its end-of-sequence token.
        control: What can be done about thinking.
        system: Whether it takes a system message.
        tools: Whether it takes tools.
    """

    source: str
    bos: str = ""
    eos: str = ""
    control: ThinkControl = "template"
    system: bool = True
    tools: bool = False


CHATML = r"""{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SMOLLM2 = r"""{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_2 = r"""{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- set system = messages[0]['content'] -%}
{%- else -%}
    {%- set turns = messages -%}
    {%- set system = false -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('user and assistant must take turns') -}}
    {%- endif -%}
    {%- if loop.index0 == 0 and system != false -%}
        {%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + turn['content'] -%}
    {%- else -%}
        {%- set content = turn['content'] -%}
    {%- endif -%}
    {%- if turn['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
    {%- elif turn['role'] == 'assistant' -%}
        {{- ' ' + content.strip() + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}"""

LLAMA_3 = r"""{% set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_3_1 = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today Date: ' + date_string + '\n\n' }}
{%- if tools is not none %}
    {{- 'Functions you may call, as {"name": ..., "parameters": {...}}:\n\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{%- endif %}
{{- system_message }}{{ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA_2 = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA_3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ '<start_of_image>' if item['type'] == 'image' else item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

GEMMA_4 = r"""{%- macro without_thoughts(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- if '<|channel>' in part -%}{%- set ns.result = ns.result + part.split('<|channel>')[0] -%}{%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set turns = messages -%}
{%- if (enable_thinking is defined and enable_thinking) or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\n' -}}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}{{- messages[0]['content'] | trim -}}{%- set turns = messages[1:] -%}{%- endif -%}
    {%- for tool in tools or [] -%}{{- '<|tool>declaration:' + tool['function']['name'] + '<tool|>' -}}{%- endfor -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\n' -}}
    {%- if role == 'model' -%}{{- without_thoughts(message['content']) -}}{%- else -%}{{- message['content'] | trim -}}{%- endif -%}
    {{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\n' -}}
    {%- if not (enable_thinking | default(false)) -%}{{- '<|channel>thought\n<channel|>' -}}{%- endif -%}
{%- endif -%}"""

MISTRAL_V1 = r"""{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}
{%- if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

MISTRAL_TOOLS = r"""{%- if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != 'return' %}
                    {%- if val is string %}{{ '"' + key + '": "' + val + '"' }}{% else %}{{ '"' + key + '": ' + val | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{ '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{% else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('a call needs an id of nine characters') }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_V7 = r"""{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
    {%- else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

MAGISTRAL = r"""{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set system = 'First draft your thinking: [THINK]your thoughts[/THINK]Then answer.' %}{% set turns = messages %}{% endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}
    {%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""

DEEPSEEK_V2 = r"""{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}
{%- elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}
{%- elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

_DEEPSEEK_HEAD = r"""{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}
        {%- else %}{% set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}{% endif %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
"""

DEEPSEEK_V3 = (
    _DEEPSEEK_HEAD
    + r"""{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message.tool_calls %}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' }}{{ tool['function']['arguments'] | tojson }}{{ '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}
    {%- if message['role'] == 'tool' %}{% set ns.is_tool = true %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"""
)

DEEPSEEK_R1 = (
    _DEEPSEEK_HEAD
    + r"""{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
)

DEEPSEEK_V3_1 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}\n"
    + _DEEPSEEK_HEAD
    + r"""{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' + message['content'].split('</think>', 1)[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}{% endif %}"""
)

GPT_OSS = r"""{%- macro typescript(spec, required, is_nullable=false) -%}
    {%- if spec.type == 'array' -%}
        {%- if spec['items'] -%}{{ typescript(spec['items'], required) + '[]' }}{%- else -%}{{ 'any[]' }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {{ spec.type | join(' | ') }}
    {%- elif spec.type == 'string' -%}
        {%- if spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}{%- else -%}{{ 'string' }}{%- endif -%}
    {%- elif spec.type in ['number', 'integer'] -%}{{ 'number' }}
    {%- elif spec.type == 'object' and spec.properties -%}
        {{ '{\n' }}
        {%- for name, inner in spec.properties.items() -%}
            {{ name }}{%- if name not in (spec.required or []) -%}{{ '?' }}{%- endif -%}{{ ': ' }}{{ typescript(inner, spec.required or []) }}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
        {%- endfor -%}
        {{ '}' }}
    {%- else -%}{{ 'any' }}{%- endif -%}
{%- endmacro -%}
{%- macro tool_namespace(name, tools) -%}
    {{ '## ' + name + '\n\nnamespace ' + name + ' {\n\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '// ' + tool.description + '\ntype ' + tool.name + ' = (' }}
        {%- if tool.parameters and tool.parameters.properties %}{{ '_: ' + typescript(tool.parameters, []) }}{% endif -%}
        {{- ') => any;\n\n' }}
    {%- endfor %}
    {{- '} // namespace ' + name }}
{%- endmacro -%}
{%- set ns = namespace(last_tool_call=none) -%}
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif -%}
{{- '<|start|>system<|message|>You are a large language model.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' + reasoning_effort + '\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{%- if tools -%}{{ '\nCalls to these tools must go to the commentary channel: functions.' }}{%- endif -%}
{{- '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}
    {%- set instructions = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set instructions = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if instructions %}{{ '# Instructions\n\n' + instructions + '\n\n' }}{% endif %}
    {%- if tools -%}{{ '# Tools\n\n' }}{{ tool_namespace('functions', tools) }}{%- endif -%}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in turns -%}
    {%- if message.role == 'assistant' -%}
        {%- if 'content' in message and '<|channel|>final<|message|>' in message.content %}{{ raise_exception('the content holds channel tags') }}{% endif %}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}{{ call.arguments | tojson }}{{ '<|call|>' }}
            {%- set ns.last_tool_call = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if ns.last_tool_call is none %}{{ raise_exception('a tool message without a call before it') }}{% endif %}
        {{- '<|start|>functions.' + ns.last_tool_call + ' to=assistant<|channel|>commentary<|message|>' }}{{ message.content | tojson }}{{ '<|end|>' }}
    {%- elif message.role == 'user' -%}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

GRANITE_3 = r"""{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'Knowledge Cutoff Date: April 2024.\nToday\'s Date: ' + strftime_now('%B %d, %Y') + '.\nYou are Granite.' %}
    {%- if tools and documents %}{% set system_message = system_message + ' Use the tools and documents.' %}
    {%- elif tools %}{% set system_message = system_message + ' Use the tools.' %}
    {%- elif thinking %}{% set system_message = system_message + ' Write your thoughts after \'Here is my thought process:\' and the answer after \'Here is my response:\'.' %}{% endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' }}{{ tools | tojson(indent=4) }}{{ '<|end_of_text|>\n' }}{% endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}{% if controls %}{{ ' ' + controls | tojson }}{% endif %}{{ '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

PHI_3 = r"""{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI_4 = r"""{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

QWEN_2_5 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}{{ 'You are Qwen.' }}{% endif %}
    {{- '\n\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\n\nReturn each call within <tool_call></tool_call> tags.<|im_end|>\n' }}
{%- elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}{{ tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' }}{{ message.content }}{{ '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_QWEN_3_BODY = r"""{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
"""

QWEN_3 = (
    _QWEN_3_BODY
    + r"""{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
)

# Always thinks, and shows with its own last turn how an answer behind reasoning looks.
QWEN_3_THINKING = (
    _QWEN_3_BODY + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

COMMAND_R = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{%- if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for message in loop_messages %}
{%- set content = message['content'] %}
{%- if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

ZEPHYR = r"""{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = r"""{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'] + ' ' }}{%- set turns = messages[1:] -%}{%- else -%}{{ 'A chat between a curious user and an assistant. ' }}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
{%- if message['role'] == 'user' -%}{{ 'USER: ' + message['content'] + ' ' }}{%- else -%}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}"""

LFM_2 = r"""{{- bos_token -}}
{%- set ns = namespace(system_prompt='') -%}
{%- if messages[0]['role'] == 'system' -%}{%- set ns.system_prompt = messages[0]['content'] -%}{%- set messages = messages[1:] -%}{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + ('\n' if ns.system_prompt else '') + 'List of tools: <|tool_list_start|>[' -%}
    {%- for tool in tools -%}
        {%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}
        {%- set ns.system_prompt = ns.system_prompt + tool -%}
        {%- if not loop.last -%}{%- set ns.system_prompt = ns.system_prompt + ', ' -%}{%- endif -%}
    {%- endfor -%}
    {%- set ns.system_prompt = ns.system_prompt + ']<|tool_list_end|>' -%}
{%- endif -%}
{%- if ns.system_prompt -%}{{- '<|im_start|>system\n' + ns.system_prompt + '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\n' -}}
    {%- set content = message['content'] -%}
    {%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
    {%- if message['role'] == 'tool' -%}{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' -%}{%- endif -%}
    {{- content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# Thinks of its own accord: the template only forgets old thoughts.
LFM_2_5 = r"""{{- bos_token -}}
{%- set keep_past_thinking = keep_past_thinking | default(false) -%}
{%- set ns = namespace(last_assistant_index=-1) -%}
{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{%- set ns.last_assistant_index = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\n' -}}
    {%- set content = message['content'] -%}
    {%- if message['role'] == 'assistant' and not keep_past_thinking and loop.index0 != ns.last_assistant_index -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] | trim -%}{%- endif -%}
    {%- endif -%}
    {{- content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

GLM_4 = r"""[gMASK]<sop>{% for item in messages %}{% if item['role'] != 'tool' %}{{ '<|' + item['role'] + '|>\n' + item['content'] }}{% else %}{{ '<|observation|>\n' + item['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

GLM_4_5 = r"""[gMASK]<sop>
{%- if tools %}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif %}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}{%- for item in content -%}{{ item.text if item is mapping and item.type == 'text' else item }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user_index = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' -%}
<|user|>
{{ visible_text(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith('/nothink')) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- if m.reasoning_content is string %}{% set reasoning_content = m.reasoning_content %}{% endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}{{ '\n<think>' + reasoning_content.strip() + '</think>' }}{%- else -%}{{ '\n<think></think>' }}{%- endif -%}
{%- if visible_text(m.content).strip() -%}{{ '\n' + visible_text(m.content).strip() }}{%- endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}"""

SMOLLM_3 = r"""{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = '/think' if enable_thinking else '/no_think' -%}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' + reasoning_mode + '\n\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' -}}{%- endif -%}
    {%- if message.role == 'assistant' -%}{% generation %}{{- '<|im_start|>assistant\n' + message.content.lstrip('\n') + '<|im_end|>\n' -}}{% endgeneration %}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n') -}}{%- endif -%}"""

KIMI_K2 = r"""{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}
    {%- set role_name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'user' -%}<|im_user|>{{ role_name }}<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ role_name }}<|im_middle|>
    {%- else -%}<|im_system|>{{ role_name }}<|im_middle|>{%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        <|tool_calls_section_begin|>
        {%- for call in message['tool_calls'] -%}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{%- endfor -%}
        <|tool_calls_section_end|>
    {%- else -%}{{ message['content'] }}{%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

PUBLISHED: dict[str, Published] = {
    "chatml": Published(source=CHATML, eos="<|im_end|>"),
    "smollm2": Published(source=SMOLLM2, bos="<|im_start|>", eos="<|im_end|>"),
    "llama-2": Published(source=LLAMA_2, bos="<s>", eos="</s>"),
    "llama-3": Published(source=LLAMA_3, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "llama-3.1": Published(source=LLAMA_3_1, bos="<|begin_of_text|>", eos="<|eot_id|>", tools=True),
    "gemma-2": Published(source=GEMMA_2, bos="<bos>", eos="<eos>", system=False),
    "gemma-3": Published(source=GEMMA_3, bos="<bos>", eos="<eos>"),
    "gemma-4": Published(source=GEMMA_4, bos="<bos>", eos="<turn|>", tools=True),
    "mistral-v1": Published(source=MISTRAL_V1, bos="<s>", eos="</s>", system=False),
    "mistral-tools": Published(source=MISTRAL_TOOLS, bos="<s>", eos="</s>", tools=True),
    "mistral-v7": Published(source=MISTRAL_V7, bos="<s>", eos="</s>"),
    "magistral": Published(source=MAGISTRAL, bos="<s>", eos="</s>", control="none"),
    "deepseek-v2": Published(source=DEEPSEEK_V2, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>"),
    "deepseek-v3": Published(source=DEEPSEEK_V3, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>"),
    "deepseek-r1": Published(
        source=DEEPSEEK_R1, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", control="none"
    ),
    "deepseek-v3.1": Published(
        source=DEEPSEEK_V3_1, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>"
    ),
    "gpt-oss": Published(source=GPT_OSS, eos="<|return|>", control="prefill", tools=True),
    "granite-3": Published(source=GRANITE_3, eos="<|end_of_text|>", tools=True),
    "phi-3": Published(source=PHI_3, bos="<s>", eos="<|endoftext|>"),
    "phi-4": Published(source=PHI_4, eos="<|im_end|>"),
    "qwen-2.5": Published(source=QWEN_2_5, eos="<|im_end|>", tools=True),
    "qwen-3": Published(source=QWEN_3, eos="<|im_end|>"),
    "qwen-3-thinking": Published(source=QWEN_3_THINKING, eos="<|im_end|>", control="prefill"),
    "command-r": Published(source=COMMAND_R, bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>"),
    "zephyr": Published(source=ZEPHYR, bos="<s>", eos="</s>"),
    "vicuna": Published(source=VICUNA, bos="<s>", eos="</s>"),
    "lfm-2": Published(source=LFM_2, bos="<|startoftext|>", eos="<|im_end|>", tools=True),
    "lfm-2.5": Published(source=LFM_2_5, bos="<|startoftext|>", eos="<|im_end|>", control="none"),
    "glm-4": Published(source=GLM_4, eos="<|endoftext|>"),
    "glm-4.5": Published(source=GLM_4_5, eos="<|endoftext|>", tools=True),
    "smollm-3": Published(source=SMOLLM_3, eos="<|im_end|>"),
    "kimi-k2": Published(source=KIMI_K2, bos="[BOS]", eos="<|im_end|>", tools=True),
}

# What a stranger might put into a file instead, by what it wants.
HOSTILE = {
    "a loop in a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1] * 50 recursive %}{{ loop([1] * 50) if loop.depth < 9 }}{% endfor %}",
    "a range": "{{ range(10**9) }}",
    "a product of text": "{{ 'a' * 10**10 }}",
    "a product of lists": "{{ [1] * 10**10 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled text": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added text": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "shared lists": "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "hashed pairs": "{% set ns = namespace(x=()) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "shared namespaces": (
        "{% set ns = namespace(x=namespace()) %}{% set top = ns.x %}{% for i in range(60) %}{% set n = namespace() %}"
        "{% set c = ns.x %}{% set c.a = [n, n] %}{% set ns.x = n %}{% endfor %}{{ top }}"
    ),
    "a namespace in itself": "{% set a = namespace() %}{% set a.x = a %}{{ a }}",
    "a macro in itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro twice in itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "a block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "endless output": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "endless captured output": "{% set x %}{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endset %}",
    "endless text of its own": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "endless captured text": "{% set x %}{% for i in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endset %}",
    "padding by %": "{{ '%9999999999d' % 1 }}",
    "padding by * in %": "{{ '%*d' % (10**9, 1) }}",
    "padding by format": "{{ '{:9999999999}'.format(1) }}",
    "padding by a width in format": "{{ '{:{}}'.format(1, 10**9) }}",
    "padding by the filter": "{{ '%9999999999d'|format(1) }}",
    "padding of dates": "{{ strftime_now('%9999999999Y') }}",
    "padding by a method": "{{ 'a'.ljust(10**10) }}",
    "padding by zfill": "{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "a wide filter": "{{ 'a'|center(10**10) }}",
    "an indent": "{{ 'a\nb'|indent(10**10) }}",
    "an indent of text": "{{ ('a\n' * 99999)|indent('x' * 99999) }}",
    "indented json": "{{ messages|tojson(indent=10**9) }}",
    "json indented by text": "{{ messages|tojson(indent='x' * 9999) }}",
    "json indented in depth": (
        "{% set ns = namespace(x=range(99999)|list) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x} %}{% endfor %}"
        "{{ ns.x|tojson(indent=16) }}"
    ),
    "much json": "{{ ([messages] * 9999999)|tojson }}",
    "replacing": "{{ ('a' * 999999).replace('', 'b' * 999999) }}",
    "the filter replacing": "{{ ('a' * 999999)|replace('a', 'b' * 999999) }}",
    "joining": "{{ ('b' * 999999).join(range(99999)|map('string')) }}",
    "the filter joining": "{{ range(99999)|join('b' * 999999) }}",
    "stripping": "{{ ('a' * 3999999).strip('b' * 3999999 ~ 'a') }}",
    "splitting": "{% for i in range(99999) %}{% set x = ('a' * 999999).split('a') %}{% endfor %}",
    "comparing": "{% set t = 'a' * 3999999 %}{% for i in range(99999) %}{% set x = t == t ~ '' %}{% endfor %}",
    "slicing": "{% set t = 'a' * 3999999 %}{% for i in range(99999) %}{% set x = t[1:] %}{% endfor %}",
    "filtering": "{% for i in range(99999) %}{% set x = range(99999)|map('string')|list %}{% endfor %}",
    "adding up": "{{ range(99999)|map('list')|sum(start=[]) }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "unpacking": "{% for i in range(99999) %}{% set x = dict(*range(99999)) %}{% endfor %}",
    "deep brackets": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long sums": "{{ 1" + " + 1" * 9999 + " }}",
    "long negations": "{{ " + "not " * 9999 + "1 }}",
    "nested blocks": "{% if 1 %}" * 999 + "{% endif %}" * 999,
    "nested loops": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "a long template": "x" * 300_000,
    "lorem ipsum": "{{ lipsum(10**6) }}",
    "an include": "{% include 'secret' %}",
    "an import": "{% import 'secret' as s %}",
    "a parent": "{% extends 'secret' %}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a function's globals": "{{ raise_exception.__globals__['sys'] }}",
    "a type's initialiser": "{{ cycler.__init__.__globals__.os }}",
    "a format's attribute": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "attributes by filter": "{{ ''|attr('__class__') }}",
    "a message changed": "{{ messages.append(1) }}",
    "a message emptied": "{{ messages[0].clear() }}",
    "the environment": "{{ self.environment.loader }}",
    "division by zero": "{{ 1 / 0 }}",
    "an undefined value": "{{ a.b.c }}",
    "a refusal across lines": "{{ raise_exception('no\nway\x1b[0m') }}",
    "a refusal without end": "{{ raise_exception('x' * 999999) }}",
}
