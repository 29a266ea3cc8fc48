"""A browser for pages: headless Chromium through Playwright."""

import re
import shutil

import pytest

from reports.page.render import render


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on this machine; `make test` installs it")
    with sync_playwright() as p:
        started = p.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield started
        started.close()


@pytest.fixture
def look(browser, tmp_path):
    """Render a record and look at its page, or at a page's HTML.

    No axe violation, no sideways scrolling of the page, no request, no script error, in this scheme and width.
    """

    def look(shown, width, scheme):
        from axe_playwright_python.sync_playwright import Axe

        path = tmp_path / "report.html"
        if isinstance(shown, str):
            path.write_text(shown, encoding="utf-8")
        else:
            render(shown, path)
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        tab = context.new_page()
        requests, errors = [], []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(path.as_uri())
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert requests == [path.as_uri()] and not errors
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        results = Axe().run(tab)
        assert results.violations_count == 0, results.generate_report()
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        luminance = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
        assert (luminance > 200) == (scheme == "light")
        visible = tab.evaluate(
            "[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().height > 25)"
        )
        assert visible, "the figures are drawn"
        context.close()

    return look
