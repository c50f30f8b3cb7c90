"""Every store of ours passes the public suite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3.bucket import Server, serving
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.open import open_store
from ucformat.storage.store import Store
from ucformat.testing import StoreTests


class TestLocal(StoreTests):
    def make(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "store"))


class TestMemory(StoreTests):
    def make(self, tmp_path: Path) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}")


class _OnServer(StoreTests):
    server: Server

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serving(cls) -> Iterator[None]:
        with serving() as cls.server:
            yield


class TestS3(_OnServer):
    def make(self, tmp_path: Path) -> Store:
        return open_store(f"{self.server.bucket}/{uuid.uuid4().hex}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
class TestS3fs(_OnServer):
    """The one object store of fsspec that can run against a real server here: it stands for the others."""

    keeps_folders = True

    def make(self, tmp_path: Path) -> Store:
        return FsspecStore.open(f"{self.server.bucket}/{uuid.uuid4().hex}")
