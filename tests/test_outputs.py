"""Output paths are checked before work, and no input image is replaced."""

import pytest

from mrla_mm.errors import InputError
from mrla_mm.outputs import make_folder, make_place, spare_inputs


def test_folders_and_places_are_made(tmp_path):
    assert make_folder(tmp_path / "a/b").is_dir()
    assert make_place(tmp_path / "c/d.html", "--out").parent.is_dir()


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(InputError, match=r"--out-dir .*file.* cannot be made a folder"):
            make_folder(path)
        with pytest.raises(InputError, match="the folder of --out .* cannot be made"):
            make_place(path / "x.html", "--out")


def test_a_place_that_is_a_folder(tmp_path):
    with pytest.raises(InputError, match="is a folder: give the name of a file in it"):
        make_place(tmp_path, "--out")


def test_inputs_are_spared_by_folder_and_behind_links(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "out").mkdir()
    image = tmp_path / "images/a.png"
    image.touch()
    spare_inputs([image], [tmp_path / "out/a.png"])
    with pytest.raises(InputError, match="holds the input"):
        spare_inputs([image], [tmp_path / "out/../images/overview.png"])
    (tmp_path / "out/histograms.png").symlink_to(image)
    with pytest.raises(InputError, match=r"histograms\.png there is an input image"):
        spare_inputs([image], [tmp_path / "out/histograms.png"])
