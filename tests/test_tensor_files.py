"""Files of tensors: every flipped bit is noticed, or changes nothing."""

import errno
import random
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import tensor_files
from moesaic.tensor_files import open_tensors, write_tensors
from moesaic.validated_json import InvalidFile

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}
CONTENT = {"names": ["a", "ä"], "loss": float("nan"), "pair": (1, 2.5), "nested": {"x": None}}


def read(path):
    with open_tensors(path) as file:
        return file.tensors(), file.content()


def test_tensors_and_json_come_back(tmp_path):
    write_tensors(tmp_path / "file", TENSORS, CONTENT)
    tensors, content = read(tmp_path / "file")
    assert content["pair"] == [1, 2.5]
    assert content["loss"] != content["loss"]
    assert tensors.keys() == TENSORS.keys() == load_file(tmp_path / "file").keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize("trial", range(60))
def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path, trial):
    path = tmp_path / "file"
    write_tensors(path, TENSORS, {"names": ["a"]})
    content = bytearray(path.read_bytes())
    bit = random.Random(trial).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with suppress(InvalidFile):
        tensors, header = read(path)
        assert {name: header[name] for name in ("names",)} == {"names": ["a"]}
        assert tensors.keys() == TENSORS.keys()
        assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_a_flipped_bit_of_a_weight_is_noticed(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, {"weight": torch.arange(100.0)}, {})
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match="its content does not match its checksum; use a copy of it, or train again"):
        read(path)


def test_other_metadata_needs_no_checksum_but_cannot_pass_for_ours(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "file", metadata={"mean": "0.5"})
    with open_tensors(tmp_path / "file") as file:
        assert file.tensors()["x"].tolist() == [0, 0]
        with pytest.raises(InvalidFile, match="not one that moesaic wrote"):
            file.content()


def test_a_file_that_cannot_be_written_is_told_with_its_size(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_files, "write_atomic", full)
    with pytest.raises(OSError, match=r"of 1\.2 MB could not be written .*; there is none before it"):
        write_tensors(tmp_path / "file", {"weight": torch.zeros(300_000)}, {})
