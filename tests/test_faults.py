"""What the README promises of kills, damage, rubbish and strangers, a few faults of each kind.

python -m pytest tests/test_faults.py -m "not slow" runs the quick ones, python tests/faults.py all.
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

slow = pytest.mark.slow

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

@pytest.mark.parametrize("stage, points, fault", [
    ("corpus", 1, faults.die_at), ("batch-tome", 1, faults.power_cut_at),
    ("memory", 1, faults.power_cut_at), ("memory", "part/meta.json.tmp", faults.die_at),
    ("append third", 1, faults.die_at), ("append second", 1, faults.stop_at),
    *(pytest.param(stage, 4, fault, marks=slow) for stage in faults.STAGES
      for fault in (faults.die_at, faults.power_cut_at))])
def test_a_stage_cut_off_at_a_file_operation_and_started_again_ends_as_if_nothing_had_happened(
        reference, stage, points, fault):
    """A few, or those of a file, of the operations that tests/faults.py goes through one by one."""
    operations = dict(enumerate(reference.operations[stage], 1))
    if isinstance(points, int):
        chosen = random.Random(f"{stage} {points}").sample([*operations], points)
    else:
        chosen = [n for n, what in operations.items() if what.endswith(points)]
    died, wrong = faults.kills(reference, stage, fault, chosen)
    assert died == len(chosen) > 0 and not wrong

def commit_of(reference, stage):
    """The operation by which run.json comes to name another corpus."""
    *_, at = (i for i, what in enumerate(reference.operations[stage], 1)
           if what.startswith("os.rename") and "run.json" in what)
    return at

@pytest.mark.parametrize("fault, late", [
    (faults.die_at, 0), (faults.power_cut_at, 1), pytest.param(faults.die_at, 1, marks=slow),
    pytest.param(faults.power_cut_at, 0, marks=slow)])
def test_an_append_cut_off_around_its_commit_goes_forward_or_back(reference, small, fault, late):
    """run.json names the corpus: before it is replaced the old state counts, then the new one."""
    stage, out = "append second", reference.fresh("append second")
    arguments = command(stage, reference.folder, out)
    assert run(arguments, fault(commit_of(reference, stage) + late))[0] == -signal.SIGKILL
    there = {path.name for path in out.iterdir()}
    old, new = ({name.split("/")[0] for name in held if "/" in name}
                for held in (contents(reference.before[stage]), reference.after[stage]))
    assert there >= old or there >= new                                         # never neither
    assert quietly(evaluation.main, ["--out", out, "--json"])[0] == 0           # it can be read
    assert run(arguments)[0] == 0 and not difference(out, reference.after[stage])

def test_another_command_after_an_append_that_was_cut_off_takes_it_back(reference, small):
    out = reference.fresh("append second")
    fault = faults.die_at(commit_of(reference, "append second"))
    run(command("append second", reference.folder, out), fault)
    assert difference(out, contents(reference.before["append second"]))
    assert quietly(train.main, command("tome", reference.folder, out))[0] == 0
    assert not set(difference(out, contents(reference.before["append second"]))) - {"run.json.tmp"}

def test_an_append_goes_on_where_the_files_in_use_cannot_be_removed(reference):
    """As on a network file system. They stay until the next command."""
    def fault():
        real = os.unlink

        def unlink(path, **options):
            if str(path).endswith((".bin", ".npy")):
                raise OSError(f"{path} is busy")
            real(path, **options)
        os.unlink = os.remove = unlink
    assert faults.after_fault(reference, "append third", fault) == (False, None)

def test_what_was_appended_is_not_lost_without_a_word(reference, small):
    """The corpus is damaged after an append, and its owner follows the advice. What was appended
    is lost with it: that is said with exit code 1, and it can be appended again."""
    done = reference.fresh("append second")
    shutil.rmtree(only(done, "corpus"))
    one_sentence(*quietly(train.main, command("memory", reference.folder, done)), "append")
    for stage in ("memory", "append first"):
        assert quietly(train.main, command(stage, reference.folder, done))[0] == 0
    assert not difference(done, reference.after["append first"])
    assert quietly(evaluation.main, ["--out", done, "--json"])[0] == 0

def test_a_damaged_toy_world_is_named_and_nothing_of_others_is_removed(tmp_path, monkeypatch):
    few = {name: max(n // 14, 10) for name, n in data.COUNTS.items()}
    monkeypatch.setattr(data, "COUNTS", data.COUNTS | few)
    world = tmp_path / "world"
    train.make_world(world, 0)
    whole = contents(world)
    faults.spoil(world / "corpus.jsonl", random.Random(0), "flip")
    shutil.copytree(world, tmp_path / "world.part")             # and half of one lies about
    spoilt = contents(world)
    for name in ("world", "mine"):                              # the other one is a user's own folder
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "level1.map").write_text("...")
        with pytest.raises(data.UserError, match=f"{name} is missing or damaged"):
            train.make_world(tmp_path / name, 0)
    assert not difference(world, spoilt) and (tmp_path / "mine" / "level1.map").exists()
    shutil.rmtree(world)
    train.make_world(world, 1)
    train.make_world(world, 0)                                  # another seed's is replaced
    assert not difference(world, whole) and not (tmp_path / "world.part").exists()

@slow
def test_a_terminal_that_is_not_utf_8_ends_no_training(reference, tmp_path):
    """In a program of its own: the name of the corpus file is said before anything is done."""
    corpus = tmp_path / "z\xfcrich.jsonl"
    corpus.write_text("{}")
    arguments = ["--stage", "batch-tome", "--corpus", corpus, "--out", tmp_path / "run"]
    done = subprocess.run([sys.executable, ROOT / "train.py", *arguments], capture_output=True,
                          text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1 and "z\\xfcrich.jsonl:1: title: missing" in done.stderr, done.stderr

@pytest.mark.parametrize("stage, number", [
    ("batch-tome", signal.SIGINT), ("memory", signal.SIGTERM), ("append third", signal.SIGINT),
    pytest.param("corpus", signal.SIGTERM, marks=slow)])
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
        memory.encode_passages = then(memory.encode_passages, {"memory": 4, "append third": 1}.get(stage, -1))
        torch.optim.AdamW.step = then(torch.optim.AdamW.step, 3 if stage == "batch-tome" else -1)

    code, said = run(arguments, fault)
    assert code == 130 and "the same command goes on" in said and "Traceback" not in said, said
    assert not list(out.rglob("*.tmp"))
    if stage == "batch-tome":
        assert torch.load(out / "batch-tome.pt", weights_only=True)["step"] == 3
    code, said = run(arguments)
    assert code == 0 and not difference(out, reference.after[stage]), said

# -- several processes

def ended(children, limit=60):
    started = time.time()
    results = [child.wait(limit) for child in children]
    assert time.time() - started < limit
    return results

@slow
def test_when_one_of_two_processes_dies_the_other_says_so_and_the_same_command_goes_on(reference, tmp_path):
    whole, out, alone = (tmp_path / name for name in ("whole", "run", "alone"))

    def no_dropout():       # its random numbers are each process's own
        train.PRESETS["toy"] = {**faults.MICRO, "dropout": 0.0}

    def both(out, last=no_dropout):
        return ended(faults.several(command("batch-tome", reference.folder, out), [no_dropout, last]))

    assert [code for code, _ in both(whole)] == [0, 0]
    (code, said), (killed, _) = both(out, lambda: (no_dropout(), faults.die_at_step(4)()))
    assert killed == -signal.SIGKILL and code == 1 and "Traceback" not in said
    assert "another process has ended" in said and "the same command goes on" in said
    assert torch.load(out / "batch-tome.pt", weights_only=True)["step"] == 3
    shutil.copytree(out, alone)
    assert [code for code, _ in both(out)] == [0, 0]
    assert not difference(out, contents(whole))
    # and with another number of processes: equal up to rounding
    code, said = run(command("batch-tome", reference.folder, alone), no_dropout)
    assert code == 0
    a, b = (torch.load(folder / "batch-tome.pt", weights_only=True)["model"] for folder in (whole, alone))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3)

def test_a_process_that_dies_while_the_memory_is_built_ends_the_other(reference):
    out = reference.fresh("memory")
    (code, said), (killed, _) = ended(faults.several(command("memory", reference.folder, out),
                                                           [lambda: None, faults.die_at(9)]))
    assert killed == -signal.SIGKILL and code == 1 and "another process has ended" in said, said
    code, said = run(command("memory", reference.folder, out))
    assert code == 0 and not difference(out, reference.after["memory"]), said

# -- corrupted

@pytest.mark.parametrize("n", [1, pytest.param(8, marks=slow)])
@pytest.mark.parametrize("kind", faults.KINDS)
def test_damage_is_found_and_named_or_changes_nothing(reference, small, kind, n):
    found, harmless, wrong = faults.corruptions(reference, kind, n, random.Random(f"{kind} {n}"))
    assert found + harmless == n and not wrong

def test_what_the_message_says_about_a_damaged_shard_helps(reference, done, small):
    folder = only(done, "memory")
    faults.spoil(folder / "keys-00002.npy", random.Random(0), "flip")
    one_sentence(*quietly(evaluation.main, ["--out", done]), "keys-00002.npy", str(folder),
                 "remove it")
    shutil.rmtree(folder)
    assert quietly(train.main, command("memory", reference.folder, done))[0] == 0
    assert not difference(done, contents(reference.run))

@slow
def test_half_a_memory_of_another_encoder_is_not_gone_on_with(reference, small):
    """The same recipe gives other weights, equal up to rounding, to another number of processes."""
    out = reference.fresh(reference.spoilt_in["half a memory"])
    model = torch.load(out / "batch-tome.pt", weights_only=True)["model"]
    change(out / "batch-tome.pt", model={name: 1.01 * t for name, t in model.items()})
    memories = []
    for _ in range(2):          # the second one from nothing
        assert quietly(train.main, command("memory", reference.folder, out))[0] == 0
        memories.append(contents(only(out, "memory")))
        shutil.rmtree(only(out, "memory"))
    assert faults.equal(*memories)

@pytest.fixture(scope="module")
def stranger(reference, tmp_path_factory):
    """A run of another seed on another corpus, a subject longer: everything has the same shapes."""
    folder = tmp_path_factory.mktemp("stranger")
    faults.write_world(folder, subjects=25)

    def short():
        schedule = dict.fromkeys(faults.MICRO["schedule"], train.Schedule(1, 1e-3, 1, 8))
        train.PRESETS["toy"] = {**faults.MICRO, "schedule": schedule}
    code, said = run(command("tome", folder, folder / "run", "--seed", "1"), short)
    assert code == 0, said
    return folder / "run"

@pytest.mark.parametrize("name, words", [
    ("tome.pt", "tome.pt was made with --seed 1, not 0"), ("memory", "another mention encoder"), ("corpus", "was made with --"), ("run.json", "is missing"),
    ("corpus/vocab.txt", "vocab.txt")])
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
    ("tome.pt", {"seed": 9}, ["--seed 9, not 0"]), ("tome.pt", {"n_blocks": 2}, ["--blocks 2, not 1"]),
    ("tome.pt", {"clip": 2.0}, ["--set clip=2.0, not 1.0"]), ("tome.pt", {"steps": "many"}, ["tome.pt"]),
    ("tome.pt", {"corpus": None}, ["made from another corpus"]), ("tome.pt", {"lr": 3}, ["tome.pt"]),
    ("tome.pt", {"published": {"trained": True}}, ["made from another --init"]),
    ("tome.pt", {"batch-tome": 3}, ["made from another batch-tome"])])
def test_a_checkpoint_of_another_recipe_is_named(done, small, name, recipe, words):
    whole = torch.load(done / name, weights_only=True)
    change(done / name, recipe=whole["recipe"] | recipe)
    one_sentence(*quietly(evaluation.main, ["--out", done]), *words)

@pytest.mark.parametrize("name, values, words", [
    ("tome.pt", {"encoder": "0" * 64}, ["another mention encoder"]), ("run.json", {"format": 1}, ["run.json", "format 1"]),
    ("run.json", {"preset": "huge"}, ["run.json"]), ("run.json", {"set": 3}, ["run.json"]),
    ("run.json", {"blocks": "x"}, ["run.json"]), ("run.json", {"appended": [1]}, ["corpus-"]),
    ("memory/meta.json", {"format": 1}, ["memory-", "format 1"]),
    ("corpus/meta.json", {"format": 0}, ["format 0"]), ("corpus/meta.json", {"recipe": {}}, ["corpus-"])])
def test_another_format_or_encoder_is_named(done, small, name, values, words):
    folder, _, inner = name.partition("/")
    change(only(done, folder) / inner if inner else done / name, **values)
    one_sentence(*quietly(evaluation.main, ["--out", done]), *words)

def test_a_deeply_nested_run_file_is_one_sentence(done, small):
    for text in ("[" * 100_000, '{"a":' * 100_000, ""):
        (done / "run.json").write_text(text)
        one_sentence(*quietly(evaluation.main, ["--out", done]), "run.json", "damaged")

def test_a_stage_is_not_taken_up_with_other_examples(reference, done, small, tmp_path):
    change(done / "qa.pt", evaluated=2, step=2)
    text = (reference.folder / "qa.train.jsonl").read_text()
    (tmp_path / "qa.train.jsonl").write_text(text.partition("\n")[2])
    one_sentence(*quietly(train.main, command("finetune", tmp_path, done)[2:]),
                 "qa.pt was made with other --examples; give them again")

def test_a_corpus_that_changes_between_stages_is_refused(reference, done, small, tmp_path):
    text = (reference.folder / "corpus.jsonl").read_text()
    (tmp_path / "corpus.jsonl").write_text(text + text.splitlines()[0] + "\n")
    change(done / "run.json", corpus=str(tmp_path / "corpus.jsonl"))
    one_sentence(*quietly(train.main, command("memory", tmp_path, done)), "made from another corpus")

def test_results_without_a_run_file_are_not_overwritten(done, small, reference):
    """What they are they say themselves: the command that made them finds them, another is refused."""
    before = contents(done)
    (done / "run.json").unlink()
    one_sentence(*quietly(train.main, command("tome", reference.folder, done, "--set", "clip=2")), "batch-tome.pt", "--set clip=")
    one_sentence(*quietly(train.main, command("tome", reference.folder, done, "--set", "vocab=500")), "batch-tome.pt", "--set vocab=")
    assert quietly(train.main, command("tome", reference.folder, done))[0] == 0
    assert set(difference(done, before)) <= {"run.json"}        # which had the flags of stage qa

# -- rubbish in

@pytest.mark.parametrize("n", [64, pytest.param(2000, marks=slow)])
def test_no_mutated_line_is_lost_or_breaks_anything(tmp_path, n):
    pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    counts = faults.fuzz(tmp_path, n)
    assert all(c["kept"] and c["reported"] for c in counts.values())
    assert sum(sum(c.values()) for c in counts.values()) >= n

@pytest.mark.parametrize("arguments, words", [
    ("--stage tome --steps -5", "of at least 0"), ("--stage tome --steps 1e3", "whole number"),
    ("--stage tome --seed " + "9" * 30, "whole number"), ("--stage finetune", "needs --task"),
    ("--stage memory --steps 5", "--steps goes with"), ("--stage tome --nonsense", "unrecognized")])
def test_a_command_line_that_cannot_be_meant_is_refused(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        train.main(arguments.split())
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())

def test_a_folder_that_cannot_be_written_is_one_sentence(reference, small, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        one_sentence(*quietly(train.main, command("tome", reference.folder, out)), str(out))

@pytest.fixture
def disk(tmp_path):
    """mount(options) of a small disk; returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
                              capture_output=True)
        if done.returncode:
            pytest.skip("a small disk is mounted only by root, where the system allows it")
        return folder
    yield mount
    subprocess.run(["umount", "-l", folder], capture_output=True)

@pytest.mark.parametrize("stage, room", [("corpus", 16), ("corpus", 94), ("memory", 60), *(
    pytest.param(*where, marks=slow) for where in (("corpus", 368), ("batch-tome", 1000),
                                                   ("append first", 40)))])
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on_once_there_is_room(
        reference, small, disk, stage, room):
    files = reference.before[stage].rglob("*")
    folder = disk(f"size={sum(p.stat().st_size + 4096 for p in files) // 1024 + room}k")
    out = Path(shutil.copytree(reference.before[stage], folder / "run"))
    arguments = command(stage, reference.folder, out)
    one_sentence(*quietly(train.main, arguments), str(out))
    assert not list(out.rglob("*.tmp*"))
    subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
    assert quietly(train.main, arguments)[0] == 0
    assert not difference(out, reference.after[stage])

def test_a_read_only_disk_is_one_sentence(reference, small, disk):
    arguments = command("tome", reference.folder, disk("size=1m,ro") / "run")
    one_sentence(*quietly(train.main, arguments), "run", "Read-only")

# -- numbers

@pytest.mark.parametrize("value", ["nan", pytest.param("inf", marks=slow)])
def test_a_loss_that_is_no_number_names_step_and_batch(reference, small, tmp_path, monkeypatch, value):
    real, made, batches = train.mlm_loss, train.masked_batch, []
    monkeypatch.setattr(train, "masked_batch",
                        lambda run, passages, *a: batches.append(passages) or made(run, passages, *a))
    monkeypatch.setattr(train, "mlm_loss", lambda *a: real(*a) * (float(value) if len(training()) == 4 else 1))

    def training():
        return [b for b in batches if len(b) == faults.MICRO["schedule"]["batch-tome"].batch]
    one_sentence(*quietly(train.main, command("batch-tome", reference.folder, tmp_path / "run")), "at step 3",
                 f"passages {', '.join(map(str, sorted(training()[3])))}")
    assert torch.load(tmp_path / "run" / "batch-tome.pt", weights_only=True)["step"] == 3

TEXT = "Mona Varga was born in Port Ellin and her teacher was Igor Sand of the old town."

@pytest.mark.parametrize("lines", [
    [(TEXT, [(0, 10, "Mona")])],
    [(TEXT, [(0, 10, "Mona")])] + [(TEXT, [(23, 33, None)])] * 20,
    pytest.param([(TEXT, [(0, 10, "Mona")])] + [(TEXT, [])] * 20, marks=slow),
    pytest.param([(TEXT, [(0, len(TEXT), "Mona")])] * 3, marks=slow),
    pytest.param([("Mona", [(0, 4, "Mona")])] * 2 + [("?", [])], marks=slow),
], ids=["one passage", "the others not linked", "one mention", "only mentions", "hardly a word"])
def test_a_corpus_with_hardly_anything_in_it_trains_without_nan(small, tmp_path, lines):
    data.write_lines(tmp_path / "corpus.jsonl", (
        {"title": f"T{i}", "text": text, "split": "train",
         "mentions": [dict(zip(("start", "end", "entity"), m)) for m in mentions]}
        for i, (text, mentions) in enumerate(lines)))
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
    keys, path = only(done, "memory") / "keys-00000.npy", only(done, "memory") / "meta.json"
    np.save(keys, array, allow_pickle=True)
    meta = data.read_json(path)
    meta["crc32"][keys.name] = data.checksum(keys)
    data.write_json(path, meta)
    one_sentence(*quietly(evaluation.main, ["--out", done]), "keys", "damaged")
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
        max_position_embeddings=96, hidden_act="gelu")))
    torch.save({"embeddings": Evil(tmp_path / "owned")}, bert / "cannot be read as a BERT")
    arguments = command("batch-tome", reference.folder, tmp_path / "run", "--init", str(bert))
    one_sentence(*quietly(train.main, arguments), "cannot be read as a BERT")
    assert not (tmp_path / "owned").exists()

def test_no_file_is_written_outside_of_out_and_the_same_seed_gives_the_same_bits(
        reference, tmp_path):
    """Working folder, home and temporary folder stay as they are; and the same seed gives the same
    bits, wherever that is."""
    here = tmp_path / "here"
    (here / "home").mkdir(parents=True)
    (here / "tmp").mkdir()
    code, said = run(command("tome", reference.folder, tmp_path / "run"), lambda: os.chdir(here),
                     environment={"HOME": str(here / "home"), "TMPDIR": str(here / "tmp"),
                                  "XDG_CACHE_HOME": str(here / "home")})
    assert code == 0, said
    assert sorted(p.name for p in here.rglob("*")) == ["home", "tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "run"]
    assert not difference(tmp_path / "run", {
        **reference.after["tome"], "run.json": (tmp_path / "run" / "run.json").read_bytes()})

def test_no_link_is_followed(reference, small, tmp_path):
    """What lies in a run folder under the names that a command writes."""
    out, mine, folder = reference.fresh("memory"), tmp_path / "bashrc", tmp_path / "photos"
    folder.mkdir()
    for path in (mine, folder / "1.jpg"):
        path.write_text("mine")
    (out / "log.jsonl").unlink()
    links = [out / name for name in ("log.jsonl", "tome.pt.tmp", "run.json.tmp")]
    for path in links:
        path.symlink_to(mine)
    for name in {name.split("/")[0] for name in reference.after["tome"] if "/" in name}:
        links.append(out / f"{name}.part")
        links[-1].symlink_to(folder)
    while (said := quietly(train.main, command("tome", reference.folder, out)))[0]:
        one_sentence(*said)                 # it is named, or replaced
        next(path for path in links if str(path) in said[2]).unlink()
    assert "mine" == mine.read_text() == "".join(path.read_text() for path in folder.iterdir())
    assert set(difference(out, reference.after["tome"])) <= {"run.json", "run.json.tmp", "log.jsonl"}

# -- memory

@slow
def test_nothing_leaks(reference, small):
    faults.leak(reference, steps=500)       # oneDNN makes a kernel for each new shape and keeps it
    early, half, late = faults.leak(reference, steps=500)
    assert late[1] == half[1]               # tensors
    # A leak of 64 KB a step (a batch and what is made of it takes more) would show; what an allocator
    # takes when is a matter of 15 MB either way.
    assert late[0] - early[0] < 25
