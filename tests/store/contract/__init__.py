"""What a store promises, on whatever server it lies. test_contract.py runs all of it on each kind (conftest.SERVERS)."""

from .commits import *  # noqa: F403
from .damage import *  # noqa: F403
from .lock import *  # noqa: F403
from .lookup import *  # noqa: F403
from .operator import *  # noqa: F403
from .server import *  # noqa: F403
from .turns import *  # noqa: F403
