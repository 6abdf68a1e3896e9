"""Loads the fixtures that these tests share with research/tests."""

# pytest loads its own module for the name `fixtures`
pytest_plugins = ["shared_fixtures"]
