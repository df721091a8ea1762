"""The JSON API in process, and what it refuses."""

import io
import struct
import time
import zipfile
import zlib

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from infssm.integrations.serve import Limits, create_app
from tests.integrations.serve.fake import Learner

HERE = "http://127.0.0.1:7860"
SMALL = Limits(request_bytes=200_000, file_bytes=100_000, files=5, json_bytes=2000, waiting=1)


def picture(colour=(200, 30, 30), seed=0, size=16):
    noise = np.random.default_rng(seed).integers(-20, 20, (size, size, 3))
    file = io.BytesIO()
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def upload(*contents, name="photo.png"):
    return [("files", (name, content, "image/png")) for content in contents]


def wait(client, answer):
    assert answer.status_code == 202, answer.text
    while (job := client.get(f"/api/jobs/{answer.json()['id']}").json())["state"] in ("waiting", "running"):
        time.sleep(0.02)
    return job


@pytest.fixture
def client(tmp_path):
    Learner.wait = 0
    with TestClient(create_app(Learner(tmp_path / "learner"), limits=SMALL), base_url=HERE) as client:
        yield client


def teach(client, label, colour):
    files = upload(*(picture(colour, seed) for seed in range(4)))
    return wait(client, client.post("/api/learn", data={"label": label}, files=files))


def test_teach_classify_forget_and_undo(client):
    assert client.get("/api/learner").json()["classes"] == []
    answer = client.post("/api/predict", files=upload(picture()))
    assert answer.status_code == 409
    assert "teach it" in answer.json()["detail"]

    assert teach(client, "red", (200, 30, 30)) | {"id": ""} == {
        "id": "", "kind": "learn", "label": "red", "state": "done", "progress": 1.0, "message": "", "version": 1,
    }  # fmt: skip
    assert teach(client, "blue", (30, 30, 200))["version"] == 2
    state = client.get("/api/learner").json()
    assert state["classes"] == [{"label": "red", "samples": 4}, {"label": "blue", "samples": 4}]
    assert [lesson["samples"] for lesson in state["history"]] == [{"red": 4}, {"blue": 4}]

    files = upload(picture((190, 40, 30), 9), picture((30, 40, 190), 9), picture((20, 240, 20), 9))
    answer = client.post("/api/predict", files=files).json()
    assert answer["version"] == 2
    assert [(p["label"], p["known"]) for p in answer["predictions"]][:2] == [("red", True), ("blue", True)]
    assert not answer["predictions"][2]["known"]
    assert [share["label"] for share in answer["predictions"][0]["top"]] == ["red", "blue"]
    assert len(client.post("/api/predict?top=1", files=files).json()["predictions"][0]["top"]) == 1

    assert wait(client, client.post("/api/undo"))["state"] == "done"
    assert [c["label"] for c in client.get("/api/learner").json()["classes"]] == ["red"]
    assert wait(client, client.post("/api/forget", json={"label": "red"}))["state"] == "done"
    assert client.get("/api/learner").json()["classes"] == []


def test_a_lesson_that_fails_leaves_the_version_before(client):
    teach(client, "red", (200, 30, 30))
    job = teach(client, "bad", (0, 0, 0))
    assert (job["state"], job["message"]) == ("failed", "photo.png is bad: choose another")
    state = client.get("/api/learner").json()
    assert (state["version"], len(state["classes"])) == (1, 1)


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
        (upload(picture()[:200]), 422, "damaged"),
        (upload(bytes(150_000)), 413, "larger than"),
        (upload(*[picture()] * 6), 400, "Too many files"),
        (upload(bytes(250_000)), 413, "the request is larger"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_uploads_are_refused_by_both_routes(client, files, status, says):
    for path in ("/api/predict", "/api/learn"):
        answer = client.post(path, data={"label": "red"} if path.endswith("learn") else None, files=files)
        assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
    assert client.get("/api/learner").json()["jobs"] == []


@pytest.mark.parametrize("name", ["../../escaped.png", "/etc/passwd", "C:\\windows\\a.png", "a\nb.png", "x" * 500])
def test_the_name_of_a_file_is_no_path(client, name, tmp_path):
    teach(client, "red", (200, 30, 30))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    answer = client.post("/api/predict", files=upload(picture(), name=name))
    assert answer.status_code == 200
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("label", ["", "  ", "a\nb", "x" * 101])
def test_labels_that_are_refused(client, label):
    answer = client.post("/api/learn", data={"label": label}, files=upload(picture()))
    assert answer.status_code == 422
    assert "label" in answer.json()["detail"]


def test_a_label_with_html_is_text(client):
    label = "<img src=x onerror=alert(1)>"
    assert teach(client, label, (9, 9, 9))["state"] == "done"
    answer = client.get("/api/learner")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["classes"][0]["label"] == label


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
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://[::1"}, 400),
        ({"origin": HERE, "sec-fetch-site": "same-origin"}, 200),
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
    app = create_app(Learner(tmp_path / "learner"), host="0.0.0.0", allow=["my.proxy"], token="secret")
    with TestClient(app, base_url="http://192.168.0.7:7860") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            answer = client.get("/api/learner", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.post("/api/learn?token=secret", files=upload(picture())).status_code == 401
        assert client.get("/").status_code == client.get("/docs").status_code == 200
        right = {"authorization": "Bearer secret"}
        assert client.get("/api/learner", headers=right).status_code == 200
        assert client.get("/api/learner", headers=right | {"host": "my.proxy"}).status_code == 200
        assert client.get("/api/learner", headers=right | {"host": "evil.example"}).status_code == 403


def test_other_bodies_are_small(client):
    for content in (bytes(3000), (bytes(1000) for _ in range(3))):
        answer = client.post("/api/forget", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
    assert client.post("/api/forget", json={"name": "red"}).json()["detail"] == "body.label: Field required"
    assert client.post("/api/forget", json={"label": "red"}).status_code == 404
    assert client.get("/api/jobs/none").status_code == 404


def test_too_many_changes_are_refused(client):
    Learner.wait = 0.05
    answers = [client.post("/api/learn", data={"label": "red"}, files=upload(picture())) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert wait(client, answers[1])["version"] == 2


def test_pages_load_nothing_from_elsewhere(client):
    for path in ("/", "/docs"):
        answer = client.get(path)
        assert "sha256-" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "//" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {f"/api/{name}" for name in ("learner", "predict", "learn", "forget", "undo", "jobs/{id}")}
