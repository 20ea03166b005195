"""The machine is described by what matters for a measurement, and not by names of users or hosts."""

import getpass
import platform

import torch

from moesaic.report import describe_machine


def test_it_tells_cores_versions_and_device():
    text = describe_machine("cpu")
    assert "core" in text
    assert f"torch {torch.__version__}" in text
    assert text.endswith(", CPU")


def test_it_tells_neither_host_nor_user_nor_path(monkeypatch):
    text = describe_machine("cpu")
    assert platform.node() not in text
    assert "/" not in text
    assert getpass.getuser() not in text.split()


def test_a_gpu_is_called_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert describe_machine("cuda").endswith(", NVIDIA H200")
