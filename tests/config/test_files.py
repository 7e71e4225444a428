"""What is wrong in a config file is said in one line, with the file and the line."""

import pytest

from mrla_mm.config import read_file
from mrla_mm.errors import InputError


def said_of(path):
    with pytest.raises(InputError) as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "text, line, expected",
    [
        ("a = 1\nb = dict(\nc = 3\n", 2, "SyntaxError: '(' was never closed"),
        ("a = 1\nb = undefined\n", 2, "NameError: name 'undefined' is not defined"),
        ("def f():\n    return 1 / 0\n\n\na = f()\n", 2, "ZeroDivisionError: division by zero"),
        ("a = 1\n\n_base_ = './gone.py'\n", 3, "gone.py does not exist"),
        ("_base_ = './hier.py'\n", 1, "heir.py?"),
        ("_base_ = [\n    'mmdet::_base_/default_runtime.py',\n    'mmseg::_base_/x.py',\n]\n", 3, "pip install mmseg"),
        ("_base_ = 'mmdet::nothing/of_it.py'\n", 1, "of_it.py"),
        ("_base_ = 'mrla_mm::retinanet_r50_mrla_lihgt_1x.py'\n", None, "did you mean mrla_mm::retinanet_r50_mrla_l"),
        ("a = 1\nb = int('two')\n", 2, "ValueError: invalid literal"),
    ],
)
def test_broken_files(tmp_path, text, line, expected):
    """Each mistake is named where it was made, in a file that inherits the broken one too."""
    path, heir = tmp_path / "own.py", tmp_path / "heir.py"
    path.write_text(text)
    heir.write_text("x = 1\n_base_ = ['./own.py']\n")
    for start in (path, heir):
        said = said_of(start)
        assert expected in said
        assert line is None or said.startswith(f"config file {path}, line {line}: ")


def test_broken_data_files(tmp_path):
    """JSON and YAML name their lines as well."""
    for name, text in (("a.json", '{\n"a": 1,\n}'), ("a.yaml", "a: 1\nb: [1\nc: 2\n")):
        (tmp_path / name).write_text(text)
        assert said_of(tmp_path / name).startswith(f"config file {tmp_path / name}, line 3: ")


def test_values_that_do_not_merge(tmp_path):
    """What mmengine says of values that cannot be merged with the base's is kept, after the file's name."""
    (tmp_path / "base.py").write_text("a = 1\n")
    (tmp_path / "own.py").write_text("_base_ = './base.py'\na = dict(b=2)\n")
    said = said_of(tmp_path / "own.py")
    assert said.startswith(f"config file {tmp_path / 'own.py'}: TypeError: ") and "_delete_=True" in said


def test_modules_that_are_not_there(tmp_path, monkeypatch):
    """A module of custom_imports that is not found is an input error; a bug inside one keeps its traceback."""
    path = tmp_path / "own.py"
    path.write_text("custom_imports = dict(imports=['unheard_of_module'])\n")
    said = said_of(path)
    assert "No module named 'unheard_of_module'" in said and "PYTHONPATH" in said
    (tmp_path / "own_module_with_bug.py").write_text("{}['x']\n")
    monkeypatch.syspath_prepend(tmp_path)
    path.write_text("custom_imports = dict(imports=['own_module_with_bug'])\n")
    with pytest.raises(KeyError, match="x"):
        read_file(path)
