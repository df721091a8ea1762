"""The JSON API in process, and what it refuses."""

import io
import struct
import threading
import time
import zipfile
import zlib

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from infssm import Learner
from infssm.integrations.serve import Limits, create_app
from tests.learner.taught import digits

HERE = "http://127.0.0.1:7860"
SMALL = Limits(request_bytes=200_000, file_bytes=100_000, files=40, json_bytes=2000, waiting=1)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pictures(label, start=60, count=1):
    """PNG files of a digit."""
    return [png(pixels) for pixels in digits(label, start, count)]


STRIPES = png(np.tile(np.uint8([0, 255]), (8, 4)))


def upload(*contents, name="photo.png"):
    return [("files", (name, content, "image/png")) for content in contents]


def wait(client, answer):
    assert answer.status_code == 202, answer.text
    while (job := client.get(f"/api/jobs/{answer.json()['id']}").json())["state"] in ("waiting", "running"):
        time.sleep(0.02)
    return job


def new_learner(folder):
    return Learner("vim_nano", weights="omniglot", folder=folder)


@pytest.fixture
def client(tmp_path):
    with TestClient(create_app(new_learner(tmp_path / "learner"), limits=SMALL), base_url=HERE) as client:
        yield client


def teach(client, label, digit, count=30):
    answer = client.post("/api/learn", data={"label": label}, files=upload(*pictures(digit, 0, count)))
    return wait(client, answer)


def test_teach_classify_forget_and_undo(client, tmp_path):
    state = client.get("/api/learner").json()
    assert (state["name"], state["version"], state["modality"], state["classes"]) == ("learner", 0, None, [])
    answer = client.post("/api/predict", files=upload(STRIPES))
    assert answer.status_code == 409
    assert "teach it" in answer.json()["detail"]

    assert teach(client, "zero", 0) | {"id": ""} == {
        "id": "", "kind": "learn", "label": "zero", "state": "done", "progress": 1.0, "message": "", "version": 1,
    }  # fmt: skip
    assert teach(client, "one", 1)["version"] == 2
    assert teach(client, "four", 4)["version"] == 3
    state = client.get("/api/learner").json()
    assert (state["classes"], state["previous"]) == (["zero", "one", "four"], 2)
    assert [lesson["samples"] for lesson in state["history"]] == [{"zero": 30}, {"one": 30}, {"four": 30}]

    files = upload(*pictures(0), *pictures(4), STRIPES)
    answer = client.post("/api/predict", files=files).json()
    expected = Learner.load(tmp_path / "learner").predict([digits(0, 60, 1)[0], digits(4, 60, 1)[0]])
    assert answer["version"] == 3
    for found, prediction in zip(answer["predictions"], expected, strict=False):
        assert (found["label"], found["known"]) == (prediction.label, prediction.known)
        assert found["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)
    assert [found["label"] for found in answer["predictions"]][:2] == ["zero", "four"]
    assert not answer["predictions"][2]["known"]
    one = client.post("/api/predict?top=1", files=files).json()["predictions"][0]
    assert list(one["probabilities"]) == ["zero"]

    assert wait(client, client.post("/api/undo"))["version"] == 2
    assert client.get("/api/learner").json()["classes"] == ["zero", "one"]
    assert wait(client, client.post("/api/forget", json={"label": "zero"}))["state"] == "done"
    state = client.get("/api/learner").json()
    assert (state["classes"], state["previous"]) == (["one"], 0)
    assert Learner.load(tmp_path / "learner").classes == ("one",)


def test_changes_of_another_process_are_noticed(client, tmp_path):
    teach(client, "zero", 0, 6)
    other = Learner.load(tmp_path / "learner")
    other.learn(list(digits(1, 0, 6)), "one")
    answer = client.post("/api/predict", files=upload(*pictures(1))).json()
    assert (answer["version"], answer["predictions"][0]["label"]) == (2, "one")
    other.undo()
    assert client.get("/api/learner").json()["classes"] == ["zero"]
    (tmp_path / "learner" / "learner.json").write_text("{")
    answer = client.get("/api/learner")
    assert answer.status_code == 503
    assert "learner.json is damaged" in answer.json()["detail"]


def test_a_change_that_fails_leaves_the_version_before(client):
    teach(client, "zero", 0, 4)
    two = upload(STRIPES, STRIPES)
    for path, sent, says in (
        ("learn", {"data": {"label": "one"}, "files": upload(STRIPES)}, "needs at least two"),
        ("learn", {"data": {"label": "ZERO"}, "files": two}, "differ in case"),
        ("learn", {"data": {"label": "../one"}, "files": two}, "not a name"),
        ("undo", {}, "no version before"),
        ("forget", {"json": {"label": "zero"}}, "all classes of the learner"),
    ):
        job = wait(client, client.post(f"/api/{path}", **sent))
        assert (job["state"], says in job["message"]) == ("failed", True), job["message"]
    state = client.get("/api/learner").json()
    assert (state["version"], state["classes"], state["jobs"]) == (1, ["zero"], [])


def test_series_are_taught_and_classified(tmp_path):
    draw = np.random.default_rng(0)

    def files(frequency, count, suffix):
        for _ in range(count):
            x = np.sin(frequency * np.arange(20))[:, None] + 0.1 * draw.normal(size=(20, 1))
            file = io.BytesIO()
            np.save(file, x) if suffix == "npy" else np.savetxt(file, x, delimiter=",")
            yield "files", (f"one.{suffix}", file.getvalue())

    settings = {"model": {"options": {"d_model": 16, "n_layer": 1}}, "train": {"epochs": 1, "threads": 1}}
    learner = Learner("mamba_nano", folder=tmp_path / "learner", settings=settings)
    x = np.stack([np.sin(f * np.arange(20))[:, None] for f in (0.2, 0.2, 1.5, 1.5)])
    learner.learn(x, ["slow", "slow", "fast", "fast"])
    with TestClient(create_app(learner), base_url=HERE) as client:
        for suffix in ("npy", "csv"):
            answer = client.post("/api/learn", data={"label": suffix}, files=list(files(0.6, 4, suffix)))
            assert wait(client, answer)["message"] == ""
        assert client.post("/api/predict", files=list(files(0.6, 2, "csv"))).status_code == 200
        assert client.post("/api/predict", files=upload(STRIPES)).status_code == 415


def large_png(side, data=b""):
    """A grey PNG of side x side pixels by its header; it holds none unless given, since nobody should look for them."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data, 1)) + chunk(b"IEND", b"")


def bomb():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.png", bytes(20_000_000))
    return file.getvalue()


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'


@pytest.mark.parametrize(
    ("files", "status", "says"),
    [
        ([], 415, "multipart"),
        (upload(), 415, "multipart"),
        (upload(b""), 422, "empty"),
        (upload(bomb()), 415, "archives are not accepted"),
        (upload(SVG, name="drawing.svg"), 415, "SVG"),
        (upload(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), 415, "formats"),
        (upload(large_png(10_000)), 413, "megapixels"),
        (upload(large_png(60_000)), 413, "megapixels"),
        (upload(STRIPES[:45]), 422, "damaged"),
        (upload(bytes(150_000)), 413, "larger than"),
        (upload(*[STRIPES] * 41), 400, "Too many files"),
        (upload(bytes(250_000)), 413, "the request is larger"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_uploads_are_refused_by_both_routes(client, files, status, says):
    for path in ("/api/predict", "/api/learn"):
        answer = client.post(path, data={"label": "zero"} if path.endswith("learn") else None, files=files)
        assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
    assert client.get("/api/learner").json()["jobs"] == []


@pytest.mark.parametrize("name", ["../../escaped.png", "/etc/passwd", "C:\\windows\\a.png", "a\nb.png", "x" * 500])
def test_the_name_of_a_file_is_no_path(client, name, tmp_path):
    teach(client, "zero", 0, 4)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    answer = client.post("/api/predict", files=upload(STRIPES, name=name))
    assert answer.status_code == 200
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("label", ["", "  ", "a\nb", "x" * 101])
def test_labels_that_are_refused(client, label):
    answer = client.post("/api/learn", data={"label": label}, files=upload(STRIPES))
    assert answer.status_code == 422
    assert "label" in answer.json()["detail"]


def test_a_label_with_html_is_text(client):
    label = "<img src=x onerror=alert(1)>"
    assert teach(client, label, 0, 4)["state"] == "done"
    answer = client.get("/api/learner")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["classes"] == [label]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:7860"}, 403),
        ({"host": "192.168.0.7:7860"}, 403),
        ({"host": "[::1"}, 400),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 403),
        ({"origin": "http://[::1"}, 400),
        ({"origin": HERE}, 200),
        ({"host": "localhost:7860"}, 200),
        ({"host": "[::1]:7860"}, 200),
    ],
)
def test_other_hosts_and_origins_are_refused(client, headers, status):
    answer = client.get("/api/learner", headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers
    refused = client.post("/api/undo", headers=headers)
    assert refused.status_code == (202 if status == 200 else status)


def test_a_token_is_needed_where_there_is_one(tmp_path):
    app = create_app(new_learner(tmp_path / "learner"), host="0.0.0.0", token="secret")
    with TestClient(app, base_url="http://192.168.0.7:7860") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            answer = client.get("/api/learner", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.post("/api/learn?token=secret", files=upload(STRIPES)).status_code == 401
        assert client.get("/").status_code == client.get("/docs").status_code == 200
        right = {"authorization": "Bearer secret"}
        assert client.get("/api/learner", headers=right).status_code == 200
        assert client.get("/api/learner", headers=right | {"host": "evil.example"}).status_code == 403


def test_other_bodies_are_small(client):
    for content in (bytes(3000), (bytes(1000) for _ in range(3))):
        answer = client.post("/api/forget", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
    assert client.post("/api/forget", json={"name": "zero"}).json()["detail"] == "body.label: Field required"
    assert client.post("/api/forget", json={"label": "zero"}).status_code == 404
    assert client.get("/api/jobs/none").status_code == 404


def test_too_many_changes_are_refused(client, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(Learner, "undo", lambda _: free.wait(60))
    answers = [client.post("/api/undo") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    free.set()
    assert wait(client, answers[1])["state"] == "done"


def test_pages_load_nothing_from_elsewhere(client):
    for path in ("/", "/docs"):
        answer = client.get(path)
        assert "sha256-" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "//" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {f"/api/{name}" for name in ("learner", "predict", "learn", "forget", "undo", "jobs/{id}")}
