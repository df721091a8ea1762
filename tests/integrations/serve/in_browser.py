"""The page in a real Chromium: ``make test-browser``. Screenshots go to the folder that the last line names."""

import re
import shutil
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from infssm import Learner
from infssm.integrations.serve import create_app

HTML = "<b>stripes<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser():
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert binary, "no Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve(tmp_path):
    """Start servers of a learner; returns their addresses."""
    servers = []

    def start(**options):
        listening = socket.create_server(("127.0.0.1", 0))
        learner = Learner(weights="cifar100-base", folder=tmp_path / f"learner-{len(servers)}")
        app = create_app(learner, **options)
        server = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        servers.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{listening.getsockname()[1]}/"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("screenshots")
    yield folder
    print(f"\nscreenshots: {folder}")  # noqa: T201


@pytest.fixture
def photos(tmp_path):
    """Files of discs, stripes and checks, 20 each, in changing sizes and colours."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rows, columns = np.mgrid[:64, :64]
    draw = np.random.default_rng(0)
    for n in range(20):
        x, y = draw.integers(22, 42, 2)
        shapes = {
            "disc": (rows - y) ** 2 + (columns - x) ** 2 < draw.integers(10, 20) ** 2,
            "stripes": (rows + x) // draw.integers(5, 8) % 2 == 0,
            "checks": (rows // 4 + columns // 4) % 2 == 0,
        }
        for name, shape in shapes.items():
            colours = draw.integers(0, 40, 3), draw.integers(210, 250, 3)
            pixels = np.where(shape[:, :, None], *colours) + draw.integers(-5, 5, (64, 64, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{name}-{n:02}.png")
    return lambda name: [str(path) for path in sorted(folder.glob(f"{name}-*"))]


def teach(page, label, files):
    page.get_by_label("Class", exact=True).fill(label)
    page.locator("#lesson").set_input_files(files)
    page.get_by_role("button", name=re.compile("^Teach")).click()
    expect(page.locator("#teach-say")).to_contain_text("Learnt", timeout=20_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_teach_classify_unknown_undo(browser, serve, photos, screenshots, scheme, width):
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    outside = []
    address = serve()
    page.on(
        "request", lambda request: request.url.startswith((address, "blob:", "data:")) or outside.append(request.url)
    )
    page.goto(address)
    expect(page.locator("#nothing")).to_be_visible()
    shot = lambda name: page.screenshot(path=screenshots / f"{width}-{scheme}-{name}.png", full_page=True)  # noqa: E731
    shot("1-empty")

    teach(page, "disc", photos("disc")[:16])
    expect(page.get_by_role("button", name="Undo the last change")).to_be_disabled()
    page.get_by_label("Class", exact=True).fill(HTML)
    page.locator("#lesson").set_input_files(photos("stripes")[:16])
    shot("2-chosen")
    page.get_by_role("button", name=re.compile("^Teach")).click()
    expect(page.locator("#classes li")).to_have_count(2, timeout=20_000)
    assert page.locator("#classes b").all_inner_texts() == ["disc", HTML]

    page.locator("#probe").set_input_files([photos("disc")[19], photos("stripes")[19], photos("checks")[0]])
    expect(page.locator(".result")).to_have_count(3, timeout=20_000)
    shot("3-classified")
    unknown, stripes, disc = page.locator(".result h3").all_inner_texts()
    assert disc == "disc"
    assert stripes == HTML
    assert unknown.startswith("Unknown")

    (Path(photos("disc")[0]).parent / "drawing.png").write_text("<svg></svg>")
    page.locator("#probe").set_input_files(str(Path(photos("disc")[0]).parent / "drawing.png"))
    expect(page.locator(".result .bad")).to_contain_text("SVG is not accepted")
    expect(page.locator("#test-say")).to_have_text("0 of 1 file classified.")
    errors[:] = [error for error in errors if "415" not in error]  # the browser reports every refused request

    page.get_by_role("button", name="Undo the last change").click()
    expect(page.locator("#classes li")).to_have_count(1, timeout=20_000)
    expect(page.get_by_role("button", name="Forget disc")).to_be_disabled()
    teach(page, "stripes", photos("stripes"))
    page.get_by_role("button", name="Forget disc").click()
    shot("4-sure")
    page.get_by_role("button", name="Keep").click()
    page.get_by_role("button", name="Forget disc").click()
    page.get_by_role("button", name="Forget", exact=True).click()
    expect(page.locator("#classes li")).to_have_count(1, timeout=20_000)
    assert page.locator("#classes b").all_inner_texts() == ["stripes"]
    shot("5-forgotten")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.goto(f"{address}docs")
    expect(page.locator("h2")).not_to_have_count(0)
    shot("6-docs")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (errors, outside) == ([], [])
    page.close()


def test_with_the_keyboard_alone(browser, serve, photos):
    page = browser.new_page()
    page.goto(serve())
    page.wait_for_selector("#nothing:visible")
    seen = []
    for _ in range(6):
        page.keyboard.press("Tab")
        focus = page.evaluate("[document.activeElement.id, document.activeElement.tagName]")
        seen.append(focus[0] or focus[1])
        style = (
            "e => { const s = getComputedStyle(e.matches('.hidden') ? e.parentElement : e); return s.outlineStyle; }"
        )
        if focus[1] != "BODY":
            assert page.evaluate_handle("document.activeElement").evaluate(style) != "none", focus
    assert [name for name in seen if name in ("label", "lesson", "teach-button", "probe")] == [
        "label", "lesson", "teach-button", "probe",
    ]  # fmt: skip
    page.focus("#label")
    page.keyboard.type("disc")
    page.locator("#lesson").set_input_files(photos("disc"))
    page.focus("#label")
    page.keyboard.press("Enter")
    expect(page.locator("#classes li")).to_have_count(1, timeout=20_000)
    page.close()


def test_files_can_be_dropped(browser, serve, photos):
    page = browser.new_page()
    page.goto(serve())
    teach(page, "disc", photos("disc"))
    data = page.evaluate_handle(
        """bytes => { const t = new DataTransfer();
           t.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"})); return t; }""",
        list(Path(photos("disc")[0]).read_bytes()),
    )
    page.dispatch_event("label[for=probe]", "drop", {"dataTransfer": data})
    expect(page.locator(".result .file")).to_contain_text("dropped.png")
    page.close()


def test_the_token_of_the_address_is_kept(browser, serve):
    address = serve(token="secret")
    page = browser.new_page()
    page.goto(address)
    expect(page.locator("#trouble")).to_contain_text("send the token")
    page.goto(f"{address}?token=secret")
    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#trouble")).to_be_hidden()
    assert page.url == address
    page.reload()
    expect(page.locator("#version")).to_contain_text("version")
    page.close()
