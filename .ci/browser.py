"""A real browser walks login and consent by keyboard alone, at phone and desktop width, light and dark:
nothing is blocked by the pages' own policy, nothing is cut off, and the code arrives."""

import json
import sys
from urllib.parse import parse_qs, urlencode, urlparse

import requests
from playwright.sync_api import sync_playwright

ready, browser_path = sys.argv[1:]
node = json.load(open(ready))
url, ca = node["nodes"][0]["base_url"], node["ca_cert"]
back = "https://app.example/callback"
made = requests.post(
    f"{url}/v1/oauth/applications", verify=ca,
    headers={"Authorization": f"Bearer {node['live_key']}"},
    json={"name": "Browser", "redirect_uris": [back], "scopes": ["agents:read"]},
)
assert made.status_code == 201, made.text
client_id = made.json()["data"]["client_id"]
query = {"client_id": client_id, "redirect_uri": back, "response_type": "code", "state": "s"}
address = f"{url}/oauth/authorize?{urlencode(query)}"


def no_overflow(page):
    wide = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert not wide, "the page is wider than the window"


def first_field_is_focused(page):
    """Chromium gives `autofocus` with the first frame, which can come after the page has loaded."""
    page.wait_for_function("document.activeElement.id === 'email'", timeout=10_000)


def luminance(page, what):
    color = page.evaluate(f"getComputedStyle(document.body).{what}")
    return sum(int(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])


with sync_playwright() as play:
    browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
    for width in (360, 1280):
        for scheme in ("light", "dark"):
            context = browser.new_context(
                ignore_https_errors=True, color_scheme=scheme, viewport={"width": width, "height": 800}
            )
            page = context.new_page()
            said = []
            page.on("console", lambda message: said.append(message.text))
            sent = []
            page.on("request", lambda request: sent.append(request.url))
            page.goto(address)
            no_overflow(page)
            assert (luminance(page, "backgroundColor") < 200) == (scheme == "dark"), scheme
            first_field_is_focused(page)
            page.keyboard.type(node["email"])
            page.keyboard.press("Tab")
            page.keyboard.type("wrong password")
            page.keyboard.press("Enter")
            page.wait_for_selector("[role=alert]")
            first_field_is_focused(page)
            assert page.input_value("#email") == node["email"], "what was typed stays"
            page.keyboard.press("Tab")
            page.keyboard.type(node["password"])
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
            page.keyboard.press("Enter")
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id") == "org_id"
            no_overflow(page)
            page.keyboard.type(node["org_id"])
            page.keyboard.press("Enter")
            page.wait_for_selector("button[value=allow]")
            no_overflow(page)
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.value") == "allow"
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", "the focus can be seen"
            page.keyboard.press("Enter")
            for _ in range(100):
                if any(one.startswith(back) for one in sent):
                    break
                page.wait_for_timeout(50)
            arrived = [one for one in sent if one.startswith(back)]
            assert arrived, sent
            told = parse_qs(urlparse(arrived[0]).query)
            assert told["state"] == ["s"] and told["code"] and told["iss"] == [url], arrived
            blocked = [line for line in said if "Content Security Policy" in line]
            assert not blocked, blocked
            context.close()
    browser.close()
print("a browser logged in and agreed, by keyboard, at two widths, light and dark")
