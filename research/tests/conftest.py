"""Loads the fixtures of python/tests: `pythonpath` in pyproject.toml names that folder."""

pytest_plugins = ["shared_fixtures"]
