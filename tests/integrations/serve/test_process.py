"""A server in a process of its own: clients that predict while it is taught, hostile requests, a kill."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.integrations.serve.fake import Learner
from tests.integrations.serve.test_app import large_png, picture, upload, wait

START = """
from infssm.integrations.serve.running import serve
from tests.integrations.serve.fake import Learner
import sys
say = lambda text: print(text, flush=True)
serve(Learner.load(sys.argv[1]), host="127.0.0.1", port=0, allow=(), token=None, say=say)
"""
COLOURS = {"red": (200, 30, 30), "blue": (30, 30, 200), "grey": (128, 128, 128), "white": (230, 230, 230)}


@pytest.fixture
def server(tmp_path):
    """A process that serves a learner of no classes; its address and its learner's folder."""
    Learner(tmp_path / "learner")
    process = subprocess.Popen(
        [sys.executable, "-c", START, tmp_path / "learner"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with process:
        address = re.search(r"http://\S+/", process.stdout.readline()).group()
        yield process, address, tmp_path / "learner"
        process.kill()


def teach(client, label):
    files = upload(*(picture(COLOURS[label], seed) for seed in range(6)))
    return client.post("/api/learn", data={"label": label}, files=files)


def test_twenty_clients_predict_while_it_is_taught(server):
    _, address, _ = server
    done, problems = threading.Event(), []
    answers = defaultdict(set)
    image = upload(picture(COLOURS["red"], 99))

    def predict():
        with httpx2.Client(base_url=address, timeout=60) as client:
            while not done.is_set():
                answer = client.post("/api/predict?top=1000", files=image)
                if answer.status_code != 200:
                    problems.append(answer.text)
                    return
                found = answer.json()
                (one,) = found["predictions"]
                answers[found["version"]].add(tuple((s["label"], s["probability"]) for s in one["top"]))

    with httpx2.Client(base_url=address, timeout=60) as client:
        known = {wait(client, teach(client, "red"))["version"]: {"red"}}
        clients = [threading.Thread(target=predict) for _ in range(20)]
        for thread in clients:
            thread.start()
        labels = ["red"]
        for label in ("blue", "grey", "white"):
            labels.append(label)
            known[wait(client, teach(client, label))["version"]] = set(labels)
        done.set()
        for thread in clients:
            thread.join()
    assert problems == []
    assert len(answers) > 1
    for version, shares in answers.items():
        assert len(shares) == 1, f"version {version} gave different answers"
        assert {label for label, _ in shares.pop()} == known[version]


def test_it_survives_hostile_requests(server):
    process, address, _ = server
    place = urlsplit(address)
    for path, kind in (("/api/learn", "multipart/form-data; boundary=x"), ("/api/forget", "application/json")):
        sender = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
        sender.putrequest("POST", path)
        sender.putheader("Content-Type", kind)
        sender.putheader("Content-Length", str(1 << 30))
        sender.endheaders()
        sender.send(bytes(1 << 16))
        answer = sender.getresponse()
        assert answer.status == 413
        assert b"larger than" in answer.read(60)
        sender.close()
    with httpx2.Client(base_url=address, timeout=60) as client:
        side = 10_000
        real = large_png(side, bytes(side * (side + 1)))
        assert client.post("/api/predict", files=upload(real)).status_code == 413
        assert client.get("/api/learner", headers={"host": "evil.example"}).status_code == 403
        assert client.post("/api/undo", headers={"origin": "http://evil.example"}).status_code == 403
        assert client.get("/api/learner").json()["version"] == 0
    assert process.poll() is None


def test_a_kill_while_it_is_taught_leaves_a_version(server):
    process, address, folder = server
    with httpx2.Client(base_url=address, timeout=60) as client:
        wait(client, teach(client, "red"))
        teach(client, "blue")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Learner.load(folder).classes in (("red",), ("red", "blue"))


def test_an_interrupt_ends_it(server):
    process, address, _ = server
    with httpx2.Client(base_url=address, timeout=60) as client:
        teach(client, "red")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, 130, -signal.SIGINT)
