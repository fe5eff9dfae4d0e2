"""The documents agree with the program: links, commands, the list of packages and the generated pages."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import string
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import slipstream
from slipstream.cli import dispatch
from slipstream.cli.parse import parse
from slipstream.config.schema import Config
from slipstream.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *SITE]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_readme_lists_every_package():
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", README, re.MULTILINE)
    package = Path(slipstream.__file__).parent
    found = [path.stem for path in package.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))]
    found = [name for name in found if not name.startswith("_")]
    assert sorted(listed) == sorted(found)


def test_the_architecture_page_names_every_module():
    page = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE):
        package = Path(slipstream.__file__).parent / row[0]
        if row[0] not in ("tools", "cli") and package.is_dir():
            named = set(re.findall(r"`(\w+)`", row[1])) & {path.stem for path in package.glob("*.py")}
            assert named == {path.stem for path in package.glob("*.py")} - {"__init__"}, row[0]


@pytest.mark.parametrize(
    ("page", "name"),
    [("README.md", "convnet"), ("docs/start/model.md", "convnet"), ("docs/guides/library.md", "own_loop")],
)
def test_the_example_on_the_page_is_the_file(page, name):
    example = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert f"```python\n{example}```" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["commands.md", "configuration.md", "api.md"])
def test_a_generated_page_is_up_to_date(name):
    written = (GENERATOR.REFERENCE / name).read_text(encoding="utf-8")
    assert written == GENERATOR.pages()[name], "run make docs, or python docs/generate.py"


def test_every_page_is_in_the_navigation_and_every_entry_exists():
    entries = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(entries) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in SITE)


# Links.


def without_code(text: str) -> str:
    """Links are looked for in prose: neither in fenced or indented blocks nor in code spans."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", text)


def links(text: str) -> list[str]:
    targets = re.findall(r"\]\(([^()\s]+)\)", without_code(text))
    return [target for target in targets if "://" not in target and not target.startswith("mailto:")]


def anchors(text: str) -> set[str]:
    """As the site makes them of headings."""
    without_fences = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_fences, re.MULTILINE)
    kept = string.ascii_lowercase + string.digits + "_ -"
    return {re.sub(r"[ -]+", "-", "".join(c for c in heading.lower() if c in kept).strip()) for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    found = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        missing_anchor = anchor and goal.suffix == ".md" and goal.is_file()
        if not goal.exists() or (missing_anchor and anchor not in anchors(goal.read_text(encoding="utf-8"))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    assert broken(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", SITE, ids=name_of)
def test_a_page_of_the_site_links_only_to_the_site(page):
    """The site has no copy of the rest of the repository: such a file is named, not linked."""
    paths = [(page.parent / target.partition("#")[0]).resolve() for target in links(page.read_text(encoding="utf-8"))]
    assert [path for path in paths if not path.is_relative_to(ROOT / "docs")] == []


def test_a_broken_link_is_found():
    page = ROOT / "README.md"
    text = "[a](LICENSE) [b](missing.md) [c](CONTRIBUTING.md#nowhere) `[d](missing.md)` [e](https://example.org)"
    assert broken(page, text) == ["missing.md", "CONTRIBUTING.md#nowhere"]


def test_every_file_that_is_named_exists():
    """Files of the repository in code: `tests/...`, `benchmarks/...` and so on."""
    folders = "benchmarks|configs|examples|experiments|recipes|slipstream|tests"
    missing = []
    for page in PAGES:
        named = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./*-]*[\w*/])", page.read_text(encoding="utf-8"))
        missing += [(name_of(page), path) for path in named if not any(ROOT.glob(path.rstrip("/")))]
    assert missing == []


# Commands.


def command_lines(text: str) -> Iterator[str]:
    """What follows `slipstream` in code, to the end of its command: lines of blocks, and code spans. [OPTIONAL] and ...
    are left out."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^(?: {4,}|\t)(.*)$", text, re.MULTILINE)
    for block in re.findall(r"^```(?:text|bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines += block.splitlines()
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        for command in re.split(r"&&|;|\|", re.sub(r"\[[^\]]*\]|\.\.\.", "", line)):
            if start := re.match(r"\s*(?:\$ |B=\")?(?:sudo |torchrun .* -m |for .* do )?slipstream (?=\w)", command):
                yield re.split(r" +#|  +->", command[start.end() :])[0].strip()


def arguments_in(line: str) -> tuple[str, list[str]]:
    """A command and its arguments. A variable of the shell becomes a number."""
    command, *arguments = [re.sub(r"\$\w+", "1", word) for word in shlex.split(line.rstrip('"'))]
    return command, arguments


def check(command: str, arguments: list[str]) -> None:
    """Raises UsageError if an option does not exist or its value is of another type. A mention may leave it out."""
    if command not in dispatch.COMMANDS:
        raise UsageError(f"command {command!r} is unknown")
    options = GENERATOR.arguments_of(command)
    takes_file = issubclass(options, Config) or command == "study"
    if takes_file and arguments and not arguments[0].startswith("-"):
        path = arguments.pop(0)
        if path.startswith("configs/") and not (ROOT / path).is_file():
            raise UsageError(f"{path} does not exist")
    default = options() if issubclass(options, Config) else None
    # A word in capitals stands for what the reader writes; a number is a value of every such type.
    pairs = zip(["", *arguments], arguments, strict=False)
    given = ["1" if word.isupper() and before.startswith("--") else word for before, word in pairs]
    try:
        parse(options, given, f"slipstream {command}", "", default)
    except UsageError as error:
        if "has no value" not in str(error):
            raise


COMMANDS = sorted(
    {
        (name_of(page), line)
        for page in PAGES
        for line in command_lines(page.read_text(encoding="utf-8"))
        if "--help" not in line
    }
)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: value)
def test_every_command_line_that_is_shown_can_be_parsed(page, line):
    command, arguments = arguments_in(line)
    if arguments:  # alone, the name of a command is no command line
        check(command, arguments)


def test_there_are_commands_to_check_and_a_wrong_one_is_found():
    assert len(COMMANDS) > 60
    with pytest.raises(UsageError, match="unknown"):
        check(*arguments_in("train configs/tiny.toml --train.step 5"))
    with pytest.raises(UsageError, match="does not exist"):
        check(*arguments_in("study configs/studies/missing.toml"))


def test_every_command_has_a_section():
    page = (GENERATOR.REFERENCE / "commands.md").read_text(encoding="utf-8")
    for command in dispatch.COMMANDS:
        assert f"\n## {command}\n" in page
        arguments = GENERATOR.arguments_of(command)
        for member in dataclasses.fields(arguments):
            if not issubclass(arguments, Config) or member.name not in GENERATOR.SECTIONS:
                option, value = f"`--{member.name.replace('_', '-')}", f"`{member.name.upper()}`"
                assert option in page or value in page, (command, member.name)
