"""``infssm serve``: a learner as a local web page and a JSON API. Needs the extra ``serve`` (FastAPI, uvicorn)."""

from infssm.integrations.serve.app import create_app
from infssm.integrations.serve.guard import Limits

__all__ = ["Limits", "create_app"]
