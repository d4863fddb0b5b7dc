"""The site of docs/: every page has its place in it, and the page that leads to all says the same."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = ROOT / "deploy" / "site"
COPIES = "repository/"


class Loader(yaml.SafeLoader):
    """Reads the file without the functions that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/object/apply:", lambda loader, suffix, node: suffix)


def hooks(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def links() -> ModuleType:
    return hooks("repository_links")


def parts() -> dict[str, list[str]]:
    """Part of the navigation -> its pages, as paths of the repository."""
    nav: list[dict[str, Any]] = yaml.load((SITE / "mkdocs.yml").read_text(), Loader)["nav"]
    found = {}
    for part in nav:
        [(name, entries)] = part.items()
        pages = [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries]
        if isinstance(entries, list):
            found[name] = [page.removeprefix(COPIES) if page.startswith(COPIES) else f"docs/{page}" for page in pages]
    return found


def test_every_page_is_in_one_part() -> None:
    pages = [page for part in parts().values() for page in part]
    assert sorted(page for page in pages if page.startswith("docs/")) == sorted(
        f"docs/{file.name}" for file in DOCS.glob("*.md") if file.name != "index.md"
    )
    assert len(pages) == len(set(pages))
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def test_the_first_page_has_the_same_parts() -> None:
    sections = re.split(r"^## ", (DOCS / "index.md").read_text(), flags=re.MULTILINE)[1:]
    told = {}
    for section in sections:
        name, _, text = section.partition("\n")
        found = [str((DOCS / link).resolve().relative_to(ROOT)) for link in re.findall(r"\]\(([^)#]+)\)", text)]
        told[name.replace(" ", "-")] = found
    assert {name: sorted(pages) for name, pages in told.items()} == {
        name: sorted(pages) for name, pages in parts().items()
    }


def test_links_out_of_the_docs_lead_to_copies_in_the_site(links: ModuleType) -> None:
    def shown(uri: str, text: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        return str(links.on_page_markdown(text, page=page, config=None, files=None))

    assert shown("api.md", "[a](keys.md#roles) [b](../helm/README.md#values)") == (
        "[a](keys.md#roles) [b](repository/helm/README.md#values)"
    )
    assert shown("repository/README.md", "![a](docs/pictures/x.png) [b](LICENSE) [c](https://x.org/a)") == (
        "![a](../pictures/x.png) [b](LICENSE) [c](https://x.org/a)"
    )
    assert shown("repository/helm/README.md", "[a](../docs/api.md) [b](#x)") == "[a](../../api.md) [b](#x)"


def test_what_the_site_copies_is_there(links: ModuleType) -> None:
    copied = links._reached()
    assert {"README.md", "LICENSE", "helm/README.md", "deploy/systemd/paddock.service"} <= set(copied)
    assert all((ROOT / path).is_file() for path in copied)


AS_ON_GITHUB = """\
- one
  goes on
- code:

      paddock up

  and after it
- three

1. first

   ```sh
   - no item
   ```

Text
    code of its own
```yaml
- no item
  either
```
"""
AS_MKDOCS_READS_IT = """\
- one
    goes on
- code:

        paddock up

    and after it

- three

1. first

    ```sh
    - no item
    ```

Text
    code of its own
```yaml
- no item
  either
```
"""


def test_lists_are_read_as_on_github() -> None:
    shown = hooks("github_markdown").on_page_markdown(AS_ON_GITHUB, page=None, config=None, files=None)
    assert shown == AS_MKDOCS_READS_IT.rstrip("\n")
