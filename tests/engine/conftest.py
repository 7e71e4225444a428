import os

import pytest


@pytest.fixture(autouse=True)
def idle_disk(monkeypatch):
    """Forcing files to a busy disk takes seconds; the tests of a full one put their own function here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
