"""HTML that is right by construction: a tree of elements, which is escaped when it is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias
from xml.etree.ElementTree import Element, tostring

Child: TypeAlias = "Element | str | int | Iterable[Child] | None"
# What no HTML may hold; a lone surrogate has no UTF-8.
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Element:
    """An element. Texts among `children` stay text; an attribute of None is left out.

    `_` in names of attributes stands for `-`, one at the end for nothing; numbers have a decimal.
    """
    element = Element(name)
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.1f}" if isinstance(value, float) else str(value)
            element.set(key.rstrip("_").replace("_", "-"), _legal(text))
    _add(element, children)
    return element


def _add(element: Element, children: Child) -> None:
    if children is None:
        return
    if isinstance(children, Element):
        element.append(children)
    elif isinstance(children, str | int):
        text = _legal(str(children))
        if len(element):
            element[-1].tail = (element[-1].tail or "") + text
        else:
            element.text = (element.text or "") + text
    else:
        for child in children:
            _add(element, child)


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)


def document(html: Element) -> str:
    """The page as text."""
    return f"<!doctype html>\n{tostring(html, encoding='unicode', method='html')}\n"
