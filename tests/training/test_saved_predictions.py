"""The predictions of the last test are written by `fit`, read back whole, and refused where anything is wrong."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from training.squares import LONG, TASK, Notes, dense, routed

from moesaic.data.image_dataset import ImageDataset, LabelledImages
from moesaic.tensor_files import open_tensors, write_tensors
from moesaic.training import saved_predictions
from moesaic.training.fit import fit
from moesaic.training.saved_predictions import PREDICTIONS, read_predictions
from moesaic.validated_json import InvalidFile

NAMED = replace(TASK, test=replace(TASK.test, names=tuple(f"up/{i}.png" for i in range(40))))
SHORT = replace(LONG, epochs=1)


def test_they_are_those_of_the_network(tmp_path):
    model = routed()
    found = fit(model, NAMED, SHORT, out=tmp_path)
    saved = read_predictions(tmp_path / PREDICTIONS, 2)
    with torch.no_grad():
        probability = model(NAMED.eval_transform(NAMED.test.pixels, torch.zeros(40, 3))).softmax(1)
    labels, predicted = NAMED.test.labels, probability.argmax(1)
    assert saved.epoch == 1
    assert saved.labels.tolist() == labels.tolist()
    assert saved.predicted.tolist() == predicted.tolist()
    assert 100 * float((saved.labels == saved.predicted).double().mean()) == pytest.approx(found.accuracy)
    wrong = [row for row in range(40) if labels[row] != predicted[row]]
    wrong.sort(key=lambda row: -float(probability[row].max()))
    assert wrong, "a network after one epoch makes mistakes"
    for mistake, row in zip(saved.mistakes, wrong, strict=False):
        assert mistake.name == f"up/{row}.png"
        assert mistake.label == labels[row]
        assert mistake.top[0] == predicted[row]
        assert mistake.probabilities == pytest.approx(probability[row].sort(descending=True).values.tolist(), abs=1e-5)
        assert mistake.label_probability == pytest.approx(float(probability[row, labels[row]]), abs=1e-5)
        assert torch.equal(mistake.image, NAMED.test.pixels[row])
    confusion = saved.confusion(2)
    assert confusion.sum() == 40
    assert [confusion.sum(1).tolist(), confusion.diagonal().tolist()] == [
        each.tolist() for each in saved.class_counts(2)
    ]
    pairs = Counter((int(labels[row]), int(predicted[row])) for row in wrong)
    assert {(label, guess): count for label, guess, count in saved.confusions(5)} == pairs
    assert len(saved.confusions(1)) == 1


def test_a_run_without_a_folder_writes_none_and_a_stopped_one_those_of_its_last_test(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_predictions, "_WRITE_SECONDS", math.inf)
    fit(dense(), TASK, SHORT)
    with pytest.raises(KeyboardInterrupt):
        fit(dense(), TASK, LONG, out=tmp_path, progress=Notes(2))
    assert read_predictions(tmp_path / PREDICTIONS, 2).epoch == 2


def test_names_that_no_file_can_hold_are_replaced_and_a_test_without_batches_is_none(tmp_path):
    names = ("a\udcff\x1b.png", *NAMED.test.names[1:])
    task = replace(TASK, test=replace(TASK.test, names=names, labels=1 - TASK.test.labels))  # most are mistakes
    fit(dense(), task, SHORT, out=tmp_path)
    saved = read_predictions(tmp_path / PREDICTIONS, 2)
    assert all(mistake.name.isprintable() for mistake in saved.mistakes)
    callback = saved_predictions.PredictionsCallback()
    callback.on_test_end(None)
    callback.final_metrics(None)


@pytest.mark.parametrize(
    ("shape", "expected"), [((1, 8, 8), (1, 8, 8)), ((5, 8, 8), (1, 8, 8)), ((3, 150, 300), (3, 56, 112))]
)
def test_images_of_mistakes_are_small_and_have_one_or_three_channels(shape, expected):
    pixels = torch.randint(0, 256, (4, *shape), dtype=torch.uint8)
    labels = torch.zeros(4, dtype=torch.long)
    images = saved_predictions._thumbnails(LabelledImages(pixels, labels, labels), torch.tensor([2, 0]))
    assert tuple(images.shape[1:]) == expected
    if shape == expected:
        assert torch.equal(images, pixels[[2, 0]])


def test_a_network_without_mistakes_has_none(tmp_path):
    labels = torch.zeros(4, dtype=torch.long)
    images = LabelledImages(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), labels, labels)
    scale = TASK.eval_transform
    fit(
        dense(), ImageDataset(images, images, ("a", "b"), ("a", "b"), scale, scale), replace(LONG, lr=1.0), out=tmp_path
    )
    saved = read_predictions(tmp_path / PREDICTIONS, 2)
    assert saved.mistakes == ()
    assert saved.confusions(5) == []


def damaged(tensors, header):
    """Each fault that a stranger's file may have, by name."""
    labels, top, images = tensors["labels"], tensors["top"], tensors["images"]
    return {
        "classes are out of range": ({**tensors, "labels": labels + 5}, header),
        "top classes": ({**tensors, "top": top[:, :1]}, header),
        "probabilities": ({**tensors, "probability": tensors["probability"] + 2}, header),
        "not equally long": ({**tensors, "labels": labels[1:]}, header),
        "images do not fit": ({**tensors, "images": images[:, :2]}, header),
        "wrong size": ({**tensors, "images": images.repeat(1, 1, 20, 1)}, header),
        "names": (tensors, {**header, "names": ["one"]}),
        "it must be torch.int32": ({**tensors, "labels": labels.long()}, header),
        "has the tensors": ({**tensors, "more": labels}, header),
        "keys": (tensors, {"epoch": 1}),
    }


def test_a_file_that_is_not_what_a_run_writes_is_refused_in_one_line(tmp_path):
    fit(dense(), NAMED, SHORT, out=tmp_path)
    path = tmp_path / PREDICTIONS
    with open_tensors(path) as file:
        tensors, header = file.tensors(), file.content()
    assert len(tensors["top"]) > 1
    for fault, changed in damaged(tensors, header).items():
        write_tensors(path, *changed)
        with pytest.raises(InvalidFile, match=fault) as refused:
            read_predictions(path, 2)
        assert "\n" not in str(refused.value)
