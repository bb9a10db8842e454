"""A real browser, driven by its own debugging protocol: a page in a window of some width, and what is wrong with it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
_START_S = 60.0
_WIDTHS = (
    "JSON.stringify([innerWidth, document.documentElement.scrollWidth, "
    "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 "
    "&& !e.closest('pre, svg')).map(e => e.outerHTML.slice(0, 80))])"
)


@dataclass(kw_only=True)
class Seen:
    """What a page was like. ``wider``: elements that reach past the window; ``requests``: all but the page itself."""

    window: int
    scroll_width: int
    picture: bytes
    wider: list[str]
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message: dict[str, Any] = await self._socket.receive_json(timeout=_START_S)
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._events.append(message)

    async def look(self, file: Path, *, width: int, dark: bool) -> Seen:
        """Open a file in a window, look, and take a picture of the whole page."""
        self._events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Page.navigate", url=file.as_uri())
        await self.until("Page.loadEventFired")
        found = await self.call("Runtime.evaluate", expression=_WIDTHS)
        window, scroll_width, wider = json.loads(found["result"]["value"])
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width, "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return Seen(
            window=window,
            scroll_width=scroll_width,
            picture=base64.b64decode(shot["data"]),
            wider=wider,
            complaints=self._complaints(),
            requests=self._asked(file),
        )

    async def until(self, event: str) -> None:
        while all(one.get("method") != event for one in self._events):
            self._events.append(await self._socket.receive_json(timeout=_START_S))

    def _complaints(self) -> list[str]:
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(one) for one in self._events if one.get("method") in bad]

    def _asked(self, file: Path) -> list[str]:
        urls = [
            str(one["params"]["request"]["url"])
            for one in self._events
            if one.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if url != file.as_uri() and not url.startswith("data:")]


@asynccontextmanager
async def new_page() -> AsyncIterator[Page]:
    """Start a browser of its own and give a page of it."""
    with tempfile.TemporaryDirectory(prefix="toprope-browser-") as home:
        process = await asyncio.create_subprocess_exec(
            BROWSER,
            *_FLAGS,
            f"--user-data-dir={home}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(home) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    yield page
                    await page.call("Browser.close")
            await process.wait()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(_START_S):
        while "\n" not in (text := _text(file)):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
        return int(text.split()[0])


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
