"""Variables that begin like ours and are none: a misspelled one does nothing, and nobody would notice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from difflib import get_close_matches
from typing import Final

from proxy.config.fault import Fault
from proxy.config.layers import FLAGS
from proxy.config.translate import LISTS, PREFIX, TABLES, fields, variable

_LISTS: Final = frozenset(f"{PREFIX}{section}".upper() for section in LISTS)
_TOKEN: Final = "WARMFOLD_ADMIN_TOKEN"
"""What `warmfold sessions` sends, whatever admin.token_env says."""
_TESTS: Final = frozenset({"WARMFOLD_CONVERSATIONS", "WARMFOLD_WIRE", "WARMFOLD_PROPERTIES"})

# Kubernetes and Docker tell every container where the services beside it are. One that is called warmfold, or begins so, sets these:
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE: Final = re.compile(
    r"WARMFOLD_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:ADDR|PORT|PROTO))?)"
)
_LINK: Final = re.compile(r"WARMFOLD_(?:\w+_)?PORT")
_LINK_VALUE: Final = re.compile(r"(?:tcp|udp|sctp)://")


def strays(environ: Mapping[str, str], named: Set[str]) -> Iterator[Fault]:
    """A fault for each variable that begins with WARMFOLD_ and means nothing. `named`: those that the configuration names.

    WARMFOLD_SECTION__KEY is not judged here: the key's own table does that. Values are not shown.
    """
    for name, value in environ.items():
        if not name.startswith(PREFIX) or "__" in name or name in _LISTS | _TESTS | named | {_TOKEN}:
            continue
        if _SERVICE.fullmatch(name) or (_LINK.fullmatch(name) and _LINK_VALUE.match(value)):
            continue
        allowed = f"{PREFIX}SECTION__KEY with two underscores, {', '.join(sorted(_LISTS))}, or one that a key ending in _env names"
        near = _meant(name)
        yield Fault(name, "", "a variable that sets nothing", allowed + (f", did you mean {near}?" if near else ""))


def _meant(name: str) -> str | None:
    """The variable that was probably meant: the section is missing, or an underscore."""
    ours = [variable(section, key) for section in TABLES if section not in LISTS for key in fields(section)]
    by_spelling = {own.replace("__", "_"): own for own in ours} | {own: own for own in (*_LISTS, _TOKEN)}
    by_key = {f"{PREFIX}{own.partition('__')[2]}": own for own in reversed(ours)}  # the first section that has the key
    by_flag = {f"{PREFIX}{flag.removeprefix('--')}".upper(): variable(*key.split(".")) for key, flag in FLAGS.items()}
    maps = (by_spelling, by_flag, by_key)
    for known in maps:
        if name in known:
            return known[name]
    for known in maps:
        if near := get_close_matches(name, known, 1, cutoff=0.8):
            return known[near[0]]
    return None
