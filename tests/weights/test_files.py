"""Broken, foreign and dangerous files: each stops with its own message, nothing runs and nothing is kept."""

import argparse
import builtins
import hashlib
import os
import pickle
import socket
from concurrent import futures

import pytest
import torch

from mrla_mm.errors import InputError
from mrla_mm.weights import files, read_checkpoint

from .conftest import checkpoint_bytes


def message(location):
    with pytest.raises(InputError) as caught:
        read_checkpoint(location)
    return str(caught.value)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def legacy_bytes():
    import io

    buffer = io.BytesIO()
    torch.save({"weight": torch.rand(500)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


WHOLE = checkpoint_bytes({"weight": torch.rand(500)})
BROKEN = {
    "empty": (b"", "are an empty file"),
    "page": (b"\n<!DOCTYPE html><html><title>Log in</title>", "are a web page, not a checkpoint (it begins '<!DOCTYPE"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "are a Git LFS pointer"),
    "cut": (WHOLE[: len(WHOLE) // 2], "are cut off"),
    "cut-old-format": (legacy_bytes()[:1500], "are damaged or no PyTorch checkpoint (unexpected EOF"),
    "cut-old-format-head": (legacy_bytes()[:200], "are damaged or no PyTorch checkpoint"),
    "text": (b"not a checkpoint\n", "are damaged or no PyTorch checkpoint"),
    "other-pickle": (pickle.dumps({"weight": [1.0]}), "are damaged or no PyTorch checkpoint"),
    "list": (checkpoint_bytes([torch.rand(1)]), "hold a list, not a state dict"),
    "module": (
        checkpoint_bytes(torch.nn.Linear(1, 1)),
        "hold more than weights: reading them would call torch.nn.modules.linear.Linear",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content, expected", BROKEN.values(), ids=BROKEN)
def test_broken_files(content, expected, tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    assert f"weights {path} {expected}" in message(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [builtins.exec, os.system])
def test_code_in_a_file_is_not_executed(function, zipped, tmp_path):
    """The payload would create a file when it runs, which it does under the unrestricted loader."""
    victim, path = tmp_path / "created", tmp_path / "evil.pth"
    code = f"open({str(victim)!r}, 'w')" if function is builtins.exec else f"touch {victim}"
    torch.save({"state_dict": {"w": Call(function, code)}}, path, _use_new_zipfile_serialization=zipped)
    said = message(path)
    assert "hold more than weights" in said and function.__name__ in said and "nothing was executed" in said
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the payload is harmless: the case tests nothing"


def test_weights_only_is_always_on(tmp_path, monkeypatch):
    """The restricted unpickler is asked for, whatever this torch has as its default."""
    seen = []
    original = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: seen.append(kwargs) or original(*args, **kwargs))
    (tmp_path / "w.pth").write_bytes(checkpoint_bytes())
    read_checkpoint(tmp_path / "w.pth")
    assert seen == [dict(map_location="cpu", weights_only=True)]


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="this torch has no allow-lists")
def test_arguments_of_a_training_script_are_read(tmp_path):
    """DeiT's training script saves its argparse.Namespace; it is allowed while a file is read, and only then."""
    path = tmp_path / "deit.pth"
    torch.save({"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=0.1)}, path)
    assert read_checkpoint(path)["args"].lr == 0.1
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_missing_file_and_name(tmp_path):
    assert f"weights {tmp_path}/none.pth do not exist" in message(tmp_path / "none.pth")
    assert f"weights {tmp_path} are a folder" in message(tmp_path)
    assert "torchvision:// has no weights 'resnet5O'; nearest: " in message("torchvision://resnet5O")


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("digits", [8, 64])
def test_hash_in_the_name(digits, tmp_path):
    content = checkpoint_bytes()
    right, wrong = tmp_path / f"w-{sha(content)[:digits]}.pth", tmp_path / f"w-{'0' * (digits - 1)}a.pth"
    right.write_bytes(content), wrong.write_bytes(content)
    assert read_checkpoint(right)["weight"].tolist() == [0, 1, 2]
    said = message(wrong)
    assert (
        "are not what they should be" in said and sha(content)[:digits][:16] in said and "its name says 0000000" in said
    )


def test_hash_in_a_sidecar(tmp_path):
    path, content = tmp_path / "w.pth", checkpoint_bytes()
    path.write_bytes(content)
    sidecar = tmp_path / "w.pth.sha256"
    sidecar.write_text(f"{sha(content)}  w.pth\n")
    read_checkpoint(path)
    sidecar.write_text(f"{sha(b'another')}  w.pth\n")
    assert f"{sidecar} says {sha(b'another')[:16]}" in message(path)


def test_a_date_is_no_hash(tmp_path):
    path = tmp_path / "resnet50-20240131.pth"
    path.write_bytes(checkpoint_bytes())
    read_checkpoint(path)


def test_fetched_once(serve, cache):
    content = checkpoint_bytes()
    pages = {f"/w-{sha(content)[:8]}.pth": content}
    location = f"{serve(pages)}/w-{sha(content)[:8]}.pth?raw=1"
    pages[f"/w-{sha(content)[:8]}.pth?raw=1"] = content
    assert read_checkpoint(location)["weight"].tolist() == [0, 1, 2]
    assert [path.name for path in cache.iterdir()] == [f"w-{sha(content)[:8]}.pth"]
    pages.clear()
    read_checkpoint(location)


@pytest.mark.parametrize(
    "name, content, promise, expected",
    [
        ("w.pth", checkpoint_bytes(), 100, "the connection ended after"),
        ("w.pth", b"<html>Sign in to the network</html>", 0, "are a web page, not a checkpoint"),
        ("w-0123abcd.pth", checkpoint_bytes(), 0, "its name says 0123abcd"),
        ("w.pth", checkpoint_bytes()[:300], 0, "are cut off"),
        ("gone.pth", None, 0, "the server answers 404"),
    ],
)
def test_bad_downloads_are_not_kept(name, content, promise, expected, serve, cache):
    """What did not arrive whole and right leaves no file that a later run would take for the weights."""
    address = serve({} if content is None else {f"/{name}": content}, promise)
    said = message(f"{address}/{name}")
    assert expected in said and f"{address}/{name}" in said
    assert not list(cache.iterdir())


def test_unreachable_server(cache):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    said = message(f"http://127.0.0.1:{port}/w.pth")
    assert "cannot be fetched" in said and "refused" in said and f"put it at {cache / 'w.pth'}" in said


@pytest.mark.parametrize(
    "url", ["http://localhost:1/a b.pth", "http://localhost:x/w.pth", "http://localhost:1/\xe4.pth"]
)
def test_malformed_urls(url, cache):
    """Nobody answered, so nothing is said of an answer."""
    assert f"weights {url} cannot be fetched: the URL is malformed" in message(url)


def test_schemes_that_nothing_serves():
    assert "weights htps://host/w.pth cannot be read: " in message("htps://host/w.pth")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhalf", "no whole one of HTTP: IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nhalf", "timed out"),
        (b"220 mail server ready\r\n", "no whole one of HTTP: BadStatusLine"),
    ],
)
def test_answers_that_break_off_leave_nothing(answer, expected, cache, monkeypatch):
    """In the middle of a chunk, or of a file whose server falls silent; nor is what speaks no HTTP a traceback."""
    monkeypatch.setattr(files, "TIMEOUT", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        location = f"http://127.0.0.1:{listener.getsockname()[1]}/w.pth"
        with futures.ThreadPoolExecutor(1) as pool:
            said = pool.submit(message, location)
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                if expected != "timed out":
                    connection.shutdown(socket.SHUT_WR)
                assert f"weights {location} cannot be fetched" in said.result() and expected in said.result()
    assert not list(cache.iterdir())


def test_silent_server(cache, monkeypatch):
    """A server that accepts and never answers is given up on."""
    monkeypatch.setattr(files, "TIMEOUT", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        said = message(f"http://127.0.0.1:{listener.getsockname()[1]}/w.pth")
    assert "timed out" in said
