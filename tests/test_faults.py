"""What the README promises of kills, damage, rubbish and strangers, a few faults of each kind.

python -m pytest tests/test_faults.py -m "not slow"      the quick ones;   python tests/faults.py   the campaign
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import faults
import memory
import train
from faults import command, contents, difference, quietly, run

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return faults.Reference(tmp_path_factory.mktemp("faults") / "reference")


@pytest.fixture
def small(monkeypatch):
    """The model and shards of faults.py in this process too."""
    monkeypatch.setitem(train.PRESETS, "toy", faults.MICRO)
    monkeypatch.setattr(memory, "PASSAGES_PER_SHARD", faults.SHARD)
    monkeypatch.setattr(evaluation, "report", lambda *_: None)


@pytest.fixture
def done(reference, tmp_path):
    """A whole run, to be spoilt."""
    return Path(shutil.copytree(reference.folder / "run", tmp_path / "run"))


def one_sentence(code, out, err, *words):
    assert code == 1 and "Traceback" not in err and err.strip().count("\n") == 0, err
    assert all(word in err for word in words), err


# -- killed anywhere


@pytest.mark.parametrize("stage", ["memory", *(pytest.param(stage, marks=pytest.mark.slow) for stage in faults.STAGES
                                               if stage != "memory")])
def test_a_killed_stage_started_again_ends_as_if_nothing_had_happened(reference, stage):
    died, wrong = faults.kills(reference, stage, 3, random.Random(1))
    assert died >= 2 and not wrong


@pytest.mark.parametrize("stage, number", [("corpus", signal.SIGTERM), ("batch-tome", signal.SIGINT),
                                           ("memory", signal.SIGINT), ("memory", signal.SIGTERM)])
def test_a_signal_saves_says_how_to_go_on_and_leaves_nothing_half_written(reference, stage, number):
    out = reference.fresh(stage)
    arguments = command(stage, reference.folder, out)

    def fault():        # the signal comes from inside, at a moment in the middle of the stage's work
        def then(real, after):
            calls = []

            def call(*args, **kwargs):
                calls.append(1)
                if len(calls) == after:
                    os.kill(os.getpid(), number)
                return real(*args, **kwargs)
            return call
        data.encode_text = then(data.encode_text, 50 if stage == "corpus" else -1)
        memory.encode_passages = then(memory.encode_passages, 4 if stage == "memory" else -1)
        torch.optim.AdamW.step = then(torch.optim.AdamW.step, 3 if stage == "batch-tome" else -1)

    code, said, _ = run(arguments, fault)
    assert code == 130 and "the same command goes on" in said and "Traceback" not in said, said
    assert not [p for p in out.rglob("*.tmp*")]
    if stage == "batch-tome":
        assert torch.load(out / "batch-tome.pt", weights_only=True)["step"] == 3
    code, said, _ = run(arguments)
    assert code == 0 and not difference(out, reference.after[stage]), said


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(reference, tmp_path):
    for seed in ("0", "1"):
        code, said, _ = run(command("batch-tome", reference.folder, tmp_path / seed, "--seed", seed))
        assert code == 0, said
    assert not difference(tmp_path / "0", reference.after["batch-tome"])
    assert {"batch-tome.pt", "log.jsonl"} <= set(difference(tmp_path / "1", reference.after["batch-tome"]))


# -- several processes


def ended(children, limit=60):
    started = time.time()
    results = [child.wait(limit) for child in children]
    assert time.time() - started < limit
    return results


@pytest.mark.slow
def test_when_one_of_two_processes_dies_the_other_says_so_and_the_same_command_goes_on(reference, tmp_path):
    whole, out, alone = (tmp_path / name for name in ("whole", "run", "alone"))

    def no_dropout():       # its random numbers are each process's own
        train.PRESETS["toy"] = {**faults.MICRO, "dropout": 0.0}

    def both(out, last=no_dropout):
        return ended(faults.several(command("batch-tome", reference.folder, out), [no_dropout, last]))

    assert [code for code, _, _ in both(whole)] == [0, 0]
    (code, said, _), (killed, _, _) = both(out, lambda: (no_dropout(), faults.die_at_step(4)()))
    assert killed == -signal.SIGKILL and code == 1 and "Traceback" not in said
    assert "another process has ended" in said and "the same command goes on" in said
    assert torch.load(out / "batch-tome.pt", weights_only=True)["step"] == 2
    shutil.copytree(out, alone)
    assert [code for code, _, _ in both(out)] == [0, 0]
    assert not difference(out, contents(whole))
    # and with another number of processes: equal up to rounding, and the log says so
    code, said, _ = run(command("batch-tome", reference.folder, alone), no_dropout)
    assert code == 0 and "1 processes instead of 2" in said
    log = [json.loads(line) for line in (alone / "log.jsonl").read_text().splitlines()]
    assert [line["processes"] for line in log] == [1, 1]
    a, b = (torch.load(folder / "batch-tome.pt", weights_only=True)["model"] for folder in (whole, alone))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3)


def test_a_process_that_dies_while_the_memory_is_built_ends_the_other(reference):
    out = reference.fresh("memory")
    (code, said, _), (killed, _, _) = ended(faults.several(command("memory", reference.folder, out),
                                                           [lambda: None, faults.die_at_write(9)]))
    assert killed == -signal.SIGKILL and code == 1 and "another process has ended" in said, said
    code, said, _ = run(command("memory", reference.folder, out))
    assert code == 0 and not difference(out, reference.after["memory"]), said


@pytest.mark.slow
def test_torchrun_ends_when_a_worker_is_killed(reference, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
                      "import os, torch; torch.set_num_threads(1)\nimport faults, train; faults.shrink()\n"
                      "if os.environ['RANK'] == '1': faults.die_at_step(3)()\nsys.exit(train.main(sys.argv[1:]))\n")
    started = time.time()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker]
    done = subprocess.run([*torchrun, *command("batch-tome", reference.folder, tmp_path / "run")], text=True,
                          timeout=150, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode and "another process has ended" in done.stderr + done.stdout
    assert time.time() - started < 90       # 60, and starting Python three times


# -- corrupted


@pytest.mark.parametrize("kind", faults.KINDS)
def test_damage_is_found_and_named_or_changes_nothing(reference, small, kind):
    if not hasattr(reference, "folders"):
        reference.folders = faults.halves(reference)
    found, harmless, wrong = faults.corruptions(reference, reference.folders, kind, 2, random.Random(kind))
    assert found + harmless == 2 and not wrong


def test_what_the_message_says_about_a_damaged_shard_helps(reference, done, small):
    shard = done / "memory" / "keys-00002.npy"
    faults.spoil(shard, random.Random(0), "flip")
    one_sentence(*quietly(evaluation.main, ["--out", done]), str(shard), "manifest.json and shard-00002.json",
                 "--stage memory")
    for name in ("manifest.json", "shard-00002.json"):
        (done / "memory" / name).unlink()
    assert quietly(train.main, command("memory", reference.folder, done))[0] == 0
    assert not difference(done, contents(reference.folder / "run"))


@pytest.fixture(scope="module")
def stranger(reference, tmp_path_factory):
    """A run of another seed on another corpus, a subject longer: everything has the same shapes."""
    folder = tmp_path_factory.mktemp("stranger")
    faults.write_world(folder, subjects=25)
    code, said, _ = run(command("tome", folder, folder / "run", "--seed", "1"))
    assert code == 0, said
    return folder / "run"


@pytest.mark.parametrize("files, arguments, words", [
    (["tome.pt"], None, ["tome.pt", "another"]),
    (["batch-tome.pt"], ["--stage", "tome"], ["batch-tome.pt", "another"]),
    (["memory"], None, ["memory", "another mention encoder"]),
    (["memory/manifest.json"], None, ["memory", "another mention encoder"]),
    (["corpus"], None, ["another"]),
    (["corpus/tokenizer.json"], None, ["tokenizer.json", "damaged"]),
    (["run.json"], None, ["another"]),
])
def test_what_belongs_to_another_run_is_refused(stranger, done, small, files, arguments, words):
    for name in files:
        to = done / name
        shutil.rmtree(to) if to.is_dir() else to.unlink()
        (shutil.copytree if (stranger / name).is_dir() else shutil.copy)(stranger / name, to)
    if arguments:
        (done / "tome.pt").unlink()
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    one_sentence(*quietly(train.main if arguments else evaluation.main, [*(arguments or []), "--out", done]), *words)
    assert before == {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}


def change(path, **values):
    """A checkpoint or record with other values, in whole files: checksums fit."""
    if path.suffix == ".pt":
        torch.save({**torch.load(path, weights_only=True), **values}, path)
    else:
        data.write_json(path, {**data.read_json(path), **values})


@pytest.mark.parametrize("name, values, words", [
    ("tome.pt", {"format": 1}, ["tome.pt", "format (1,"]), ("tome.pt", {"stage": "qa"}, ["stage (qa,"]),
    ("tome.pt", {"preset": "mini"}, ["preset (mini,"]), ("tome.pt", {"seed": 9}, ["seed (9,"]),
    ("tome.pt", {"blocks": 2}, ["blocks (2,"]), ("tome.pt", {"corpus": 2}, ["corpus (2,"]),
    ("tome.pt", {"encoder": "0" * 64}, ["another mention encoder"]),
    ("run.json", {"format": 1}, ["run.json", "format 1"]),
    ("memory/manifest.json", {"format": 1}, ["manifest.json", "format 1"]),
    ("memory/manifest.json", {"corpus": {}}, ["another corpus"]),
    ("corpus/meta.json", {"format": 0}, ["format 0"])])
def test_another_format_preset_stage_or_encoder_is_named(done, small, name, values, words):
    change(done / name, **values)
    one_sentence(*quietly(evaluation.main, ["--out", done]), *words)


def test_a_stage_is_not_taken_up_with_another_encoder_or_other_examples(reference, done, small):
    change(done / "qa.pt", step=2)
    other = reference.folder / "other.jsonl"
    other.write_text("\n".join((reference.folder / "qa.train.jsonl").read_text().splitlines()[1:]))
    one_sentence(*quietly(train.main, ["--stage", "finetune", "--task", "qa", "--examples", other, "--out", done]),
                 "qa.pt", "another examples")
    change(done / "tome.pt", step=2, encoder="0" * 64)
    one_sentence(*quietly(train.main, command("tome", reference.folder, done)), "tome.pt", "another encoder")


def test_a_corpus_that_changes_between_stages_is_refused(reference, done, small, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(reference.folder / "corpus.jsonl", mine)
    assert quietly(train.main, command("corpus", mine, tmp_path / "new"))[0] == 0
    with open(mine / "corpus.jsonl", "a") as file:
        file.write((mine / "corpus.jsonl").read_text().splitlines()[0] + "\n")
    one_sentence(*quietly(train.main, command("memory", mine, tmp_path / "new")), "corpus.jsonl has changed")


def test_results_without_a_run_file_are_not_overwritten(done, small, reference):
    (done / "run.json").unlink()
    one_sentence(*quietly(train.main, command("tome", reference.folder, done)), "no run.json", "batch-tome.pt")


# -- rubbish in


def test_no_mutated_line_is_lost_or_breaks_anything(tmp_path):
    pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    counts = faults.fuzz(tmp_path, 80)
    assert all(c["kept"] and c["reported"] for c in counts.values())


@pytest.mark.slow
def test_no_mutated_line_of_2000_is_lost_or_breaks_anything(tmp_path):
    pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    assert sum(sum(c.values()) for c in faults.fuzz(tmp_path, 2000).values()) >= 2000


@pytest.mark.parametrize("arguments, words", [
    ("--stage nonsense", "invalid choice"), ("", "--stage"), ("--stage tome --steps -5", "of at least 1"),
    ("--stage tome --steps 0", "whole number"), ("--stage tome --steps 1e3", "whole number"),
    ("--stage tome --lr fast", "not a learning rate"), ("--stage tome --lr 0", "not a learning rate"),
    ("--stage tome --seed -1", "whole number"), ("--stage tome --seed " + "9" * 30, "whole number"),
    ("--stage memory --steps 5", "do not go with --stage memory"), ("--stage finetune", "needs it"),
    ("--stage tome --task qa", "--task goes with"), ("--stage tome --examples x", "--examples goes with"),
    ("--stage finetune --task qa --cloze", "--cloze goes with"),
    ("--stage tome --blocks 3", "invalid choice"), ("--stage tome --preset huge", "invalid choice"),
    ("--stage tome --device tpu", "invalid choice"), ("--stage tome --nonsense", "unrecognized")])
def test_a_command_line_that_cannot_be_meant_is_refused(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        train.main(arguments.split())
    assert leaving.value.code == 2 and words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_sentence(reference, small, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        one_sentence(*quietly(train.main, command("tome", reference.folder, out)), str(out), "cannot be made")


def mounted(folder, options):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.parametrize("stage, room", [("corpus", 16), ("batch-tome", 1000), ("memory", 60)])
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on_once_there_is_room(reference, small, tmp_path,
                                                                                     stage, room):
    disk = tmp_path / "disk"
    size = sum(p.stat().st_size + 4096 for p in reference.before[stage].rglob("*")) // 1024 + room
    if not mounted(disk, f"size={size}k"):
        pytest.skip("a small disk is mounted only by root, where the system allows it")
    try:
        out = Path(shutil.copytree(reference.before[stage], disk / "run"))
        arguments = command(stage, reference.folder, out)
        one_sentence(*quietly(train.main, arguments), "cannot be written", str(out))
        assert not list(out.rglob("*.tmp*"))
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        assert quietly(train.main, arguments)[0] == 0
        assert not difference(out, reference.after[stage])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_read_only_disk_is_one_sentence(reference, small, tmp_path):
    disk = tmp_path / "disk"
    if not mounted(disk, "size=1m,ro"):
        pytest.skip("a disk is mounted only by root, where the system allows it")
    try:
        one_sentence(*quietly(train.main, command("tome", reference.folder, disk / "run")), "cannot be made", "Read-only")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# -- numbers


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_no_number_names_step_and_batch(reference, small, tmp_path, monkeypatch, value):
    real, made, batches = train.mlm_loss, data.make_batch, []
    monkeypatch.setattr(data, "make_batch",
                        lambda corpus, passages, *a: batches.append(passages) or made(corpus, passages, *a))
    monkeypatch.setattr(train, "mlm_loss", lambda *a: real(*a) * (float(value) if len(training()) == 4 else 1))

    def training():
        return [b for b in batches if len(b) == faults.MICRO["schedule"]["batch-tome"].batch]
    one_sentence(*quietly(train.main, command("batch-tome", reference.folder, tmp_path / "run")), "at step 3",
                 f"passages {', '.join(map(str, sorted(training()[3])))}")
    assert torch.load(tmp_path / "run" / "batch-tome.pt", weights_only=True)["step"] == 2


TEXT = "Mona Varga was born in Port Ellin and her teacher was Igor Sand of the old town."


@pytest.mark.parametrize("lines", [
    [{"text": TEXT, "mentions": [(0, 10, "Mona")]}],
    [{"text": TEXT, "mentions": [(0, 10, "Mona")]}] + [{"text": TEXT, "mentions": []}] * 20,
    [{"text": TEXT, "mentions": [(0, 10, "Mona")]}] + [{"text": TEXT, "mentions": [(23, 33, None)]}] * 20,
    [{"text": TEXT, "mentions": [(0, len(TEXT), "Mona")]}] * 3,
    [{"text": "Mona", "mentions": [(0, 4, "Mona")]}] * 2 + [{"text": "?", "mentions": []}],
], ids=["one passage", "one mention in all", "the others not linked", "nothing but mentions", "hardly a word"])
def test_a_corpus_with_hardly_anything_in_it_trains_without_nan(small, tmp_path, lines):
    with open(tmp_path / "corpus.jsonl", "w") as file:
        for i, line in enumerate(lines):
            mentions = [dict(zip(("start", "end", "entity"), m)) for m in line["mentions"]]
            print(json.dumps({"title": f"T{i}", "text": line["text"], "mentions": mentions, "split": "train"}), file=file)
    code, _, err = quietly(train.main, command("tome", tmp_path, tmp_path / "run"))
    assert code == 0, err
    for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines():
        assert "NaN" not in line and "Infinity" not in line
    for name in ("batch-tome.pt", "tome.pt"):
        assert all(t.isfinite().all() for t in torch.load(tmp_path / "run" / name, weights_only=True)["model"].values())


# -- trust


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_crafted_checkpoint_and_a_crafted_array_run_no_code(done, small, tmp_path):
    owned = tmp_path / "owned"
    whole = torch.load(done / "tome.pt", weights_only=True)
    torch.save({**whole, "model": Evil(owned)}, done / "tome.pt")
    one_sentence(*quietly(evaluation.main, ["--out", done]), "tome.pt", "damaged")
    torch.save(whole, done / "tome.pt")
    array = np.empty(1, object)
    array[0] = Evil(owned)
    np.save(done / "memory" / "keys-00000.npy", array, allow_pickle=True)
    manifest = data.read_json(done / "memory" / "manifest.json")
    manifest["shards"][0]["crc32"]["keys"] = data.checksum(done / "memory" / "keys-00000.npy")
    data.write_json(done / "memory" / "manifest.json", manifest)
    one_sentence(*quietly(evaluation.main, ["--out", done]), "keys-00000.npy", "no array of numbers")
    assert not owned.exists()
    np.load(done / "memory" / "keys-00000.npy", allow_pickle=True)     # it would have run
    assert owned.exists()


def test_a_crafted_bert_runs_no_code(tmp_path, reference, small):
    bert = tmp_path / "bert"
    bert.mkdir()
    words = [*data.SPECIAL[:5], "[unused0]", "[unused1]", *"abcdefghijklmnopqrstuvwxyz"]
    (bert / "vocab.txt").write_text("\n".join(words) + "\n")
    (bert / "config.json").write_text(json.dumps(dict(
        vocab_size=len(words), hidden_size=96, num_hidden_layers=3, num_attention_heads=6, intermediate_size=96,
        max_position_embeddings=96)))
    torch.save({"embeddings": Evil(tmp_path / "owned")}, bert / "pytorch_model.bin")
    arguments = command("batch-tome", reference.folder, tmp_path / "run", "--init", str(bert))
    one_sentence(*quietly(train.main, arguments),
                 "pytorch_model.bin")
    assert not (tmp_path / "owned").exists()


def test_no_file_is_written_outside_of_out(reference, tmp_path):
    """Working folder, home and temporary folder stay as they are."""
    here = tmp_path / "here"
    (here / "home").mkdir(parents=True)
    (here / "tmp").mkdir()
    code, said, _ = run(command("tome", reference.folder, tmp_path / "run"), lambda: os.chdir(here),
                        environment={"HOME": str(here / "home"), "TMPDIR": str(here / "tmp"),
                                     "XDG_CACHE_HOME": str(here / "home")})
    assert code == 0, said
    assert sorted(p.name for p in here.rglob("*")) == ["home", "tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "run"]


# -- memory


@pytest.mark.slow
def test_nothing_leaks(reference, small):
    early, _, late = faults.leak(reference, steps=500)
    assert late - early < 8
