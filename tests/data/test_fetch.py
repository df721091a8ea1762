"""Downloads from a server on this machine, one that cuts connections among others; fetch and check."""

import hashlib
import io
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from infssm.data import Archive, check, fetch, load_dataset, register_dataset, write_synthetic
from infssm.data.dataset import DATASETS
from infssm.data.fetching import download, verify_file
from infssm.errors import ConfigError, DataError

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves ``server.content``; behaves as badly as ``server.cut``, ``.ranges`` and ``.failures`` say."""

    def do_GET(self):
        server = self.server
        wanted = self.headers.get("Range")
        server.requests.append(wanted)
        server.hold.wait(5)
        if self.path == "/absent":
            return self.send_error(404)
        if server.failures:
            server.failures -= 1
            return self.send_error(503)
        start = int(wanted[len("bytes=") : -1]) if wanted and server.ranges else 0
        if start >= len(server.content) and wanted and server.ranges:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if server.cut is None else body[: server.cut])
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.content, running.requests, running.cut, running.ranges, running.failures = CONTENT, [], None, True, 0
        running.hold = threading.Event()
        running.hold.set()
        running.url = f"http://127.0.0.1:{running.server_port}/file"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def get(server, target, **options):
    return download(server.url, target, wait=0, timeout=5, **options)


def test_download(server, tmp_path):
    steps = []
    target = get(
        server,
        tmp_path / "new" / "f",
        md5=MD5,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        progress=lambda *s: steps.append(s),
    )
    assert target.read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert os.listdir(target.parent) == ["f"]


def test_a_cut_connection_is_resumed(server, tmp_path):
    server.cut = 100_000
    assert get(server, tmp_path / "f", md5=MD5).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=100000-", "bytes=200000-"]


def test_a_server_that_cannot_resume_starts_anew(server, tmp_path):
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    server.ranges = False
    assert get(server, tmp_path / "f", md5=MD5).read_bytes() == CONTENT
    assert server.requests == ["bytes=1000-"]


def test_a_later_call_goes_on_where_the_first_stopped(server, tmp_path):
    server.cut = 120_000
    server.ranges = True
    with pytest.raises(DataError, match="run it again to continue"):
        download(server.url, tmp_path / "f", wait=0, attempts=1, timeout=5, progress=_stop_after(server, 100_000))
    kept = (tmp_path / "f.part").stat().st_size
    assert kept == 120_000
    assert not (tmp_path / "f").exists()
    server.cut = None
    assert get(server, tmp_path / "f", md5=MD5).read_bytes() == CONTENT
    assert server.requests[-1] == "bytes=120000-"


def _stop_after(server, limit):
    """From then on every connection is cut before its first byte."""

    def progress(have, total):
        if have >= limit:
            server.cut = 0

    return progress


def test_server_errors_are_tried_again_but_not_for_ever(server, tmp_path):
    server.failures = 2
    assert get(server, tmp_path / "f").read_bytes() == CONTENT
    server.failures = 99
    with pytest.raises(DataError, match="503"):
        get(server, tmp_path / "g", attempts=3)
    assert server.failures == 96


def test_a_complete_or_too_long_part(server, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT)
    assert get(server, tmp_path / "f", md5=MD5).read_bytes() == CONTENT
    (tmp_path / "g.part").write_bytes(CONTENT + b"more")
    assert get(server, tmp_path / "g", md5=MD5).read_bytes() == CONTENT


def test_wrong_digest_leaves_nothing(server, tmp_path):
    for digests in ({"md5": "0" * 32}, {"sha256": "0" * 64}):
        with pytest.raises(DataError, match=r"expected 0+; the download was removed"):
            get(server, tmp_path / "f", **digests)
        assert os.listdir(tmp_path) == []


def test_hopeless_addresses(server, tmp_path):
    with pytest.raises(DataError, match="404"):
        download(server.url.replace("/file", "/absent"), tmp_path / "f", wait=0)
    with pytest.raises(ConfigError, match="http or https"):
        download("file:///etc/passwd", tmp_path / "f")
    port = server.server_port
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match="refused"):
        download(f"http://127.0.0.1:{port}/file", tmp_path / "f", wait=0, attempts=2, timeout=5)


def packed(*names):
    buffer = io.BytesIO()
    image = io.BytesIO()
    Image.new("RGB", (4, 4)).save(image, "png")
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = image.getbuffer().nbytes
            archive.addfile(info, io.BytesIO(image.getvalue()))
    return buffer.getvalue()


@pytest.fixture
def pets(server, monkeypatch):
    """A registered data set of two classes, published by the server."""
    monkeypatch.setattr(DATASETS, "_items", dict(DATASETS._items))
    server.content = packed("pets-1.0/cat/0.png", "pets-1.0/dog/0.png")

    def publish(md5):
        DATASETS._items.pop("pets", None)
        archive = Archive(server.url, "pets.tar.gz", "pets-1.0", md5=md5)

        @register_dataset("pets", classes=2, images=2, archives=(archive,))
        def load(root):
            return load_dataset(str(root / "pets-1.0"))

    publish(hashlib.md5(server.content).hexdigest())
    server.publish = publish
    return server


def visible(folder):
    """Names in a folder; the hidden file that processes lock stays."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_processes_that_fetch_at_once_share_the_download(pets, tmp_path):
    """The server answers once both have asked, or could have asked, for the archive."""
    pets.hold = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, "pets", tmp_path) for _ in range(2)]
        threading.Timer(0.3, pets.hold.set).start()
        assert [done.result() for done in both] == [[tmp_path / "pets-1.0"]] * 2
    assert pets.requests == [None]
    assert load_dataset("pets", tmp_path).classes == ("cat", "dog")


def test_fetch_downloads_unpacks_and_tidies_up(pets, tmp_path):
    assert fetch("pets", tmp_path) == [tmp_path / "pets-1.0"]
    assert visible(tmp_path) == ["pets-1.0"]
    assert load_dataset("pets", tmp_path).classes == ("cat", "dog")
    fetch("pets", tmp_path)
    assert len(pets.requests) == 1
    assert check("pets", tmp_path).ok


def test_fetch_uses_an_archive_that_is_there_and_keeps_it(pets, tmp_path):
    (tmp_path / "pets.tar.gz").write_bytes(pets.content)
    fetch("pets", tmp_path)
    assert pets.requests == []
    assert visible(tmp_path) == ["pets-1.0", "pets.tar.gz"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pets.tar.gz").write_bytes(pets.content[:-1])
    with pytest.raises(DataError, match=r"pets\.tar\.gz has md5"):
        fetch("pets", tmp_path / "other")


def test_fetch_leaves_nothing_half_unpacked(pets, tmp_path):
    for content, message in (
        (packed("pets-1.0/cat/0.png", "../dog/0.png"), "leads outside"),
        (packed("something/else.png"), "does not hold pets-1.0"),
        (packed("pets-1.0/cat/0.png")[:60], "truncated or damaged"),
    ):
        pets.content = content
        pets.publish(None)
        root = tmp_path / message.split()[0]
        with pytest.raises(DataError, match=message):
            fetch("pets", root)
        assert visible(root) == ["pets.tar.gz"]


def test_fetch_of_what_needs_no_fetching(tmp_path):
    with pytest.raises(ConfigError, match="nothing to fetch for 'digits'"):
        fetch("digits", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'imagenet-r'"):
        fetch("imagenet", tmp_path)


def test_fetch_into_a_file(pets, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write under"):
        fetch("pets", tmp_path / "file" / "root")


def test_check_counts_and_finds_unreadable_files(tmp_path):
    write_synthetic("imagenet-r", tmp_path, per_class=2, size=16)
    bad = tmp_path / "imagenet-r" / "004.class" / "image001.jpg"
    bad.write_bytes(bad.read_bytes()[:-200])
    steps = []
    report = check("imagenet-r", tmp_path, progress=lambda *s: steps.append(s))
    assert (report.classes, report.images, report.ok) == (200, 400, False)
    assert [path for path, _ in report.unreadable] == ["004.class/image001.jpg"]
    assert report.problems[0] == "400 images, expected 30000"
    assert report.problems[1].startswith("1 files cannot be read, first 004.class/image001.jpg")
    assert steps[-1] == (400, 400)


def test_check_of_absent_and_own_data(tmp_path):
    report = check("cub200", tmp_path)
    assert not report.ok
    assert str(tmp_path / "CUB_200_2011") in report.problems[0]
    assert check("digits").ok
    write_synthetic("cub200", tmp_path, per_class=1, size=8)
    own = check(str(tmp_path / "cub200"))
    assert (own.ok, own.classes, own.images) == (True, 200, 400)


def test_known_digests_are_well_formed(tmp_path):
    for name in DATASETS:
        for archive in DATASETS[name].archives:
            assert archive.url.startswith("https://")
            if name == "speech-digits":  # GitHub packs a tag anew, so there is no digest to rely on
                assert archive.md5 is archive.sha256 is None
                continue
            assert archive.md5 is not None
            assert len(bytes.fromhex(archive.md5)) == 16
    path = tmp_path / "f"
    path.write_bytes(b"")
    verify_file(path)
    verify_file(path, md5="d41d8cd98f00b204e9800998ecf8427e")
