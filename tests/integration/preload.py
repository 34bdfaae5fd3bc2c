"""What the fork server imports once for all children of the tests. Nothing here may start a thread or open UCX."""

import ucxx  # noqa: F401

import kvstream.transport.ucx  # noqa: F401
import tests.integration.worker  # noqa: F401
