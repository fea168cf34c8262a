"""The command line: argv, file and environment -> Config -> run. Exit status 2 for bad usage or configuration.

Each command imports what it runs: `warmfold sessions` needs no server, `--version` needs nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from proxy import __version__

if TYPE_CHECKING:
    from proxy.config import Config, Fault

_ENVIRON: Final[Mapping[str, str]] = os.environ  # noqa: TID251 - read here, handed on from here
_ADMIN: Final = "http://127.0.0.1:9090"
_LIMIT: Final = 50
_LIMIT_HELP: Final = "Sessions at most."
_FULL_HELP: Final = "All columns, however wide the terminal is."
_BAD_CONFIGURATION: Final = 2


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of `sessions` that were given before the command: each command takes them where it has none of its own."""

    admin: str
    limit: int
    full: bool


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="warmfold")
def main() -> None:
    """A caching reverse proxy for OpenAI-compatible APIs that compacts long conversations by replaying the warm request."""


@main.command(short_help="Run the proxy.")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration file (TOML). None is read unasked.",
)
@click.option("--upstream", metavar="URL", help="The provider's base URL: upstream.base_url.")
@click.option("--host", metavar="H", help="Address to listen on: server.host.")
@click.option("--port", type=int, metavar="P", help="Port to listen on: server.port.")
@click.option("--store", metavar="URL", help="Where sessions live: store.url.")
@click.option("--window", type=int, metavar="TOKENS", help="The models' context length: compaction.max_context_tokens.")
@click.option("--workers", type=int, metavar="N", help="Processes: server.workers (1 in this version).")
def serve(path: Path | None, **given: object) -> None:
    """Run the proxy. Flags win over WARMFOLD_SECTION__KEY in the environment, that over the file."""
    from proxy.config.layers import FLAGS  # noqa: PLC0415 - see above

    config = _loaded(path, {key: given[flag.removeprefix("--")] for key, flag in FLAGS.items()})
    from proxy.server import run  # noqa: PLC0415

    run(config, path)


@main.command(short_help="Validate a configuration and print what is in effect.")
@click.argument("path", type=click.Path(path_type=Path), metavar="[FILE]", required=False)
def check(path: Path | None) -> None:
    """Validate FILE together with the environment, or the environment alone, and print the effective configuration.

    Secrets are not printed. What only a start can show is not looked at: a port in use, a directory that is not ours.
    """
    from proxy.check import report  # noqa: PLC0415

    report(path, _loaded(path, {}))


@main.command(short_help="Show compaction on this machine, without key or network.")
def demo() -> None:
    """Show compaction on this machine: a provider, the proxy and a client at once, without key or network."""
    from proxy.demo.run import demo as run_demo  # noqa: PLC0415

    sys.exit(run_demo())


@main.group(invoke_without_command=True, short_help="Look at sessions of a running proxy and act on them.")
@click.option("--admin", metavar="URL", default=_ADMIN, show_default=True, help="The proxy's admin listener.")
@click.option("--limit", type=click.IntRange(min=1), default=_LIMIT, show_default=True, metavar="N", help=_LIMIT_HELP)
@click.option("--full", is_flag=True, help=_FULL_HELP)
@click.pass_context
def sessions(context: click.Context, admin: str, limit: int, full: bool) -> None:
    """Look at sessions and act on them, through a running proxy's admin listener; list them where no command is given.

    The token is taken from WARMFOLD_ADMIN_TOKEN.
    """
    context.obj = _Asked(admin, limit, full)
    if context.invoked_subcommand is None:
        context.invoke(list_)


_admin = click.option("--admin", metavar="URL", help=f"The proxy's admin listener.  [default: {_ADMIN}]")
_id = click.argument("id", metavar="ID")


@sessions.command("list")
@_admin
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help=f"{_LIMIT_HELP}  [default: {_LIMIT}]")
@click.option("--full", is_flag=True, help=_FULL_HELP)
@click.pass_obj
def list_(asked: _Asked, admin: str | None, limit: int | None, full: bool) -> None:
    """List sessions, the one with the newest turn first."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.list_sessions(admin or asked.admin, _token(), limit or asked.limit, full=full or asked.full))


@sessions.command()
@_id
@_admin
@click.option("--full", is_flag=True, help=_FULL_HELP)
@click.pass_obj
def show(asked: _Asked, admin: str | None, full: bool, id: str) -> None:
    """Show one session: its facts, checkpoints and journal."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.show(admin or asked.admin, _token(), id, full=full or asked.full))


@sessions.command()
@_id
@_admin
@click.option(
    "--credential-env",
    metavar="NAME",
    default="OPENAI_API_KEY",
    show_default=True,
    help="Variable with the key of the session's client, which the call to the provider needs. Unset: the proxy has a key of its own.",
)
@click.pass_obj
def compact(asked: _Asked, admin: str | None, id: str, credential_env: str) -> None:
    """Compact a session now and wait for it."""
    from proxy.admin import client  # noqa: PLC0415

    credential = _ENVIRON.get(credential_env, "").strip()
    sys.exit(client.compact(admin or asked.admin, _token(), id, credential, variable=credential_env))


@sessions.command()
@_id
@_admin
@click.pass_obj
def undo(asked: _Asked, admin: str | None, id: str) -> None:
    """Stop using the newest checkpoint of a session."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.undo(admin or asked.admin, _token(), id))


@sessions.command()
@_id
@_admin
@click.pass_obj
def delete(asked: _Asked, admin: str | None, id: str) -> None:
    """Forget a session and its checkpoints.

    The texts of its messages run out later, by themselves. DELETE /tenants/HASH of the admin listener removes all of a tenant at once.
    """
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.delete(admin or asked.admin, _token(), id))


def _loaded(path: Path | None, flags: Mapping[str, object]) -> Config:
    """What `serve` would start with, and `check` calls valid. Ends the process with all faults where there are any."""
    from proxy.config import ConfigError, load  # noqa: PLC0415

    try:
        config = load(path, _ENVIRON, flags)
    except ConfigError as error:
        _refuse(error.faults)
    from proxy.refusals import store_url  # noqa: PLC0415

    if faults := store_url(config):
        _refuse(faults)
    return config


def _refuse(faults: Iterable[Fault]) -> NoReturn:
    for fault in faults:
        click.echo(str(fault), err=True)
    sys.exit(_BAD_CONFIGURATION)


def _token() -> str:
    return _ENVIRON.get("WARMFOLD_ADMIN_TOKEN", "").strip()


if __name__ == "__main__":
    main(prog_name="warmfold")
