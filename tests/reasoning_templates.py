"""Chat templates of reasoning models, shortened."""

from __future__ import annotations

# Short templates that treat earlier reasoning like these models' published templates.
QWEN_3 = """
{%- set last = messages | map(attribute='role') | list | length - 1 %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- set reasoning = '' %}
    {%- if m.reasoning_content is defined and m.reasoning_content is not none %}
        {%- set reasoning = m.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last %}
        {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""
DEEPSEEK_R1 = """
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}
    {%- if m['role'] == 'assistant' %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜><think>\n' }}"""
GLM_4_7 = """
{%- for m in messages %}
    {%- if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}
    {%- if m.role == 'assistant' %}<|assistant|></think>{{ m.content.strip() }}{% endif %}
{%- endfor %}<|assistant|><think>"""
# It opens the reasoning in the prompt, as DeepSeek R1's template does, and drops earlier reasoning.
OPENS_REASONING = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{{- '<|im_start|>assistant\n<think>\n' }}"""
LING_3 = """
{%- for m in messages %}
    {%- if m.role == 'user' %}<role>HUMAN</role>{{ m.content }}<|role_end|>{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<role>ASSISTANT</role>\n<think>' + (m.reasoning_content or '') + '</think>' + m.content }}
        {{- '<|role_end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<role>ASSISTANT</role>\n<think>' }}"""
SEED_OSS = """
{%- for m in messages %}
    {{- '<seed:bos>' + m.role + '\n' }}
    {%- if m.reasoning_content %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>\n' }}{% endif %}
    {{- m.content + '<seed:eos>' }}
{%- endfor %}
{{- '<seed:bos>assistant\n' }}"""
# It writes each reply as Qwen 3 generates it, so that the tokens of the reply can be reused.
KEEPS_ALL = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""
MAGISTRAL = """
{%- for m in messages %}
    {%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% endif %}
    {%- if m.role == 'assistant' %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
GPT_OSS = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in m.content %}{{ raise_exception('<|channel|> in the content') }}{% endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' }}"""
