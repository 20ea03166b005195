"""Links, anchors and commands on every page lead somewhere: nothing is fetched and no command runs."""

import importlib
import re
import runpy
import shlex
import tomllib
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tyro

from moesaic.cli.commands import COMMANDS, find_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SITE_PAGES = sorted(DOCS.glob("**/*.md"))
PAGES = [*ROOT_PAGES, *SITE_PAGES]

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|(?:src|href|srcset)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.*?) *(?:\{ *#([\w-]+) *\})?$", re.MULTILINE)
ID = re.compile(r"\bid=\"([^\"]+)\"")
INCLUDE = re.compile(r"^--8<-- \"([^\"]+)\"$", re.MULTILINE)
CROSS_REFERENCE = re.compile(r"\]\[(moesaic(?:\.\w+)+)\]")


OTHER_PROGRAMS = ["cd", "cp", "eval", "export", "git", "head", "kill", "ls", "mkdir", "rsync", "sbatch", "source"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its code, which may look like links and headings."""
    return CODE.sub("", FENCE.sub("", page.read_text("utf-8")))


def site_slug(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def github_slug(heading: str) -> str:
    """The anchor that the repository's page on the web gives a heading."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Those that work on the site and, for files of the root, in the repository."""
    text = FENCE.sub("", page.read_text("utf-8"))
    for included in INCLUDE.findall(text):
        text += (ROOT / included).read_text("utf-8")
    slug = github_slug if page in ROOT_PAGES else site_slug
    found = set(ID.findall(text))
    for heading, given in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        found.add(given or slug(words))
    return frozenset(found)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each link that stays in the repository."""
    for link in LINK.finditer(prose(page)):
        target = link[1] or link[2]
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        yield (page.parent / file).resolve() if file else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_resolves(page: Path):
    found = list(links(page))
    assert [name(file) for file, _ in found if not file.exists()] == []
    wrong = [f"{name(file)}#{anchor}" for file, anchor in found if anchor and anchor not in anchors(file)]
    assert wrong == [], f"anchors are {sorted(anchors(found[0][0]))}"
    if page in SITE_PAGES:  # what lies outside of docs/ is not on the site
        assert [name(file) for file, _ in found if not file.is_relative_to(DOCS)] == []


def test_a_wrong_link_and_a_wrong_anchor_would_be_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, once\n\n[a](#a-title-once) [b](other.md#x)\n\n```\n# no heading\n[c](d)\n```\n", "utf-8"
    )
    assert list(links(page)) == [(page, "a-title-once"), (tmp_path / "other.md", "x")]
    assert anchors(page) == {"a-title-once"}


def documented() -> set[str]:
    """Modules whose names have a place in the API reference."""
    return {module for page in SITE_PAGES for module in re.findall(r"^::: ([\w.]+)", page.read_text("utf-8"), re.M)}


@pytest.mark.parametrize("page", [page for page in SITE_PAGES if CROSS_REFERENCE.search(prose(page))], ids=name)
def test_cross_references_name_what_the_api_reference_has(page: Path):
    modules = documented()
    for full in set(CROSS_REFERENCE.findall(FENCE.sub("", page.read_text("utf-8")))):
        module = next(
            (full.rsplit(".", n)[0] for n in range(1, full.count(".")) if full.rsplit(".", n)[0] in modules), ""
        )
        assert module, f"{full}: no page of the API reference has its module"
        found = importlib.import_module(module)
        for part in full.removeprefix(module + ".").split("."):
            found = getattr(found, part)


def test_every_page_is_in_the_menu():
    site = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]
    listed = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    there = {str(page.relative_to(DOCS)) for page in SITE_PAGES} - {"images/README.md"}
    assert sorted(there - listed) == [], "add them to nav in zensical.toml"
    assert sorted(listed - there) == [], "the menu leads nowhere"


def test_files_of_the_root_are_pages_of_the_site_with_links_between_pages():
    pages = runpy.run_path(str(DOCS / "root_files.py"))
    rewrite = pages["with_page_links"]
    found = rewrite("[a](docs/heads.md#the-rule) and [b](CONTRIBUTING.md)")
    assert found == "[a](heads.md#the-rule) and [b](contributing.md)"
    found = rewrite("[results](benchmarks/results), [x](https://x.org/docs/y), [z](heads.md)")
    assert found == "results, [x](https://x.org/docs/y), [z](heads.md)"
    for file, page in pages["PAGES"].items():
        if file != "README.md":
            assert INCLUDE.findall((DOCS / page).read_text("utf-8")) == [file]


def test_the_reference_of_commands_is_that_of_the_parser():
    reference = runpy.run_path(str(DOCS / "cli_reference.py"))
    assert reference["PAGE"].read_text("utf-8") == reference["page"](), "run: python docs/cli_reference.py"


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in the console blocks of a page, without the variables in front of it."""
    for _, language, block in FENCE.findall(page.read_text("utf-8")):
        if language != "console":
            continue
        text = block.replace("\\\n", " ")
        for line in re.findall(r"^ *\$ (.*)$", text, re.MULTILINE):
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|&;"):
                    if words:
                        yield words
                    words = []
                elif words or not re.match(r"[A-Z_]+=", word):
                    words.append(word)


def check_moesaic(words: list[str]) -> None:
    """Parses the arguments as the program does, and runs nothing."""
    if words in (["--version"], ["--help"]):
        return
    assert words, "a command of moesaic is missing"
    assert words[0] in COMMANDS, f"moesaic {words[0]}: no such command"
    if "--help" not in words:
        command, count = find_command(words)
        tyro.cli(command, prog=" ".join(["moesaic", *words[:count]]), args=words[count:])


def check_script(words: list[str]) -> None:
    """The script exists and mentions every option."""
    script = ROOT / words[0]
    assert script.is_file(), f"{words[0]}: no such file"
    source = script.read_text("utf-8")
    missing = [word for word in words[1:] if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
    assert missing == [], f"{words[0]} has no such options"


def check(words: list[str]) -> None:
    program, rest = re.sub(r"^(python|pip)[\d.]+$", r"\1", Path(words[0]).name), words[1:]
    if program in ("torchrun", "srun", "ssh"):  # which start another program
        starts = [i for i, word in enumerate(rest) if word == "-m" or word.endswith((".py", "moesaic", "python"))]
        assert starts, f"{program} starts nothing"
        inner = rest[starts[0] :]
        check(inner if inner[0].endswith(("moesaic", "python")) else ["python", *inner])
    elif program == "moesaic":
        check_moesaic(rest)
    elif program == "make":
        targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)[0].split()
        assert [word for word in rest if "=" not in word and word not in targets] == []
    elif program == "python" and rest[0] == "-m":
        if rest[1] == "moesaic":
            check_moesaic(rest[2:])
        else:
            assert rest[1] in ("pip", "pytest", "venv", "http.server", "zensical"), rest[1]
    elif program == "python":
        script = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        check_script(rest[script:])
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        asked = [name for word in rest for names in re.findall(r"\[([\w,]+)\]", word) for name in names.split(",")]
        assert [name for name in asked if name not in extras] == []
    else:
        assert program in OTHER_PROGRAMS, words


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name)
def test_the_commands_of_a_page_parse(page: Path, capsys: pytest.CaptureFixture[str]):
    for words in commands(page):
        try:
            check(words)
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}\n{capsys.readouterr()}")


@pytest.mark.parametrize(
    "line",
    [
        "moesaic trian images",
        "moesaic train images --no-such-option 3",
        "moesaic train images --epochs many",
        "moesaic predict",
        "make tests",
        "python examples/nothing.py",
        "python examples/photo_mosaics.py --nothing",
        "pip install 'moesaic[nothing]'",
        "A=1 frobnicate",
    ],
)
def test_a_command_that_does_not_exist_would_be_noticed(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ {line}\n```\n", "utf-8")
    (words,) = commands(page)
    with pytest.raises((AssertionError, SystemExit)):
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_within_sentences_have_the_options_they_are_given(page: Path):
    reference = runpy.run_path(str(DOCS / "cli_reference.py"))
    for command, rest in re.findall(r"`moesaic (\w+)([^`\n]*)`", FENCE.sub("", page.read_text("utf-8"))):
        if command == "COMMAND":
            continue
        assert command in COMMANDS, f"moesaic {command}"
        _, known = reference["arguments"](command, find_command([command, *rest.split()])[0])
        given = set(re.findall(r"(?<!\S)(--[a-z][a-z0-9-]*)", rest))
        assert given <= {option for each in known for option in each.option_strings} | {"--help"}, command + rest
