"""Hooks of mkdocs for the documentation site (mkdocs.yml). Pages lie beside the code, so the site has the paths of the
repository. A file that a page links to, such as a config, becomes a page with its source."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FOLDERS = ("automodel_rl", "benchmarks", "configs", "tests")
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".toml": "toml",
    ".sh": "sh",
    ".json": "json",
    ".html": "html",
    ".ipynb": "json",
}
IMAGES = (".png", ".svg")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of `docs_dir` by all pages, the images on them, and the sources that they link to."""
    theme = [file for file in files if not file.src_uri.endswith((".md", *IMAGES)) and file.generated_by]
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    pages = sorted(str(path.relative_to(ROOT)) for path in found)
    linked = {target for page in pages for target in _targets(page)} - {*pages}
    shown = [File(name, str(ROOT), config.site_dir, config.use_directory_urls) for name in pages]
    for target in sorted(linked):
        path = ROOT / target
        if path.suffix in IMAGES:
            shown.append(File(target, str(ROOT), config.site_dir, config.use_directory_urls))
        elif path.is_file():
            shown.append(File.generated(config, f"{target}.md", content=_source(path)))
    return Files([*theme, *shown])


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Leads links to files and folders to their pages."""

    def to_page(link: re.Match[str]) -> str:
        path = (ROOT / page.file.src_uri).parent / link[1]
        if path.is_dir():
            return f"{link[1].rstrip('/')}/README.md"
        return link[1] if path.suffix in (".md", *IMAGES) else f"{link[1]}.md"

    return LINK.sub(to_page, markdown)


def _targets(page: str) -> list[str]:
    folder = (ROOT / page).parent
    links = LINK.findall((ROOT / page).read_text())
    return [str((folder / link).resolve().relative_to(ROOT)) for link in links]


def _source(path: Path) -> str:
    name = path.relative_to(ROOT)
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
