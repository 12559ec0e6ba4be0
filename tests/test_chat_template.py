"""Chat templates: found in a bundle, rendered as transformers renders them, and kept in bounds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import api_model
import pytest

from runtime import manifest as mf
from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.server.chat import parse_chat
from runtime.server.fields import ApiError
from runtime.server.model import Limits, Model
from runtime.server.template import MAX_CHARS, MAX_STEPS, ChatTemplate, load, special_tokens

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}
"""
HEADERS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'Be helpful.' %}
    {%- set rest = messages %}
{%- endif %}
{{- '[system]\\n' ~ system ~ '[end]' }}
{%- for m in rest %}
    {{- '[' + m.role + ']\\n' + m.content | trim + '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}
"""
MERGING = """{% if messages[0]['role'] == 'system' %}
{% set intro = '<<SYS>>' + messages[0]['content'] + '<</SYS>> ' %}{% set talk = messages[1:] %}
{% else %}{% set intro = '' %}{% set talk = messages %}{% endif %}
{% for m in talk %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant, starting with user') }}
{% endif %}
{% if m['role'] == 'user' %}
{{ bos_token + '[INST] ' + (intro if loop.first else '') + m['content'].strip() + ' [/INST]' -}}
{% elif m['role'] == 'assistant' %}
{% generation %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endgeneration -%}
{% endif %}
{% endfor %}"""
ZEPHYR = """{% for message in messages %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
<|{{ message['role'] }}|>
{{ message['content'] }}{{ eos_token }}
{% if loop.last and add_generation_prompt %}
<|assistant|>
{% endif %}
{% endfor %}
"""
MACROS = """{%- macro show(m, depth=0) -%}
{{ '#' * (depth + 1) }} {{ m.role | upper }}: {{ m.content | tojson }}
{%- endmacro -%}
{%- set ns = namespace(count=0, names=[]) -%}
{%- for m in messages -%}
  {%- set ns.count = ns.count + 1 -%}
  {%- set ns.names = ns.names + [m.get('name', 'nobody')] -%}
  {{ show(m, loop.index0) }}{{ '\\n' }}
  {%- if ns.count >= 4 %}{% break %}{% endif -%}
{%- endfor -%}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif -%}
{{ ns.names | join(', ') }} {{ messages | length }} {{ messages[0] is mapping }}
{{- ' %s' % messages[-1].content }} {{ {'a': '<b>&', 'é': 1} | tojson(indent=2) }}
{%- if unset is defined %}never{% endif %}{{ missing }} {{ '%5d' % 3 }}
"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "merging": MERGING,
    "zephyr": ZEPHYR,
    "macros": MACROS,
}
USER = {"role": "user", "content": ' Héllo <b> & "you" \n'}
ASSISTANT = {"role": "assistant", "content": "語学 🦜"}
SYSTEM = {"role": "system", "content": "Be brief. "}
TALKS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, {"role": "user", "content": "", "name": "Ann"}],
    [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, {"role": "tool", "content": "42"}, USER],
    [ASSISTANT, USER],
]


def render(text: str, messages: Sequence[dict[str, Any]] = (USER,), **more: Any) -> str:
    return ChatTemplate(text, SPECIAL).render(messages, **more)


def refused(text: str, messages: Sequence[dict[str, Any]] = (USER,), **more: Any) -> str:
    with pytest.raises(ApiError) as caught:
        render(text, messages, **more)
    error = caught.value
    assert (error.status, error.param) == (400, "messages") and "\n" not in error.message
    return error.message


def test_chatml_by_hand() -> None:
    assert render(CHATML, [SYSTEM, {"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nBe brief. <|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHATML, [SYSTEM], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief. <|im_end|>\n"
    )


def test_special_tokens_and_a_refusal_by_hand() -> None:
    talk = [SYSTEM, {"role": "user", "content": "hi"}, ASSISTANT]
    assert render(MERGING, talk) == "<s>[INST] <<SYS>>Be brief. <</SYS>> hi [/INST] 語学 🦜 </s>"
    assert "Roles must alternate user/assistant" in refused(MERGING, [ASSISTANT])


def test_blocks_take_their_line_with_them() -> None:
    text = "a\n  {% if true %}\n  b{{ 1 }}\n  {% endif %}\n{# c #}\nd\n"
    assert render(text) == "a\n  b1\nd"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0].content | tojson }}") == json.dumps(
        USER["content"], ensure_ascii=False
    )
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == json.dumps(
        {"a": [2], "b": 1}, indent=1
    )


def test_a_date_and_variables() -> None:
    text = render("{{ strftime_now('%Y-%m') }} {{ mood }}", variables={"mood": "glad"})
    assert len(text) == 12 and text.endswith(" glad")


@pytest.mark.oracle
@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no-prompt"])
def test_transformers_renders_the_same(name: str, talk: list[dict[str, str]], prompt: bool) -> None:
    import tokenizers
    from jinja2 import TemplateError
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_file(str(api_model.FILES / "tokenizer.json"))
    inner.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(t, inner.token_to_id(t)) for t in ("<s>", "</s>")]
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)
    theirs.chat_template = TEMPLATES[name]
    words = api_model.Tokenizer(inner.to_str())
    ours = Model(api_model.manifest(vocab=4096), words, ChatTemplate(TEMPLATES[name], SPECIAL))
    data = api_model.body(messages=talk, add_generation_prompt=prompt)
    try:
        want = theirs.apply_chat_template(
            talk, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
    except TemplateError:
        with pytest.raises(ApiError):
            parse_chat(data, ours)
        return
    (request,) = parse_chat(data, ours).requests
    assert list(request.prompt) == want
    text = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(talk, prompt) == text


def test_begin_and_end_tokens_are_not_added_twice() -> None:
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_file(str(api_model.FILES / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    words = api_model.Tokenizer(inner.to_str())
    assert words.encode("a")[0] == 0 and words.encode("a", special=False) == words.encode("a")[1:]
    model = api_model.model(template="<|endoftext|>{{ messages[0].content }}", words=words)
    call = parse_chat(api_model.body(messages=[{"role": "user", "content": "a"}]), model)
    assert list(call.requests[0].prompt) == words.encode("a")


RUNAWAYS = [
    ("{% for i in range(100000000) %}x{% endfor %}", "steps of range()"),
    ("{% for i in range(1100) %}{% for j in range(1100) %}{% endfor %}{% endfor %}", "steps"),
    (f"{{% for i in range({MAX_STEPS}) %}}0123456789{{% endfor %}}", "characters"),
    ("{{ 'x' * 1000000000 }}", "characters"),
    ("{{ 1000000000 * 'x' }}", "characters"),
    ("{{ [0] * 1000000000 }}", "characters"),
    ("{{ 9 ** 9 ** 9 ** 9 }}", "a power of large numbers"),
    ("{{ '%1000000000d' % 1 }}", "too wide"),
    ("{{ '%*d' % (1000000000, 1) }}", "too wide"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ messages[0].content + 1 }}", "messages: the chat template refused them: can only"),
    ("{{ messages[9].content }}", "no element 9"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ raise_exception('no\nway') }}", "refused them: no way"),
    ("{{ lipsum(n=10) }}", "'lipsum' is undefined"),
    ("{% include 'x' %}", "refused them: no loader"),
    ("{{ {1: 2} | tojson(indent=messages) }}", "messages: "),
    ("{{ 1 | nofilter }}", ""),
]


@pytest.mark.parametrize(("text", "line"), RUNAWAYS, ids=[text[:30] for text, _ in RUNAWAYS])
def test_a_template_that_goes_wrong_is_a_refusal(text: str, line: str) -> None:
    if "nofilter" in text:
        with pytest.raises(UserError, match="No filter named"):
            ChatTemplate(text)
        return
    assert line in refused(text)


def test_numbers_may_be_multiplied() -> None:
    assert render("{{ 3000000 * 3000000 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 0.5 * 3 }}") == (
        "9000000000000 1024 3 1.5"
    )
    assert len(render("{{ 'x' * n }}", variables={"n": 100})) == 100
    assert MAX_CHARS > 1000


def test_half_a_character_from_a_template_is_refused() -> None:
    model = api_model.model(template="{{ '\\ud83e' }}")
    with pytest.raises(ApiError) as caught:
        parse_chat(api_model.body(messages=[USER]), model)
    assert caught.value.param == "messages"
    with pytest.raises(ApiError) as caught:
        parse_chat(api_model.body(messages=[USER]), api_model.model(template=""))
    assert caught.value.param == "messages" and "no tokens" in caught.value.message


def write(folder: Path, **files: Any) -> list[FileRef]:
    """Files (their name's last _ is a dot) and their references."""
    refs = []
    for name, value in files.items():
        stem, _, ending = name.rpartition("_")
        path = folder / f"{stem}.{ending}"
        path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
        data = path.read_bytes()
        refs.append(FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data)))
    return refs


def loaded(folder: Path, **files: Any) -> str | None:
    template = load(folder, write(folder, **files))
    return None if template is None else template.render([USER])


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": "config{{ bos_token }}", "bos_token": "<s>"}
    assert loaded(tmp_path) is None
    assert loaded(tmp_path, tokenizer_config_json={"bos_token": "<s>"}) is None
    assert loaded(tmp_path, tokenizer_config_json=config) == "config<s>"
    more: dict[str, Any] = {"chat_template_json": {"chat_template": "json{{ eos_token }}"}}
    more["special_tokens_map_json"] = {"eos_token": {"content": "</s>"}, "bos_token": "<old>"}
    assert loaded(tmp_path, tokenizer_config_json=config, **more) == "json</s>"
    more["chat_template_jinja"] = "jinja{{ bos_token }}{{ unk_token }}"
    assert loaded(tmp_path, tokenizer_config_json=config, **more) == "jinja<s>"
    listed = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert loaded(tmp_path, tokenizer_config_json={"chat_template": listed}) == "d"
    assert loaded(tmp_path, tokenizer_config_json={"chat_template": listed[:1]}) is None
    assert special_tokens({"bos_token": None, "pad_token": "<p>", "cls_token": 3}) == {
        "pad_token": "<p>"
    }


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"chat_template_jinja": "a\n{% if %}"}, "chat_template.jinja: line 2: Expected an expr"),
        ({"chat_template_jinja": "{% for m in messages %}"}, "chat_template.jinja: line 1: Unexp"),
        ({"chat_template_jinja": "{{ " + "(" * 5000}, "chat_template.jinja: "),
        ({"chat_template_json": "["}, "chat_template.json: not JSON"),
        ({"tokenizer_config_json": {"chat_template": 3}}, "tokenizer_config.json: chat_template: "),
        ({"tokenizer_config_json": {"chat_template": ["a"]}}, "tokenizer_config.json: chat_temp"),
        (
            {"tokenizer_config_json": {"chat_template": [{"name": "default", "template": 3}]}},
            "tokenizer_config.json: chat_template: found list",
        ),
    ],
)
def test_files_that_are_no_template_are_named(tmp_path: Path, files: dict, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, write(tmp_path, **files))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/{line}") and "\n" not in message


def test_a_changed_template_is_named(tmp_path: Path) -> None:
    refs = write(tmp_path, chat_template_jinja="a")
    (tmp_path / "chat_template.jinja").write_text("b")
    with pytest.raises(UserError, match=r"chat_template\.jinja: sha256"):
        load(tmp_path, refs)


def test_a_model_opens_with_what_its_bundle_has(tmp_path: Path) -> None:
    def opened(files: list[FileRef], **more: Any) -> Model:
        base = api_model.manifest()
        manifest = replace(base, files=replace(base.files, tokenizer=tuple(files)))
        (tmp_path / "manifest.json").write_text(mf.dumps(manifest))
        return Model.open(tmp_path, **more)

    words = (api_model.FILES / "tokenizer.json").read_text("utf-8")
    refs = write(tmp_path, tokenizer_json=words, chat_template_jinja="{{ messages[0].content }}")
    model = opened(refs, name="demo")
    assert model.name == "demo" and model.limits == Limits()
    call = parse_chat(api_model.body(messages=[USER], model="demo"), model)
    assert list(call.requests[0].prompt) == api_model.tokenizer().encode(USER["content"])
    model = opened(refs[:1], limits=api_model.LIMITS)
    assert model.tokenizer is not None and model.template is None
    assert model.limits == api_model.LIMITS and model.name == api_model.NAME
    assert opened(refs[1:]).template is None
    model = opened([])
    assert (model.tokenizer, model.template) == (None, None)
    (tmp_path / "chat_template.jinja").write_text("changed")
    with pytest.raises(UserError, match=r"chat_template\.jinja: sha256"):
        opened(refs)
