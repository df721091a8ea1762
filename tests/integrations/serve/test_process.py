"""A server in a process of its own: clients that predict while it is taught, hostile requests, a kill."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2
import pytest

from infssm import Learner
from tests.integrations.serve.test_app import large_png, pictures, upload, wait
from tests.learner.taught import taught


@contextmanager
def serving(folder):
    """A process that serves a learner of one class; its address."""
    taught(folder, classes=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "infssm", "serve", folder, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    with process:
        try:
            yield process, re.search(r"http://\S+/", process.stdout.readline()).group()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served") / "learner") as found:
        yield found


def teach(client, digit):
    files = upload(*pictures(digit, 0, 20))
    return client.post("/api/learn", data={"label": f"digit {digit}"}, files=files)


def test_twenty_clients_predict_while_it_is_taught(server):
    _, address = server
    done, problems = threading.Event(), []
    answers = defaultdict(set)
    image = upload(*pictures(0))

    def predict():
        with httpx2.Client(base_url=address, timeout=60) as client:
            while not done.is_set():
                answer = client.post("/api/predict?top=1000", files=image)
                if answer.status_code != 200:
                    problems.append(answer.text)
                    return
                found = answer.json()
                (one,) = found["predictions"]
                answers[found["version"]].add(tuple(one["probabilities"].items()))

    with httpx2.Client(base_url=address, timeout=60) as client:
        known = {client.get("/api/learner").json()["version"]: {"digit 0"}}
        clients = [threading.Thread(target=predict) for _ in range(20)]
        for thread in clients:
            thread.start()
        for digit in (1, 2, 3):
            version = wait(client, teach(client, digit))["version"]
            known[version] = {f"digit {label}" for label in range(digit + 1)}
        done.set()
        for thread in clients:
            thread.join()
    assert problems == []
    assert len(answers) > 1
    for version, shares in answers.items():
        assert len(shares) == 1, f"version {version} gave different answers"
        assert {label for label, _ in shares.pop()} == known[version]


def test_it_survives_hostile_requests(server):
    process, address = server
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
        assert client.get("/api/learner").status_code == 200
    assert process.poll() is None


def test_an_interrupt_ends_it(server):
    process, address = server
    with httpx2.Client(base_url=address, timeout=60) as client:
        teach(client, 5)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, 130, -signal.SIGINT)


def test_a_kill_while_it_is_taught_leaves_a_version(tmp_path):
    with serving(tmp_path / "learner") as (process, address):
        with httpx2.Client(base_url=address, timeout=60) as client:
            teach(client, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert Learner.load(tmp_path / "learner").classes in (("digit 0",), ("digit 0", "digit 1"))
