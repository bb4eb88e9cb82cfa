"""Renders chat templates, which are Jinja programs in checkpoints, as transformers does."""

import datetime
import functools
import json
from types import ModuleType
from typing import Any

from ...errors import UnsupportedError


def chat_text(message: str, template: str | None, *, bos: str = "", eos: str = "") -> str:
    """A user message in a chat template, up to the answer.

    The template runs in Jinja's sandbox, for it is a part of the checkpoint.

    Args:
        message: the message.
        template: the template.
        bos: the text of the beginning-of-text token, `bos_token` in templates.
        eos: the text of the end-of-text token, `eos_token`.

    Raises:
        UnsupportedError: when there is no template, it fails, or jinja2 is not installed.

    >>> chat_text("Hello", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    '<user>Hello<assistant>'
    """
    if template is None:
        raise UnsupportedError("the checkpoint has no chat template; give the prompt as plain text")
    environment = _environment()
    values = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render(messages=[{"role": "user", "content": message}], **values)
    except Exception as error:  # a template may raise any exception
        raise UnsupportedError(f"the chat template fails: {error}; give the prompt as plain text (--no-chat)") from error


@functools.cache
def _environment() -> Any:
    """The environment in which transformers renders templates."""
    jinja2 = _jinja2()

    class Generation(jinja2.ext.Extension):  # type: ignore[name-defined, misc]
        """`{% generation %}`, which marks answers for training."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)  # local time, as there
    return environment


def _as_json(x: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    """JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, **settings)


def _jinja2() -> ModuleType:
    """The package `jinja2`."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise UnsupportedError("jinja2 is not installed; pip install fewbit[io] brings it") from error
    return jinja2
