"""HTML, where nothing gets in that was not escaped or made here."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = {"img", "input", "br"}


class Html(str):
    """Markup that goes into the page as it is; any other value is escaped."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """A value as text of the page; markup as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(parts: Iterable[object], between: str = "") -> Html:
    """Several values, one after the other."""
    return Html(html.escape(between).join(escaped(part) for part in parts))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An element.

    Args:
        tag: of it.
        children: text, which is escaped, or markup.
        attributes: ``class_`` is class, ``data_run`` is data-run; one that is True has no value,
            and one that is False or None is left out.
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        words.append(name if value is True else f'{name}="{html.escape(str(value))}"')
    opened = Html(f"<{' '.join(words)}>")
    return opened if tag in _VOID else Html(f"{opened}{joined(children)}</{tag}>")


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, class_: str = "numbers"
) -> Html:
    """A table that scrolls by itself where the page is narrow; the first cell names its row.

    Args:
        head: a cell for each column; none of it, no head.
        rows: their cells.
        class_: "numbers" sets all columns but the first flush right.
    """
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell) for cell in row[1:]),
        )
        for row in rows
    )
    above = element("thead", top) if head else ""
    made = element("table", above, element("tbody", *body), class_=class_)
    return element("div", made, class_="scrolls", tabindex="0")


def json_text(value: Any) -> Html:
    """JSON for the inside of a script element, which no text in it can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(text)
