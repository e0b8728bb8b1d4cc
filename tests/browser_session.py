"""A headless browser that is controlled through the Chrome DevTools Protocol, with real mouse events."""

import base64
import json
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from browser import BROWSER

TIMEOUT_S = 60


class Session:
    """A tab of a browser."""

    def __init__(self, to_browser, from_browser):
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._received = b""
        self._number = 0
        self._tab = None

    def send(self, method, **parameters):
        """Sends a command to the tab, or to the browser before there is one; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._tab is not None:
            message["sessionId"] = self._tab
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._received:
            data = os.read(self._from_browser, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, address, width, height):
        """Opens a page in a window of that size."""
        self._tab = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._tab = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.enable")
        self.send("Page.navigate", url=address)
        self.wait_until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def evaluate(self, expression):
        """Returns the value of an expression of JavaScript in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, condition):
        """Waits until an expression is true in the page."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.evaluate(f"Boolean({condition})") is not True:
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def mouse(self, kind, x, y):
        """Moves, presses or releases the left button of the mouse."""
        buttons = {"mouseMoved": 1, "mousePressed": 1, "mouseReleased": 0}[kind]
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1)

    def drag(self, start, end, steps):
        """Drags the mouse with the left button from one point to another."""
        self.mouse("mousePressed", *start)
        for step in range(1, steps + 1):
            share = step / steps
            self.mouse("mouseMoved", *(a + share * (b - a) for a, b in zip(start, end, strict=True)))
        self.mouse("mouseReleased", *end)

    def click(self, selector):
        """Clicks in the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def screenshot(self, path):
        """Writes what the window shows as PNG."""
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browser_session(folder):
    """A session of a new browser, whose profile is in the folder."""
    to_browser, from_runner = os.pipe()
    from_browser, to_runner = os.pipe()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
    command += ["--remote-debugging-pipe", f"--user-data-dir={Path(folder) / 'profile'}"]

    def place_pipes():
        # The browser reads from descriptor 3 and writes to 4; either may be one of the pipes already.
        os.dup2(to_browser, 103)
        os.dup2(to_runner, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    process = subprocess.Popen(command, preexec_fn=place_pipes, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(to_runner)
    try:
        yield Session(from_runner, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(from_runner)
        os.close(from_browser)
