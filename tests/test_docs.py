"""What README and documentation tell a reader to type works: it parses, names what exists, and is run somewhere."""

import re
from functools import cache
from typing import NamedTuple

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm import cli

from .conftest import ROOT, load_tool
from .docs_fences import LANGUAGES, commands, fences, pages


class Rule(NamedTuple):
    """How commands that match a pattern are kept working.

    Exactly one of: `run`, they are run here; `test`, this test runs the same tool on small data; `needs`, why nothing
    here can run them.
    """

    pattern: str
    run: bool = False
    test: str = ""
    needs: str = ""


# A new command that no rule matches fails the test below: add a line here. The first rule that matches decides.
TRAIN, TEST, DEMO = r"(tools/|-m mrla_mm )train\b", r"(tools/|-m mrla_mm )test\b", r"(tools/|-m mrla_mm )demo\b"
SMOKE = "tests/test_smoke.py::"
RULES = (
    Rule(r"^make quickstart$", test="tests/tools/test_quickstart.py::test_it_trains_then_resumes"),
    Rule(r"^make (install|test|lint|docs)$", needs="a fresh clone, where CI runs them"),
    Rule(r"^make matrix$|matrix\.py", needs="a package index and an hour; tests/tools/test_matrix.py reads its stacks"),
    Rule(r"export\.py", test="tests/tools/test_export.py::"),
    Rule(r"^pip-audit", needs="a package index that serves advisories"),
    Rule(r"^make bench$", test="tests/tools/test_benchmark.py::"),
    Rule(r"^source .venv/bin/activate$", needs="a shell"),
    Rule(r"^pip (un)?install ", test="tests/test_packaging.py::test_wheel_and_source_distribution_carry_every_config"),
    Rule(r"^mim ", needs="OpenMMLab's package manager; the files it reads are tested in tests/analysis"),
    Rule(r"doctor", run=True),
    Rule(r"get_flops\.py configs/\S+ --shape", run=True),
    Rule(r"get_flops", test="tests/tools/test_get_flops.py::"),
    Rule(r"visualize_layer_attention", test="tests/tools/test_visualize_layer_attention.py::"),
    Rule(r"visualize_query_similarity", test="tests/tools/test_picture_tools.py::test_query_similarity"),
    Rule(r"visualize_cam", test="tests/tools/test_picture_tools.py::test_class_activation_maps"),
    Rule(r"visualize_vit_attention", test="tests/tools/test_picture_tools.py::test_attention_of_a_transformer"),
    Rule(r"tools/report\.py", test="tests/tools/test_report.py::test_predictions_are_made_and_kept"),
    Rule(r"coco_subset|check_training", needs="COCO"),
    Rule(r"benchmark\.py .*--amp|measure_gpu", needs="a GPU"),
    Rule(r"benchmark\.py", test="tests/tools/test_benchmark.py::"),
    Rule(r"collect_results", test="tests/tools/test_collect_results.py::test_a_run_is_recorded_once"),
    Rule(r"convert_weights|publish_weights", test="tests/weights/test_chain.py::"),
    Rule(r"(dist_train|train\.py) configs/imagenet|my_pretraining", test="tests/weights/test_chain.py::"),
    Rule(r"coco8", needs="COCO"),
    Rule(r"dist_train|dist_test", test=f"{SMOKE}test_two_processes"),
    Rule(r"slurm_train", needs="a Slurm cluster"),
    Rule(r"-m mrla_mm train", test="tests/test_packaging.py::test_a_project_outside_the_repository_trains"),
    Rule(r"work_dirs/try_out", test=f"{SMOKE}test_the_documented_try_on_a_cpu"),
    Rule(f"{TRAIN}|{TEST}", test=f"{SMOKE}test_train_test_resume"),
    Rule(DEMO, test="tests/tools/test_demo.py::"),
)
# Names that a page makes up, beside the configs that it shows in full.
PLACEHOLDERS = {"CONFIG"}
# What a piece of Python takes for granted, by page.
PRELUDES = {
    "docs/analysis.md": "import torch\nfrom mmengine.registry import MODELS\n"
    "class Detector(torch.nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.backbone = MODELS.build(dict(type='MRLAResNet', depth=18))\n"
    "    def extract_feat(self, images):\n"
    "        return self.backbone(images)\n"
    "model, images = Detector().eval(), torch.rand(1, 3, 64, 64)\n",
}
COMMANDS, PYTHON = commands(), fences("python")
LAUNCHERS = {"dist_train.sh": ("train", 0, 2), "dist_test.sh": ("test", 0, 3), "slurm_train.sh": ("train", 2, 3)}


def rule_of(command):
    return next((rule for rule in RULES if re.search(rule.pattern, command.text)), None)


def names(items):
    return [f"{item.page}: {getattr(item, 'text', '').splitlines()[0][:80]}" for item in items]


def invocation(words):
    """Tool of ours and its arguments that a command runs, or None for another program."""
    program, *rest = words
    name = program.rsplit("/", 1)[-1]
    if name in LAUNCHERS:
        tool, config, skipped = LAUNCHERS[name]
        checkpoint = [rest[1]] if tool == "test" else []
        return tool, [rest[config], *checkpoint, *rest[skipped:]]
    if name.startswith("python") and rest[:2] == ["-m", "mrla_mm"]:
        return rest[2], rest[3:]
    if name.startswith("python") and rest and rest[0].startswith("tools/"):
        return rest[0].removeprefix("tools/").removesuffix(".py"), rest[1:]
    return None


@cache
def shown_configs():
    """Text of the configs that pages show in full, by the file name in their first line."""
    named = {}
    for fence in PYTHON:
        match = re.match(r"# (\w+\.py)\n", fence.text)
        if match:
            named.setdefault(match[1], fence.text)
    return named


@pytest.fixture(scope="module")
def written_configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for name, text in shown_configs().items():
        (folder / name).write_text(text)
    return folder


def build(cfg):
    """Build the model of a config, or the parts it has, without weights."""
    init_default_scope(cfg.get("default_scope", "mmdet"))
    with torch.device("meta"):
        return MODELS.build(cfg.model if "type" in cfg.model else cfg.model.backbone)


@pytest.mark.parametrize("command", COMMANDS, ids=names(COMMANDS))
def test_command(command, written_configs, monkeypatch):
    """It is known, its arguments parse, the config it names exists, and its overrides fit and build."""
    assert rule_of(command), f"{command.page}: add a rule to tests/test_docs.py for: {command.text}"
    monkeypatch.chdir(ROOT)
    program = command.words[0].rsplit("/", 1)[-1]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(word for word in command.words[1:] if "=" not in word) <= set(targets)
        return
    if command.words[0].startswith("tools/"):
        assert (ROOT / command.words[0]).is_file()
    tool, argv = invocation(command.words) or (None, [])
    if tool is None:
        return
    assert (ROOT / f"tools/{tool}.py").is_file()
    module = load_tool(tool)
    if not hasattr(module, "parse_args"):
        assert not argv, f"{tool} takes no arguments"
        return
    for word in argv:
        assert not word.startswith("configs/") or (ROOT / word).is_file(), word
    args = module.parse_args(argv)
    if isinstance(getattr(args, "config", None), str) and args.config not in PLACEHOLDERS:
        check_config(args, written_configs)


def check_config(args, folder):
    """The config exists, here or on a page; its overrides fit; a checkpoint it is used with is of its last epoch."""
    if args.config in shown_configs():
        args.config = str(folder / args.config)
    if not hasattr(args, "launcher"):
        cfg = Config.fromfile(cli.locate_config(args.config))
    else:
        overridden = bool(args.cfg_options)
        cfg = cli.load_config(args)
        if overridden:
            cfg.model.backbone.init_cfg = None
            build(cfg)
    checkpoint = re.search(r"/epoch_(\d+)\.pth$", str(getattr(args, "checkpoint", "")))
    assert checkpoint is None or int(checkpoint[1]) == cfg.train_cfg.max_epochs


RUNNABLE = {command.text: command for command in COMMANDS if rule_of(command) and rule_of(command).run}


@pytest.mark.parametrize("command", RUNNABLE.values(), ids=lambda command: command.text[:80])
def test_command_runs(command, monkeypatch, capsys):
    tool, argv = invocation(command.words)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [tool, *argv])
    module = load_tool(tool)
    if tool == "doctor":
        assert module.load_doctor().main() == 0
    else:
        assert cli.run(module.main, argv) == 0
    assert capsys.readouterr().out.strip()


def test_rules_name_tests_that_exist_and_commands_that_are_written():
    for rule in RULES:
        assert bool(rule.run) + bool(rule.test) + bool(rule.needs) == 1, rule
        assert any(rule_of(command) is rule for command in COMMANDS), f"no command is left for {rule.pattern}"
        if rule.test:
            file, _, name = rule.test.partition("::")
            assert f"def {name or 'test_'}" in (ROOT / file).read_text(), rule.test


def test_every_fence_says_its_language():
    for fence in fences():
        known = fence.language in LANGUAGES or fence.language.startswith("{")
        assert known, f"{fence.page}:{fence.line}: a fence in {fence.language!r}; use {sorted(LANGUAGES)}"


def is_config(fence):
    return "import" not in fence.text.replace("imports", "") and re.search(
        r"^(_base_|model) =", fence.text, re.MULTILINE
    )


CONFIG_FENCES = [fence for fence in PYTHON if is_config(fence)]


@pytest.mark.parametrize("fence", CONFIG_FENCES, ids=names(CONFIG_FENCES))
def test_config_builds(fence, tmp_path):
    (tmp_path / "shown.py").write_text(fence.text)
    cfg = Config.fromfile(tmp_path / "shown.py")
    assert sum(p.numel() for p in build(cfg).parameters()) > 1e6


@pytest.mark.parametrize("page", sorted({fence.page for fence in PYTHON if not is_config(fence)}))
def test_python_runs(page):
    """All Python of a page, in order and in one namespace."""
    namespace = {}
    exec(PRELUDES.get(page, ""), namespace)
    registered = dict(MODELS.module_dict)
    try:
        for fence in PYTHON:
            if fence.page == page and not is_config(fence):
                exec(compile("\n" * fence.line + fence.text, str(ROOT / page), "exec"), namespace)
    finally:
        for name in set(MODELS.module_dict) - set(registered):
            del MODELS.module_dict[name]


def test_the_worked_example_computes_what_it_says():
    """The page for successors: under 40 lines, and its variant is the mean of the values of the stage's layers."""
    example, use, *_ = (fence.text for fence in PYTHON if fence.page == "docs/extending.md")
    assert len((example + use).splitlines()) < 40 + 4 and len(example.splitlines()) < 40
    namespace = {}
    try:
        exec(example, namespace)
        first, second = (namespace["MeanAttention"](16, 8, first_in_stage=start) for start in (True, False))
        x, later = torch.rand(2, 16, 5, 7), torch.rand(2, 16, 5, 7)
        out, memory = first(x, x, None)
        torch.testing.assert_close(out, first.project_value(x))
        out, _ = second(later, later, memory)
        torch.testing.assert_close(out, (first.project_value(x) + second.project_value(later)) / 2)
        net = namespace["TinyNet"](dict(type="MeanAttention", head_channels=8))
        net(torch.rand(1, 3, 64, 64))[0].sum().backward()
        assert all(p.grad is not None for p in net.parameters())
    finally:
        for name in ("MeanAttention", "TinyNet"):
            MODELS.module_dict.pop(name, None)


def test_files_that_are_mentioned_exist():
    """Tools, configs, modules and pages, wherever a page names one in full."""
    pattern = re.compile(r"\b((?:tools|configs|docs|tests|mrla_mm)/[\w/]+\.(?:py|sh|md|yml|json))\b")
    for path in pages():
        for name in pattern.findall(path.read_text(encoding="utf-8")):
            placeholder = re.search(r"/[A-Z]+\.", name)
            assert placeholder or (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_every_page_is_linked_from_the_readme_and_the_sites_front_page():
    readme, index = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    for path in set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/index.md"}:
        assert re.search(rf"^(.* <)?{path.stem}>?$", index, re.MULTILINE), f"docs/index.md does not list {path.stem}"
        assert path.stem == "changelog" or f"](docs/{path.name})" in readme, f"README.md does not link {path.name}"


def anchors(path):
    """Names that links may have for the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_links_between_pages_exist():
    """Pages and headings; anchors of the API reference are Sphinx's, which checks them itself."""
    for path in pages():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            page, where = path.parent / target if target else path, f"{path.relative_to(ROOT)} links to {target}"
            assert page.exists(), where
            assert not anchor or anchor.startswith("mrla_mm.") or anchor in anchors(page), f"{where}#{anchor}"
