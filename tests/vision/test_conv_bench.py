"""The measurement of backends: its shapes are possible, and wrong ones are refused in one line."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from runner.api import UsageError

FOLDER = Path(__file__).parents[2] / "experiments" / "conv_bench"


@pytest.fixture(scope="module")
def conv_bench():
    sys.path.insert(0, str(FOLDER))
    try:
        import conv_bench

        yield conv_bench
    finally:
        sys.path.remove(str(FOLDER))


def test_the_shapes_are_those_of_the_specification(conv_bench):
    shapes = conv_bench.read_shapes(FOLDER / "shapes.yaml")
    assert sum(name.startswith("resnet18") for name in shapes) == 12
    assert sum(name.startswith("accuracy") for name in shapes) == 6
    assert {shape.geometry.transposed for shape in shapes.values()} == {False, True}
    large = shapes["large"]
    assert conv_bench.keys_of(large, "float32")[0].nominal_flop == pytest.approx(7.399e9, rel=1e-3)


WRONG_SHAPES = {
    "x: [1, 3, 8, 8], w: [4, 2, 3, 3]": "the input has 3 channels, the weight is made for 2",
    "x: [1, 3, 2, 2], w: [4, 3, 7, 7]": "the output would have -4 x -4 pixels",
    "x: [1, 3, 8, 8], w: [4, 3, 3, 3], stride: 0": "stride: (0, 0) should be at least 1",
    "x: [1, 3, 8, 8], w: [4, 3, 3, 3], groups: -1": "groups: -1 should be at least 1",
    "x: [1, 3, 8], w: [4, 3, 3, 3]": "at least 4 items",
    "x: [1, 3, 8, 8], w: [4, 3, 3, 3], strides: 2": "strides",
}


@pytest.mark.parametrize(("sizes", "reason"), WRONG_SHAPES.items())
def test_a_wrong_shape_is_refused_in_one_line(sizes, reason, conv_bench, tmp_path):
    file = tmp_path / "shapes.yaml"
    file.write_text(f"- {{name: mine, {sizes}}}\n")
    with pytest.raises(UsageError) as error:
        conv_bench.read_shapes(file)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


WRONG_OPTIONS = [
    (["nothing"], "no shape 'nothing'"),
    (["--backends", "magic"], "unknown convolution backend 'magic'"),
    (["--backends", "fft", "winograd", "--dtype", "bfloat16"], "no backend of fft, winograd computes bfloat16"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_a_wrong_option_is_refused(options, message, conv_bench):
    with pytest.raises(UsageError, match=message):
        conv_bench.main(options)


def test_the_command_ends_with_exit_code_2(conv_bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conv_bench.py", "nothing"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "conv_bench.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"no shape 'nothing' in {FOLDER / 'shapes.yaml'}\n"


def test_errors_and_times_are_measured_once(conv_bench, tmp_path, monkeypatch):
    monkeypatch.setattr(conv_bench, "BLOCK_SECONDS", 1e-4)
    here = {"processor": "none", "threads": 1, "torch": "2", "flops": 1e11, "copy_bytes": 1e10}
    monkeypatch.setattr(conv_bench, "machine", lambda: here)
    shapes = tmp_path / "shapes.yaml"
    lines = (FOLDER / "shapes.yaml").read_text().splitlines()
    shapes.write_text("\n".join(line for line in lines if "accuracy_k3_s1" in line))
    options = ["--file", str(shapes), "--out", str(tmp_path), "--backends", "native", "im2col"]
    conv_bench.main(options)
    rows = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert [row["backend"] for row in rows] == ["native", "native again", "im2col"] * 6
    assert all(row["ms"] > 0 and row["gain"][1] <= row["gain"][0] <= row["gain"][2] for row in rows)
    errors = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert all(row["error"] <= row["tolerance"] for row in errors)
    assert {path.name for path in tmp_path.iterdir()} >= {"summary.md", "table.md", "roofline.png"}
    content = (tmp_path / "times.jsonl").read_text()
    conv_bench.main(options)
    assert (tmp_path / "times.jsonl").read_text() == content
