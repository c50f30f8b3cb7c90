"""Test suites for whoever adds a format or a store: subclass one, give it yours, and pytest runs all that it must pass.

    class TestToyReader(ReaderTests):
        reader = toy_format.READER

        def make(self, folder): ...

Needs pytest. Nothing else of ucformat imports this package.
"""

import pytest

pytest.register_assert_rewrite("ucformat.testing.readers", "ucformat.testing.stores", "ucformat.testing.writers")

from ucformat.testing.readers import ReaderTests, Sample  # noqa: E402  # asserts are rewritten from here on
from ucformat.testing.stores import StoreTests  # noqa: E402
from ucformat.testing.writers import WriterTests  # noqa: E402

__all__ = ["ReaderTests", "Sample", "StoreTests", "WriterTests"]
