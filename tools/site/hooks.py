"""What MkDocs calls while it builds: the navigation, formulas as MathML, anchors as forges make them."""

import re
from collections.abc import Callable
from typing import Any

from tools.site.pages import navigation


def on_config(config: Any) -> Any:
    config["nav"] = navigation()
    return config


def formula(source: str, *_: Any, **__: Any) -> str:
    """A fence of LaTeX as MathML, a formula up to each double backslash at a line's end."""
    from latex2mathml.converter import convert

    lines = [line.strip() for line in re.split(r"\\\\\s*\n", source) if line.strip()]
    return f'<div class="formula">{"".join(f"<div>{_parts(line, convert)}</div>" for line in lines)}</div>'


def _parts(line: str, convert: Callable[..., str]) -> str:
    """What stands between wide spaces is a formula of its own, so that a narrow page can break the line there."""
    return "".join(convert(part.strip(), display="block") for part in line.split(r"\qquad"))


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading: lower case, punctuation dropped, spaces as hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)
