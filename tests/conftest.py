"""Fixtures that several folders of tests share. Seeds and settings are in the conftest.py above."""

from launch_plans import replayed_plans  # noqa: F401  fixture
from mnist_files import mlxtends_digits, mnist, own_mnist  # noqa: F401  fixtures
from timm_fixture import timm  # noqa: F401  fixture
