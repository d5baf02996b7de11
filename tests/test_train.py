"""Stages, files, going on, several processes.   python -m pytest tests/test_train.py"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import memory as memory_file
import train

ROOT = Path(__file__).resolve().parents[1]
TINY = {**train.PRESETS["toy"], "intermediate": 96, "n_initial": 1, "n_upper": 1, "cluster": 16, "log_every": 4,
        "save_every": 2, "eval_mentions": 20,
        "schedule": {name: train.Schedule(4, 1e-3, 1, 16) for name in ("batch-tome", "tome", "claims", "qa")}}

@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(train.PRESETS, "toy", TINY)

def run(*arguments):
    return train.main([*map(str, arguments), "--quiet"])

def only(out, kind):
    """The folder of the run's corpus or memory."""
    folder, = out.glob(f"{kind}-????????")
    return folder

def weights(path):
    return torch.load(path, weights_only=True)["model"]

def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

@pytest.fixture(scope="module")
def trained_once(small_world, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.PRESETS, "toy", TINY)
        assert run("--stage", "tome", "--corpus", small_world, "--out", out) == 0
    return out

@pytest.fixture
def trained(tiny, trained_once, tmp_path):
    """A run of all stages, a few steps each: a copy, to be spoilt."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))

def test_one_command_runs_every_stage_and_reports(trained, capsys):
    assert {p.name for p in trained.iterdir()} == {
        "run.json", only(trained, "corpus").name, "batch-tome.pt", only(trained, "memory").name, "tome.pt", "log.jsonl"}
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [(r["stage"], r["step"]) for r in log] == [("batch-tome", 4), ("tome", 4)]
    assert {"mlm", "coref", "seen", "unseen", "seconds"} <= log[0].keys()
    assert {"accuracy", "entity", "mass_visible", "mass_masked"} <= log[1]["seen"].keys()
    capsys.readouterr()
    assert evaluation.main(["--out", str(trained), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["masked_mention"]["unseen"].keys() >= {"memory", "emptied", "shuffled", "n"}
    assert figures["same_entity_mass"]["seen"].keys() >= {"visible", "masked"}

def test_the_same_command_again_changes_nothing(trained, small_world):
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    assert run("--stage", "tome", "--corpus", small_world, "--out", trained) == 0
    assert before == {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}

def test_a_folder_that_another_train_works_in_is_left_alone(trained, small_world, capsys, monkeypatch):
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(flush=True); input()"
    pytest.importorskip("fcntl")
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    with subprocess.Popen([sys.executable, "-c", code, trained], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()                             # the lock is held
        assert run("--stage", "tome", "--corpus", small_world, "--out", trained) == 1
        message = capsys.readouterr().err
        assert f"{trained}: another train.py" in message and message.count("\n") == 1
        assert evaluation.main(["--out", str(trained), "--json"]) == 0      # looking is allowed
        other.kill()                                        # however it ends, the folder is free again
    assert before == {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    monkeypatch.setattr("fcntl.flock", lambda *_: os.stat("nowhere"))       # OSError, as some network file systems raise
    assert run("--stage", "tome", "--corpus", small_world, "--out", trained) == 0
    assert capsys.readouterr().out.count(f"{trained} cannot be locked") == 1

def test_in_fine_tuning_and_after_it_eq_10_compares_k_finetune_memories(trained, tmp_path, monkeypatch):
    _, examples = data.toy_world(seed=3)
    data.write_lines(tmp_path / "mine.jsonl", examples["qa.one_hop.train"][:32])
    before, asked, real = (trained / "tome.pt").read_bytes(), [], train.MentionMemory.retrieve
    monkeypatch.setattr(train.MentionMemory, "retrieve", lambda memory, query, passage, k, k_shard: (
        asked.append((k, k_shard)), real(memory, query, passage, k, k_shard))[1])
    monkeypatch.setattr(train, "read_task_examples", lambda run, task, path: [train.task_examples(run, task, path)] * 2)
    assert run("--stage", "finetune", "--task", "qa", "--examples", tmp_path / "mine.jsonl", "--out", trained, "--steps", 1,
               "--set", "k_finetune=70") == 0
    # The memory layer, then eq. 10. Each process offers all, so that the search is exact whatever their number.
    assert asked[:2] == [(TINY["k"], TINY["k_shard"]), (70, 70)]
    assert before == (trained / "tome.pt").read_bytes()     # which does not read it
    asked.clear()
    assert evaluation.main(["--out", str(trained), "--task", "qa", "--examples", str(tmp_path / "mine.jsonl"), "--json"]) == 0
    assert asked[:2] == [(TINY["k"], TINY["k_shard"]), (70, 70)]

@pytest.mark.parametrize("stage", ["batch-tome", pytest.param("tome", marks=pytest.mark.slow)])
def test_a_stage_cut_off_and_taken_up_again_ends_with_the_same_bits(trained, small_world, tmp_path, stage, monkeypatch):
    whole, log = weights(trained / f"{stage}.pt"), (trained / "log.jsonl").read_text()
    (trained / f"{stage}.pt").unlink()
    real = torch.optim.AdamW.step
    calls = []

    def dies(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:                     # after the checkpoint of step 2
            raise OSError("pulled the plug")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", dies)
    assert run("--stage", stage, "--corpus", small_world, "--out", trained) == 1
    assert torch.load(trained / f"{stage}.pt", weights_only=True)["step"] == 2
    monkeypatch.setattr(torch.optim.AdamW, "step", real)
    assert run("--stage", stage, "--corpus", small_world, "--out", trained) == 0
    assert equal(whole, weights(trained / f"{stage}.pt"))

    def strip(text):
        return {json.dumps({k: v for k, v in json.loads(line).items() if k != "seconds"})
                for line in text.splitlines()}
    assert strip(log) == strip((trained / "log.jsonl").read_text())

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_last_step_is_evaluated_ends_the_command(trained, small_world, monkeypatch, capsys, number):
    whole = weights(trained / "tome.pt")
    for name in ("batch-tome.pt", "tome.pt"):
        (trained / name).unlink()
    measure, command, calls = train.masked_mentions, ("--stage", "tome", "--corpus", small_world, "--out", trained), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:                         # after those before and after the fit
            os.kill(os.getpid(), number)
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "masked_mentions", interrupted)
        assert run(*command) == 130
    assert "Stopped after batch-tome, which is saved; the same command goes on" in capsys.readouterr().out
    assert (trained / "batch-tome.pt").exists() and not (trained / "tome.pt").exists()
    assert run(*command) == 0 and equal(whole, weights(trained / "tome.pt"))

def test_folders_of_the_user_in_the_run_folder_stay(trained, small_world):
    own = [trained / name for name in ("corpus-wikipedia", "memory-12345678.before", "corpus-20261101")]
    stale = [trained / name for name in ("corpus-12345678.part", "memory-12345678.part", "memory-12345678.89abcdef.part")]
    for folder in own + stale:
        folder.mkdir()
    own.append(trained / "memory-20261128")             # a copy with a date for its name
    shutil.copytree(only(trained, "memory"), own[-1])
    assert run("--stage", "memory", "--corpus", small_world, "--out", trained) == 0
    assert all(folder.exists() for folder in own) and not any(folder.exists() for folder in stale)

def test_all_files_of_examples_are_read_before_anything_is_trained(tiny, small_world, tmp_path, capsys):
    question = json.dumps({"question": "Who?", "answers": ["X"]})
    assert train.dev_files(".") == [] == train.dev_files("")                        # refused when they are read
    path, dev = tmp_path / "trains.train.jsonl", tmp_path / "trains.dev.jsonl"
    path.write_text(question)
    for text, said in (("", "holds no example"), ("{}", "trains.dev.jsonl:1: question"),
                       (json.dumps({"question": "Who?", "answers": []}), "no example has a label or an answer")):
        dev.write_text(text)
        assert run("--stage", "finetune", "--task", "qa", "--corpus", small_world, "--out", tmp_path / "run",
                   "--examples", path) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "run").exists()

def test_claims_of_one_label_only_teach_nothing_and_are_refused(tiny, small_world, tmp_path):
    claims = [{"text": "A", "label": "SUPPORTS"}, {"text": "B", "label": "SUPPORTS"}, {"text": "C", "label": None}]
    for label, status in (("SUPPORTS", 1), ("REFUTES", 0)):
        path = tmp_path / "claims.jsonl"
        path.write_text("".join(json.dumps(claim) + "\n" for claim in [*claims, {"text": "D", "label": label}]))
        with (pytest.raises(data.UserError, match="jsonl: its claims have one label;") if status else nullcontext()):
            args = train.parse_arguments(["--stage", "finetune", "--task", "claims", "--corpus", str(small_world),
                                          "--out", str(tmp_path / "run"), "--examples", str(path)])
            train.settle(args)

def test_more_processes_than_passages_are_refused(trained, monkeypatch):
    loaded = train.read_run(trained).open()
    n = len(train.training_passages(loaded))
    for size in (n, n + 1):
        monkeypatch.setattr(train.ann, "rank_and_size", lambda: (0, size))
        with pytest.raises(data.UserError, match=f"start at most {n}") if size > n else nullcontext():
            train.training_passages(loaded)

def test_weights_of_another_vocabulary_are_no_start(trained, tmp_path, capsys):
    other = shutil.copytree(trained, tmp_path / "other")
    checkpoint = torch.load(other / "tome.pt", weights_only=True)
    torch.save(checkpoint | {"vocab": checkpoint["vocab"] ^ 1}, tmp_path / "start.pt")
    (other / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", other, "--start", tmp_path / "start.pt") == 1
    assert "it has the vocabulary of another corpus" in capsys.readouterr().err

def test_two_seeds_differ(tiny, small_world, tmp_path):
    for seed in (0, 1):
        run("--stage", "batch-tome", "--corpus", small_world, "--out", tmp_path / str(seed), "--seed", seed)
    assert not equal(weights(tmp_path / "0/batch-tome.pt"), weights(tmp_path / "1/batch-tome.pt"))

@pytest.mark.slow
def test_tome_2_has_two_memory_layers_and_trains(small_world, tmp_path, monkeypatch):
    out = tmp_path / "two"
    monkeypatch.setitem(train.PRESETS, "toy", {**TINY, "n_initial": 2})
    assert run("--stage", "tome", "--corpus", small_world, "--out", out, "--blocks", 2) == 0
    loaded, tome, memory = train.open_run(out)
    assert len(tome.blocks) == 2 and loaded.config.n_blocks == 2

@pytest.mark.slow
def test_fine_tuning_keeps_the_best_dev_checkpoint(trained, small_world, tmp_path):
    """For each task in one run folder, also with another log_every, which decides it."""
    _, examples = data.toy_world(seed=3)
    names = {json.loads(line)["title"] for line in small_world.read_text().splitlines()}
    for task, log_every in (("claims", 2), ("qa", 3)):
        rows = [e for e in examples[f"{task}.one_hop.train"] if e["subject"] in names][:64]
        data.write_lines(tmp_path / f"{task}.jsonl", rows)
        assert run("--stage", "finetune", "--task", task, "--examples", tmp_path / f"{task}.jsonl", "--out", trained,
                   "--set", f"log_every={log_every}") == 0
        checkpoint = torch.load(trained / f"{task}.pt", weights_only=True)
        assert 0 <= checkpoint["best_score"] <= 1 and checkpoint["best"].keys() == checkpoint["model"].keys()
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    for task, log_every in (("claims", 2), ("qa", 3)):
        steps = [r["step"] for r in log if r["stage"] == task]
        assert len(steps) > 1 and steps[0] == log_every
        assert evaluation.main(["--out", str(trained), "--task", task, "--examples", str(tmp_path / f"{task}.jsonl"),
                                "--json"]) == 0

# -- the memory's files

def test_the_memory_holds_what_the_encoder_says_of_each_linked_mention(trained):
    loaded, tome, table = train.open_run(trained)
    corpus, model = loaded.corpus, train.load_model(loaded, "batch-tome")[0]
    assert len(table) == (corpus.mention_entity > 0).sum()
    for m in (0, 7, len(table) - 1):
        mention = int(table.mention[m])
        passage = int(corpus.passage_of(mention))
        tokens = torch.from_numpy(corpus.tokens[corpus.passage_start[passage]:corpus.passage_start[passage + 1]].copy())[None].long()
        number = mention - int(corpus.mention_first[passage])
        start, end = ((tokens[0] == corpus.special[marker]).nonzero()[number] for marker in (data.E_START, data.E_END))
        spans = [torch.tensor([0]), start, end]
        with torch.no_grad():
            key, value = model.encode_mentions(tokens, torch.ones_like(tokens, dtype=torch.bool), *spans)
        torch.testing.assert_close(table.keys[m], key[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(table.values[m], value[0], atol=1e-4, rtol=1e-4)
        assert table.entity[m] == corpus.mention_entity[mention] and table.passage[m] == passage

def test_a_build_that_was_stopped_goes_on_at_the_first_missing_shard(tiny, small_world, tmp_path, monkeypatch):
    command = "--stage", "memory", "--corpus", small_world, "--out", tmp_path
    monkeypatch.setattr(memory_file, "PASSAGES_PER_SHARD", 64)
    assert run(*command) == 0
    folder = only(tmp_path, "memory")
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert sum(name.startswith("keys") for name in files) > 2
    shutil.rmtree(folder)

    def pulled(*args, **kwargs):
        raise OSError("pulled the plug")
    with monkeypatch.context() as patch:
        patch.setattr(data, "commit_folder", pulled)
        assert run(*command) == 1
    part, = tmp_path.glob(f"{folder.name}.*.part")
    (part / "keys-00001.npy").unlink()
    kept = (part / "keys-00000.npy").stat().st_mtime_ns
    assert run(*command) == 0
    assert files == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert (folder / "keys-00000.npy").stat().st_mtime_ns == kept

@pytest.mark.parametrize("damage, words", [("flip", "damaged"), ("truncate", "damaged"), ("missing", "missing"),
                                           ("manifest", "damaged"), ("another encoder", "another mention encoder")])
def test_a_damaged_memory_is_named_and_left_alone(trained, small_world, capsys, damage, words):
    name = "meta.json" if damage in ("manifest", "another encoder") else "values-00000.npy"
    file = only(trained, "memory") / name
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 4
    elif damage in ("truncate", "manifest"):
        del raw[len(raw) // 2:]
    elif damage == "another encoder":
        raw = None
        data.write_json(file, {**data.read_json(file), "encoder": "0" * 64})
    if raw is not None:
        file.unlink()
    if raw is not None and damage != "missing":
        file.write_bytes(raw)
    capsys.readouterr()
    assert evaluation.main(["--out", str(trained)]) == 1
    message = capsys.readouterr().err
    assert words in message and str(trained) in message and message.count("\n") == 1
    if damage == "missing":         # nor is it said to be there
        assert run("--stage", "memory", "--out", trained) == 1 and name in capsys.readouterr().err
    if damage == "another encoder":         # nor is it added to, and TOME's own lost
        folder = only(trained, "memory")
        assert run("--stage", "memory", "--append", small_world, "--out", trained) == 1 and folder.exists()
        assert "another batch-tome.pt; remove it, and tome.pt" in capsys.readouterr().err

# -- what a user gets wrong: one sentence, a non-zero exit

@pytest.mark.parametrize("arguments, words", [
    (["--stage", "tome", "--corpus", "no/such.jsonl"], "no such file"),
    (["--stage", "finetune", "--task", "qa", "--examples", "no/such.jsonl"], "No such file"),
])
def test_missing_files_are_named_before_anything_is_trained(tiny, tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 1
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert not list(tmp_path.rglob("*.*"))

@pytest.mark.parametrize("lines, words", [
    ("", "no text"),
    ('{"title": "A", "text": "Nothing is linked here.", "mentions": []}\n', "no linked mention"),
    ('{"title": "A", "text": "Short.", "mentions": [{"start": 2, "end": 99, "entity": "A"}]}\n', "bad.jsonl:1"),
    ('{"title": "A", "text"', "bad.jsonl:1"),
])
def test_a_bad_corpus_is_one_sentence(tiny, tmp_path, capsys, lines, words):
    (tmp_path / "bad.jsonl").write_text(lines)
    assert run("--stage", "tome", "--corpus", tmp_path / "bad.jsonl", "--out", tmp_path / "run") == 1
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message and message.count("\n") == 1

def test_a_run_belongs_to_the_corpus_and_preset_that_it_was_started_with(trained, small_world, tmp_path, capsys):
    assert run("--stage", "tome", "--preset", "mini", "--out", trained) == 1
    assert "--preset toy, not mini" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text(small_world.read_text())               # a corpus that has moved is the same one
    assert run("--stage", "tome", "--corpus", other, "--out", trained) == 0
    other.write_text(small_world.read_text() * 2)
    assert run("--stage", "tome", "--corpus", other, "--out", trained) == 1
    assert "batch-tome.pt was made from another corpus" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run("--stage", "tome", "--corpus", small_world, "--out", tmp_path / "file") == 1
    assert f"{tmp_path / 'file'}: File exists" in capsys.readouterr().err

def values_out_of_range():
    """For each field of Settings and Config, numbers below and above its range and no numbers."""
    fields = vars(train.Settings()) | vars(train.Config())
    for name, value in fields.items():
        if name in ("schedule", "n_blocks", "vocab_size", "n_entities"):
            continue
        bad = {bool: ["2", "maybe"], str: ["x", ""]}.get(type(value), ["-1", "1e30", "nan", "inf", "many"])
        yield from ((name, text) for text in bad)
        if type(value) is int:
            yield name, "2" if name == "all_of_entity" else "0"
            yield name, "10001" if hasattr(train.Config, name) else "1000001"

@pytest.mark.parametrize("name, text", list(values_out_of_range()))
def test_a_value_out_of_range_is_one_sentence(name, text, capsys, tmp_path):
    command = ["--stage", "tome", "--out", str(tmp_path / "run"), "--set", f"{name}={text}"]
    try:
        code = train.main(command)
    except SystemExit as leaving:       # argparse: not of the field's type
        code = leaving.code
    message = capsys.readouterr().err
    assert code in (1, 2) and name in message and "Traceback" not in message
    assert not (tmp_path / "run").exists()

@pytest.mark.parametrize("wrong, words", [
    ("n_heads=5", "n_heads"), ("hidden=100", "n_heads"), ("hidden=33 n_heads=3", "even"),
    ("max_positions=32", "max_positions"), ("max_length=512", "max_positions"),
    ("--lr 1e-30", "--lr"), ("--batch 10000000", "--batch"), ("--lr nan", "--lr"), ("--steps 10000000000", "--steps")])
def test_after_a_setting_that_cannot_be_the_corrected_command_works_in_the_same_folder(
        tiny, small_world, tmp_path, capsys, wrong, words):
    out = tmp_path / "run"
    out.mkdir()
    command = ["--stage", "batch-tome", "--corpus", small_world, "--out", out]
    more = wrong.split() if wrong[0] == "-" else [f for setting in wrong.split() for f in ("--set", setting)]
    assert run(*command, *more) == 1
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and not list(out.iterdir())
    if wrong == "n_heads=5":
        assert run(*command) == 0

def test_until_something_is_made_another_command_may_have_the_folder(tiny, tmp_path, capsys, monkeypatch):
    """Ctrl-C while the world of seed 0 is tokenised, then another seed: its world, not the first one's."""
    real, out = data.Corpus.build, tmp_path / "run"
    small = {name: max(n // 14, 10) for name, n in data.COUNTS.items()}
    monkeypatch.setattr(data, "COUNTS", data.COUNTS | small)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
    monkeypatch.setattr(data.Corpus, "build", interrupted)
    assert run("--stage", "batch-tome", "--out", out, "--seed", 0) == 130
    monkeypatch.setattr(data.Corpus, "build", real)
    assert run("--stage", "batch-tome", "--out", out, "--seed", 5, "--steps", 1) == 0
    lines, _ = data.toy_world(5)
    held = [json.loads(line) for line in (out / "world" / "corpus.jsonl").read_text().splitlines()]
    assert held == json.loads(json.dumps(lines)) and train.read_run(out).seed == 5
    assert run("--stage", "batch-tome", "--out", out, "--seed", 0) == 1
    assert f"{out}/batch-tome.pt was made with --seed 5, not 0" in capsys.readouterr().err

def test_a_toy_world_that_has_changed_is_refused_and_stays_as_it_is(tmp_path, capsys):
    small = {name: max(n // 14, 10) for name, n in data.COUNTS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "COUNTS", data.COUNTS | small)
        train.make_world(tmp_path / "world", 0)
        whole = {path.name: path.read_bytes() for path in (tmp_path / "world").iterdir()}
        run = SimpleNamespace(out=tmp_path, saved=train.NEW_RUN)
        file = train.toy_file(run, "qa")
        for damage in (b"", whole[file.name][:-9], whole[file.name].replace(b"a", b"e", 1)):
            file.write_bytes(damage)
            with pytest.raises(data.UserError, match=f"{file.parent} is missing or damaged.*{file.name}"):
                train.toy_file(run, "qa")
            with pytest.raises(data.UserError, match=f"{file.parent} is missing or damaged.*{file.name}"):
                train.make_world(tmp_path / "world", 0)
            assert file.read_bytes() == damage

def test_what_fine_tuning_lacks_is_said_before_anything_is_trained(tiny, small_world, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"question": "Who?"\n')
    finetune = ["--stage", "finetune", "--task", "qa", "--corpus", small_world, "--out", tmp_path / "run"]
    for more, words in (([], "want --examples FILE"), (["--examples", tmp_path / "bad.jsonl"], "bad.jsonl:1"),
                        (["--start", tmp_path / "no.pt"], "no.pt: No such file"),
                        (["--start", tmp_path / "bad.jsonl"], "bad.jsonl cannot be read as")):
        assert run(*finetune, *more) == 1
        message = capsys.readouterr().err
        assert words in message and "Traceback" not in message
    assert not list((tmp_path / "run").glob("*.pt"))

def test_a_corpus_that_is_held_out_whole_is_one_sentence(tiny, small_world, tmp_path, capsys):
    lines = [json.loads(line) | {"split": "held_out"} for line in small_world.read_text().splitlines()[:3]]
    data.write_lines(tmp_path / "c.jsonl", lines)
    assert run("--stage", "tome", "--corpus", tmp_path / "c.jsonl", "--out", tmp_path / "run") == 1
    message = capsys.readouterr().err
    assert "held out" in message and message.count("\n") == 1

def test_a_line_of_the_log_that_a_crash_cut_off_does_not_swallow_the_next_one(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"stage": "tome", "step": 4}\n{"stage": "to')
    os.link(tmp_path / "log.jsonl", tmp_path / "same")
    for step in (5, 6):
        train.log(tmp_path, {"stage": "tome", "step": step})
    lines = (tmp_path / "same").read_text().splitlines()             # it was never written anew
    assert lines[1] == '{"stage": "to' and [json.loads(lines[i])["step"] for i in (0, 2, 3)] == [4, 5, 6]

def test_a_process_without_a_shard_has_an_empty_table_of_the_same_kind(tiny, small_world, tmp_path, monkeypatch):
    """It sends and receives rows: of float16 in a memory of float16."""
    out = tmp_path / "run"
    assert run("--stage", "memory", "--corpus", small_world, "--out", out, "--set", "memory_dtype=float16") == 0
    full = memory_file.load_memory(only(out, "memory"))
    monkeypatch.setattr(memory_file.ann, "rank_and_size", lambda: (1, 2))
    empty = memory_file.load_memory(only(out, "memory"))
    assert full.keys.dtype == torch.float16 and len(full) > 0 == len(empty)
    for name in memory_file.ARRAYS:
        a, b = getattr(full, name), getattr(empty, name)
        assert a.dtype == b.dtype and a.shape[1:] == b.shape[1:], name

def test_a_checkpoint_of_a_stranger_runs_no_code(trained, small_world, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(trained / "owned"),)
    torch.save({**torch.load(trained / "tome.pt", weights_only=True), "model": Evil()}, trained / "tome.pt")
    assert evaluation.main(["--out", str(trained)]) == 1
    assert not (trained / "owned").exists() and "damaged" in capsys.readouterr().err

def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_checkpoint(tiny, small_world, tmp_path, capsys,
                                                                                monkeypatch):
    real, calls = train.mlm_loss, []

    def poisoned(*args):
        calls.append(1)
        return real(*args) * (float("nan") if len(calls) == 4 else 1)
    monkeypatch.setattr(train, "mlm_loss", poisoned)
    assert run("--stage", "batch-tome", "--corpus", small_world, "--out", tmp_path) == 1
    assert "step 3" in capsys.readouterr().err
    assert torch.load(tmp_path / "batch-tome.pt", weights_only=True)["step"] == 2

@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_a_weight_that_is_not_a_number_is_never_saved_and_the_advice_works(
        tiny, small_world, tmp_path, capsys, monkeypatch, when):
    """optimizer.step() blows up; then the lower --lr that the message names goes on from the last good step."""
    real, calls, out = torch.optim.AdamW.step, [], tmp_path / "run"

    def blows_up(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == {"in the middle": 3, "at the end": 4}[when]:
            self.param_groups[0]["params"][0].data.fill_(float("inf"))
        return result

    command = ["--stage", "batch-tome", "--corpus", small_world, "--out", out]
    monkeypatch.setattr(torch.optim.AdamW, "step", blows_up)
    assert run(*command) == 1
    message = capsys.readouterr().err
    advice = message.split("--stage batch-tome ")[1].split(" training")[0].split()
    assert "not a number at step" in message and advice[0] == "--lr"
    assert torch.load(out / "batch-tome.pt", weights_only=True)["step"] == 2
    monkeypatch.setattr(torch.optim.AdamW, "step", real)
    assert run(*command, *advice) == 0
    checkpoint = torch.load(out / "batch-tome.pt", weights_only=True)
    assert checkpoint["recipe"]["lr"] == float(advice[1]) == 3e-4           # a third
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())

def test_an_evaluation_that_fails_costs_no_step_and_is_done_first_when_the_stage_goes_on(
        trained, small_world, monkeypatch, capsys):
    before, log = torch.load(trained / "tome.pt", weights_only=True), (trained / "log.jsonl").read_text().splitlines()
    (trained / "tome.pt").unlink()
    real, step, steps = train.masked_mentions, torch.optim.AdamW.step, []

    def too_big(*args):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 TB")
    monkeypatch.setattr(train, "masked_mentions", too_big)
    assert run("--stage", "tome", "--out", trained) == 1
    message = capsys.readouterr().err
    assert "can't allocate memory" in message and "Traceback" not in message
    cut = torch.load(trained / "tome.pt", weights_only=True)
    assert (cut["step"], cut["evaluated"]) == (4, 0)
    with pytest.raises(data.UserError, match="unfinished"):
        train.open_run(trained)
    assert run("--stage", "tome", "--out", trained, "--n-search", 4) == 1
    assert "was made without --n-search; leave it out" in capsys.readouterr().err
    monkeypatch.setattr(train, "masked_mentions", real)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a, **k: steps.append(1) or step(*a, **k))
    assert run("--stage", "tome", "--out", trained) == 0 and not steps
    after = torch.load(trained / "tome.pt", weights_only=True)
    assert equal(before["model"], after["model"]) and (after["step"], after["evaluated"]) == (4, 4)
    again = (trained / "log.jsonl").read_text().splitlines()
    old, new = ({k: v for k, v in json.loads(lines[-1]).items() if k != "seconds"} for lines in (log, again))
    assert old == new

# -- what belongs together

@pytest.mark.slow
def test_claims_of_another_tome_are_said_to_be_stale(trained, small_world, tmp_path, capsys):
    _, examples = data.toy_world(seed=3)
    names = {json.loads(line)["title"] for line in small_world.read_text().splitlines()}
    rows = [e for e in examples["claims.one_hop.train"] if e["subject"] in names][:32]
    data.write_lines(tmp_path / "mine.jsonl", rows)
    claims = "--stage", "finetune", "--task", "claims", "--examples", tmp_path / "mine.jsonl", "--out", trained
    assert run(*claims) == 0
    train.open_run(trained, "claims")
    (trained / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", trained, "--steps", 3) == 0
    capsys.readouterr()
    with pytest.raises(data.UserError, match="claims.pt was made from another tome"):
        train.open_run(trained, "claims")
    assert run(*claims) == 1
    assert "claims.pt was made from another tome; remove it" in capsys.readouterr().err
    (trained / "claims.pt").unlink()
    assert run(*claims) == 0
    train.open_run(trained, "claims")

def test_a_fine_tuning_goes_on_and_serves_when_text_was_appended_since(trained, small_world, tmp_path, monkeypatch):
    _, examples = data.toy_world(seed=3)
    names = {json.loads(line)["title"] for line in small_world.read_text().splitlines()}
    data.write_lines(tmp_path / "mine.jsonl", [e for e in examples["claims.one_hop.train"] if e["subject"] in names][:32])
    claims = "--stage", "finetune", "--task", "claims", "--examples", tmp_path / "mine.jsonl", "--out", trained

    def append(title):
        data.write_lines(tmp_path / "more.jsonl", [{"title": title, "text": "Alma Verran sang.", "mentions": [
            {"start": 0, "end": 11, "entity": title}]}])
        assert run("--stage", "memory", "--append", tmp_path / "more.jsonl", "--out", trained) == 0

    real, calls = torch.optim.AdamW.step, []

    def dies(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:                     # after the checkpoint of step 2
            raise OSError("pulled the plug")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", dies)
        assert run(*claims) == 1
    append("New")
    assert run(*claims) == 0
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert len(calls) == 4 and train.is_done(train.read_checkpoint(trained / "claims.pt"))
    assert [r["step"] for r in log if r["stage"] == "claims"][-1] > 2
    append("Newer")
    train.open_run(trained, "claims")
    assert run(*claims) == 0

def test_the_positions_of_a_bert_decide_how_long_a_passage_may_be():
    saved = train.NEW_RUN | {"init": "bert", "set": {"max_length": 512}}
    for positions in (None, 512, 511):
        bert = positions and {"config": {"max_positions": positions}}       # None: it is about to be read
        with pytest.raises(data.UserError, match="max_length") if positions == 511 else nullcontext():
            train.settings_of(saved | {"published": bert})

def test_a_mention_linked_to_nothing_is_no_cloze():
    corpus, text = SimpleNamespace(entity_index={"": 0, "Alma": 1}), "Alma met Bo."
    mentions = [data.Mention(0, 4, "Alma"), data.Mention(9, 11, "")]
    for some, answers in ((mentions, [["Alma"]]), (mentions[1:], [])):
        example = data.Example(text, some, data.CLAIM_LABELS.index("SUPPORTS"), [], {})
        clozes = train.clozes_of(SimpleNamespace(corpus=corpus), example, np.random.default_rng(0))
        assert [cloze.answers for cloze in clozes] == answers

def test_a_first_part_that_has_less_than_a_step_is_a_step(tiny, small_world, tmp_path, capsys):
    assert run("--stage", "batch-tome", "--corpus", small_world, "--out", tmp_path / "run", "--steps", 2, "--set",
               "memory_from=0.01") == 0
    assert "batch-tome 1, after the fit" in capsys.readouterr().out

@pytest.mark.parametrize("flags, words", [
    (["--steps", 5], "--steps 4, not 5"), (["--batch", 5], "--batch 16, not 5"), (["--lr", 1], "--lr 0.001, not 1.0"),
    (["--start", "scratch"], "without --start; leave it out"), (["--n-search", "32"], "without --n-search; leave"),
    (["--seed", 1], "--seed 0, not 1"), (["--blocks", 2], "--blocks 1, not 2"),
    (["--set", "entity_weight=0"], "--set entity_weight=0.15, not 0.0")])
def test_a_finished_stage_is_not_taken_for_another(trained, small_world, capsys, flags, words):
    before = (trained / "tome.pt").read_bytes()
    assert run("--stage", "tome", "--out", trained, *flags) == 1
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and (trained / "tome.pt").read_bytes() == before

def test_flags_of_a_stage_stay_also_where_it_was_cut_off_before_it_began(tmp_path, small_world):
    def settled(*flags):
        args = train.parse_arguments([*flags, "--corpus", str(small_world), "--out", str(tmp_path)])
        run = train.settle(args)
        data.write_json(tmp_path / "run.json", run.saved)
        return run.recipe("tome")
    assert settled("--stage", "tome", "--steps", "7", "--start", "scratch")["start"] == "scratch"
    again = settled("--stage", "tome", "--lr", "0.5")
    assert (again["steps"], again["lr"], again["start"]) == (7, 0.5, None)      # a --start is named again
    assert settled("--stage", "tome", "--steps", "9")["steps"] == 9

@pytest.mark.parametrize("name, value, read_by", [
    ("coref_weight", 0.5, ["batch-tome.pt"]), ("entity_weight", 0.5, ["tome.pt"]), ("clip", 2.0, ["batch-tome.pt", "tome.pt"]),
    ("save_every", 3, []), ("cloze_weight", 0.5, []), ("passage_length", 60, ["batch-tome.pt"])])
def test_files_of_another_setting_are_refused_by_the_stages_that_read_it(trained, small_world, capsys, name, value, read_by):
    """run.json alone is of another command: what the files themselves say counts."""
    saved = data.read_json(trained / "run.json")
    data.write_json(trained / "run.json", saved | {"set": {name: value}})
    code = run("--stage", "tome", "--corpus", small_world, "--out", trained)
    message = capsys.readouterr().err
    if read_by:
        assert code == 1 and f"{read_by[0]} was made with --set {name}=" in message
    else:
        assert code == 0

def test_only_known_settings_are_left_out_of_a_recipe_and_fine_tuning_reads_all(trained):
    known = vars(train.Settings()).keys() | vars(train.Config()).keys()
    assert train.NOT_READ.keys() == train.STAGES.keys() and not train.NOT_READ["claims"] and train.NOT_READ["qa"] == {"cloze_weight"}
    assert train.NO_RESULT | set().union(*train.NOT_READ.values()) <= known
    # lower_rate: pre-training reads it over a published BERT alone.
    bert = dict(init="/bert", published={"config": {}, "vocab": 1, "weights": "a", "trained": False})
    for more, reads in (({}, {"claims", "qa"}), (bert, train.STAGES.keys())):
        saved = dict(train.NEW_RUN, text=1, **more)
        recipes = [{kind: train.Run(trained, saved | {"set": {"lower_rate": rate}}).recipe(kind) for kind in train.STAGES}
                   for rate in (.3, .4)]
        assert {kind for kind in train.STAGES if recipes[0][kind] != recipes[1][kind]} == reads

def test_other_weights_of_the_bert_are_another_run(tiny, small_world, tmp_path):
    bert = {"config": {}, "vocab": 1, "weights": "a", "trained": False}
    saved = dict(train.NEW_RUN, init="/bert", published=bert, text=1)
    for kind, change in (("corpus", {"published": bert | {"vocab": 9}}), ("corpus", {"appended": [7]}),
                         ("batch-tome", {"published": bert | {"weights": "b"}}), ("memory", {"appended": [7]})):
        recipes = [train.Run(tmp_path, values).recipe(kind) for values in (saved, saved | change)]
        assert train.identity(recipes[0]) != train.identity(recipes[1])
    tome = [train.Run(tmp_path, values).recipe("tome") for values in (saved, saved | {"appended": [7]})]
    assert tome[0] == tome[1]

# -- readers, links

def test_opening_a_run_writes_nothing_and_builds_nothing(trained):
    def state():
        return {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in sorted(trained.rglob("*"))}
    before = state()
    for more in ([], ["--json"], ["--show"], ["--show", "[Mona Varga] sings."]):
        assert evaluation.main(["--out", str(trained), *more]) == 0
    assert before == state()
    for kind in ("memory", "corpus"):
        folder = only(trained, kind)
        folder.rename(trained / "away")
        with pytest.raises(data.UserError, match=f"{folder} is missing; run python train.py --stage"):
            train.open_run(trained)
        assert not folder.exists()
        (trained / "away").rename(folder)

def test_a_run_that_is_not_there_is_one_sentence_with_a_command_that_works(tmp_path, monkeypatch):
    with pytest.raises(data.UserError, match="python train.py --stage tome --out") as error:
        train.open_run(tmp_path / "nosuch")
    advice = str(error.value).split("python train.py ")[1].split(" trains")[0].split()
    assert train.parse_arguments(advice).out == str(tmp_path / "nosuch") and not (tmp_path / "nosuch").exists()

@pytest.mark.parametrize("field", ["recipe", "step", "evaluated", "model", "optimizer", "sums", "best", "encoder"])
def test_a_checkpoint_without_a_field_is_damaged(trained, field):
    whole = torch.load(trained / "tome.pt", weights_only=True)
    torch.save({name: value for name, value in whole.items() if name != field}, trained / "tome.pt")
    with pytest.raises(data.UserError, match="tome.pt is damaged"):
        train.open_run(trained)

def test_nothing_is_written_through_a_link(tiny, small_world, tmp_path, capsys):
    out, other = tmp_path / "run", tmp_path / "bashrc"
    out.mkdir()
    other.write_text("mine")
    command = "--stage", "batch-tome", "--corpus", small_world, "--out", out
    for name in ("corpus-12345678.part", "log.jsonl"):
        (out / name).symlink_to(other)
        assert run(*command) == 1 and f"{out / name} is a link" in capsys.readouterr().err
        (out / name).unlink()
    for name in ("world", "memory", "log.jsonl.tmp", "run.json.tmp", "batch-tome.pt.tmp"):
        (out / name).symlink_to(other)
    assert run(*command) == 0
    assert other.read_text() == "mine" and not (out / "batch-tome.pt").is_symlink()

def test_where_nothing_is_held_out_no_figure_is_said_and_what_to_do_is(tiny, small_world, tmp_path, capsys):
    lines = [json.loads(line) | {"split": "train"} for line in small_world.read_text().splitlines()]
    data.write_lines(tmp_path / "all.jsonl", lines)
    assert run("--stage", "tome", "--corpus", tmp_path / "all.jsonl", "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "accuracy" not in said and "after the fit" not in said
    out = ["--out", str(tmp_path / "run")]
    assert evaluation.main(out) == 0 and "of the memory" not in capsys.readouterr().out
    assert evaluation.main([*out, "--show"]) == 1 and "give --show a text" in capsys.readouterr().err
    assert train.main(["--stage", "batch-tome", "--out", str(tmp_path / "none"), "--corpus",
                       held_out_only(lines, tmp_path / "none.jsonl")]) == 1
    assert "none is left to train on" in capsys.readouterr().err

def held_out_only(lines, path):
    data.write_lines(path, [line | {"split": "held_out"} for line in lines])
    return str(path)

def test_text_is_appended_after_the_stages_that_lead_to_the_memory(tiny, small_world, tmp_path, capsys):
    out, more = tmp_path / "run", tmp_path / "more.jsonl"
    command = "--stage", "memory", "--append", more, "--corpus", small_world, "--out", out
    os.mkfifo(more)
    assert run(*command) == 1 and "more.jsonl: cannot be read twice" in capsys.readouterr().err and not out.exists()
    more.unlink()
    assert run(*command) == 1 and "more.jsonl: No such file" in capsys.readouterr().err and not out.exists()
    data.write_lines(more, [{"title": "New", "text": "Alma Verran sang.", "mentions": []}])
    assert run(*command) == 1 and "no linked mention" in capsys.readouterr().err
    assert not train.read_run(out).saved["appended"] and only(out, "memory").exists()       # the next append can begin
    data.write_lines(more, [{"title": "New", "text": "Alma Verran sang.", "mentions": [
        {"start": 0, "end": 11, "entity": "New"}]}])
    assert run(*command) == 0 and run("--stage", "tome", "--out", out) == 0
    loaded, _, table = train.open_run(out)
    assert loaded.corpus.entity_names[-1] == "New" and int(table.entity[-1]) == len(loaded.corpus.entity_names) - 1

@pytest.mark.slow
def test_the_report_is_a_command_that_train_runs(small_world, tmp_path):
    sizes = "intermediate=96 n_initial=1 n_upper=1 cluster=16 eval_mentions=20 log_every=4"
    settings = [part for size in sizes.split() for part in ("--set", size)]
    command = [sys.executable, str(ROOT / "train.py"), "--corpus", str(small_world), "--out", str(tmp_path / "run"), "--steps", "4"]
    for stage in ("batch-tome", "tome"):
        done = subprocess.run([*command, "--stage", stage, *settings], capture_output=True, text=True, timeout=120,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        assert ("shuffled" in done.stdout) == (stage == "tome")

# -- several processes

WORKER = """
import sys; sys.path[:0] = [{root!r}, {tests!r}]
import torch; torch.set_num_threads(1)
import train, test_train
train.PRESETS["toy"] = test_train.TINY
sys.exit(train.main(sys.argv[1:]))
"""

@pytest.mark.slow
@pytest.mark.parametrize("memory_from", [0.0, TINY["memory_from"]])
def test_two_processes_train_as_one_does(tiny, small_world, tmp_path, memory_from):
    """Same batches, same losses, same gradients: after four steps of each stage the weights agree. A fit after the first
    of these steps whitens components of hardly any variance, and so multiplies rounding: with keys of 64 numbers it moves
    eq. 10's first losses, of 33, by up to .45 in one process, too. With 8, of the largest variance, the bounds are little wider than without."""
    worker, options = tmp_path / "worker.py", ["--set", f"memory_from={memory_from}", "--set", "key_dim=8"]
    worker.write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("--stage", "tome", "--corpus", small_world, "--out", one, *options) == 0
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           str(worker), "--stage", "tome", "--corpus", str(small_world), "--out", str(two), *options],
                          capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    logs = [[json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()] for path in (one, two)]
    for a, b in zip(*logs, strict=True):
        assert a["stage"] == b["stage"]
        for name in {"mlm", "coref", "entity"} & a.keys():
            rel = 3e-4 if name == "entity" and memory_from else 0
            assert a[name] == pytest.approx(b[name], abs=2e-4, rel=rel)
    first, second = weights(one / "batch-tome.pt"), weights(two / "batch-tome.pt")
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=5e-4 if memory_from else 2e-4, rtol=1e-3)

@pytest.mark.slow
def test_while_memories_are_given_only_reading_is_learnt(trained, capsys, monkeypatch):
    before, step, values = weights(trained / "tome.pt"), train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda *args: values.append(step(*args)) or values[-1])
    (trained / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", trained, "--set", "teacher_forcing=0.5") == 0
    assert "batch-tome: already trained" in capsys.readouterr().out
    half = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])
    entity = [value["entity"] for value in values if "entity" in value]
    assert len(values) == 4 and len(entity) == 2            # the log has the mean of the steps that have this loss
    assert half["entity"] == pytest.approx(np.mean(entity), abs=1e-4)
    assert not equal(before, weights(trained / "tome.pt"))
    (trained / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", trained, "--set", "teacher_forcing=1") == 0
    after, began = weights(trained / "tome.pt"), weights(trained / "batch-tome.pt")
    moved = {name for name in after if not torch.equal(after[name], began["tome." + name])}
    assert any(".transformer." in name for name in moved) and any("memory_attention.up" in name for name in moved)
    assert not [name for name in moved if name.startswith(("initial", "entity_query")) or "query" in name]

@pytest.mark.slow
def test_of_mentions_given_memories_only_queries_are_asked_and_withheld_ones_are_in_no_loss(
        tiny, small_world, tmp_path, monkeypatch):
    n, asked, withheld, plain, loss = [], [], set(), train.retrieve_answer, train.entity_prediction_loss

    def retrieve(tome, H, batch, memory, at):
        if tome.training:
            withheld.update(train.read_run(tmp_path).open("cpu").is_withheld.nonzero()[0].tolist())
            assert withheld and not withheld & set(memory.entity.tolist())
            n.append(len(batch.entity))
        return plain(tome, H, batch, memory, at)

    monkeypatch.setattr(train, "retrieve_answer", retrieve)
    monkeypatch.setattr(train, "entity_prediction_loss", lambda *a: asked.append(a[2]) or loss(*a))
    assert run("--stage", "tome", "--corpus", small_world, "--out", tmp_path, "--set", "still_given=0.9",
               "--set", "withheld=0.5", "--set", "linking_weight=0.3") == 0
    assert not any(withheld & set(entity.tolist()) for entity in asked)
    answers, links = (sum(int((entity > 0).sum()) for entity in asked[i::2]) / sum(n) for i in (0, 1))
    assert len(n) == 4 and 0 < answers < 0.15 < 0.3 < links < 0.7

@pytest.mark.parametrize("memory", ["entities", "none"])
@pytest.mark.slow
def test_a_baseline_trains_without_a_mention_memory(tiny, small_world, tmp_path, memory, capsys):
    out = ("--out", tmp_path / "run")
    assert run("--stage", "tome", "--corpus", small_world, "--set", f"memory={memory}", *out) == 0
    assert not list(out[1].glob("memory*")) and not (out[1] / "batch-tome.pt").exists()
    state = weights(out[1] / "tome.pt")
    assert any("memory_attention" in name for name in state) == (memory == "entities")
    loaded, tome, table = train.open_run(out[1])
    assert table is tome.entities and len(table.keys) == len(loaded.corpus.entity_names)
    log = [json.loads(line) for line in (out[1] / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 8 and ("linking" in log[-1]) == (memory == "entities")     # batch-tome's steps and tome's
    assert run("--stage", "memory", *out) == 1 and "baseline" in capsys.readouterr().err
    assert run("--stage", "tome", "--set", "hidden=12", *out) == 1 and "--set hidden=96, not 12" in capsys.readouterr().err
    assert run("--stage", "tome", "--n-search", "4", *out) == 1 and "--n-search: a baseline" in capsys.readouterr().err
    assert evaluation.main(["--out", str(out[1]), "--n-search", "4"]) == 1
    assert evaluation.main(["--out", str(out[1]), "--show"]) == 1

@pytest.mark.slow
def test_a_rate_on_the_command_line_is_the_stages_and_stays(trained, capsys):
    (trained / "tome.pt").unlink()
    tome = "--stage", "tome", "--out", trained
    assert run(*tome, "--lr", 4e-4) == 0
    last = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])
    assert last["lr"] == pytest.approx(1e-4)                    # of 4 steps the last one, without warm-up
    assert run(*tome) == 0
    assert torch.load(trained / "tome.pt", weights_only=True)["recipe"]["lr"] == 4e-4
    assert run(*tome, "--lr", 1e-3) == 1 and "--lr 0.0004, not 0.001" in capsys.readouterr().err

def test_a_start_that_holds_no_tome_of_these_dimensions_is_refused(trained, capsys):
    (trained / "tome.pt").rename(trained / "other.pt")
    other = torch.load(trained / "other.pt", weights_only=True)
    other["model"] = {name: tensor[:1] for name, tensor in other["model"].items()}
    torch.save(other, trained / "other.pt")
    for start in ("batch-tome.pt", "other.pt"):         # nothing of the first one would be taken
        assert run("--stage", "tome", "--out", trained, "--start", trained / start) == 1
        assert f"--start {trained / start}: no TOME" in capsys.readouterr().err
    assert not (trained / "tome.pt").exists()

def test_a_start_of_another_width_is_refused_before_anything_is_trained(trained, tmp_path, capsys):
    hidden = 2 * train.read_run(trained).config.hidden
    assert run("--stage", "tome", "--out", tmp_path / "wide", "--set", f"hidden={hidden}",
               "--start", trained / "tome.pt") == 1
    assert f"tome.pt: no TOME with hidden={hidden} is in it" in capsys.readouterr().err
    assert not (tmp_path / "wide").exists()

def test_the_report_searches_in_as_many_buckets_as_the_stage_did(trained, monkeypatch):
    saved = train.read_run(trained).saved
    data.write_json(trained / "run.json", saved | {"stages": {"tome": {"n_search": 3}}})
    words = []
    monkeypatch.setattr(train.subprocess, "run", lambda line: words.extend(line) or argparse.Namespace(returncode=0))
    assert train.report(train.parse_arguments(["--stage", "tome", "--out", str(trained)])) == 0
    assert "--n-search=3" in words

def test_weights_to_start_from_are_named_again_where_their_stage_is_trained_anew(trained, capsys):
    (trained / "tome.pt").rename(trained / "other.pt")
    assert run("--stage", "tome", "--out", trained, "--start", trained / "other.pt") == 0
    (trained / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", trained) == 0            # a command of its own: without --start
    (trained / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", trained, "--start", trained / "other.pt", "--steps", 0) == 0
    (trained / "tome.pt").unlink()
    world = trained / "qa.jsonl"
    data.write_lines(world, [{"question": "Who?", "answers": ["A"]}])
    assert run("--stage", "finetune", "--task", "qa", "--examples", world, "--out", trained) == 1
    assert "name them again, with --stage tome --start" in capsys.readouterr().err

@pytest.mark.slow
def test_a_stage_starts_from_other_weights_where_told(trained, capsys):
    first = weights(trained / "tome.pt")
    (trained / "tome.pt").rename(trained / "other.pt")
    assert run("--stage", "tome", "--out", trained, "--start", "scratch") == 0
    scratch = weights(trained / "tome.pt")
    (trained / "tome.pt").unlink()
    assert run("--stage", "tome", "--out", trained, "--start", trained / "other.pt", "--steps", 1) == 0
    again = weights(trained / "tome.pt")

    def far(a, b):
        return max((a[name] - b[name]).abs().max().item() for name in a)

    assert far(again, first) < 0.0015 < 0.003 < far(scratch, first)     # a step away; four and more
    loaded, word = train.read_run(trained).open(), "embeddings.word.weight"
    began, other = ({word: train.new_batch_tome(loaded, seed).tome.state_dict()[word]} for seed in (loaded.seed, loaded.seed + 1))
    assert far(other, scratch) < 0.02 < 0.1 < far(began, scratch)       # what the memory's encoder began with is no stranger

def question_accuracy(out, path):
    loaded, tome, table = train.open_run(out, "qa")
    return train.task_accuracy(loaded, tome, "qa", train.task_examples(loaded, "qa", path), table)["accuracy"]

@pytest.mark.slow
def test_text_added_to_a_memory_leaves_what_was_there_as_it_was(trained, small_world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_file, "PASSAGES_PER_SHARD", 64)
    shutil.rmtree(only(trained, "memory"))
    assert run("--stage", "memory", "--out", trained) == 0
    before = data.Corpus(only(trained, "corpus"))
    tokenizer = data.load_tokenizer(only(trained, "corpus") / "vocab.txt")
    files = {path.name: path.stat().st_mtime_ns for path in only(trained, "memory").iterdir()}
    more, both = tmp_path / "more.jsonl", tmp_path / "both.jsonl"
    name = before.entity_names[1]
    new = [{"title": title, "text": f"{title} is a friend of {name}.", "mentions": [
        {"start": 0, "end": len(title), "entity": title},
        {"start": len(title) + 16, "end": len(title) + 16 + len(name), "entity": name}]} for title in ("New One", "New Two")]
    data.write_lines(more, new)
    command = ("--stage", "memory", "--append", more, "--out", trained)
    assert run(*command) == 0
    said = capsys.readouterr().out
    assert f"2 passages of {more} added to {len(before.article)}" in said
    assert run(*command) == 0                                       # once is enough
    assert "passages of" not in capsys.readouterr().out

    after = data.Corpus(only(trained, "corpus"))
    both.write_text(small_world.read_text() + more.read_text())
    built = data.Corpus.build(both, tmp_path / "both", tokenizer, 64, 128)
    for array in data.Corpus.ARRAYS:
        if array not in ("held_out", "entity_count"):               # what is added is never trained on
            assert (getattr(after, array) == getattr(built, array)).all(), array
    assert after.held_out[-2:].all() and (after.held_out[:-2] == before.held_out).all()
    assert after.entity_names == [*before.entity_names, "New One", "New Two"]
    assert (after.entity_count == [*before.entity_count, 0, 0]).all()
    full = len(before.article) // 64                                # shards that were full are not written again
    assert full > 0
    for shard in range(full):
        for path in only(trained, "memory").glob(f"*-{shard:05d}.npy"):
            assert path.stat().st_mtime_ns == files[path.name]

    loaded, _, table = train.open_run(trained)
    rows = memory_file.encode_passages(train.load_model(loaded, "batch-tome")[0], after, torch.arange(len(after.article)).numpy(),
                                       loaded.device)
    torch.testing.assert_close(table.keys, torch.from_numpy(rows["keys"]), atol=1e-5, rtol=0)
    assert (table.mention.numpy() == rows["mention"]).all()
    assert run("--stage", "tome", "--out", trained) == 0            # it is the same run still

def pretrain(out, monkeypatch):
    """A run of the toy world with stage tome done: a copy of what README's first command left, or one of fewer steps."""
    made = ROOT / "runs/toy"
    with suppress(data.UserError):
        loaded = train.read_run(made).open("cpu")
        plain = {"preset", "seed", "blocks", "set", "corpus", "init", "appended"}
        is_plain = all(loaded.saved[name] == train.NEW_RUN[name] for name in plain) and not any(
            loaded.saved["stages"].get(stage) for stage in ("batch-tome", "tome"))      # fewer steps, say
        if is_plain and train.is_done(loaded.checkpoint("tome")):
            shutil.copytree(made, out, ignore=shutil.ignore_patterns("qa.pt"))          # of other steps
            return
    schedule = train.PRESETS["toy"]["schedule"] | {
        "batch-tome": train.Schedule(2000, 1.5e-3, 100, 64), "tome": train.Schedule(150, 1e-3, 20, 64)}
    monkeypatch.setitem(train.PRESETS, "toy", train.PRESETS["toy"] | {"schedule": schedule, "log_every": 500, "eval_mentions": 40})
    assert run("--stage", "tome", "--out", out) == 0

@pytest.mark.slow
def test_a_run_learns_to_fill_in_mentions_from_its_memory(tmp_path, monkeypatch):
    """The claims of the paper in a few minutes: far better with the memory than without, also for entities never seen,
    and text of another world, which comes after training, is known as soon as it is in the memory."""
    out, more, new = tmp_path / "run", tmp_path / "more.jsonl", tmp_path / "new.jsonl"
    lines, examples = data.toy_world(1)
    known = {line["title"] for line in data.toy_world(0)[0]}
    questions = [q for q in examples["qa.one_hop.test"] if q["relations"][0] in ("director", "star", "location")
                 and q["subject"] not in known]             # films: no passage but their own names them
    data.write_lines(new, questions)
    data.write_lines(more, [line for line in lines if line["title"] in {q["subject"] for q in questions}])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)        # its matrices are too small for more
    try:
        pretrain(out, monkeypatch)
        assert run("--stage", "finetune", "--task", "qa", "--steps", 150, "--out", out) == 0
        before = question_accuracy(out, new)
        assert run("--stage", "memory", "--append", more, "--out", out) == 0
        after = question_accuracy(out, new)
        loaded, tome, table = train.open_run(out)
        figures = evaluation.masked_mention_figures(loaded, tome, table, n=200)["masked_mention"]
    finally:
        torch.set_num_threads(threads)
    print(figures, before, after)
    assert len(questions) > 50 and before < 0.1 and after > 0.4
    for kind in ("seen", "unseen"):
        controls = max(figures[kind]["emptied"], figures[kind]["shuffled"])
        assert figures[kind]["memory"] > 1.5 * controls + 0.05, figures
        assert figures[kind]["entity"] > 0.3, figures       # eq. 10 names the masked entity
