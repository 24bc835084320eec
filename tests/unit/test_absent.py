"""Packages that a process does not need: their names do nothing in the block, and are real after it."""

import importlib
import sys
import textwrap

import pytest

from hwaware.compat.absent import without


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Write a package, and a module that uses it; return a function that imports the module again."""
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package" / "__init__.py").write_text("def double(function): return lambda x: 2 * function(x)")
    (tmp_path / "slow_package" / "part.py").write_text("class Kind: pass")
    (tmp_path / "its_user.py").write_text(
        textwrap.dedent("""
        from slow_package import double
        from slow_package.part import Kind
        import slow_package.part

        slow_package.part.Kind.changed = lambda self: 1

        @double
        def same(x):
            return x
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def again():
        import its_user

        del sys.modules["its_user"]
        return its_user

    yield again
    for name in ("slow_package", "slow_package.part"):
        sys.modules.pop(name, None)


def test_a_module_is_imported_without_the_code_of_a_package(user):
    with without("slow_package"):
        assert user().same(3) == 3
    assert not [name for name in sys.modules if name.startswith("slow_package")]
    assert user().same(3) == 6


def test_a_loaded_package_stays(user):
    import slow_package

    with without("slow_package"):
        assert user().same(3) == 6
    assert sys.modules["slow_package"] is slow_package


def imported(*names):
    with without(names[0]):
        return [importlib.import_module(name) for name in names]


def test_an_error_in_the_block_takes_the_names_back():
    with pytest.raises(ModuleNotFoundError, match="another_package"):
        imported("unknown_package", "another_package")
    with pytest.raises(ModuleNotFoundError, match="unknown_package"):
        importlib.import_module("unknown_package")
