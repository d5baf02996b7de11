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


@pytest.fixture
def done(reference, tmp_path):
    """A whole run, to be spoilt."""
    return Path(shutil.copytree(reference.run, tmp_path / "run"))


def only(out, kind):
    """The folder of the run's corpus or memory."""
    folder, = out.glob(f"{kind}-????????")
    return folder


def one_sentence(code, out, err, *words):
    assert code == 1 and "Traceback" not in err and err.strip().count("\n") == 0, err
    assert all(word in err for word in words), err


# -- killed anywhere


@pytest.mark.parametrize("fault", [faults.die_at, faults.power_cut_at])
@pytest.mark.parametrize("stage, points", [
    ("corpus", 1), ("batch-tome", 1), ("memory", 1), ("append first", 1), ("append third", 1),
    *(pytest.param(stage, 4, marks=pytest.mark.slow) for stage in faults.STAGES)])
def test_a_stage_cut_off_at_a_file_operation_and_started_again_ends_as_if_nothing_had_happened(
        reference, stage, points, fault):
    """One or a few of the operations that tests/faults.py goes through one by one."""
    n = len(reference.operations[stage])
    chosen = random.Random(f"{stage} {points}").sample(range(1, n + 1), points)
    died, wrong = faults.kills(reference, stage, fault, chosen)
    assert died == points and not wrong


@pytest.mark.parametrize("fault", [faults.die_at, faults.power_cut_at])
@pytest.mark.parametrize("late", [0, 1])
def test_an_append_cut_off_around_its_commit_goes_forward_or_back(reference, small, fault, late):
    """run.json names the corpus: before it is replaced the old state counts, then the new one."""
    operations = reference.operations["append second"]
    commit, = (i for i, what in enumerate(operations, 1) if what.startswith("os.rename") and "run.json" in what)
    died, wrong = faults.kills(reference, "append second", fault, [commit + late])
    assert died == 1 and not wrong
    out = reference.fresh("append second")
    run(command("append second", reference.folder, out), fault(commit + late))
    before, after = (dict.fromkeys(name.split("/")[0] for name in held if "-" in name.split("/")[0]) for held in (
        reference.before_contents("append second"), reference.after["append second"]))
    there = {path.name for path in out.iterdir()}
    assert there >= before.keys() or there >= after.keys()          # never neither
    assert evaluation.main(["--out", str(out), "--json"]) == 0      # and it can be read meanwhile


def test_another_command_after_an_append_that_was_cut_off_takes_it_back(reference, small):
    out = reference.fresh("append second")
    operations = reference.operations["append second"]
    commit, = (i for i, what in enumerate(operations, 1) if what.startswith("os.rename") and "run.json" in what)
    run(command("append second", reference.folder, out), faults.die_at(commit))
    assert difference(out, reference.before_contents("append second"))
    assert quietly(train.main, command("tome", reference.folder, out))[0] == 0
    assert not set(difference(out, reference.before_contents("append second"))) - {"run.json.tmp"}


def test_what_was_appended_is_not_lost_without_a_word(reference, small, done):
    """The corpus is damaged after two appends, and its owner follows the advice. What was appended
    is lost with it: that is said with exit code 1, and it can be appended again."""
    for stage in ("append first", "append second"):
        assert run(command(stage, reference.folder, done))[0] == 0
    before = contents(done)
    shutil.rmtree(only(done, "corpus"))
    one_sentence(*quietly(train.main, command("memory", reference.folder, done)), "append")
    for stage in ("memory", "append first", "append second"):
        assert quietly(train.main, command(stage, reference.folder, done))[0] == 0
    assert not difference(done, before)
    assert quietly(evaluation.main, ["--out", done, "--json"])[0] == 0


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"seed": 0}'])
def test_a_damaged_record_of_the_toy_world_makes_it_anew(tmp_path, monkeypatch, content):
    few = {name: n // 8 for name, n in data.COUNTS.items() if name != "country"}
    monkeypatch.setattr(data, "COUNTS", data.COUNTS | few)
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "recipe.json").write_text(content)
    path = train.make_world(tmp_path / "world", 0)
    assert list(data.read_corpus(path)) and data.read_json(path.parent / "recipe.json")["seed"] == 0


def test_a_terminal_that_is_not_utf_8_ends_no_training(reference, tmp_path):
    """In a program of its own: the name of the corpus file is said before anything is done."""
    corpus = tmp_path / "z\xfcrich.jsonl"
    corpus.write_text("{}")
    arguments = ["--stage", "batch-tome", "--corpus", corpus, "--out", tmp_path / "run"]
    done = subprocess.run([sys.executable, ROOT / "train.py", *arguments], capture_output=True,
                          text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1 and "z\\xfcrich.jsonl:1: title: missing" in done.stderr, done.stderr


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
    assert not list(out.rglob("*.tmp"))
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
    assert torch.load(out / "batch-tome.pt", weights_only=True)["step"] == 3
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
                                                           [lambda: None, faults.die_at(9)]))
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
    folder = only(done, "memory")
    shard = folder / "keys-00002.npy"
    faults.spoil(shard, random.Random(0), "flip")
    one_sentence(*quietly(evaluation.main, ["--out", done]), str(shard), f"remove {folder}",
                 "--stage memory")
    shutil.rmtree(folder)
    assert quietly(train.main, command("memory", reference.folder, done))[0] == 0
    assert not difference(done, contents(reference.run))


@pytest.fixture(scope="module")
def stranger(reference, tmp_path_factory):
    """A run of another seed on another corpus, a subject longer: everything has the same shapes."""
    folder = tmp_path_factory.mktemp("stranger")
    faults.write_world(folder, subjects=25)
    code, said, _ = run(command("tome", folder, folder / "run", "--seed", "1"))
    assert code == 0, said
    return folder / "run"


@pytest.mark.parametrize("name, words", [
    ("tome.pt", "tome.pt was made from another corpus"), ("batch-tome.pt", "made from another batch-tome"),
    ("memory", "another mention encoder"), ("corpus", "was made with --"), ("run.json", "is missing"),
    ("corpus/tokenizer.json", "tokenizer.json")])
def test_what_belongs_to_another_run_is_refused(stranger, done, small, name, words):
    folder, _, inner = name.partition("/")
    if folder in ("corpus", "memory"):
        ours, theirs = only(done, folder), only(stranger, folder)
    else:
        ours, theirs = done / folder, stranger / folder
    if ours.is_dir() and not inner:
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
    else:
        shutil.copy(theirs / inner, ours / inner)
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    one_sentence(*quietly(evaluation.main, ["--out", done]), words)
    assert before == {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}


def change(path, **values):
    """A checkpoint or record with other values, in whole files: checksums fit."""
    if path.suffix == ".pt":
        torch.save({**torch.load(path, weights_only=True), **values}, path)
    else:
        data.write_json(path, {**data.read_json(path), **values})


@pytest.mark.parametrize("name, recipe, words", [
    ("tome.pt", {"format": 1}, ["tome.pt", "another format"]), ("tome.pt", {"kind": "qa"}, ["--kind qa, not tome"]),
    ("tome.pt", {"seed": 9}, ["--seed 9, not 0"]), ("tome.pt", {"n_blocks": 2}, ["--n_blocks 2, not 1"]),
    ("tome.pt", {"clip": 2.0}, ["--clip 2.0, not 1.0"]), ("tome.pt", {"steps": "many"}, ["tome.pt"]),
    ("tome.pt", {"made_from": {}}, ["made from another corpus"]), ("tome.pt", {"lr": 3}, ["tome.pt"]),
    ("tome.pt", {"made_from": 3}, ["tome.pt"])])
def test_a_checkpoint_of_another_recipe_is_named(done, small, name, recipe, words):
    whole = torch.load(done / name, weights_only=True)
    change(done / name, recipe=whole["recipe"] | recipe)
    one_sentence(*quietly(evaluation.main, ["--out", done]), *words)


@pytest.mark.parametrize("name, values, words", [
    ("tome.pt", {"encoder": "0" * 64}, ["another mention encoder"]), ("run.json", {"format": 1}, ["run.json", "format 1"]),
    ("run.json", {"preset": "huge"}, ["run.json"]), ("run.json", {"set": 3}, ["run.json"]),
    ("run.json", {"blocks": "x"}, ["run.json"]), ("run.json", {"appended": [1]}, ["corpus-"]),
    ("memory/manifest.json", {"format": 1}, ["memory-", "format 1"]),
    ("corpus/meta.json", {"format": 0}, ["format 0"]), ("corpus/meta.json", {"recipe": {}}, ["corpus-"])])
def test_another_format_or_encoder_is_named(done, small, name, values, words):
    folder, _, inner = name.partition("/")
    change(only(done, folder) / inner if inner else done / name, **values)
    one_sentence(*quietly(evaluation.main, ["--out", done]), *words)


def test_a_deeply_nested_run_file_is_one_sentence(done, small):
    for text in ("[" * 100_000, '{"a":' * 100_000, ""):
        (done / "run.json").write_text(text)
        one_sentence(*quietly(evaluation.main, ["--out", done]), "run.json", "damaged")


def test_a_stage_is_not_taken_up_with_another_encoder_or_other_examples(reference, done, small):
    change(done / "qa.pt", evaluated=2, step=2)
    other = reference.folder / "other.jsonl"
    other.write_text("\n".join((reference.folder / "qa.train.jsonl").read_text().splitlines()[1:]))
    one_sentence(*quietly(train.main, ["--stage", "finetune", "--task", "qa", "--examples", other, "--out", done]),
                 "qa.pt was made with --examples")
    (done / "tome.pt").unlink()
    (done / "batch-tome.pt").unlink()
    batch_tome = *command("batch-tome", reference.folder, done), "--steps", "4"
    assert quietly(train.main, batch_tome)[0] == 0
    assert quietly(train.main, command("memory", reference.folder, done))[0] == 0
    shutil.copy(reference.run / "tome.pt", done)
    one_sentence(*quietly(train.main, command("tome", reference.folder, done)), "tome.pt was made from another batch-tome")


def test_a_corpus_that_changes_between_stages_is_refused(reference, done, small, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(reference.folder / "corpus.jsonl", mine)
    assert quietly(train.main, command("corpus", mine, tmp_path / "new"))[0] == 0
    with open(mine / "corpus.jsonl", "a") as file:
        file.write((mine / "corpus.jsonl").read_text().splitlines()[0] + "\n")
    one_sentence(*quietly(train.main, command("memory", mine, tmp_path / "new")), "corpus.jsonl has changed")


def test_results_without_a_run_file_are_not_overwritten(done, small, reference):
    """What they are they say themselves: the command that made them finds them, another is refused."""
    before = contents(done)
    (done / "run.json").unlink()
    one_sentence(*quietly(train.main, command("tome", reference.folder, done, "--set", "clip=2")), "batch-tome.pt", "--clip")
    (done / "run.json").unlink()
    one_sentence(*quietly(train.main, command("tome", reference.folder, done, "--set", "vocab=500")), "run.json", "missing")
    assert quietly(train.main, command("tome", reference.folder, done))[0] == 0
    assert not difference(done, before)


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
    ("--stage tome --lr fast", "invalid float"),
    ("--stage tome --seed -1", "whole number"), ("--stage tome --seed " + "9" * 30, "whole number"),
    ("--stage memory --steps 5", "--steps goes with"), ("--stage finetune", "needs --task"),
    ("--stage tome --task qa", "--task goes with"), ("--stage tome --examples x", "--examples goes with"),
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
    assert torch.load(tmp_path / "run" / "batch-tome.pt", weights_only=True)["step"] == 3


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
    keys, path = only(done, "memory") / "keys-00000.npy", only(done, "memory") / "manifest.json"
    np.save(keys, array, allow_pickle=True)
    manifest = data.read_json(path)
    manifest["shards"][0]["crc32"]["keys"] = data.checksum(keys)
    data.write_json(path, manifest)
    one_sentence(*quietly(evaluation.main, ["--out", done]), "keys-00000.npy", "damaged")
    assert not owned.exists()
    np.load(keys, allow_pickle=True)        # it would have run
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
    faults.leak(reference, steps=500)       # oneDNN makes a kernel for each new shape and keeps it
    early, _, late = faults.leak(reference, steps=500)
    assert late - early < 8
