"""The page of a report: well-formed, closed, escaped, the same bytes again; and in a browser."""

import dataclasses
import html.parser
import itertools
import math
import os
import re
import shutil
import sys

import pytest

from fewbit.errors import QuantError, UnsupportedError
from fewbit.evaluate.metrics import Divergence, Estimate
from fewbit.evaluate.perplexity import Comparison, Perplexity
from fewbit.evaluate.report import check_page_path, report_page, save_page
from fewbit.evaluate.report.charts import LayerMap, ink_on, layer_map_chart
from fewbit.evaluate.report.facts import (
    CalibratedExperts,
    Histogram,
    InputFacts,
    MeasuredInputs,
    MeasuredQuality,
    ModelFacts,
    Report,
    StoredModel,
    TensorFacts,
)
from fewbit.evaluate.report.inputs import UNSEEN_EXPERTS
from fewbit.evaluate.report.template import _STYLE, MARKER
from fewbit.models import is_installed
from fewbit.workflows.methods.experts import UNSEEN
from tests.evaluate.report.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(not is_installed("matplotlib"), reason="needs pip install fewbit[plot]")

EVIL = '<script>alert("1")</script>&$x$\u4e2d'
VOID = {"meta", "link", "br", "input"}


def tensor(path, kind, layer, sqnr_db, *, stored="nf4", role="matmul", reason=""):
    is_quantized = stored == "nf4"
    return TensorFacts(path, kind, layer, (64, 64), stored, is_quantized, role, reason, 16384, 2304, sqnr_db)


def quality(kl):
    p, q = Perplexity(18.3, 1.1, 2048), Perplexity(21.6, 1.3, 2048)
    divergence = Divergence(Estimate(kl, 0.005), 0.1, 0.2, 0.4, 0.9)
    return MeasuredQuality("pydoc", 512, "fewbit", Comparison(p, q, Estimate(0.17, 0.01), divergence, Estimate(0.75, 0.01)))


def stored(name):
    return StoredModel(name, f"/models/{name}", "fewbit", 20_480, 13_000, 11_000)


@pytest.fixture(scope="module")
def facts():
    """Two models: one was measured, the other cannot be run; one tensor has a hostile name."""
    tensors = (
        tensor("layers/0/attn/q", "layers/*/attn/q", 0, 20.31),
        tensor("layers/1/attn/q", "layers/*/attn/q", 1, math.inf),
        tensor(f"layers/0/{EVIL}", f"layers/*/{EVIL}", 0, 18.25),
        tensor("layers/0/norm", "layers/*/norm", 0, None, stored="F32", role="norm", reason="no product contracts it"),
        tensor("head", "head", None, 21.0, stored="F32", role="unknown"),
    )
    numbers = (-1.0, 0.0, 1.0)
    histograms = tuple(
        Histogram(one.path, "nf4", "nf4", one.sqnr_db, 0.75, -1.5, 1.5, (3, 9, i), numbers, 0.01)
        for i, one in enumerate(tensors[:3])
    )
    one = ModelFacts(stored("a"), "hf", "nf4", "rtn", quality(0.2), "", tensors, histograms, (EVIL,))
    two = ModelFacts(stored("b"), "", "", "", None, f"no tokenizer {EVIL}", tensors[:2], histograms[:1], ())
    outlier = InputFacts(f"layers/0/{EVIL}", 0, 64, 120.0, 0.5, 7, 31.5)
    calm = InputFacts("layers/1/attn/q,k,v", 1, 64, 5.0, 1.0, 3, 1.25)
    experts = {"layers/1/mlp/experts": (0, 40, 300, 0), f"layers/0/{EVIL}": (9,)}
    return Report(stored(EVIL), (one, two), MeasuredInputs(EVIL, 2048, (outlier, calm), experts))


class Page(html.parser.HTMLParser):
    """Elements in order with their attributes and the headings above them; an element that is not closed is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def text(facts):
    return report_page(facts)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_it_is_one_page_that_loads_nothing(text, page):
    assert text.startswith(MARKER)
    assert page.all("script") == [{"type": "application/json", "id": "weights"}, {}] and len(page.all("style")) == 1
    loading = ("src", "href", "xlink:href", "action", "data", "srcset", "poster")
    targets = [value for _, attributes in page.elements for key, value in attributes.items() if key in loading]
    assert targets and all(value.startswith("#") or value == "data:," for value in targets)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy


def test_ids_are_unique_and_every_reference_has_one(text, page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = [value for _, a in page.elements for key in ("for", "aria-labelledby") for value in a.get(key, "").split()]
    referred += [value[1:] for _, a in page.elements for key in ("href", "xlink:href") if (value := a.get(key, "")) > "#"]
    referred = [name for name in referred if name != "ata:,"] + re.findall(r"url\(#([^)]*)\)", text)
    assert len(referred) > 10 and set(referred) <= set(ids)


def test_headings_and_labels(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    labelled = {attributes["for"] for attributes in page.all("label")}
    assert labelled == {attributes["id"] for tag in ("input", "select") for attributes in page.all(tag)}
    assert all(attributes["role"] == "img" for attributes in page.all("svg"))
    assert page.all("html") == [{"lang": "en"}] and any(m.get("name") == "viewport" for m in page.all("meta"))
    boxes = [a for a in page.all("div") if "box" in a.get("class", "").split()]
    assert boxes and all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)


def test_what_comes_from_files_is_escaped(text, page):
    assert "<script>alert" not in text
    shown = "".join(data for tag, data in page.texts if tag in ("th", "a", "h1", "h4", "li"))
    assert shown.count(EVIL) >= 4


def test_every_tensor_has_a_row(page):
    rows = [attributes["data-state"] for attributes in page.all("tr") if "data-state" in attributes]
    assert rows == ["quantized"] * 3 + ["float"] * 2 + ["quantized"] * 2
    cells = [data for tag, data in page.texts if tag in ("td", "th", "a")]
    for value in ("layers/1/attn/q", "64x64", "nf4", "16,384", "2,304", "4.500", "20.31", "=", "no product contracts it"):
        assert value in cells
    assert "7 of 7 tensors" in {data for _, data in page.texts}
    charts = [attributes.get("data-weight") for attributes in page.all("tr") if "data-state" in attributes]
    assert charts == ["0", "1", "2", None, None, "3", None]


def test_the_summary_and_the_charts_say_what_was_measured(page, text):
    words = " ".join(data for _, data in page.texts)
    for said in (
        "21.60 ± 1.30",
        "0.2 ± 0.005",
        "75.00 ± 1.00 %",
        "2,048 tokens of pydoc",
        "quality was not measured: no tok",
    ):
        assert said in words
    assert "KL divergence over bits per weight: a 0.2 nats at 4.297 bits" in words
    assert words.count("not measured") >= 3
    assert len(page.all("svg")) == 1 + 2 + 3 + 1 + 1  # quality, two maps, the worst weights, the chosen one, inputs
    assert "currentColor" in text and "#0a0b0c" not in text


def test_tensors_in_float_are_counted_by_reason(facts, page):
    assert [(g.role, g.reason, g.count) for g in facts.models[0].left_in_float] == [
        ("norm", "no product contracts it", 1),
        ("unknown", "not recorded", 1),
    ]
    assert any("Nothing: every tensor is quantized." in data for _, data in page.texts)


def test_outliers_and_experts(facts, page):
    cells = [data for tag, data in page.texts if tag in ("td", "th", "text")]
    for value in ("240.0", "120", "31.5", "layers/1/attn/q,k,v", "240", "5.0"):
        assert value in cells
    at = cells.index("layers/1/mlp/experts")
    assert cells[at + 1 : at + 7] == ["4", "0", "20", "300", "2", "0, 3"]
    without = dataclasses.replace(facts, inputs=None, why_no_inputs=f"no tokenizer {EVIL}")
    words = " ".join(data for _, data in Page(report_page(without)).texts)
    assert f"Not measured: no tokenizer {EVIL}." in words and "Tokens of experts" not in words and "#experts" not in words
    assert set(UNSEEN_EXPERTS) == set(UNSEEN)
    learned = CalibratedExperts(EVIL, 4096, "share", {"layers/1/mlp/experts": (7, 0)})
    models = (dataclasses.replace(facts.models[0], experts=learned), facts.models[1])
    texts = [data for _, data in Page(report_page(dataclasses.replace(facts, models=models))).texts]
    at = texts.index("layers/1/mlp/experts")
    assert texts[at + 1 : at + 7] == ["2", "0", "4", "7", "1", "1"]  # the run's own tokens, not those of the outliers
    assert "of 4,096 tokens" in " ".join(texts) and "(--unseen-experts share)" in " ".join(texts)
    zero = MeasuredInputs("x", 1, (InputFacts("layers/0/up", 0, 4, 0.0, 0.0, 0, 0.0),), {})
    text = report_page(dataclasses.replace(facts, inputs=zero))
    assert "All inputs are zero." in text and 'href="#inputs"' in text and 'href="#experts"' not in text


def test_a_model_in_memory_has_no_bytes_on_the_disk(facts):
    one = dataclasses.replace(facts.models[0], stored=dataclasses.replace(facts.models[0].stored, file_bytes=None))
    cells = [data for tag, data in Page(report_page(dataclasses.replace(facts, models=(one,)))).texts if tag == "td"]
    assert cells.count("not written") == 1


def test_a_tensor_that_the_source_lacks(facts):
    head = dataclasses.replace(facts.models[0].tensors[-1], bytes_before=None)
    page = Page(report_page(dataclasses.replace(facts, models=(dataclasses.replace(facts.models[1], tensors=(head,)),))))
    assert "16,384" not in {data for _, data in page.texts} and "2,304" in {data for _, data in page.texts}


def test_models_of_one_name_are_named_by_their_paths(facts):
    two = dataclasses.replace(facts.models[1], stored=dataclasses.replace(facts.models[1].stored, name="a"))
    text = report_page(dataclasses.replace(facts, models=(facts.models[0], two)))
    assert "<h3>/models/a</h3>" in text and "<h3>/models/b</h3>" in text


def test_weights_that_are_not_finite_are_not_called_equal(facts):
    odd = [tensor(f"layers/0/e/{i}/w", "layers/*/e/*/w", 0, value) for i, value in enumerate((math.inf, math.nan, 20.0))]
    odd += [tensor("layers/1/v", "layers/*/v", 1, -math.inf), tensor("layers/0/v", "layers/*/v", 0, 12.0)]
    one = dataclasses.replace(facts.models[1], tensors=tuple(odd))
    page = Page(report_page(dataclasses.replace(facts, models=(one,))))
    cells = [data for tag, data in page.texts if tag == "text"]
    assert {"nan", "-∞", "12.0"} <= set(cells) and "=" not in cells
    page = Page(report_page(dataclasses.replace(facts, models=(dataclasses.replace(one, tensors=tuple(odd[1:2])),))))
    assert {"No SQNR is finite.", "nan"} <= {data for _, data in page.texts}


def test_without_quality_and_without_loss(facts):
    exact = tuple(dataclasses.replace(t, sqnr_db=math.inf) for t in facts.models[0].tensors[:2])
    without = dataclasses.replace(facts.models[1], histograms=facts.models[0].histograms[1:2])
    models = (dataclasses.replace(without, tensors=exact), dataclasses.replace(without, tensors=(), histograms=()))
    words = " ".join(data for _, data in Page(report_page(dataclasses.replace(facts, models=models))).texts)
    assert "No chart: the quality of no model was measured" in words
    assert "Every weight of its layers is equal to the source's." in words
    assert "No SQNR was measured for weights of numbered layers." in words
    assert words.count("No quantized weight lost anything that was measured.") == 2


def test_the_same_facts_give_the_same_bytes(facts, text):
    assert report_page(facts) == text


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_a_contrast_of_four_and_a_half():
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", _STYLE)]
    assert len(themes) == 2
    for theme in themes:
        for text in ("text", "dim", "link"):
            assert min(contrast(theme[text], theme[back]) for back in ("back", "box")) >= 4.5


def test_the_numbers_of_a_map_can_be_read_on_their_colours():
    from matplotlib import colormaps

    for red, green, blue, _ in colormaps["viridis"].resampled(16)(range(16)):
        fill = "#" + "".join(f"{round(255 * channel):02x}" for channel in (red, green, blue))
        assert contrast(fill, ink_on((red, green, blue))) >= 4.5


def test_a_map_has_a_number_for_each_weight():
    found = LayerMap.of({("up", 0): 20.31, ("down", 0): math.inf, ("down", 3): 18.0})
    assert found.values == ((20.31, None), (math.inf, 18.0))
    svg = layer_map_chart(found, prefix="p", title="a & b", label="SQNR, dB")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert texts.count("20.3") == texts.count("18.0") == texts.count("=") == 1
    assert LayerMap.of({("x/*/up", 0): 1.0, ("x/*/down", 1): 2.0}).kinds == ("up", "down")
    large = layer_map_chart(
        LayerMap.of({("up", 0): 3.0, ("up", 1): 1234.4}), prefix="p", title="", label="", is_logarithmic=True
    )
    assert {"3.0", "1234"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", large))
    assert '<title id="p-title">a &amp; b</title>' in svg and {"up", "down", "layer"} <= set(texts)


# --- the file ---


def test_only_reports_are_replaced(facts, tmp_path):
    path = save_page(tmp_path / "r.html", facts)
    first = path.read_bytes()
    assert save_page(path, facts).read_bytes() == first
    path.write_text("<!doctype html>\n<p>mine")
    with pytest.raises(
        QuantError, match=r"is no report of fewbit, so it is not replaced; .*or pass overwrite=True, --overwrite"
    ):
        save_page(path, facts)
    assert save_page(path, facts, overwrite=True).read_bytes() == first
    assert os.listdir(tmp_path) == ["r.html"]


def test_paths_that_cannot_be_written(tmp_path):
    with pytest.raises(QuantError, match=r"is a directory, so it is not replaced; name a file, such as .*report\.html"):
        check_page_path(tmp_path)
    with pytest.raises(QuantError, match="no does not exist"):
        check_page_path(tmp_path / "no" / "r.html")
    with pytest.raises(QuantError, match="/dev/null is no regular file"):
        check_page_path("/dev/null", overwrite=True)
    model = tmp_path / "model" / "model.safetensors"
    model.parent.mkdir()
    model.write_bytes(b"weights")
    with pytest.raises(QuantError, match=r"model\.safetensors is a file of .*model, the model that is read"):
        check_page_path(model, overwrite=True, sources=[model.parent])
    with pytest.raises(QuantError, match="is the model itself"):
        check_page_path(model, overwrite=True, sources=[model])
    report = model.parent / "report.html"
    assert check_page_path(report, sources=[model.parent]) == report
    report.write_text(MARKER)
    assert check_page_path(report, sources=[model.parent]) == report


def test_a_file_that_comes_while_a_page_is_written_stays(facts, tmp_path, monkeypatch):
    path = tmp_path / "r.html"

    def slow(report):
        path.write_text("mine")
        return MARKER

    monkeypatch.setattr(sys.modules["fewbit.evaluate.report.page"], "report_page", slow)
    with pytest.raises(QuantError, match="is no report of fewbit, so it is not replaced"):
        save_page(path, facts)
    assert path.read_text() == "mine" and os.listdir(tmp_path) == ["r.html"]


def test_matplotlib_is_asked_for_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r'pip install "fewbit\[plot\]"'):
        check_page_path(tmp_path / "r.html")


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=[(375, True), (1280, False)], ids=["phone-dark", "desktop-light"])
def opened(request, browser, facts, tmp_path):
    """A browser with the page of the facts, as it opens for a fragment. No message may come to its console."""
    path, (width, is_dark) = save_page(tmp_path / "r.html", facts), request.param
    before = len(browser.messages)

    def open_at(fragment):
        browser.open(f"{path.as_uri()}#{fragment}", width=width, is_dark=is_dark)
        return browser

    yield open_at
    assert browser.messages[before:] == []
    assert browser.value("document.documentElement.scrollWidth") <= width == browser.value("innerWidth")


def rows_shown(browser):
    return browser.value("Array.from(document.querySelectorAll('tr[data-state]'), row => !row.hidden)")


def chosen(browser):
    """The text of the chosen weight, and the outline of its bars."""
    text = browser.value("document.getElementById('chosen-caption').textContent")
    return text, browser.value("document.querySelector('#chosen-chart .bars').getAttribute('d')")


def focus(browser, element):
    browser.value(f"document.{element}.focus()")


needs_browser = pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason=f"needs {CHROMIUM}")


@pytest.mark.slow
@needs_browser
def test_a_browser_filters_the_plan(opened):
    browser = opened("q=attn&show=quantized")
    assert rows_shown(browser) == [True, True, False, False, False, True, True]
    assert browser.value("shown.textContent") == "4 of 7 tensors"
    browser.value("search.value = ''")
    focus(browser, "getElementById('search')")
    browser.type("layers/1 Q")
    assert browser.value("shown.textContent") == "2 of 7 tensors"
    browser.value("search.value = ''; filter.value = 'float'; filter.dispatchEvent(new Event('change'))")
    assert rows_shown(browser) == [False, False, False, True, True, False, False]


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_the_weight_that_is_chosen(opened):
    browser = opened("")
    first = chosen(browser)
    assert first[0] == "a, layers/0/attn/q: nf4, 20.31 dB, largest magnitude 0.75, 3 numbers of nf4, 1 % clipped"
    assert browser.value("document.querySelector('#chosen-chart .grid').getAttribute('d').match(/V/g).length") == 3
    assert browser.value("found.textContent") == "4 of 4 weights"
    focus(browser, "getElementById('weight')")
    browser.press("ArrowDown")
    second = chosen(browser)
    assert second[0].startswith("a, layers/1/attn/q: nf4, equal to the source's, ") and second[1] != first[1]
    browser.press("ArrowUp")
    assert chosen(browser) == first

    focus(browser, "getElementById('weight-search')")
    browser.type("B attn")
    assert chosen(browser)[0].startswith("b, layers/0/attn/q: ")
    assert browser.value("found.textContent") == "1 of 4 weights"
    browser.press("Tab")
    assert browser.value("document.activeElement.id") == "weight"

    focus(browser, "querySelectorAll('tr[data-weight] a')[2]")
    browser.press("Enter")
    assert chosen(browser)[0].startswith(f"a, layers/0/{EVIL}: nf4, 18.25 dB")
    assert browser.value("document.activeElement.id") == "chosen"
    assert browser.value("[found.textContent, list.value, weightSearch.value]") == ["4 of 4 weights", "2", ""]

    browser.click("document.querySelector('tr[data-weight=\"1\"]').cells[2]")
    assert chosen(browser) == second
    browser.click("document.querySelector('tr[data-state=float]').cells[2]")
    assert chosen(browser) == second


@pytest.mark.slow
@needs_browser
def test_a_fragment_chooses_a_weight(opened):
    assert chosen(opened("weight=layers/1/attn/q"))[0].startswith("a, layers/1/attn/q: ")
    assert chosen(opened("weight=nothing"))[0].startswith("a, layers/0/attn/q: ")


@pytest.mark.slow
@needs_browser
def test_without_histograms_there_is_nothing_to_choose(browser, facts, tmp_path):
    without = tuple(dataclasses.replace(model, histograms=()) for model in facts.models)
    path = save_page(tmp_path / "r.html", dataclasses.replace(facts, models=without))
    before = len(browser.messages)
    browser.open(f"{path.as_uri()}#weight=x", width=375)
    assert browser.value("document.getElementById('chooser').hidden") and browser.messages[before:] == []
