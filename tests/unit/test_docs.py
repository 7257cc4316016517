import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from sparse_kernels import limits
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.registration import BACKENDS
from vllm_sparse_plugin.tools.cli.app import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE = ROOT / "vllm_sparse_plugin"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"

STANDS_FOR = {
    "{call}": ("reload_weights", "sleep"),
    "{field}.draft_length": (f"{KEY}.lossless.draft_length",),
    "{field}.threshold": (f"{KEY}.routing.threshold",),
    "{field}.{form}": (f"{KEY}.routing.threshold", f"{KEY}.routing.cubic"),
    "{field}.recommended": (f"{KEY}.routing.recommended",),
    # A setting by its path, the name of a preset, an option with JSON; what `expect` names has a row of its own.
    "{field}": (f"{KEY}.preset", "additional_config", "engine_args", "settings", "task"),
    "{origin}": (f"{KEY}.config",),
    f"{KEY}.selection.{{name}}": tuple(f"{KEY}.selection.{name}" for name in ("policy", "page_size", "statistics")),
    f"{KEY}.{{SWITCH}}": (f"{KEY}.trained",),
    "entry point {self.group}": ("entry point",),
    # Any setting of training, by its path.
    "settings.{name}": ("hard_steps", "rows_at_once", "straight_through", "selection_loss"),
    "vllm-sparse {command}": tuple(f"vllm-sparse {name}" for name in ("eval", "fetch-model", "real", "train", "tune")),
    "{self._option}": (),  # the option of a report, which has an entry of its own
    "{option}": ("data", "json", "output", "prompts", "completions", "model", "tokenizer"),
    "{', '.join(engine)}": ("attention_backend", "additional_config", "engine_args"),
    "{', '.join(arguments)}": ("attention_backend", "additional_config", "engine_args"),
    "{reason}": (),  # what `eval` refuses of `tune`
    "{name}": ("density", "tau"),  # and a task of eval
    "{' '.join(sentence.splitlines())}": (),  # any setting, by its path
    "{given[0]}": ("sparse", "sparse_budget_tokens"),
    "{', '.join(names)}": (),  # arguments of a request, which are refused alone, too
    "{', '.join(reads)}": (),  # the same
    "{printable(', '.join(misplaced))}": (),  # fields of a request that are arguments, or are not known
    "{', '.join(values)}": (),  # the same
    "{PROTECT}": ("sparse_protect",),
    "{FORCED_TOKENS_ARGUMENT}": (),  # refused by the server, for one request
}
"""The fields of messages whose field name is a variable."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(node: ast.expr) -> str:
    """A string as written in the code, with placeholders in braces."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(text_of(value) for value in node.values)
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
        case _:
            return f"{{{ast.unparse(node)}}}"


def assigned(tree: ast.AST, name: str) -> Iterator[str]:
    """The strings that are assigned to a variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, values = [node.targets[0]], [node.value]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = targets[0].elts, node.value.elts
            for target, value in zip(targets, values, strict=True):
                if (
                    isinstance(target, ast.Name)
                    and target.id == name
                    and isinstance(value, ast.Constant | ast.JoinedStr)
                ):
                    yield text_of(value)


def refusals() -> Iterator[tuple[str, str, str]]:
    """The text before `: got` in each refusal of the package, the value, and the place of the refusal."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            yields = path.stem == "refusals" and isinstance(node, ast.Yield)
            if yields and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
                field, got = node.value.elts[:2]
                leads = assigned(tree, field.id) if isinstance(field, ast.Name) else [text_of(field)]
                yield from ((lead, text_of(got), f"{name_of(path)}:{node.lineno}") for lead in leads)
            if not isinstance(node, ast.Call):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            place = f"{name_of(path)}:{node.lineno}"
            if called == "expect":
                field, got = node.args[1], text_of(node.args[2])
                leads = assigned(tree, field.id) if isinstance(field, ast.Name) else [text_of(field)]
                yield from ((lead, got, place) for lead in leads)
            elif called in ("ConfigurationError", "PydanticCustomError", "ValueError") and node.args:
                lead, _, rest = text_of(node.args[called == "PydanticCustomError"]).partition(":")
                if called != "ValueError" or rest.startswith(" got"):
                    # vLLM's checks of a backend begin with the words "attention backend" and its name.
                    lead = "attention backend" if lead.startswith("attention backend") else lead
                    yield lead, rest.partition(", allowed")[0].removeprefix(" got"), place


def refused_fields() -> dict[str, str]:
    """Every field named by a refusal, and a place of the refusal."""
    fields = {}
    for written, _, place in refusals():
        lead = written.replace("{KEY}", KEY)
        if "{" in lead:
            assert lead in STANDS_FOR, f"{place}: say in STANDS_FOR which fields {lead!r} stands for"
        fields |= dict.fromkeys(STANDS_FOR[lead] if lead in STANDS_FOR else lead.split(", "), place)
    # Kernels name limits themselves, if admission has no name that users know better.
    fields |= dict.fromkeys((limits.HEAD_SIZE, limits.GROUP, limits.SHARED_MEMORY), "limits.py")
    return fields


def entries(page: str) -> set[str]:
    """The fields that have an entry on the page: list items that begin with them."""
    heads = re.findall(r"^ *- ((?:`[^`]+`(?:,\s+)?)+):", page, re.MULTILINE)
    return {field for head in heads for field in re.findall(r"`([^`]+)`", head)}


def code_lines(path: Path) -> Iterator[str]:
    """Lines of the code blocks of a page, continued lines joined."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"'\{[^']*\}'", lambda quoted: re.sub(r"\n\s*", " ", quoted[0]), text)  # JSON over several lines
    for line in text.splitlines():
        if line.startswith("    ") and not line.lstrip().startswith("-"):
            yield line.strip()


def commands() -> list[tuple[str, list[str]]]:
    """Every `vllm-sparse` command of the pages that has options, as its arguments."""
    found = []
    for path in PAGES:
        for line in code_lines(path):
            if re.match(r"(python3 run\.py exec )?vllm-sparse ", line):
                words = shlex.split(line, comments=True)
                arguments = words[words.index("vllm-sparse") + 1 :]
                if arguments and arguments[0] not in ("serve", "bench"):
                    found.append((f"{name_of(path)}: {line}", arguments))
    return found


def settings() -> list[tuple[str, str, dict]]:
    """Every `sparse_attention` of the pages' commands, and its backend."""
    found = []
    for path in PAGES:
        for line in code_lines(path):
            match = re.search(r"--additional-config '([^']*)'", line)
            if match and '"NAME"' not in match[1]:  # a method of a package
                backend = re.search(r"--attention-backend (\w+)", line)
                found.append((f"{name_of(path)}: {line}", backend[1] if backend else "unique", json.loads(match[1])))
    return found


def test_backends_of_the_pages_exist():
    lines = [(name_of(path), line) for path in PAGES for line in code_lines(path)]
    named = [(page, line, name) for page, line in lines for name in re.findall(r"--attention-backend[ =](\w+)", line)]
    assert len(named) > 20
    for page, line, name in named:
        assert name.upper() in {*BACKENDS, "FLASH_ATTN", "BACKEND", "NAME"}, f"{page}: {line}"


def test_the_readme_fits_a_few_screens_and_helps_in_the_first():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    first = "\n".join(lines[:40])
    for help_in_it in ("pip install", "vllm serve MODEL --attention-backend unique", "\n## Try it\n"):
        assert help_in_it in first


def test_no_merge_left_its_conflicts():
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    pages = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    assert [path.name for path in pages if marks.search(path.read_text())] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_lines_can_be_read(path):
    lines = enumerate(path.read_text().splitlines(), 1)
    # Rows of tables cannot be wrapped.
    assert [(number, len(line)) for number, line in lines if len(line) > (199 if "|" in line else 120)] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_code_is_as_wide_as_the_page(path):
    # The site and GitHub cut longer lines off, behind a scroll bar.
    blocks = [each.content for each in MarkdownIt().parse(path.read_text(encoding="utf-8")) if each.tag == "code"]
    assert [line for block in blocks for line in block.splitlines() if len(line) > 96] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(path):
    # mkdocs checks this for the site, which does not include the README.
    for target in re.findall(r"\]\((?!\w+:|#)([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        there = path.parent / file
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_every_backend_has_a_page_with_the_same_questions():
    presets = {"unique_offload": "offload", "infllm": "infllm", "mean": "mean"}
    pages = {"unique_prefill": "prefill"} | dict.fromkeys(("snapkv", "pyramidkv", "h2o"), "compaction") | presets
    for backend in (*BACKENDS.values(), *presets):
        page = (ROOT / "docs" / "methods" / f"{pages.get(backend, backend)}.md").read_text(encoding="utf-8")
        assert (f'"preset": "{backend}"' if backend in presets else f"--attention-backend {backend}") in page
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        wanted = ("What it does", "Turn it on", "Use it when", "Do not use it when", "Measured")
        assert [heading for heading in headings if heading in wanted] == list(wanted), backend


def test_the_limits_of_the_kernels_are_those_of_the_page():
    rows, sizes = (ROOT / "docs" / "support.md").read_text(encoding="utf-8").splitlines(), limits.HEAD_SIZES
    for begin, told in {
        "| head size |": f"multiples of {sizes.step} from {sizes[0]} to {sizes[-1]} ",
        "| query heads to a KV head |": f"up to {limits.MAX_GROUP} where attention may stop",
        "| pages of a budget |": f"up to {limits.MAX_K:,} where attention may stop",
    }.items():
        assert [told in row for row in rows if row.startswith(begin)] == [True], begin


def test_every_page_is_in_the_navigation():
    def names(nav: object) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        elif isinstance(nav, dict):
            yield from names(list(nav.values()))
        elif isinstance(nav, list):
            for entry in nav:
                yield from names(entry)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES if path != README}
    assert {name for name in names(nav) if not name.startswith("../")} == pages


def test_troubleshooting_has_every_refusal_and_no_other():
    fields = refused_fields()
    listed = entries(TROUBLESHOOTING.read_text(encoding="utf-8"))
    assert {field: place for field, place in fields.items() if field not in listed} == {}
    assert listed - set(fields) == set()


def test_troubleshooting_has_every_notice_and_no_other():
    files = PACKAGE / "notices.py", PACKAGE / "compaction" / "notices.py", PACKAGE / "lossless" / "notices.py"
    sentences = [
        text_of(node.value)
        for file in files
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name.startswith("_about_")
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr)
    ]
    fields = {sentence.partition(":")[0].removeprefix("{KEY}.") for sentence in sentences}
    section = TROUBLESHOOTING.read_text(encoding="utf-8").partition("### Notices")[2].partition("\n## ")[0]
    listed = {
        field for cell in re.findall(r"^\| (`[^|]*`) \|", section, re.M) for field in re.findall(r"`(.*?)`", cell)
    }
    assert fields >= {"selection.lambda", "routing.{form}", "lossless.draft_length"}
    assert listed == {field.replace("{form}", form) for field in fields for form in ("threshold", "cubic")}


def test_troubleshooting_says_what_is_wrong_with_a_model():
    page = re.sub(r"[*`]", "", TROUBLESHOOTING.read_text(encoding="utf-8"))
    reasons = [re.sub(r"\{[^}]*\} ?", "", got).strip() for lead, got, _ in refusals() if lead == "model"]
    told = [reason for reason in reasons if len(reason) > len("with")]
    assert "with MLA" in told
    assert [reason for reason in told if reason not in page] == []


@pytest.mark.parametrize(("line", "arguments"), [pytest.param(*case, id=case[0][:60]) for case in commands()])
def test_commands_of_the_pages_have_the_options_that_they_are_given(line, arguments):
    command = get_command(app)
    for word in arguments:
        if isinstance(command, TyperGroup) and word in command.commands:
            _, command, _ = command.resolve_command(Context(command), [word])
        elif word.startswith("--"):
            assert word in [option for parameter in command.params for option in parameter.opts], line


@pytest.mark.parametrize(("line", "backend", "config"), [pytest.param(*case, id=case[0][:60]) for case in settings()])
def test_settings_of_the_pages_are_settings(line, backend, config):
    assert list(config) == [KEY], line
    if "config" not in config[KEY]:
        resolve(config[KEY], BACKENDS[backend.upper()])
