"""Chat templates in the shapes that models ship, and the special tokens they write."""

SPECIAL_IDS = {
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<s>": 3,
    "</s>": 4,
    "<|start_header_id|>": 5,
    "<|end_header_id|>": 6,
    "<|eot_id|>": 7,
    "<|begin_of_text|>": 8,
    "<|user|>": 9,
    "<|assistant|>": 10,
    "<|system|>": 11,
    "<|end|>": 12,
    "<think>": 13,
    "</think>": 14,
    "<tool_call>": 15,
    "</tool_call>": 16,
}
TEXT_OF = {token: text for text, token in SPECIAL_IDS.items()}

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# As Qwen 2.5 does it: tools listed in the system turn, calls between tags, results as a user's turn.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\n\n' }}{%- endif %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
    {{- 'Answer between <tool_call> and </tool_call>.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# As Llama 3.1 does it: the begin token as a variable, headers, a date, one call per message.
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- 'Today: ' + date_string + '\n' + system_message }}
{%- if tools is not none %}{%- for tool in tools %}{{- '\n' + tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('One tool call at a time, please.') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# As Phi does it: the special token is put together around the role.
ASSEMBLED = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""

# As Qwen 3 does it: what the model thought before is cut out of its earlier turns.
THINKING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

# As models that also see images do it: content is always a list of parts.
PARTS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""

ALL = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama": LLAMA,
    "assembled": ASSEMBLED,
    "thinking": THINKING,
}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
