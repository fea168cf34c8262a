"""Which URLs open a store, and what is said of those that do not."""

from __future__ import annotations

import pytest

from proxy.config import ConfigError
from proxy.store.connect import open_store
from store.builders import Client, Settings, Troubles, talk
from store.gate import gate_to


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "redis+cluster://user:secret@host:7000",
            "found redis+cluster://***@host:7000; allowed: embedded: or a URL that begins with redis://, ",
        ),
        (
            "redis+sentinel://host:26379/name",
            "found redis+sentinel://host:26379/name; allowed: embedded: or a URL that begins with redis://, ",
        ),
        ("http://host", "allowed: embedded: or"),
        ("redis://host:port", "a URL whose port, database and options redis-py knows"),
        ("redis://host?colour=secret", "a URL whose port, database and options redis-py knows"),
    ],
)
async def test_a_url_that_opens_nothing_is_refused_by_its_setting(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await open_store(Settings(url), Troubles())
    assert str(refused.value).startswith("configuration: store.url: found ")
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_network_url_with_options_of_its_own_keeps_our_deadlines(url: str) -> None:
    client = Client(talk(3))
    async with gate_to(url) as gate:
        store = await open_store(
            Settings(f"{gate.url}/3?socket_timeout=9&decode_responses=true&max_connections=1"), Troubles()
        )
        pool = store._line.client.connection_pool  # type: ignore[attr-defined]
        options = pool.connection_kwargs
        assert (options["socket_timeout"], options["decode_responses"], options["db"], pool.max_connections) == (
            None,
            False,
            3,
            32,
        )
        assert await store.save(client.saved())
        assert await store.session(client.id) is not None
        assert await store.delete_tenant(client.tenant) == 9
        await store.close()


async def test_a_unix_url_is_percent_encoded(tmp_path_factory: pytest.TempPathFactory, url: str) -> None:
    link = tmp_path_factory.mktemp("with space") / "ü?.sock"
    link.symlink_to(url.removeprefix("unix://"))
    store = await open_store(Settings(f"unix://{str(link).replace(' ', '%20').replace('?', '%3F')}"), Troubles())
    assert await store.ping()
    await store.close()
