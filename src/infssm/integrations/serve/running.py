"""Start the server."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from infssm.errors import ConfigError
from infssm.integrations.serve.app import create_app
from infssm.learner import Learner


def serve(learner: Learner, *, host: str, port: int, token: str | None, say: Callable[[str], None]) -> None:
    """Serve until interrupted; ``say`` is given the address once the port is open."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}; try --port 0") from None
    with listening:
        name = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
        address = f"http://{name}:{listening.getsockname()[1]}/"
        say(f"serving {learner.folder} at {address}{f'?token={token}' if token else ''} (Ctrl-C ends it)")
        app = create_app(learner, host=host, token=token)
        config = uvicorn.Config(
            app, http="h11", ws="none", access_log=False, log_level="warning", timeout_graceful_shutdown=5
        )
        uvicorn.Server(config).run(sockets=[listening])
