"""The kinds of text a key may hold: what is allowed, in words, and how a value is shown without giving away a secret."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, PlainSerializer
from pydantic.fields import FieldInfo

STORE_SCHEMES: Final = ("redis", "rediss", "unix")
_SHOWN_CHARS: Final = 80

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")


def quoted(text: str) -> str:
    """The text in quotes on one line, control characters escaped, cut to 80 characters."""
    cut = text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in json.dumps(cut, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class Kind:
    """What a text must be, in words, and how it is shown."""

    allowed: str
    show: Callable[[str], str] = quoted


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this host. A name other than localhost counts as reachable from outside."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def masked_url(text: str) -> str:
    """A URL without its user info and query, of which only the presence shows: both may hold a password."""
    # Up to the last @, because a password may itself hold one, or a question mark. At worst too much is masked, never too little.
    start, at, rest = text.rpartition("@")
    scheme, slashes, _ = start.partition("://")
    bare, query, _ = rest.partition("?")
    return (f"{scheme}{slashes}***@" if slashes else "***@" if at else "") + bare + ("?***" if query else "")


def _show_url(text: str) -> str:
    return quoted(masked_url(text))


def _show_variable(text: str) -> str:
    # The usual mistake is the key itself instead of the name of its variable: such text is not echoed.
    return quoted(text) if not text or _VARIABLE.fullmatch(text) else "a text that is no variable name"


def _show_prompt(text: str) -> str:
    return f"a text of {len(text)} characters" if text else quoted(text)


def _host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # A name whose last part is a number is a mistyped address: 127.0.0.256.
        if not _HOST_NAME.fullmatch(text) or text.rpartition(".")[2].isdigit():
            raise
    return text


def _base_url(text: str) -> str:
    url = urlsplit(text)
    _ = url.port  # raises ValueError where it is not a port
    plain = text.isascii() and text.isprintable() and not any(c in text for c in ' ?#\\"<>') and "@" not in url.netloc
    if url.scheme not in ("http", "https") or not url.hostname or not plain:
        raise ValueError(text)
    return text.rstrip("/")


def _store_url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if text != "embedded:" and (scheme not in STORE_SCHEMES or not separator or not rest or not text.isprintable()):
        raise ValueError(text)
    return text


def _variable(text: str) -> str:
    if text and not _VARIABLE.fullmatch(text):
        raise ValueError(text)
    return text


def _header(text: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise ValueError(text)
    return text.lower()


def _header_or_empty(text: str) -> str:
    return _header(text) if text else text


def _filled(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(text)
    return text


Host = Annotated[str, AfterValidator(_host), Kind("an IP address or a host name, without a port")]
BaseUrl = Annotated[
    str, AfterValidator(_base_url), Kind("an http:// or https:// URL without user info, query or fragment", _show_url)
]
StoreUrl = Annotated[
    str,
    AfterValidator(_store_url),
    PlainSerializer(masked_url, return_type=str),
    Kind(
        f"embedded: or a URL that begins with {', '.join(f'{scheme}://' for scheme in STORE_SCHEMES)} (no other is built yet)",
        _show_url,
    ),
]
Variable = Annotated[
    str, AfterValidator(_variable), Kind("the name of an environment variable, or empty", _show_variable)
]
Header = Annotated[str, AfterValidator(_header), Kind("the name of an HTTP header")]
HeaderOrEmpty = Annotated[str, AfterValidator(_header_or_empty), Kind("the name of an HTTP header, or empty")]
Filled = Annotated[str, AfterValidator(_filled), Kind("a text that is not empty, on one line")]
Prompt = Annotated[str, Kind("text", _show_prompt)]


def shown(value: object, field: FieldInfo | None = None) -> str:
    """A value as TOML would have it, on one line; masked where it may hold a secret, and a table or an unknown text by its type only."""
    kind = kind_of(field) if field else Kind("")
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.15g}"
        case str():
            return kind.show(value)
        case Mapping():
            return "a table"
        case Sequence():
            return "[" + ", ".join(shown(item, field) for item in value[:8]) + (", …]" if len(value) > 8 else "]")
        case _:
            return quoted(str(value))[1:-1]


def kind_of(field: FieldInfo) -> Kind:
    """What a field's text must be; for a list, its items."""
    return _kind(field.annotation, field.metadata)


def _kind(annotation: object, metadata: Sequence[object]) -> Kind:
    for mark in metadata:
        if isinstance(mark, Kind):
            return mark
    if get_origin(annotation) is tuple:
        return _kind(get_args(annotation)[0], ())
    if get_origin(annotation) is Annotated:
        base, *marks = get_args(annotation)
        return _kind(base, marks)
    return Kind("text")


def allowed(field: FieldInfo) -> str:
    """What a field may hold, in words: `a number above 0 and at most 1`."""
    annotation = field.annotation
    options = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Literal:
        *first, last = map(quoted, options)
        return f"{', '.join(first)} or {last}"
    if get_origin(annotation) is tuple:
        return f"a list, each {kind_of(field).allowed}"
    plain = options[0] if options else annotation
    if plain is bool:
        return "true or false"
    if plain is int:
        return "a whole number" + _range(field.metadata)
    if plain is float:
        return "a number" + _range(field.metadata)
    return kind_of(field).allowed


def _range(metadata: Sequence[object]) -> str:
    low = next((m.ge for m in metadata if isinstance(m, Ge)), None)
    above = next((m.gt for m in metadata if isinstance(m, Gt)), None)
    high = next((m.le for m in metadata if isinstance(m, Le)), None)
    if low is not None:
        return f" from {low} to {high}" if high is not None else f" of at least {low}"
    if above is not None:
        return f" above {above}" + (f" and at most {high}" if high is not None else "")
    return ""
