"""Chat templates are rendered as by transformers."""

import datetime
import sys

import pytest

from fewbit.errors import UnsupportedError
from fewbit.models.tokenizers import chat_template
from fewbit.models.tokenizers.chat_template import chat_text

pytest.importorskip("jinja2")

LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

# A template, and what it makes of "hi".
CASES = {
    "ChatML": (LOOP + ASKS, ASKED),
    "default system message": (
        "{%- if messages[0]['role'] == 'system' %}\n{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
        "{%- else %}\n{{- '<|im_start|>system\\nYou\\'re \\\\boxed{}.\\nBe brief.<|im_end|>\\n' }}\n{%- endif %}\n"
        + LOOP
        + ASKS,
        "<|im_start|>system\nYou're \\boxed{}.\nBe brief.<|im_end|>\n" + ASKED,
    ),
    "system message in parts": (
        "{{- '<|im_start|>system\\n' -}}\n{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- else -%}\n"
        "{{- '## Metadata\\n' -}}\n{%- endif -%}{{- '<|im_end|>\\n' -}}" + LOOP + ASKS,
        "<|im_start|>system\n## Metadata\n<|im_end|>\n" + ASKED,
    ),
    "thought": (LOOP + "{{- '<|im_start|>assistant\\n<think>\\n' }}", ASKED + "<think>\n"),
    "comment": ("{# <|im_start|>system\nold<|im_end|> #}" + LOOP + ASKS, ASKED),
    "Phi-4": (
        LOOP.replace("\\n'", "<|im_sep|>'", 1).replace("<|im_end|>\\n", "<|im_end|>"),
        "<|im_start|>user<|im_sep|>hi<|im_end|>",
    ),
    "start and end": (
        "{{ bos_token }}{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{{ eos_token }}{% endfor %}",
        "<s>[INST] hi [/INST]</s>",
    ),
    "generation and loop controls": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "hi",
    ),
    "JSON": ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
    "blocks on lines of their own": (
        "{% if tools %}\n  tools\n{% endif %}\n  {% if true %}\n{{ messages[0].content }}{% endif %}",
        "hi",
    ),
}


@pytest.mark.parametrize(("template", "expected"), CASES.values(), ids=CASES)
def test_a_template_is_rendered(template: str, expected: str):
    assert chat_text("hi", template, bos="<s>", eos="</s>") == expected


@pytest.mark.oracle
@pytest.mark.parametrize("template", [template for template, _ in CASES.values()], ids=CASES)
def test_a_template_is_rendered_as_by_transformers(template: str):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    for message in ("hi", " <b>\n 'é' "):
        chats, _ = utilities.render_jinja_template(
            conversations=[[{"role": "user", "content": message}]],
            chat_template=template,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
        assert chat_text(message, template, bos="<s>", eos="</s>") == chats[0]


def test_a_template_that_asks_for_the_date():
    assert chat_text("hi", "{{ strftime_now('%Y') }}") in {str(datetime.date.today().year + i) for i in (-1, 0)}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the checkpoint has no chat template; give the prompt as plain text"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template fails: roles must alternate; give the prompt"),
        ("{% if %}", "the chat template fails: Expected an expression"),
        ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__' of 'str' object is unsafe"),
    ],
    ids=["none", "refused", "syntax", "error", "sandbox"],
)
def test_a_template_that_cannot_be_rendered(template: str | None, message: str):
    with pytest.raises(UnsupportedError, match=message):
        chat_text("hi", template)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    chat_template._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    with pytest.raises(UnsupportedError, match=r"jinja2 is not installed; pip install fewbit\[io\] brings it"):
        chat_text("hi", "{{ bos_token }}")
