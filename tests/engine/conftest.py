import os

import pytest


@pytest.fixture(autouse=True)
def idle_disk(monkeypatch):
    """Do not force files to a busy disk, which takes seconds."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
