"""docs/: the generated parts are what the rules, arguments, schema and package give now; links lead somewhere."""

import re

import make_docs
import pytest

from specgen.runtime.package import Package

ROOT = make_docs.DOCS.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(make_docs.DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", ["combinations.md", "functions.md", "spec.md", "tuning.md"])
def test_a_page_is_what_its_source_gives(page):
    made = make_docs.pages()[page]
    assert (make_docs.DOCS / page).read_text(encoding="utf-8") == made, "run `python tests/make_docs.py`"


def test_every_field_has_a_section_in_order_of_the_schema():
    headings = re.findall(
        r"^#+ `([\w.]+)`$", (make_docs.DOCS / "spec.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    top = ["tensor_parallel", "targets"]
    assert sorted(headings) == sorted(make_docs.fields())
    assert [name for name in headings if name not in top] == [
        name for name in make_docs.fields() if name not in top
    ]


def test_every_public_function_is_described():
    text = (make_docs.DOCS / "functions.md").read_text(encoding="utf-8")
    names = (
        "attention attention_varlen append_kv merge_states workspace warmup explain explain_varlen describe"
    )
    for name in names.split():
        assert f"## `{name}`" in text and callable(getattr(Package, name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
