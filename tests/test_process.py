"""Cyclic garbage is searched for again afterwards, as before."""

from __future__ import annotations

import gc

import pytest

from ucformat.process import collected_later


def test_collection_is_off_inside_and_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), collected_later():
        assert not gc.isenabled()
        with collected_later():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
