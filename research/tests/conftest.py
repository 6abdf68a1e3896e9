"""Loads the fixtures of python/tests: `pythonpath` in pyproject.toml names that folder."""

# pytest loads its own module for the name `fixtures`
pytest_plugins = ["shared_fixtures"]
