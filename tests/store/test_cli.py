"""The command line over a real directory: what it prints, where, and its exit statuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.stores import JobBuilder, small_store

from toprope import __version__
from toprope.__main__ import GROUPS, PROGRAMS, main
from toprope.store.errors import UnavailableError
from toprope.store.objects.directory import DirectoryStore
from toprope.store.objects.opening import open_store


@pytest.fixture
def root(memory_dir: Path) -> Path:
    """Return a store with the jobs gpt (READY 10, 20, 30) and new (none)."""
    store = DirectoryStore(memory_dir)
    small_store(store, steps=(10, 20, 30), name="gpt")
    JobBuilder(store, "new").begin()
    return memory_dir


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def spoil(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 4
    path.write_bytes(body)


def one(root: Path, pattern: str) -> Path:
    (path,) = root.glob(pattern)
    return path


def ckpt(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_ls_lists_jobs_and_steps(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("ls", root) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()][1:] == [
        ["gpt", "10", "4", "1", "2", "1.11", "KiB"],
        ["gpt", "20", "5", "1", "2", "1.11", "KiB"],
        ["gpt", "30", "6", "1", "2", "1.11", "KiB", "newest"],
        ["new", "-", "-", "1", "-", "-", "no", "READY", "checkpoint", "yet"],
    ]
    assert err == ""
    assert ckpt("ls", root, "--json") == 0
    jobs = json.loads(capsys.readouterr().out)
    assert [checkpoint["step"] for checkpoint in jobs[0]["checkpoints"]] == [10, 20, 30]


def test_show_tells_the_log_in_words(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("show", root, "--job", "gpt") == 0
    out = capsys.readouterr().out
    assert "attempt 1, 2 ranks, a fresh start" in out
    assert "step 30 of attempt 1, 1,134 bytes" in out
    assert ckpt("show", root, "--job", "gpt", "--json") == 0
    assert [record["kind"] for record in json.loads(capsys.readouterr().out)["log"]] == [
        "JOB", "ELECTED", "JOB", "ATTEMPT", "READY", "READY", "READY",
    ]  # fmt: skip


def test_show_step_lists_shards_and_tensors(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("show", root, "--job", "gpt", "--step", 20) == 0
    out = capsys.readouterr().out
    assert out.count("model.weight") == 2
    assert "gpt/shards/a1/s000000020/rank-00001-of-00002-" in out
    assert ckpt("show", root, "--job", "gpt", "--step", 20, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["manifest"]["step"], len(shown["indexes"])) == (20, 2)


def test_show_files_lists_exactly_the_files_that_there_are(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("show", root, "--job", "gpt", "--files") == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(name for name in contents(root) if name.startswith("gpt/"))
    assert ckpt("show", root, "--job", "gpt", "--files", "--json") == 0
    assert {named["kind"] for named in json.loads(capsys.readouterr().out)} == {
        "log", "facts", "manifest", "index", "shard",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("xxhsum") is None, reason="xxhsum is not installed")
def test_xxhsum_accepts_the_check_file(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ckpt("show", root, "--job", "gpt", "--xxhsum") == 0
    check = tmp_path / "sums"
    check.write_text(capsys.readouterr().out)
    command = [str(shutil.which("xxhsum")), "-c", str(check)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == 6
    spoil(one(root, "gpt/shards/a1/s000000020/rank-00000*.safetensors"))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(": OK")) == (1, 5)


def test_verify_says_that_all_is_good(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root)
    assert ckpt("verify", root) == 0
    out, err = capsys.readouterr()
    assert out.count("ok       job gpt, step") == 3
    assert err.startswith("all good: 3 checkpoints")
    assert ckpt("verify", root, "--job", "gpt", "--step", 20, "--json") == 0
    assert [report["step"] for report in json.loads(capsys.readouterr().out)["checkpoints"]] == [20]
    assert contents(root) == before


def test_verify_names_what_is_damaged_and_restore_uses_the_next_older(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = one(root, "gpt/shards/a1/s000000030/rank-00001*.safetensors")
    body = bytearray(path.read_bytes())
    body[-23] ^= 4
    path.write_bytes(body)
    assert ckpt("verify", root) == 2
    out, err = capsys.readouterr()
    assert "job gpt, step 30, rank 1, tensor __document__: digest" in out
    assert f"({path.relative_to(root)} bytes {len(body) - 23} to {len(body)})" in out
    assert err == "DAMAGED: 1 finding, 1 of 3 checkpoints\n"
    assert ckpt("verify", root, "--json") == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["damages"][0]["tensor"]) == (False, "__document__")
    assert ckpt("verify", root, "--job", "gpt", "--step", 20) == 0
    capsys.readouterr()
    assert ckpt("restore", root, "--job", "gpt", "--to", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert out.startswith("restored step 20 of job gpt")
    assert "passed over step 30 (READY 6):" in err
    assert "rank 1, tensor __document__: digest" in err
    assert ckpt("taint", root, "gpt@10..20", "--reason", "it diverged") == 0
    capsys.readouterr()
    assert ckpt("restore", root, "--job", "gpt", "--to", tmp_path / "none") == 2
    assert capsys.readouterr().err.count("tainted: it diverged\n") == 2


def test_what_is_tainted_is_said_by_verify_and_by_a_restore_that_passes_it_over(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert ckpt("taint", root, "gpt@30", "--reason", "the loss\x1b[2J went up") == 0
    assert ckpt("verify", root) == 0
    out = capsys.readouterr().out
    assert "(READY 6, attempt 1, tainted)" in out
    assert out.count("tainted)") == 1
    assert ckpt("verify", root, "--json") == 0
    assert [one["tainted"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [False, False, True]
    why = "passed over step 30 (READY 6) of attempt 1: tainted: the loss [2J went up\n"
    for words in (("restore", "--to"), ("export", "--per-rank")):
        to = tmp_path / words[0]
        assert ckpt(words[0], root, "--job", "gpt", *words[1:], to) == 0
        assert why in capsys.readouterr().err
        assert ckpt(words[0], root, "--job", "gpt", *words[1:], to, "--force", "--step", 10) == 0
        assert "passed over" not in capsys.readouterr().err
    assert ckpt("taint", root, "gpt@10..20", "--reason", "so it had before") == 0
    capsys.readouterr()
    for word, *more in (("restore", "--to"), ("restore", "--only", "*", "--to"), ("export", "--per-rank")):
        assert ckpt(word, root, "--job", "gpt", *more, tmp_path / "none") == 3
        err = capsys.readouterr().err
        assert (why in err, err.count("tainted: so it had before\n")) == (True, 2)


@pytest.mark.parametrize("pattern", ["shards/a1/s000000020/*.index.json", "manifests/a1-s000000020-*", "facts/*"])
def test_verify_finds_damage_in_each_kind_of_object(root: Path, pattern: str) -> None:
    for path in sorted(root.glob(f"gpt/{pattern}")):
        good = path.read_bytes()
        spoil(path)
        assert ckpt("verify", root) == 2
        path.write_bytes(good)
    assert ckpt("verify", root) == 0


@pytest.mark.parametrize("number", range(7))
def test_a_damaged_log_stops_everything_and_nothing_is_changed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    spoil(root / f"gpt/log/{number:020d}.json")
    before = contents(root)
    for arguments in (
        ("verify", root, "--job", "gpt"),
        ("restore", root, "--job", "gpt", "--to", tmp_path / "out"),
        ("show", root, "--job", "gpt"),
        ("ls", root, "--job", "gpt"),
    ):
        assert ckpt(*arguments) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"ckpt: LOG_CORRUPT record {number} (gpt/log/{number:020d}.json): ")
        assert out == ""
    assert contents(root) == before
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_log_of_one_job_hides_no_other_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(root / "new" / "log" / f"{1:020d}.json")
    assert ckpt("ls", root) == 2
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()][1:] == [["gpt", "10"], ["gpt", "20"], ["gpt", "30"]]
    assert err.startswith("job new: LOG_CORRUPT record 1 (new/log/")
    assert ckpt("verify", root) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "DAMAGED  job new, log"
    assert [line.split(":")[0] for line in out.splitlines()[2:]] == [
        f"ok       job gpt, step {n}" for n in (10, 20, 30)
    ]
    assert "DAMAGED: 1 finding" in err
    assert ckpt("verify", root, "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], len(told["checkpoints"]), [one["job"] for one in told["damages"]]) == (False, 3, ["new"])
    assert ckpt("verify", root, "--job", "gpt") == 0


def test_nothing_to_verify_is_3(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", tmp_path) == 3
    assert "no jobs, so nothing to verify" in capsys.readouterr().err
    assert ckpt("verify", root, "--job", "new") == 3
    assert ckpt("verify", root, "--step", 15) == 3
    assert "there are steps [10, 20, 30]" not in capsys.readouterr().out
    assert ckpt("verify", root, "--job", "gpt", "--step", 15) == 3
    assert "there are steps [10, 20, 30]" in capsys.readouterr().err
    assert ckpt("restore", root, "--job", "new", "--to", tmp_path / "out") == 3


def test_a_job_whose_log_was_removed_is_not_taken_for_none(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "gpt" / "log")
    assert ckpt("ls", root) == 3
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("gpt: objects of checkpoints and no log that names them")
    assert "bring back gpt/log/" in line
    assert "new" in out, "the others are listed"
    assert ckpt("ls", root, "--job", "gpt") == ckpt("show", root, "--job", "gpt") == 3
    assert [one.split(": ", 1)[1] for one in capsys.readouterr().err.splitlines()] == [line] * 2
    shutil.rmtree(root / "new")
    for words in (("ls", root), ("verify", root), ("verify", root, "--json"), ("show", root)):
        assert ckpt(*words) == 3
        (said,) = capsys.readouterr().err.splitlines()
        assert line in said


def test_verify_says_which_job_has_no_log_and_verifies_the_others(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root / "gpt", root / "old", ignore=shutil.ignore_patterns("log"))
    assert ckpt("verify", root) == 3
    assert capsys.readouterr().err.startswith("old: objects of checkpoints and no log")
    assert ckpt("verify", root, "--json") == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], len(told["checkpoints"]), told["without_log"]) == (False, 3, ["old"])
    assert ckpt("verify", root, "--job", "gpt") == 0


@pytest.mark.parametrize("name", ["\u0438\u043c\u044f \u0445", "Mine", "a\x1b[2Jb"])
def test_a_directory_whose_name_no_job_can_have_hides_no_job(
    root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (root / name / "log").mkdir(parents=True)
    (root / name / "log" / f"{0:020d}.json").write_bytes(one(root, f"gpt/log/{0:020d}.json").read_bytes())
    for word, what in (("ls", "gpt"), ("verify", "job gpt, step 30"), ("du", "job gpt: ")):
        assert ckpt(word, root) == 0
        out, err = capsys.readouterr()
        assert what in out
        assert f"passed over {name!r}: a job's name is 1 to 64 of a-z" in err
        assert "\x1b" not in out + err
    assert ckpt("verify", root, "--job", name) == 64


@pytest.mark.parametrize("command", ["ls", "show", "verify", "log"])
def test_the_directory_of_a_job_is_not_taken_for_an_empty_store(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert ckpt(command, root / "gpt") == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ckpt: {root}/gpt is the directory of a job, not a store: give the one that it lies in\n"


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_store_that_cannot_be_reached_is_4(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert ckpt(command, tmp_path / "gone") == 4
    err = capsys.readouterr().err
    assert err == f"ckpt: store {tmp_path}/gone can't be reached: it does not exist or is not mounted\n"


def test_a_store_that_may_not_be_looked_into_is_4(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:  # as somebody who is not root, to whom all is open
        os.chmod(tmp_path, 0o700)  # noqa: PTH101 - as short as it can be
        if os.getuid() == 0:
            os.setuid(65534)
        else:
            os.chmod(tmp_path, 0)  # noqa: PTH101 - as above
        try:
            open_store(str(tmp_path / "store"))
        except UnavailableError as error:
            os._exit(4 if "can't be reached: Permission denied; let this user read" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_show_says_which_checkpoint_follows_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = small_store(DirectoryStore(tmp_path), steps=(10, 20))
    first = min(builder.log.state.readies)
    builder.open_attempt(ready=first, from_step=10)
    last = builder.checkpoint(15)
    assert ckpt("show", tmp_path) == 0
    assert f"lineage: 15 (READY {last}) <- 10 (READY {first})\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "'nonsense' is not a command"),
        (["ls"], "Missing argument"),
        (["ls", "ROOT", "--colour"], "No such option"),
        (["ls", "http://bucket/x"], "give a directory, file:///path or s3://bucket/prefix"),
        (["ls", "s3://bucket/x?secret=y"], "there is no option 'secret'"),
        (["show", "ROOT"], "ROOT holds 2 jobs: give --job, one of gpt, new"),
        (["show", "ROOT", "--job", "gtp"], "job 'gtp': no such job in this store; there are gpt, new"),
        (["verify", "ROOT", "--job", "gtp"], "job 'gtp': no such job"),
        (["restore", "ROOT", "--job", "../gpt", "--to", "OUT"], "job '../gpt' is not usable"),
        (["restore", "ROOT", "--job", "GPT", "--to", "OUT"], "job 'GPT' is not usable"),
        (["restore", "ROOT", "--job", "gpt"], "Missing option '--to'"),
        (["restore", "ROOT", "--job", "gpt", "--to", "OUT/a/b"], "no such directory"),
        (["restore", "ROOT", "--job", "gpt", "--to", "ROOT", "--force"], "lies inside the store"),
        (["restore", "ROOT", "--job", "gpt", "--to", "ROOT/gpt/out"], "lies inside the store"),
        (["export", "ROOT", "ROOT/out", "--job", "gpt"], "lies inside the store"),
        (["verify", "ROOT", "--step", "none"], "Invalid value for '--step'"),
        (["verify", "ROOT", "--step", "0"], "Invalid value for '--step'"),
        (["show", "ROOT", "--job", "gpt", "--files", "--step", "10"], "leave out --step"),
    ],
)
def test_wrong_use_is_64_with_one_line_and_changes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    before = contents(root)
    places = {"ROOT": str(root), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
        text = text.replace(name, place)
    assert ckpt(*arguments) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ckpt: ")
    assert err.count("\n") == 1
    assert text in err
    assert contents(root) == before
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_command_and_loads_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    for word, program in PROGRAMS.items():
        assert f"  {word:<12} {program.purpose}" in out
    assert all(title in out for title in GROUPS)
    loaded = "import sys; from toprope.__main__ import main; main(['--help']); print('typer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ckpt {__version__}\n"


@pytest.mark.parametrize("word", ["ls", "show", "verify", "restore"])
def test_each_command_explains_itself(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: ckpt {word}")


def test_a_missing_extra_is_one_clear_line() -> None:
    program = (
        "import sys; sys.modules['typer'] = None; from toprope.__main__ import main; sys.exit(main(['ls', '/tmp']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "ckpt: `ckpt ls` needs the package 'typer': install toprope[service]\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--show-completion", "bash"]], ids=" ".join)
def test_nobody_who_reads_is_no_traceback(words: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "toprope", *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["at the end", "at once"])
def test_what_cannot_be_printed_is_said_in_one_line(root: Path, options: list[str]) -> None:
    command = [sys.executable, *options, "-m", "toprope", "ls", str(root)]
    with Path("/dev/full").open("w") as full:  # each write to it fails, as on a full disk
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "ckpt: what it says can't be written: No space left on device\n")
