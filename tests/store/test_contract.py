"""The store's contract on every kind of server in conftest.SERVERS."""

from .contract import *  # noqa: F403  # pytest collects what it finds in this module
