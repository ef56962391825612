"""The page at /, in Chromium, on the server as it is: chat, the map of experts, resizing, keyboard, themes, and what it must not do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import LAPTOP, Browser, browser
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from serving import Server, serving

import tinyserve_gguf

ModelFile = Callable[..., Path]

WEB = Path(tinyserve_gguf.__file__).parent / "web"
KEY = "a key"
QUESTION = "What is the capital of France?"
STORY = "Write a long story about a river."


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[Server]:
    with serving(demo_model, "--expert-cache", "25%", "--device", "CPU", "-t", "1", "-c", "1024", "--temp", "0", key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(server: Server, chromium: Browser) -> Iterator[Browser]:
    """Opened, with the key. Nothing is written to its console."""
    chromium.complaints()
    chromium.driver.get(server.url)
    chromium.run("sessionStorage.setItem('tinyserve-key', arguments[0])", KEY)
    chromium.driver.refresh()
    chromium.until(lambda: "of 240" in chromium.text("resident"))
    yield chromium
    chromium.theme("light")
    chromium.resize(*LAPTOP)
    assert chromium.complaints() == []


def ask(page: Browser, text: str) -> None:
    page["prompt"].send_keys(text, Keys.ENTER)


def answered(page: Browser) -> bool:
    return page["send"].is_displayed()


def write_size(page: Browser, text: str) -> None:
    """Over what is there, as a user does."""
    page["size"].send_keys(Keys.CONTROL + "a")
    page["size"].send_keys(text)


def resident(page: Browser) -> int:
    return int(page.text("resident").split()[0])


# ---- key ------------------------------------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_only_here(server: Server, chromium: Browser) -> None:
    chromium.driver.get(server.url)
    chromium.run("sessionStorage.clear()")
    chromium.driver.refresh()
    chromium.until(chromium["key-form"].is_displayed)
    assert chromium.run("return document.activeElement.id") == "key"
    chromium["key"].send_keys("another", Keys.ENTER)
    chromium.until(lambda: chromium.text("server") == "wrong API key")
    chromium["key"].send_keys(KEY, Keys.ENTER)
    chromium.until(lambda: "demo-1" in chromium.text("model"))
    assert not chromium["key-form"].is_displayed()
    assert chromium.run("return document.activeElement.id") == "prompt"
    assert chromium.until(lambda: "of 240" in chromium.text("resident"))
    assert KEY not in chromium.driver.page_source


def test_no_key_is_asked_for_where_none_is_wanted(model_file: ModelFile, chromium: Browser) -> None:
    """On a tiny model, whose replies come in no time."""
    with serving(model_file("gpt-oss"), "--expert-cache", "50%", "--device", "CPU", "-t", "1", "-c", "256", key=None) as other:
        chromium.driver.get(other.url)
        chromium.until(lambda: "of 24" in chromium.text("resident"))
        assert not chromium["key-form"].is_displayed()
        assert chromium.text("axes") == "3 layers of 8 experts, 2 a token"
        chromium.driver.get("about:blank")


# ---- chat and map ---------------------------------------------------------------------------------------------------------------------------


def test_a_message_streams_and_the_map_follows(server: Server, page: Browser) -> None:
    """The reply grows token by token to the one that the API gives, and the map shows who was loaded for it."""
    with server.client() as client:
        messages = [{"role": "user", "content": QUESTION}]
        alone = client.chat.completions.create(model="demo-1", messages=messages, temperature=0)  # type: ignore[call-overload]
    page.driver.refresh()
    page.until(lambda: "of 240" in page.text("resident"))
    before, moved = page.pixels("map"), page.text("moved")
    ask(page, QUESTION)
    seen = set()
    while not answered(page):
        seen.add(page.run("return document.querySelector('.message.assistant')?.textContent"))
    answers = page.run("return [...document.querySelectorAll('.message.assistant')].map((node) => node.textContent)")
    assert answers == [alone.choices[0].message.content]
    assert len(seen - {None, ""}) > 2
    assert all(answers[0].startswith(part) for part in seen - {None})
    cost = page.driver.find_element("class name", "cost").text
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tok/s · hit rate [\d.]+ % · [\d.]+ MB/token", cost)
    page.until(lambda: page.text("moved") != moved)
    assert page.pixels("map") != before
    assert resident(page) == 60
    assert re.fullmatch(r"[\d.]+ %", page.text("hit-rate"))
    assert page["prompt"].get_attribute("value") == ""


def test_the_map_moves_while_a_reply_runs(page: Browser) -> None:
    ask(page, STORY)
    pictures, links, rates = set(), set(), set()
    while len(pictures) < 4 or len(links) < 3 or len(rates) < 2 or not re.fullmatch(r"[\d.]+ tok/s", page.text("speed")):
        assert not answered(page)
        pictures.add(page.pixels("map"))
        links.add(page.pixels("link-chart"))
        rates |= {page.text("hit-now")} - {""}
        time.sleep(0.1)
    assert page.text("server") == "replying"
    page["stop"].click()
    page.until(lambda: answered(page))


def test_escape_stops_a_reply(server: Server, page: Browser) -> None:
    ask(page, STORY)
    page.until(lambda: len(page.text("log")) > len(STORY) + 30)
    page["prompt"].send_keys(Keys.ESCAPE)
    page.until(lambda: answered(page))
    assert page.text("log").endswith("stopped")
    server.until("tinyserve_requests_running", 0)
    ask(page, "And now?")  # what was said so far is part of the conversation
    page.until(lambda: len(page.driver.find_elements("class name", "assistant")) == 2)
    page["stop"].click()
    page.until(lambda: answered(page))
    page["new-chat"].click()
    assert page.driver.find_elements("class name", "message") == []
    assert page["empty"].is_displayed()


def test_a_turn_remembers_and_settings_are_sent(server: Server, page: Browser) -> None:
    page["settings"].find_element("tag name", "summary").click()
    page["system"].send_keys("Answer briefly.")
    page["temperature"].send_keys("0")
    page["max-tokens"].send_keys("5")
    ask(page, QUESTION)
    page.until(lambda: answered(page) and page.driver.find_elements("class name", "cost"))
    assert "cut off" in page.driver.find_element("class name", "cost").text
    ask(page, "And of Italy?")
    page.until(lambda: len(page.driver.find_elements("class name", "cost")) == 2)
    said = [node.text for node in page.driver.find_elements("class name", "assistant")]
    with server.client() as client:
        messages = [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": said[0]},
            {"role": "user", "content": "And of Italy?"},
        ]
        alone = client.chat.completions.create(model="demo-1", messages=messages, temperature=0, max_tokens=5)  # type: ignore[call-overload]
    assert said[1] == alone.choices[0].message.content


def test_a_refused_message_can_be_sent_again(page: Browser) -> None:
    text = "word " * 1100
    page.run("document.getElementById('prompt').value = arguments[0]", text)
    page["prompt"].send_keys(Keys.ENTER)
    page.until(lambda: page.driver.find_elements("class name", "error"))
    assert "1024" in page.driver.find_element("class name", "error").text
    assert page["prompt"].get_attribute("value") == text.strip()
    assert page.driver.find_elements("class name", "user") == []


# ---- the size of the cache ------------------------------------------------------------------------------------------------------------------


def test_resizing_while_a_reply_runs(server: Server, page: Browser) -> None:
    ask(page, STORY)
    page.until(lambda: len(page.text("log")) > len(STORY) + 10)
    for size, slots in (("50%", 120), ("all", 240), ("30", 30)):
        write_size(page, size)
        page["apply"].click()
        page.until(lambda slots=slots: f"expert cache: {slots} of 240 experts instead of" in page.text("resized"))
        page.until(lambda slots=slots: f"in {slots} slots" in str(page["resident"].get_attribute("title")))
        assert page["all-resident"].is_displayed() == (size == "all")
    assert not answered(page)
    page["stop"].click()
    page.until(lambda: answered(page))
    for wrong, why in (("1", "too small"), ("many", "the expert cache is all, auto")):
        write_size(page, wrong + Keys.ENTER)
        page.until(lambda why=why: why in page.text("resized"))
        assert page.text("resized").endswith("; nothing changed")
    with server.http() as http:
        assert http.get("/v1/experts").json()["slots"]["total"] == 30
    write_size(page, "25%" + Keys.ENTER)
    page.until(lambda: "60 of 240" in page.text("resized"))


def test_the_slider_names_a_share(page: Browser) -> None:
    page["share"].send_keys(Keys.ARROW_RIGHT)
    assert page["size"].get_attribute("value") == "26%"
    write_size(page, "75%")
    assert page["share"].get_attribute("value") == "75"


# ---- keyboard and pointer -------------------------------------------------------------------------------------------------------------------


def test_tab_reaches_everything_in_order(page: Browser) -> None:
    wanted = ["skip", "new-chat", "log", "SUMMARY", "prompt", "send", "heat", "map", "share", "size", "apply"]
    page.run("document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus()")
    order = []
    for _ in wanted:
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        order.append(page.run("const node = document.activeElement; return node.id || node.name || node.className || node.tagName"))
        assert page.run("return document.activeElement.matches(':focus-visible')"), order
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none", order
    assert order == wanted


def test_arrows_walk_over_the_map(page: Browser) -> None:
    page["map"].send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_UP)
    assert page["cell"].get_attribute("textContent").startswith("Layer 1, expert 1\n")
    assert page["tip"].is_displayed()
    page["prompt"].click()
    assert not page["tip"].is_displayed()


def test_the_pointer_names_experts(server: Server, page: Browser) -> None:
    """With the numbers that the API gives."""
    with server.http() as http:
        layer = http.get("/v1/experts").json()["layers"][29]
    box = page["map"].rect
    for expert in (0, 7):
        x = 26 + (box["width"] - 26) * (expert + 0.5) / 8
        move = ActionChains(page.driver).move_to_element_with_offset(page["map"], round(x - box["width"] / 2), round(box["height"] / 2 - 4))
        move.perform()
        lines = page.text("tip").splitlines()
        assert lines[0] == f"Layer 29, expert {expert}"
        assert lines[1].startswith("resident" if layer["resident"][expert] else "in host memory")
        assert f"{layer['hits'][expert]:,} hit" in lines[1]
        tip = page["tip"].rect
        assert tip["x"] + tip["width"] <= box["x"] + box["width"] + 1


def test_colour_shows_recent_or_all_use(page: Browser) -> None:
    recent = page.pixels("map")
    page.driver.find_element("css selector", "input[value=total]").click()
    assert page.pixels("map") != recent
    assert re.fullmatch(r"\d+ uses", page.text("hot"))


# ---- looks ----------------------------------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative, as WCAG has it, of "#rrggbb"."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_readable(page: Browser, theme: str) -> None:
    page.theme(theme)
    names = ("bg", "panel", "soft", "ink", "muted", "accent", "on-accent", "bad", "resident", *(f"heat-{i}" for i in range(5)))
    script = "const style = getComputedStyle(document.documentElement); return arguments[0].map((name) => style.getPropertyValue(`--${name}`).trim())"
    colours = dict(zip(names, page.run(script, names), strict=True))
    light = {name: luminance(colour) for name, colour in colours.items()}
    for text, behind, least in (
        ("ink", "panel", 7), ("ink", "soft", 7), ("muted", "panel", 4.5), ("muted", "soft", 4.5), ("muted", "bg", 4.5),
        ("on-accent", "accent", 4.5), ("bad", "panel", 4.5), ("resident", "panel", 3), ("accent", "panel", 4.5),
    ):  # fmt: skip
        bright, dark = sorted((light[text], light[behind]), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= least, (text, behind)
    heat = [light[f"heat-{i}"] for i in range(5)]
    assert heat == sorted(heat, reverse=theme == "light")  # hotter is always darker, or always brighter: no colour vision needed
    assert (light["bg"] > 0.5) == (theme == "light")
    assert page.run("return getComputedStyle(document.body).color") == "rgb({}, {}, {})".format(*bytes.fromhex(colours["ink"][1:]))


def test_everything_fits_on_a_laptop(page: Browser) -> None:
    """Nothing scrolls but the conversation, and no word of the figures is cut."""
    assert page.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == list(LAPTOP)
    for name in ("prompt", "send", "map", "hit-chart", "link-chart", "apply", "resized"):
        box = page[name].rect
        assert box["x"] >= 0, name
        assert box["y"] >= 0, name
        assert box["x"] + box["width"] <= LAPTOP[0], name
        assert box["y"] + box["height"] <= LAPTOP[1], name
    assert page["map"].rect["height"] > 200
    assert page.run("return [...document.querySelectorAll('.tiles dt, .tiles dd')].filter((node) => node.scrollWidth > node.clientWidth).length") == 0
    page.resize(500, 900)
    assert page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_controls_have_names(page: Browser) -> None:
    """By the accessibility tree of the browser."""
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "textbox", "slider", "combobox", "radio", "application", "spinbutton", "image", "log"}
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")]
    controls = [(role, name) for role, name in named if role in roles]
    assert {role for role, _ in controls} >= {"button", "textbox", "slider", "combobox", "radio", "application", "image", "log"}
    assert [role for role, name in controls if not name] == []
    names = [name for role, name in controls if role == "application"]
    assert re.fullmatch(r"Map of experts: 30 layers, \d+ experts resident in 60 slots", *names)


# ---- what it must not do --------------------------------------------------------------------------------------------------------------------


def test_what_a_model_writes_stays_text(page: Browser) -> None:
    """Also in code, between stars and among thoughts; nothing of it becomes an element that it names."""
    evil = '<img src=x onerror="document.title=1"><script>document.title = 1</script>'
    text = f"<think>{evil}</think>{evil} **{evil}** `{evil}`\n```html\n{evil}\n```\nend {evil}"
    script = """
        const { show } = await import(location.origin + "/render.js");
        const node = document.createElement("div");
        document.body.append(node);
        show(node, args[0]);
        const found = [node.textContent, [...node.querySelectorAll("*")].map((one) => one.tagName)];
        node.remove();
        return found;
    """
    shown, tags = page.module(script, text)
    assert shown == f"Thoughts{evil}{evil} {evil} {evil}{evil}end {evil}"
    assert sorted(tags) == ["CODE", "CODE", "DETAILS", "PRE", "STRONG", "SUMMARY"]
    assert "demo-1" in page.driver.title


def test_text_that_streams_into_code(page: Browser) -> None:
    """Half a block of code is shown as code, at every length."""
    text = "So:\n```python\nx = 1\n\ny = 2\n```\nDone `it`."
    script = """
        const { show } = await import(location.origin + "/render.js");
        const node = document.createElement("div");
        return Array.from({ length: args[0].length }, (_, n) => { show(node, args[0].slice(0, n + 1)); return [node.textContent, node.innerHTML]; });
    """
    parts = page.module(script, text)
    assert parts[-1][0] == "So:x = 1\n\ny = 2Done it."
    assert parts[text.index("y = 2") + 4][1] == "So:<pre><code>x = 1\n\ny = 2</code></pre>"


def test_nothing_comes_from_elsewhere(server: Server, page: Browser) -> None:
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert {"style.css", "app.js", "chat.js", "map.js"} <= {url.rpartition("/")[2] for url in loaded}
    assert [url for url in loaded if not url.startswith(server.url)] == []
    for file in WEB.iterdir():
        found = set(re.findall(r"https?://[^\s\"'<>)]+", file.read_text("utf-8")))
        assert found <= {"http://www.w3.org/2000/svg"}, file.name
        assert "innerHTML" not in file.read_text("utf-8"), file.name


def test_a_server_that_goes_away_is_said(model_file: ModelFile, chromium: Browser) -> None:
    with serving(model_file("gpt-oss"), "--expert-cache", "25%", "--device", "CPU", "-t", "1", "-c", "256", key=None) as other:
        chromium.driver.get(other.url)
        chromium.until(lambda: "of 24" in chromium.text("resident"))
    chromium.until(lambda: chromium.text("server") == "the server cannot be reached")
    ask(chromium, QUESTION)
    chromium.until(lambda: chromium.driver.find_elements("class name", "error"))
    assert chromium["prompt"].get_attribute("value") == QUESTION
