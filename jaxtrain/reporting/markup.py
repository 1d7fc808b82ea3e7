"""Builds HTML; all text that was not built here is escaped."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = {"img", "input", "br"}


class Html(str):
    """Markup that goes into the page unchanged; any other value is escaped."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """Escapes a value; leaves markup unchanged."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(values: Iterable[object], between: str = "") -> Html:
    """Escapes and joins several values."""
    return Html(html.escape(between).join(escaped(value) for value in values))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Builds an element.

    Args:
        attributes: ``class_`` is class, ``data_run`` is data-run. True gives an attribute without a
            value; False and None omit it.
    """
    opening = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        opening.append(name if value is True else f'{name}="{html.escape(str(value))}"')
    opened = Html(f"<{' '.join(opening)}>")
    return opened if tag in _VOID else Html(f"{opened}{joined(children)}</{tag}>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Builds a table that scrolls sideways on a narrow page; a row's first cell is its heading."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = (
        element(
            "tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])
        )
        for row in rows
    )
    above = element("thead", top) if head else ""
    built = element("table", above, element("tbody", *body))
    return element("div", built, class_="scrolls", tabindex="0")


def json_text(value: Any) -> Html:
    """Encodes JSON for a script element so that no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(text)
