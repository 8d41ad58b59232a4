"""Fuzz chat templates, made of pieces of real, broken and hostile ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from scripts.fuzzing.mutations import damage, nasty_text, several
from scripts.fuzzing.worker import Files

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- endif %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{ raise_exception('no tools') }}{%- endif %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{%- endfor %}{{ strftime_now('%d %b %Y') }}"
    "{{ messages | tojson(indent=2) }}"
)
_PIECES = (
    "{{ messages }}",
    "{{ messages[-1].content.split('</think>')[-1] }}",
    "{{ messages[99] }}",
    "{{ 1 / 0 }}",
    "{{ none.x }}",
    "{{ x.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ 'a' | attr('__class__') }}",
    "{{ lipsum(100) }}",
    "{{ '%s' % messages }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ messages | map('upper') | list }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% set ns = namespace(x=0) %}{% set ns.x = 10 %}{{ ns.x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ (10 ** 5000) | string }}",
    "{{ 'a' * 4000000000 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{% set x = 'a' %}{% for i in range(40) %}{% set x = x + x %}{% endfor %}",
    "{{ [1] * 999999999 }}",
    "{{ range(10 ** 8) | list }}",
    "{{ messages | sort }}",
    "{{ 'x' | center(999999999) }}",
    "{% include 'x' %}",
    "{% extends messages %}",
    "{% import 'os' as os %}",
    "{{ self }}",
    "{{ raise_exception([]) }}",
    "{{ raise_exception('\ud800') }}",
    "{{ strftime_now('%' * 999) }}",
    "{{ strftime_now(1) }}",
    "{{ strftime_now('\\0') }}",
    "{{ messages | tojson(indent=-1) }}",
    "{{ range(10) | random }}",
    "{% break %}",
    "{% for x in messages %}{% continue %}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ undefined_name.a.b }}",
    "{{ undefined_name }}",
    "{{ 'x",
    "{% if",
    "{#",
    "{{ }}",
    "{{ x | nofilter }}",
    "{{ x is notest }}",
    "{% endfor %}",
    "{{ tools | length }}",
    "{{ ''.join(1) }}",
    "{{ caller() }}",
    "{% call f() %}{% endcall %}",
    "{{ loop }}",
    "{{ 'a'.encode('utf-16') }}",
    "{{ 1 if messages else }}",
)
# Nested constructs: the text before, the opening part, the innermost text, the closing part, and the text
# after.
_NESTED = (
    ("{{ ", "(", "1", ")", " }}"),
    ("{{ ", "[", "1", "]", " }}"),
    ("{{ ", "-", "1", "", " }}"),
    ("", "{% if 1 %}", "", "{% endif %}", ""),
    ("", "{% for a in [1] %}", "", "{% endfor %}", ""),
)


def make(rng: Random) -> Files:
    """Return a template made of several pieces, sometimes damaged, and the text of a message."""
    source = ""
    for _ in range(rng.randint(1, 4)):
        source += rng.choice((_CHATML, _LLAMA, rng.choice(_PIECES), nasty_text(rng)))
    if rng.random() < 0.1:
        before, opening, inner, closing, after = rng.choice(_NESTED)
        depth = rng.choice((10, 100, 1_000, 5_000))
        source += before + opening * depth + inner + closing * depth + after
    data = source.encode("utf-8", "surrogatepass")
    if rng.random() < 0.4:
        data = several(rng, data, damage)
    return {"template": data, "message": nasty_text(rng).encode("utf-8", "surrogatepass")}


def run(folder: Path) -> None:
    """Compile the template and render a chat."""
    source, text = (
        (folder / name).read_bytes().decode("utf-8", "surrogateescape") if (folder / name).exists() else ""
        for name in ("template", "message")
    )
    template = ChatTemplate(source, "<s>", "</s>")
    template.render([Message("system", "Be brief."), Message("user", text), Message("assistant", text)])
    template.render([Message("user", text)])
