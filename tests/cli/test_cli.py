"""What all commands share: help, versions, misspelt words, completion."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

import moesaic
from moesaic.cli import main
from moesaic.cli.commands import COMMANDS


@pytest.mark.parametrize("given", [["--version"], ["--version", "train"]])
def test_the_version_is_told(given: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(given) == 0
    assert capsys.readouterr().out == f"moesaic {moesaic.__version__}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=["", *COMMANDS])
def test_help_explains_and_ends_well_within_80_columns(
    capsys: pytest.CaptureFixture[str], command: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: moesaic" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


@pytest.mark.parametrize(
    "given", ["claims", "claims --figure 6", "theory", "theory --data mnist-patches --samples 100"]
)
def test_tables_fit_80_columns(given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(given.split()) == 0
    assert max(cell_len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["reproduse"], "'reproduse' is not a command; did you mean 'reproduce'?"),
        (["trian", "x", "--epochs", "3"], "'trian' is not a command; did you mean 'train'?"),
        (["--versio"], "did you mean '--version'?"),
        (["xyzzy"], "'xyzzy' is not a command; the commands are train, compare"),
        ([], "commands:"),
        (["train", "x", "--epoch", "3"], "--epochs INT"),
        (["claims", "--papr", "chen2022"], "--paper ID"),
    ],
)
def test_misspelt_commands_and_options_get_the_nearest_name(
    given: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main(given)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert hint in printed.err
    assert not printed.out


def test_only_options_of_the_command_itself_are_suggested(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["predict", "run", "a.png", "--bach-size", "3"])
    assert capsys.readouterr().err.count("--batch-size") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_completes_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*COMMANDS, "target-macs"))
    found = shutil.which(shell)
    if found is not None:
        subprocess.run([found, "-n"], input=script, text=True, check=True)


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "fsh"]) == 2
    assert "use 'bash', 'zsh' or 'fish' (did you mean 'fish'?)" in capsys.readouterr().err


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(moesaic.__file__).parents[1])}


def test_the_version_is_printed_without_torch():
    code = "import sys; from moesaic.cli import main; main(['--version']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert run.stdout == f"moesaic {moesaic.__version__}\nFalse\n"


@pytest.mark.parametrize("command", ["claims", "theory", "completion bash"])
def test_a_reader_that_has_enough_is_no_error(command: str):
    """`moesaic claims | head`: the pipe is closed before anything is written."""
    code = (
        "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        f"from moesaic.cli import main; sys.exit(main({command.split()!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment())
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("given", [["theory", "--n", "many"], ["theory", "--nn", "3"], ["reproduse"], []])
def test_words_that_no_command_knows_end_with_2(capsys: pytest.CaptureFixture[str], given: list[str]):
    with pytest.raises(SystemExit) as end:
        main(given)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_asking_for_help_loads_nothing_heavy():
    code = (
        "import sys; from moesaic.cli import main\n"
        "try: main(['reproduce', '--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert not {"torch", "matplotlib", "jinja2", "rich", "sklearn", "mlxtend", "PIL"} & set(run.stderr.split())
