"""What the documentation site has beside docs/: the README as its first page, CHANGELOG, CONTRIBUTING and the examples.

MkDocs calls the functions named `on_...`. Pages link to files as they are in the repository, so that links work there
too; here they are changed to the pages that show these files.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SHOWN = {".py": "python", ".yaml": "yaml", ".csv": "text"}
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)")
# The theme loads this script from a network; docs/javascripts has a copy.
SHIM, SHIM_COPY = re.compile(r"https://[\w.]+/iframe-worker/shim"), "javascripts/iframe-worker.js"
INCLUDED = re.compile(r"^<!-- code: (\S+) (.*) -->$", re.MULTILINE)

origins: dict[str, str] = {}  # by page of the site: the file of the repository that it shows


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files that are not in docs/."""
    origins.clear()
    origins.update({page: path for path, page in PAGES.items()})
    contents = {page: (ROOT / path).read_text() for path, page in PAGES.items()}
    contents["index.md"] = "---\nhide: [navigation]\n---\n\n" + contents["index.md"]
    for path in examples():
        contents[site_path(path)] = notebook_page(path) if path.endswith(".ipynb") else source_page(path)
    contents |= folder_pages(examples())
    for page, text in contents.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to pages of the site; `<!-- code: FILE NAME ... -->` shows these functions and classes of a file."""
    here = page.file.src_uri
    if here.startswith("examples/"):
        return markdown
    folder = posixpath.dirname(origins.get(here, f"docs/{here}"))

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        return found[1] + posixpath.relpath(site_path(path), posixpath.dirname(here) or ".")

    markdown = LINK.sub(target, markdown)
    return INCLUDED.sub(lambda found: fenced("python", definitions(found[1], found[2].split())), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return SHIM.sub(posixpath.relpath(SHIM_COPY, posixpath.dirname(page.file.dest_uri) or "."), output)


def on_post_template(output_content: str, **_: Any) -> str:
    return SHIM.sub(f"/{SHIM_COPY}", output_content)


def examples() -> list[str]:
    """Files under examples/, but those of runs and caches."""
    found = (path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.*"))
    return sorted(
        str(path) for path in found if path.suffix in (*SHOWN, ".ipynb") and not {"runs", "__pycache__"} & {*path.parts}
    )


def site_path(path: str) -> str:
    """The page that shows a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples"):
        return f"{path}/files.md" if (ROOT / path).is_dir() else f"{path}.md"
    return PAGES.get(path, path)


def folder_pages(paths: list[str]) -> dict[str, str]:
    """A list of links for every folder, to its files and the folders in it."""
    members: dict[str, dict[str, None]] = {}
    for path in paths:
        while folder := posixpath.dirname(path):
            members.setdefault(folder, {})[path] = None
            path = folder
    return {
        site_path(folder): f"# {folder}\n\n"
        + "".join(f"- [`{each}`]({posixpath.relpath(site_path(each), folder)}){first_line(each)}\n" for each in inside)
        for folder, inside in members.items()
    }


def source_page(path: str) -> str:
    return f"# {Path(path).name}\n\n`{path}`\n\n" + fenced(SHOWN[Path(path).suffix], (ROOT / path).read_text())


def notebook_page(path: str) -> str:
    """The cells of a notebook, with the text and the pictures that they printed."""
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        parts += [shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join([*parts, f"The notebook: `{path}`.\n"])


def shown(output: dict[str, Any]) -> str:
    if "text" in output:
        return fenced("text", "".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return fenced("text", "".join(data["text/plain"]))


def first_line(path: str) -> str:
    """What a program says about itself."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) if path.endswith(".py") else None
    return f": {text.partition(chr(10))[0]}" if text else ""


def definitions(path: str, names: list[str]) -> str:
    """The source of functions, classes, methods (`Class.method`) and assignments, in the order given."""
    text = (ROOT / path).read_text()
    lines, found = text.splitlines(), dict(named_nodes(ast.parse(text).body))
    if missing := [name for name in names if name not in found]:
        raise PluginError(f"{path} does not define {', '.join(missing)}")
    parts = []
    for name in names:
        node = found[name]
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n".join(parts)


def named_nodes(body: list[ast.stmt], prefix: str = "") -> Any:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from named_nodes(node.body, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else ()
        elif isinstance(node, ast.Assign):
            yield from ((prefix + name.id, node) for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name))


def fenced(language: str, code: str) -> str:
    return f"```{language}\n{code.rstrip()}\n```\n"
