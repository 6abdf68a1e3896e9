"""Loads the fixtures that these tests share with research/tests."""

pytest_plugins = ["shared_fixtures"]
