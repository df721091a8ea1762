"""The application: the page, the JSON API and its description; and the server that runs it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import anyio
import uvicorn
from anyio.to_thread import run_sync
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile

from infssm.data.facts import SampleLike
from infssm.errors import ConfigError, InfssmError
from infssm.integrations.serve.guard import Guard, Limits
from infssm.integrations.serve.jobs import Job, Service
from infssm.integrations.serve.uploads import Sample, store
from infssm.learner import Learner, Lesson
from infssm.learner.events import Control, Listener


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


class LearnerInfo(BaseModel):
    """The learner as it stands."""

    name: str = Field(description="The name of its folder.")
    version: int
    previous: int = Field(description="The version that undo goes back to; 0 for none.")
    modality: str | None = Field(description="images, series or tokens; null before the first lesson.")
    classes: list[str]
    history: list[Lesson] = Field(description="The lessons, oldest first.")
    jobs: list[Job] = Field(description="Changes that run or wait.")


class FilePrediction(BaseModel):
    """The prediction for one file."""

    file: str
    label: str = Field(description="The most probable class.")
    known: bool = Field(description="False for a sample unlike every class that was taught.")
    probabilities: dict[str, float] = Field(description="Of the most probable classes, the first one first.")


class Predictions(BaseModel):
    """Predictions of one request, all by the same version of the learner."""

    version: int
    predictions: list[FilePrediction]


class Forget(BaseModel):
    """The class to forget."""

    label: str = Field(max_length=200)


def create_app(
    learner: Learner, *, host: str = "127.0.0.1", token: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """The web application of a learner that is stored in a folder.

    Args:
        learner: classifies samples; its ``folder`` is where changes are stored. It may know nothing yet.
        host: the address the server listens on.
        token: what clients must send as ``Authorization: Bearer TOKEN``; None for no check.
        limits: bounds of requests.
    """
    limits = limits or Limits()
    service = Service(learner, limits.waiting)
    scratch = tempfile.TemporaryDirectory(prefix="infssm-serve-")
    # One batch at a time: PyTorch uses all cores for it. Two decoders bound the memory that large images take.
    predicting, storing = anyio.CapacityLimiter(1), anyio.CapacityLimiter(2)
    opening = anyio.CapacityLimiter(1)  # many requests that notice one change open it once

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_sync(service.close)
        scratch.cleanup()

    app = FastAPI(
        title="infssm serve",
        version=version("infssm"),
        description="Teach a learner new classes and classify samples.",
        docs_url=None,  # the default one loads its scripts from another server
        redoc_url=None,
        lifespan=lifespan,
        responses={"4XX": {"model": Problem, "description": "Refused; `detail` names the reason."}},
    )
    app.add_middleware(Guard, host=host, token=token, limits=limits)
    app.add_exception_handler(RequestValidationError, _validation_problem)

    @contextlib.asynccontextmanager
    async def form_of(request: Request) -> AsyncIterator[FormData]:
        """The request's form, its files on disk."""
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise HTTPException(415, "send the files as multipart/form-data")
        async with request.form(max_files=limits.files, max_fields=10, max_part_size=4096) as form:
            yield form

    async def refreshed() -> Learner:
        try:
            return await run_sync(service.refreshed, limiter=opening)
        except (InfssmError, OSError) as error:
            raise HTTPException(503, str(error)) from None

    async def stored(form: FormData, folder: Path, learner: Learner) -> list[Sample]:
        files = [value for value in form.getlist("files") if isinstance(value, UploadFile)]
        return await run_sync(store, files, folder, learner.modality, limits, limiter=storing)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return _html("page.html")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> HTMLResponse:
        return _html("docs.html")

    @app.get("/api/learner")
    async def learner_info() -> LearnerInfo:
        """The classes, the history, and the changes in progress."""
        current = await refreshed()
        return LearnerInfo(
            name=Path(current.folder or "").resolve().name,
            version=current.version,
            previous=current.previous,
            modality=current.modality,
            classes=list(current.classes),
            history=list(current.history),
            jobs=service.unfinished,
        )

    @app.post("/api/predict", openapi_extra=_form(files="Samples to classify."))
    async def predict(request: Request, top: Annotated[int, Query(ge=1, le=1000)] = 5) -> Predictions:
        """Classify files. All predictions of a response come from the version it names."""
        async with form_of(request) as form:
            with tempfile.TemporaryDirectory(dir=scratch.name) as folder:
                current = await refreshed()  # the one reference that this response uses
                samples = await stored(form, Path(folder), current)
                if not current.classes:
                    raise HTTPException(409, "the learner knows no class yet: teach it one first")
                paths: list[SampleLike] = [sample.path for sample in samples]
                try:
                    found = await run_sync(lambda: current.predict(paths), limiter=predicting)
                except InfssmError as error:
                    raise HTTPException(422, _with_names(error, samples)) from None
        return Predictions(
            version=current.version,
            predictions=[
                FilePrediction(
                    file=sample.name,
                    label=p.label,
                    known=p.known,
                    probabilities=dict(list(p.probabilities.items())[:top]),
                )
                for sample, p in zip(samples, found, strict=True)
            ],
        )

    @app.post("/api/learn", status_code=202, openapi_extra=_form(label="The class.", files="Samples of it."))
    async def learn(request: Request) -> Job:
        """Teach one class, new or known, from files. Returns the job at once; ask for it until it is done or failed."""
        async with form_of(request) as form:
            label = form.get("label")
            if not isinstance(label, str) or not label.strip():
                raise HTTPException(422, "the form field 'label' must name the class")
            label = label.strip()
            if len(label) > 100 or not label.isprintable():
                raise HTTPException(422, "a label has at most 100 characters and no line breaks")
            folder = tempfile.TemporaryDirectory(dir=scratch.name)
            try:
                samples = await stored(form, Path(folder.name), await refreshed())

                def change(learner: Learner, listen: Listener, control: Control) -> None:
                    try:
                        learner.learn([sample.content for sample in samples], label, listen=listen, control=control)
                    except InfssmError as error:
                        raise type(error)(_with_names(error, samples)) from error

                return service.submit(Job(kind="learn", label=label), change, folder.cleanup)
            except BaseException:
                folder.cleanup()
                raise

    @app.post("/api/forget", status_code=202)
    async def forget(body: Forget) -> Job:
        """Remove a class from everything that is stored. Returns the job."""
        if body.label not in service.learner.classes:
            raise HTTPException(404, f"there is no class {body.label!r}")
        return service.submit(Job(kind="forget", label=body.label), lambda learner, *_: learner.forget(body.label))

    @app.post("/api/undo", status_code=202)
    async def undo() -> Job:
        """Go back to the version before the last change. Returns the job."""
        return service.submit(Job(kind="undo"), lambda learner, *_: learner.undo())

    @app.get("/api/jobs/{id}")
    async def job(id: str) -> Job:
        """How far a change is."""
        found = service.job(id)
        if found is None:
            raise HTTPException(404, "there is no such job: it was finished long ago, or the server was started again")
        return found

    return app


def _with_names(error: InfssmError, samples: list[Sample]) -> str:
    """An error with the names of files as the client knows them instead of where they are stored."""
    message = str(error)
    for sample in samples:
        message = message.replace(str(sample.path), sample.name)
    return message


def _form(files: str, label: str | None = None) -> dict[str, Any]:
    """The OpenAPI description of a form, which is read by hand so that its parts can be limited."""
    fields: dict[str, Any] = {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}}
    fields["files"]["description"] = files
    if label is not None:
        fields = {"label": {"type": "string", "maxLength": 100, "description": label}, **fields}
    schema = {"type": "object", "required": list(fields), "properties": fields}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _html(name: str) -> HTMLResponse:
    """A page of this package; it may use only its own script and style, and load nothing."""
    text = (Path(__file__).parent / name).read_text("utf-8")
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    policy += ["connect-src 'self'", "img-src 'self' blob: data:"]
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy.append(f"{tag}-src 'sha256-{digest}'")
    return HTMLResponse(text, headers={"content-security-policy": "; ".join(policy)})


async def _validation_problem(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001 - a handler's signature
    assert isinstance(error, RequestValidationError)
    lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return JSONResponse({"detail": "; ".join(lines)}, 422)


def run_server(learner: Learner, *, host: str, port: int, token: str | None, say: Callable[[str], None]) -> None:
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
