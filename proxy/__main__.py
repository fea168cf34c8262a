"""The command line: argv, file and environment -> Config -> run. Exit status 2 for bad usage or configuration.

Each command imports what it runs: `warmfold sessions` needs no server, `--version` needs nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from proxy import __version__

if TYPE_CHECKING:
    from proxy.config import Config, Fault

_ENVIRON: Final[Mapping[str, str]] = os.environ  # noqa: TID251 - read here, handed on from here
_ADMIN: Final = "http://127.0.0.1:9090"
_BAD_CONFIGURATION: Final = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="warmfold")
def main() -> None:
    """A caching reverse proxy for OpenAI-compatible APIs that compacts long conversations by replaying the warm request."""


@main.command()
@click.option("--config", "path", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file (TOML).")
@click.option("--upstream", metavar="URL", help="The provider's base URL: upstream.base_url.")
@click.option("--host", metavar="H", help="Address to listen on: server.host.")
@click.option("--port", type=int, metavar="P", help="Port to listen on: server.port.")
@click.option("--store", metavar="URL", help="Where sessions live: store.url.")
@click.option("--workers", type=int, metavar="N", help="Processes: server.workers.")
def serve(path: Path | None, **given: object) -> None:
    """Run the proxy. Flags win over WARMFOLD_SECTION__KEY in the environment, that over the file."""
    from proxy.config import Fault  # noqa: PLC0415 - see above
    from proxy.config.layers import FLAGS  # noqa: PLC0415

    config = _loaded(path, {key: given[flag.removeprefix("--")] for key, flag in FLAGS.items()})
    if config.server.workers > 1:
        allowed = "1 for now (several workers come with a later release)"
        _refuse([Fault(config.origin("server.workers"), "server.workers", str(config.server.workers), allowed)])
    from proxy.server import run  # noqa: PLC0415

    run(config)


@main.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
def check(path: Path) -> None:
    """Validate FILE and print the effective configuration, with what the environment sets. Secrets are not printed."""
    from proxy.check import report  # noqa: PLC0415

    report(path, _loaded(path, {}))


@main.command()
def demo() -> None:
    """Show compaction on this machine: a provider, the proxy and a client at once, without key or network."""
    from proxy.demo.run import demo as run_demo  # noqa: PLC0415

    sys.exit(run_demo())


@main.group(invoke_without_command=True)
@click.option("--admin", metavar="URL", default=_ADMIN, show_default=True, help="The proxy's admin listener.")
@click.pass_context
def sessions(context: click.Context, admin: str) -> None:
    """Look at sessions and act on them, through a running proxy's admin listener; list them where no command is given.

    The token is taken from WARMFOLD_ADMIN_TOKEN.
    """
    context.obj = admin
    if context.invoked_subcommand is None:
        context.invoke(list_)


_admin = click.option("--admin", metavar="URL", help=f"The proxy's admin listener.  [default: {_ADMIN}]")
_id = click.argument("id", metavar="ID")


@sessions.command("list")
@_admin
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="N", help="Sessions at most."
)
@click.pass_obj
def list_(group_admin: str, admin: str | None, limit: int) -> None:
    """List sessions."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.list_sessions(admin or group_admin, _token(), limit))


@sessions.command()
@_id
@_admin
@click.pass_obj
def show(group_admin: str, admin: str | None, id: str) -> None:
    """Show one session: its facts, checkpoints and journal."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.show(admin or group_admin, _token(), id))


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
def compact(group_admin: str, admin: str | None, id: str, credential_env: str) -> None:
    """Compact a session now and wait for it."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.compact(admin or group_admin, _token(), id, _ENVIRON.get(credential_env, "").strip()))


@sessions.command()
@_id
@_admin
@click.pass_obj
def undo(group_admin: str, admin: str | None, id: str) -> None:
    """Stop using the newest checkpoint of a session."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.undo(admin or group_admin, _token(), id))


@sessions.command()
@_id
@_admin
@click.pass_obj
def delete(group_admin: str, admin: str | None, id: str) -> None:
    """Forget a session and its checkpoints."""
    from proxy.admin import client  # noqa: PLC0415

    sys.exit(client.delete(admin or group_admin, _token(), id))


def _loaded(path: Path | None, flags: Mapping[str, object]) -> Config:
    from proxy.config import ConfigError, load  # noqa: PLC0415

    try:
        return load(path, _ENVIRON, flags)
    except ConfigError as error:
        _refuse(error.faults)


def _refuse(faults: Iterable[Fault]) -> NoReturn:
    for fault in faults:
        click.echo(str(fault), err=True)
    sys.exit(_BAD_CONFIGURATION)


def _token() -> str:
    return _ENVIRON.get("WARMFOLD_ADMIN_TOKEN", "").strip()


if __name__ == "__main__":
    main(prog_name="warmfold")
