"""Checks the run folder's contract, the stages and wrong flags.   python -m pytest tests/test_train.py

"Contract 1" to "8" refer to the numbered rules of the run folder in the README.
"""
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import faults
import memory as memory_file
import train
from faults import before_call, command, contents, difference, log_of, quietly, refused, weights

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("small")
slow = pytest.mark.slow

def run(stage, out, *flags):
    """(exit code, stdout, stderr) of train.py. stage: for example "finetune --task qa"."""
    return quietly(train.main, ["--stage", *stage.split(), "--out", out, "--quiet", *flags])

def works(*arguments):
    """The output of a command, which must end with status 0."""
    code, said, err = run(*arguments)
    assert code == 0, err
    return said

def about(path):
    return train.read_checkpoint(path)["about"]

def times(out):
    """{path: time of its last change}, to check that a command changes nothing."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}

def retouch(path):
    """Changes a checkpoint's weights and leaves the file otherwise intact."""
    whole = torch.load(path, weights_only=True)
    torch.save(whole | {"model": {name: 1.01 * t for name, t in whole["model"].items()}}, path)

def figures_of(out, *flags):
    code, said, err = quietly(evaluation.main, ["--out", out, "--json", *flags])
    assert code == 0, err
    return json.loads(said)

@pytest.fixture
def before(reference, tmp_path):
    """before(stage), which returns a copy of the run folder before this stage, for tests to change."""
    def copied(stage):
        return Path(shutil.copytree(reference.before[stage] / "run", tmp_path / f"before {stage}"))
    return copied

@pytest.fixture
def corpus_file(reference, tmp_path):
    """A user's corpus file, with the texts of the small toy world."""
    return Path(shutil.copy(reference.whole / "world/corpus.jsonl", tmp_path / "mine.jsonl"))

# ---- Contract 1 and 2: run.json ------------------------------------------------------------------

def test_a_command_says_what_it_will_train_and_leaves_a_self_contained_run(tmp_path):
    out = tmp_path / "run"
    said = works("tome", out, "--steps", 3)
    assert said.startswith(f"{out}: batch-tome (4 steps, preset toy), memory, tome-1 (3 steps, "
                           "--steps).\n")
    assert {p.name for p in out.iterdir()} == {
        "run.json", "world", "corpus", "batch-tome.pt", "memory", "tome-1.pt", "log.jsonl"}
    saved = json.loads((out / "run.json").read_text())
    assert saved["settings"].keys() == train.FLAGS.keys()
    assert saved["schedule"].keys() == {"batch-tome", "tome", "claims", "qa"}
    assert (saved["preset"], saved["seed"], saved["corpus"]) == ("toy", 0, None)
    log = log_of(out)
    assert [(r["stage"], r["step"]) for r in log] == [
        ("batch-tome", 3), ("batch-tome", 4), ("tome-1", 3)]
    assert {"mlm", "coref", "seen", "unseen", "seconds", "lr"} <= log[0].keys()
    assert {"tokens", "entity", "attention_visible", "attention"} <= log[2]["seen"].keys()
    assert "nothing is left to train" in works("tome", out)

def test_a_finished_run_does_not_depend_on_what_presets_say_later(done, monkeypatch):
    figures = figures_of(done)
    monkeypatch.delitem(train.PRESETS, "toy")
    assert figures_of(done) == figures
    works("finetune --task claims", done, "--steps", 1)

def test_repeating_the_commands_changes_nothing(reference, done):
    whole = times(done)
    for stage in faults.STAGES:
        if stage != "from":
            assert quietly(train.main, command(stage, reference.folder, done))[0] == 0
    assert times(done) == whole

@pytest.mark.parametrize("flag, value, before", [
    ("--preset", "mini", "toy"), ("--seed", 1, 0), ("--hidden", 48, 96), ("--clip", 2.0, 1.0),
    ("--key-dim", 32, 16), ("--log-every", 9, 3), ("--corpus", "mine.jsonl", "without"),
    ("--from", "elsewhere", "without")])
def test_a_flag_that_contradicts_run_json_is_refused_with_both_values(
        done, corpus_file, flag, value, before):
    whole = contents(done)
    if value in ("mine.jsonl", "elsewhere"):
        value = corpus_file.parent / value
    refused(run("tome", done, flag, value), f"{flag} {value}", before, "leave the flag out",
            "choose another --out")
    assert not difference(done, whole)
    works("tome", done, "--preset", "toy", "--seed", 0, "--hidden", 96, "--clip", 1)    # equal values

def test_a_corpus_file_may_move_but_not_change(tmp_path, corpus_file):
    out = tmp_path / "run"
    works("batch-tome", out, "--corpus", corpus_file, "--steps", 1)
    moved = corpus_file.rename(tmp_path / "moved.jsonl")
    works("memory", out)                        # the text is in the run folder
    works("memory", out, "--corpus", moved)
    moved.write_text(moved.read_text() + moved.read_text().splitlines()[0] + "\n")
    refused(run("memory", out, "--corpus", moved), "--corpus", moved, corpus_file, "leave the flag")

@pytest.mark.parametrize("stage, flag", [("batch-tome", "--corpus"), ("memory", "--append")])
def test_a_file_that_grows_while_it_is_read_is_refused(
        before, reference, tmp_path, monkeypatch, stage, flag):
    out = before("append") if flag == "--append" else tmp_path / "run"
    file = Path(shutil.copy(reference.folder / "more.jsonl", tmp_path))
    whole, line = contents(out), file.read_text().splitlines(True)[0]

    def grow(path, *_):
        with open(path, "a") as end:
            end.write(line)
    with monkeypatch.context() as patch:
        patch.setattr(data.Corpus, "build", before_call(data.Corpus.build, grow, 1))
        refused(run(stage, out, flag, file), file, "changed while it was being read")
    assert not difference(out, whole)
    works(stage, out, flag, file)

def test_until_the_corpus_is_complete_a_command_may_change_the_seed(tmp_path):
    out, fault = tmp_path / "run", faults.signal_at_call(1, data.Corpus, "build")
    assert faults.run(command("batch-tome", "", out), fault)[0] < 0
    refused(run("batch-tome", out, "--seed", 5), "world", "--seed")
    shutil.rmtree(out / "world")
    works("batch-tome", out, "--seed", 5, "--steps", 1)
    assert train.read_run(out).seed == 5

def test_results_without_run_json_are_not_overwritten(done):
    whole = contents(done)
    (done / "run.json").unlink()
    refused(run("tome", done), "batch-tome.pt exists", "run.json is missing")
    assert difference(done, whole) == ["run.json"]

# ---- Contract 3: --from --------------------------------------------------------------------------

def test_from_links_earlier_results_and_allows_new_settings_and_steps_of_the_stage(reference, tmp_path):
    out, old = tmp_path / "new", reference.whole
    flags = "--from", old, "--entity-weight", 0.4
    works("tome", out, *flags, "--steps", 6)
    assert (out / "batch-tome.pt").samefile(old / "batch-tome.pt")
    assert (out / "memory/keys-00000.npy").samefile(old / "memory/keys-00000.npy")
    assert not (out / "qa-1.pt").exists() and not list(out.parent.glob("*.part"))
    assert train.read_run(out).settings.entity_weight == 0.4
    assert about(out / "tome-1.pt")["steps"] == 6 and about(old / "tome-1.pt")["steps"] == 4
    whole = contents(out)
    assert "nothing is left to train" in works("tome", out, *flags)     # the same command again
    works("tome", out)                                                  # and without flags
    refused(run("tome", out, "--from", tmp_path), "--from", old, tmp_path)
    assert not difference(out, whole)

@pytest.mark.parametrize("stage, flag, value, before", [
    ("tome", "--hidden", 48, 96), ("tome", "--clip", 2.0, 1.0), ("tome", "--seed", 1, 0),
    ("tome", "--passage-length", 32, 64), ("tome", "--memory-dtype", "float16", "float32"),
    ("batch-tome", "--vocab", 500, 600), ("finetune --task qa", "--entity-weight", 0.5, 0.15)])
def test_from_refuses_a_setting_that_an_inherited_result_depends_on(
        reference, tmp_path, stage, flag, value, before):
    refused(run(stage, tmp_path / "new", "--from", reference.whole, flag, value),
            f"{flag} {value}", before, "depend on it")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("*.part"))

def test_a_second_command_does_not_empty_the_new_folder_of_the_first(reference, tmp_path):
    """Both commands use NEW.part, which the first has locked."""
    fcntl, part = pytest.importorskip("fcntl"), tmp_path / "new.part"
    part.mkdir()
    (part / "batch-tome.pt").write_text("half of it")
    folder = os.open(part, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    refused(run("tome", tmp_path / "new", "--from", reference.whole), "another train.py is running")
    os.close(folder)
    assert (part / "batch-tome.pt").exists()
    works("tome", tmp_path / "new", "--from", reference.whole, "--steps", 1)

# ---- Contract 4: TOME-1 and TOME-2 ---------------------------------------------------------------

def test_tome_2_shares_batch_tome_and_the_memory_of_tome_1(before, reference):
    out = before("tome-2")
    shared = (out / "batch-tome.pt", *out.glob("memory/*"))
    whole = times(out)
    assert "tome-2 (4 steps, preset toy)." in works("tome --blocks 2", out)
    assert all(times(out)[path] == whole[path] for path in shared)
    assert not set(difference(out, reference.after["tome-2"]))
    for blocks in (1, 2):
        loaded, tome, _ = train.open_run(out, blocks=blocks)
        assert len(tome.blocks) == loaded.config.n_blocks == blocks

def test_tome_2_fine_tunes_on_examples_of_one_and_two_facts_by_default(done, monkeypatch):
    names, real = [], data.read_examples
    monkeypatch.setattr(data, "read_examples", before_call(
        real, lambda path, task: names.append(path.name)))
    works("finetune --task qa --blocks 2", done, "--steps", 1)
    assert names == ["qa.both.train.jsonl", "qa.both.dev.jsonl"]
    assert about(done / "qa-2.pt")["blocks"] == 2

# ---- Contract 5: the flags of a stage ------------------------------------------------------------

@pytest.mark.parametrize("flag, value, before", [
    ("--steps", 5, 4), ("--batch", 5, 8), ("--lr", 0.0001, 0.001), ("--n-search", 3, 0),
    ("--start", "scratch", "without --start")])
def test_a_finished_stage_refuses_other_flags_and_names_its_file(done, flag, value, before):
    whole = contents(done)
    refused(run("tome", done, flag, value), f"{flag} {value}", "tome-1.pt was made with", before,
            f"remove {done / 'tome-1.pt'}")
    assert not difference(done, whole)

def test_a_stage_that_has_begun_continues_with_its_flags_or_a_lower_rate(before, reference):
    out = before("tome")
    flags = "--steps", 6, "--lr", 5e-4, "--batch", 4
    code, said = faults.run(command("tome", reference.folder, out, *flags), faults.die_at_step(4))
    assert code < 0, said
    begun = about(out / "tome-1.pt")
    assert not begun["finished"] and (begun["step"], begun["steps"], begun["lr"]) == (3, 6, 5e-4)
    refused(run("tome", out, "--steps", 7), "--steps 7", "tome-1.pt was made with --steps 6")
    refused(run("tome", out, "--lr", 1e-3), "--lr 0.001", "0.0005")
    assert "tome-1 (from step 3 to 6)" in works("tome", out, "--lr", 1e-4)
    assert (about(out / "tome-1.pt")["lr"], about(out / "tome-1.pt")["batch"]) == (1e-4, 4)

@pytest.mark.parametrize("n", [3, 4], ids=["in the middle", "at the end"])
def test_a_weight_that_is_not_finite_is_never_saved_and_the_advice_works(before, monkeypatch, n):
    def blow_up(optimizer):
        optimizer.param_groups[0]["params"][0].data.fill_(float("inf"))
    out, step = before("tome"), torch.optim.AdamW.step
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", before_call(step, blow_up, n))
        result = run("tome --blocks 2", out)
    refused(result, "not finite at step", "tome-2.pt has the last checkpoint")
    advice = result[2].split("--stage tome ")[1].rstrip(".").split()
    assert advice[:3] == ["--blocks", "2", "--lr"]
    works("tome", out, *advice)
    assert about(out / "tome-2.pt")["lr"] == float(advice[3]) == 3e-4           # a third
    assert all(t.isfinite().all() for t in weights(out / "tome-2.pt").values())

def test_a_loss_that_is_not_a_number_names_step_and_passages(before, monkeypatch):
    out, passages, made, loss = before("tome"), set(), train.masked_batch, train.mlm_loss
    monkeypatch.setattr(train, "masked_batch", before_call(
        made, lambda run, chosen, *_: passages.update(chosen.tolist()), 4))
    monkeypatch.setattr(train, "mlm_loss", before_call(
        loss, lambda logits, answers: logits.data.fill_(float("nan")), 4))
    refused(run("tome", out), "at step 3", ", ".join(map(str, sorted(passages))))
    assert passages and about(out / "tome-1.pt")["step"] == 3

def test_an_evaluation_that_fails_costs_no_step_and_is_repeated_first(
        before, reference, monkeypatch):
    out, step, steps = before("tome"), torch.optim.AdamW.step, []

    def too_big(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 TB")
    with monkeypatch.context() as patch:
        patch.setattr(train, "masked_mentions", too_big)
        refused(run("tome", out, "--log-every", 3), "can't allocate memory", "the same command")
    assert (about(out / "tome-1.pt")["step"], about(out / "tome-1.pt")["evaluated"]) == (3, 0)
    with pytest.raises(data.UserError, match="unfinished"):
        train.open_run(out)
    monkeypatch.setattr(torch.optim.AdamW, "step", before_call(step, steps.append))
    works("tome", out)
    assert len(steps) == 1 and not difference(out, reference.after["tome"])

def test_resuming_with_another_number_of_threads_is_reported_once(before, reference):
    out, n = before("tome"), torch.get_num_threads()
    arguments = command("tome", reference.folder, out)
    faults.run(arguments, faults.die_at_step(4))
    code, said = faults.run(arguments, lambda: torch.set_num_threads(n + 1))
    assert code == 0 and said.count(f"threads was {n} and is now {n + 1}") == 1, said
    assert "rounding" in said

# ---- Contract 6: the chain of checksums ----------------------------------------------------------

@pytest.mark.parametrize("changed, stage, refused_file", [
    ("corpus/meta.json", "memory", "batch-tome.pt was made with a different corpus"),
    ("batch-tome.pt", "tome", "tome-1.pt was made with a different batch-tome"),
    ("batch-tome.pt", "tome --blocks 2 --steps 4", "tome-2.pt was made with a different batch-tome"),
    ("tome-1.pt", "finetune --task qa", "qa-1.pt was made with a different tome-1"),
    ("world/meta.json", "finetune --task qa", None)])
def test_a_result_is_refused_if_its_source_has_changed(done, changed, stage, refused_file):
    if changed.endswith(".pt"):
        retouch(done / changed)
    else:
        (done / changed).write_text((done / changed).read_text() + " ")
    whole = contents(done)
    if refused_file is None:                # the world's other files are unchanged
        works(stage, done)
    else:
        refused(run(stage, done), refused_file, "remove")
    assert not difference(done, whole)

def test_a_memory_is_refused_if_batch_tome_has_changed(before):
    out = before("tome")
    retouch(out / "batch-tome.pt")
    refused(run("tome", out), f"{out / 'memory'} was made with a different batch-tome")
    shutil.rmtree(out / "memory")
    works("tome", out, "--steps", 1)        # as advised

@pytest.mark.parametrize("kind, source", [
    ("memory", "memory"), ("corpus", "corpus"), ("memory", "appended-0001/memory"),
    ("corpus", "appended-0001/corpus")])
def test_an_appended_corpus_and_memory_that_do_not_match_are_refused(done, kind, source):
    """Pairs the memory from before an append with the corpus from after it, and vice versa."""
    target = done / "appended-0002" / kind
    shutil.rmtree(target)
    shutil.copytree(done / source, target)
    refused(quietly(evaluation.main, ["--out", done]), "appended-0002/memory was made with a different")

def test_a_model_is_refused_if_the_corpus_was_rebuilt_with_another_vocabulary(done, monkeypatch):
    """Different versions of the tokenizers package may learn different vocabularies."""
    real = data.train_tokenizer
    shutil.rmtree(done / "corpus")
    monkeypatch.setattr(
        data, "train_tokenizer", lambda texts, size: real([*texts, "xylophone"], size))
    refused(run("memory", done), "batch-tome.pt was made with a different corpus")

# ---- Contract 7: bytes ---------------------------------------------------------------------------

def test_an_interruption_and_an_append_do_not_change_the_bytes_of_a_finished_file(
        reference, before):
    """A finished file contains only weights; an unfinished file also has the optimizer's state."""
    out = before("qa")
    assert faults.run(command("qa", reference.folder, out), faults.die_at_step(4))[0] < 0
    half = torch.load(out / "qa-1.pt", weights_only=True)
    assert half.keys() == {"about", "model", "optimizer", "best"}
    works("memory", out, "--append", reference.folder / "more.jsonl")
    works("finetune --task qa", out)
    assert torch.load(out / "qa-1.pt", weights_only=True).keys() == {"about", "model"}
    assert (out / "qa-1.pt").read_bytes() == reference.after["qa"]["qa-1.pt"]
    assert figures_of(out, "--task", "qa")

@slow
def test_another_seed_gives_other_weights(reference, tmp_path):
    works("batch-tome", tmp_path / "run", "--seed", 1)
    first, other = (weights(out / "batch-tome.pt") for out in (reference.whole, tmp_path / "run"))
    assert first.keys() == other.keys()
    assert any(not torch.equal(first[name], other[name]) for name in first)

# ---- Contract 8: --append ------------------------------------------------------------------------

def test_an_append_is_one_new_folder_and_leaves_everything_else_alone(reference):
    was, now = (reference.after[stage] for stage in ("qa", "append"))
    assert all(now[name] == content for name, content in was.items())
    new = {name.split("/")[0] for name in now.keys() - was.keys()}
    assert new == {"appended-0001"}
    assert [what for what in reference.operations["append"] if what.startswith("rename")][-1] \
        == "rename run/appended-0001.part"

def test_the_append_with_the_highest_number_is_used(done):
    names = []
    for newest in ("appended-0002", "appended-0001", ""):
        names.append(train.open_run(done)[0].corpus.titles)
        shutil.rmtree(done / newest)
    assert len(names[0]) > len(names[1]) > len(names[2]) and names[0][:len(names[1])] == names[1]

def test_training_does_not_depend_on_appended_text(reference, done):
    """Nor does fine-tuning, although only the appended text contains some of the answers."""
    for stage, name in (("tome", "tome-1"), ("tome-2", "tome-2"), ("qa", "qa-1")):
        (done / f"{name}.pt").unlink()
        assert quietly(train.main, command(stage, reference.folder, done))[0] == 0
    assert not set(difference(done, reference.after["append again"])) - {"log.jsonl"}

def test_appending_the_same_file_again_is_reported_and_does_nothing(reference, done):
    whole = contents(done)
    said = works("memory", done, "--append", reference.folder / "other.jsonl", "--replace")
    assert "already contains" in said and "other.jsonl" in said and not difference(done, whole)

def test_replace_removes_old_articles_from_the_memory_and_append_alone_does_not(reference, done):
    titles = {json.loads(line)["title"] for line in open(reference.folder / "other.jsonl")}
    loaded, _, table = train.open_run(done)
    corpus = loaded.corpus
    texts = [corpus.text[a:b].tobytes().decode() for a, b in corpus.text_at]
    new = {json.loads(line)["text"] for line in open(reference.folder / "other.jsonl")}
    kept = {(corpus.titles[corpus.article[p]], texts[p]) for p in table.passage.unique().tolist()}
    assert {text for title, text in kept if title in titles} == new
    assert {title for title, _ in kept} == {*corpus.titles}
    shutil.rmtree(done / "appended-0002")
    works("memory", done, "--append", reference.folder / "other.jsonl")
    _, _, both = train.open_run(done)
    assert len(both) > len(table)

def test_an_append_gives_the_memory_of_a_corpus_built_at_once(reference, done, tmp_path):
    shutil.rmtree(done / "appended-0002")
    loaded, _, table = train.open_run(done)
    both, settings = tmp_path / "both.jsonl", loaded.settings
    both.write_text((done / "world/corpus.jsonl").read_text()
                    + (reference.folder / "more.jsonl").read_text())
    built = data.Corpus.build(both, tmp_path / "both", loaded.tokenizer, settings.passage_length,
                              settings.max_length)
    encoder = train.load_model(loaded, "batch-tome")
    rows = memory_file.encode_passages(encoder, built, np.arange(len(built.article)), loaded.device)
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(table, name), torch.from_numpy(rows[name]), atol=1e-5, rtol=0)
    for name in ("mention", "passage"):
        assert (getattr(table, name).numpy() == rows[name]).all()
    assert [loaded.corpus.entity_names[e] for e in table.entity] == [built.entity_names[e] for e in rows["entity"]]

def test_the_cost_of_an_append_is_linear_in_the_new_text(done, tmp_path):
    """Measures cost in Python function calls. All texts have the same title."""
    shutil.rmtree(done / "appended-0002")
    calls = []
    for n in (50, 200, 800):
        lines = [{"title": "Ann Lee", "text": f"Ann Lee saw the number {n} {i}.", "mentions": [
            {"start": 0, "end": 7, "entity": "Ann Lee"}]} for i in range(n)]
        data.write_lines(tmp_path / f"{n}.jsonl", lines)
        calls.append(0)

        def count(*_):
            calls[-1] += 1
        sys.setprofile(count)
        try:
            works("memory", done, "--append", tmp_path / f"{n}.jsonl")
        finally:
            sys.setprofile(None)
    assert calls[2] - calls[0] < 7 * (calls[1] - calls[0])              # 750 and 150 more texts

def test_a_mistake_in_an_appended_file_changes_nothing(before, tmp_path):
    out, more = before("append"), tmp_path / "more.jsonl"
    whole = contents(out)
    refused(run("memory", out, "--append", more), "more.jsonl")
    data.write_lines(more, [{"title": "New", "text": "Alma Verran sang.", "mentions": []}])
    refused(run("memory", out, "--append", more), "more.jsonl", "no linked mention")
    assert not difference(out, whole)
    data.write_lines(more, [{"title": "New", "text": "Alma Verran sang.", "mentions": [
        {"start": 0, "end": 11, "entity": "New"}]}])
    assert "1 passages from" in works("memory", out, "--append", more)
    loaded, _, table = train.open_run(out)
    assert loaded.corpus.entity_names[int(table.entity[-1])] == "New"

# ---- The stages ----------------------------------------------------------------------------------

def test_the_memory_contains_the_encoders_key_and_value_of_each_linked_mention(reference):
    loaded = train.read_run(reference.whole).open("cpu")
    table, corpus = train.open_memory(loaded), loaded.corpus
    model = train.load_model(loaded, "batch-tome")
    assert len(table) == (corpus.mention_entity > 0).sum()
    for m in (0, 7, len(table) - 1):
        mention = int(table.mention[m])
        p = int(corpus.passage_of(mention))
        tokens = torch.from_numpy(corpus.passage(p).tokens.astype(np.int64))[None]
        number = mention - int(corpus.mention_first[p])
        spans = [(tokens[0] == corpus.special[marker]).nonzero()[number]
                 for marker in (data.E_START, data.E_END)]
        with torch.no_grad():
            everywhere = torch.ones_like(tokens, dtype=torch.bool)
            key, value = model.encode_mentions(tokens, everywhere, torch.tensor([0]), *spans)
        torch.testing.assert_close(table.keys[m], key[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(table.values[m], value[0], atol=1e-4, rtol=1e-4)
        assert table.entity[m] == corpus.mention_entity[mention] and table.passage[m] == p

def test_a_process_without_a_shard_has_an_empty_memory_of_the_same_type(
        before, tmp_path, monkeypatch):
    """Processes exchange rows, which have the memory's type, such as float16."""
    out = before("memory")
    works("memory", tmp_path / "half", "--from", out, "--memory-dtype", "float16")
    full = memory_file.load_memory(tmp_path / "half/memory")[0]
    monkeypatch.setattr(memory_file.ann, "rank_and_size", lambda: (99, 100))
    empty = memory_file.load_memory(tmp_path / "half/memory")[0]
    assert full.keys.dtype == torch.float16 and len(full) > 0 == len(empty)
    for name in memory_file.ARRAYS:
        a, b = getattr(full, name), getattr(empty, name)
        assert a.dtype == b.dtype and a.shape[1:] == b.shape[1:], name

def test_eq_10_compares_k_finetune_memories_in_fine_tuning_and_evaluation(before, monkeypatch):
    out, asked, real = before("qa"), [], train.MentionMemory.retrieve
    monkeypatch.setattr(train.MentionMemory, "retrieve", before_call(
        real, lambda memory, query, passage, k, k_shard: asked.append((k, k_shard))))
    works("finetune --task qa", out, "--steps", 1)
    # The memory layer, then eq. 10.
    assert asked[:2] == [(8, 8), (16, 16)]
    asked.clear()
    figures_of(out, "--task", "qa")
    assert asked[:2] == [(8, 8), (16, 16)]

@slow
def test_fine_tuning_keeps_the_weights_with_the_best_dev_score(before):
    out = before("qa")
    said = works("finetune --task claims", out, "--steps", 8)
    scores = [record["score"] for record in log_of(out) if record["stage"] == "claims-1"]
    assert len(scores) == 3 and said.count("dev accuracy") == 3     # after 3, 6, 8 steps
    loaded, tome, table = train.open_run(out, "claims")
    dev = train.task_examples(loaded, "claims", out / "world/claims.one_hop.dev.jsonl")
    judged = train.judged_examples(loaded, tome, "claims", dev, table)
    assert np.mean([item.is_correct for item in judged]) == max(scores)

def test_a_mention_without_an_entity_makes_no_cloze():
    corpus, text = SimpleNamespace(entity_index={"": 0, "Alma": 1}), "Alma met Bo."
    mentions = [data.Mention(0, 4, "Alma"), data.Mention(9, 11, "")]
    for some, answers in ((mentions, [["Alma"]]), (mentions[1:], [])):
        example = data.Example(text, some, data.CLAIM_LABELS.index("SUPPORTS"), [], {})
        clozes = train.clozes_of(SimpleNamespace(corpus=corpus), example, np.random.default_rng(0))
        assert [cloze.answers for cloze in clozes] == answers

def test_more_processes_than_passages_are_refused(reference, monkeypatch):
    loaded = train.read_run(reference.whole).open("cpu")
    n = len(train.training_passages(loaded))
    monkeypatch.setattr(train.ann, "rank_and_size", lambda: (0, n + 1))
    with pytest.raises(data.UserError, match=f"only {n} passages to train on"):
        train.training_passages(loaded)

def test_no_training_passage_mentions_an_entity_held_out_by_unseen(tmp_path):
    works("batch-tome", tmp_path / "run", "--unseen", 0.2, "--steps", 1)
    loaded = train.read_run(tmp_path / "run").open("cpu")
    corpus, passages = loaded.corpus, train.training_passages(loaded)
    trained = {int(e) for p in passages for e in corpus.passage_entities(p)}
    chosen = {e for e, name in enumerate(corpus.entity_names)
              if name and data.zlib.crc32(name.encode()) < 0.2 * 2 ** 32}
    assert trained and 0.1 < len(chosen) / len(corpus.entity_names) < 0.3 and not trained & chosen
    assert all(loaded.entity_group[e] == "unseen" for e in chosen)

@slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_tome_1s_queries_are_sharpened_once_before_the_last_step(reference, tmp_path, monkeypatch, blocks):
    seen, plain = [], train.TOMEStage.losses
    monkeypatch.setattr(train.TOMEStage, "losses", before_call(
        plain, lambda stage, *_: seen.append({name: p.detach().clone() for name, p in
                                              stage.model.named_parameters()})))
    out, flags = tmp_path / "run", ("--blocks", blocks, "--steps", 3, "--lr", 1e-9)
    works("tome", out, "--from", reference.whole, "--sharpen", 1.5, *flags)
    first, second, third = seen
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    scaled = [name for name in first if not torch.allclose(second[name], third[name], atol=1e-6)]
    assert len(scaled) == (2 if blocks == 1 else 0)         # weight and bias
    assert all(".memory_attention.query." in name for name in scaled)
    assert all(torch.allclose(third[name], 1.5 * second[name], atol=1e-6) for name in scaled)
    after = weights(out / f"tome-{blocks}.pt")
    assert all(torch.allclose(after[name], third[name], atol=1e-6) for name in third)

@slow
def test_while_all_mentions_are_given_memories_the_layers_below_are_frozen(reference, tmp_path):
    out, old = tmp_path / "given", reference.whole
    works("tome", out, "--from", old, "--teacher-forcing-until", 1, "--sharpen", 1)
    after, began = weights(out / "tome-1.pt"), weights(old / "batch-tome.pt")
    moved = {n for n in after if not torch.equal(after[n], began["tome." + n])}
    assert all(any(part in n for n in moved) for part in (".transformer.", "memory_attention.up"))
    assert not [n for n in moved if n.startswith(("initial", "entity_query")) or "query" in n]
    half = tmp_path / "half"
    works("tome", half, "--from", old, "--teacher-forcing-until", 0.5, "--log-every", 1)
    assert ["entity" in record for record in log_of(half) if record["stage"] == "tome-1"] == [
        False, False, True, True]

@slow
def test_eq_10_is_not_trained_on_mentions_that_were_given_memories(
        reference, tmp_path, monkeypatch):
    asked, n, plain, loss = [], [], train.retrieve_entities, train.entity_prediction_loss

    def count(tome, H, batch, *_):
        if tome.training:
            n.append(len(batch.entity))
    monkeypatch.setattr(train, "retrieve_entities", before_call(plain, count))
    monkeypatch.setattr(train, "entity_prediction_loss", before_call(
        loss, lambda scores, found, entity: asked.append(entity)))
    works("tome", tmp_path / "run", "--from", reference.whole, "--teacher-forcing-rate", 0.8,
          "--linking-weight", 0.3)
    answers, links = (sum(int((entity > 0).sum()) for entity in asked[i::2]) / sum(n)
                      for i in (0, 1))
    assert len(n) == 4 and 0 < answers < 0.4 and links > 0.9        # TOME-1's query always learns

@slow
@pytest.mark.parametrize("memory", ["entities", "none"])
def test_a_baseline_trains_without_a_mention_memory(tmp_path, memory):
    out = tmp_path / "run"
    works("tome", out, "--memory", memory)
    assert not (out / "memory").exists() and not (out / "batch-tome.pt").exists()
    state = weights(out / "tome-1.pt")
    assert any("memory_attention" in name for name in state) == (memory == "entities")
    loaded, tome, table = train.open_run(out)
    assert table is tome.entities and len(table.keys) == len(loaded.corpus.entity_names)
    last = log_of(out)[-1]
    assert last["step"] == 8 and ("linking" in last) == (memory == "entities")
    refused(run("memory", out), "baseline")
    refused(run("tome", out, "--n-search", 4), "--n-search: a baseline")

# ---- --start -------------------------------------------------------------------------------------

def test_a_start_with_other_dimensions_or_another_vocabulary_is_refused(done, tmp_path):
    tome = (done / "tome-1.pt").rename(tmp_path / "tome.pt")
    cut, other = tmp_path / "cut.pt", tmp_path / "other.pt"
    whole = torch.load(tome, weights_only=True)
    torch.save(whole | {"model": {name: t[:1] for name, t in whole["model"].items()}}, cut)
    told = json.loads(whole["about"])
    torch.save(whole | {"about": json.dumps(told | {"vocab": told["vocab"] ^ 1})}, other)
    for start, words in ((done / "batch-tome.pt", "no TOME"), (cut, "no TOME"),
                         (other, "vocabulary of another corpus")):
        refused(run("tome", done, "--start", start), f"--start {start}", words)
    assert not (done / "tome-1.pt").exists()
    refused(run("tome", tmp_path / "wide", "--hidden", 192, "--start", tome), "no TOME", "192")
    assert not (tmp_path / "wide").exists()             # refused before anything was trained

@slow
def test_start_begins_a_stage_from_other_weights(done, tmp_path):
    def far(a, b):
        return max((a[name] - b[name]).abs().max().item() for name in a)
    other, old = (done / "tome-1.pt").rename(tmp_path / "other.pt"), tmp_path / "scratch"
    works("tome", done, "--start", other, "--steps", 0)     # used without further training
    assert far(weights(done / "tome-1.pt"), weights(other)) == 0
    assert about(done / "tome-1.pt")["start"] == [[str(other), data.checksum(other)]]
    works("tome", old, "--from", done, "--start", "scratch")
    scratch, loaded = weights(old / "tome-1.pt"), train.read_run(old).open("cpu")
    word = "embeddings.word.weight"
    began, seed_1 = ({word: train.new_batch_tome(loaded, seed).tome.state_dict()[word]}
                     for seed in (loaded.seed, loaded.seed + 1))
    # The Mention Encoder's own initial weights would not be independent of that encoder (app. B.6).
    assert far(seed_1, scratch) < 0.02 < 0.1 < far(began, scratch)

# ---- Mistakes: one sentence, a non-zero exit, nothing half-written -------------------------------

@pytest.mark.parametrize("arguments, words", [
    ("--stage tome --corpus no/such.jsonl", "o such file"),
    ("--stage finetune --task qa --examples no/such.jsonl", "o such file"),
    ("--stage tome --from no/run", "run.json is missing"),
    ("--stage tome --n-heads 5", "multiple of --n-heads"),
    ("--stage tome --hidden 33 --n-heads 3", "even"),
    ("--stage tome --max-positions 32", "--max-positions"),
    ("--stage tome --max-length 512", "--max-length"),
    ("--stage tome --device cuda", "--device cuda")])
def test_a_mistake_is_found_before_anything_is_written(tmp_path, monkeypatch, arguments, words):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    refused(quietly(train.main, arguments.split()), words)
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]

@pytest.mark.parametrize("arguments, words", [
    ("--stage tome --steps 1e3", "invalid int"), ("--stage finetune", "needs --task"),
    ("--stage memory --steps 5", "--steps goes with"), ("--stage tome --nonsense", "unrecognized"),
    ("--stage memory --n-search 5", "--n-search goes with"),
    ("--stage tome --replace", "--replace goes"), ("--stage tome --hidden wide", "invalid int"),
    ("--stage tome --memory some", "invalid choice"), ("--stage tome --set clip=2", "--set")])
def test_a_command_line_that_makes_no_sense_is_refused(
        arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        train.main(arguments.split())
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())

@pytest.mark.parametrize("name", [name for name in train.CHECKED if name != "warmup"])
def test_a_setting_out_of_range_gives_one_sentence(name, capsys, tmp_path):
    """Tries values below and above the range, NaN, infinity, and a word that is not allowed."""
    setting, flag, out = train.CHECKED[name], f"--{name.replace('_', '-')}", tmp_path / "run"
    values = ["x"]
    if not isinstance(setting.default, str):
        low, high = setting.metadata["allowed"]
        values += [str(type(setting.default)(low) - 1), str(high * 2 + 1), "nan", "inf"]
    for value in values:
        try:
            code = train.main(["--stage", "tome", "--out", str(out), f"{flag}={value}"])
        except SystemExit as leaving:       # from argparse: the value has the wrong type
            code = leaving.code
        err = capsys.readouterr().err
        assert code in (1, 2) and flag in err and "Traceback" not in err, (value, err)
        assert code == 2 or err.count("\n") == 1, (value, err)             # 2: argparse also prints the usage
    assert not out.exists()

@slow
def test_a_setting_at_the_lower_end_of_its_range_trains_or_gives_one_sentence(tmp_path):
    names = [name for name, f in train.FLAGS.items() if not isinstance(f.default, str)]
    for name in np.random.default_rng(0).permutation(names)[:8]:
        value, out = train.FLAGS[name].metadata["allowed"][0], tmp_path / name
        code, _, err = run("batch-tome", out, "--steps", 1, f"--{name.replace('_', '-')}={value}")
        assert code == 0 or code == 1 and not out.exists() and err.count("\n") == 0, (name, err)

@pytest.mark.parametrize("lines, words", [
    ('{"title": "A", "text"', "bad.jsonl:1"),
    ('{"title": "A", "text": "Ann Lee", "mentions": [{"start": 0, "end": 7, "entity": "Ann"}], '
     '"split": "held_out"}', "held out")])
def test_a_bad_corpus_gives_one_sentence(tmp_path, lines, words):
    (tmp_path / "bad.jsonl").write_text(lines)
    refused(run("tome", tmp_path / "run", "--corpus", tmp_path / "bad.jsonl"), words)
    assert not list((tmp_path / "run").glob("*.pt"))

def test_examples_are_read_before_anything_is_trained(tmp_path):
    question = {"question": "Who?", "answers": ["X"]}
    path, dev = tmp_path / "my.train.jsonl", tmp_path / "my.dev.jsonl"
    data.write_lines(path, [question])
    unanswered = json.dumps(question | {"answers": []})
    for text, words in (("", "no example"), ("{}", "my.dev.jsonl:1"),
                        (unanswered, "no example has a label or an answer")):
        dev.write_text(text)
        refused(run("finetune --task qa", tmp_path / "run", "--examples", path), words)
    claims = [{"text": text, "label": "SUPPORTS"} for text in "AB"]
    data.write_lines(path, claims)
    dev.unlink()
    refused(run("finetune --task claims", tmp_path / "run", "--examples", path), "same label")
    assert not (tmp_path / "run").exists()

def test_fine_tuning_on_a_users_corpus_needs_examples(tmp_path, corpus_file):
    refused(run("finetune --task qa", tmp_path / "run", "--corpus", corpus_file), "--examples FILE")
    assert not (tmp_path / "run").exists()

def test_a_stage_continues_only_with_its_examples(before, reference, tmp_path):
    out, mine = before("qa"), tmp_path / "mine.train.jsonl"
    for end in ("train", "dev"):
        shutil.copy(out / f"world/qa.one_hop.{end}.jsonl", tmp_path / f"mine.{end}.jsonl")
    works("finetune --task qa", out, "--examples", mine, "--steps", 1)
    moved = [p.rename(tmp_path / p.name.replace("mine", "moved")) for p in tmp_path.glob("mine.*")]
    works("finetune --task qa", out, "--examples", tmp_path / "moved.train.jsonl")
    moved[0].write_text(moved[0].read_text().partition("\n")[2])
    refused(run("finetune --task qa", out, "--examples", tmp_path / "moved.train.jsonl"),
            "--examples", "qa-1.pt was made with")

def test_a_batch_far_larger_than_the_training_data_is_refused(before):
    out = before("tome")
    refused(run("tome", out, "--batch", 100_000), "--batch 100000", "to train on")

@pytest.mark.parametrize("name", ["qa.one_hop.train.jsonl", "qa.one_hop.dev.jsonl"])
def test_a_damaged_toy_world_is_refused(before, name):
    out = before("qa")
    file = out / "world" / name
    file.write_bytes(file.read_bytes().replace(b"a", b"e", 1))
    refused(run("finetune --task qa", out), f"{out / 'world'} is missing or damaged", name)

# ---- Reading, reporting --------------------------------------------------------------------------

def test_opening_a_run_writes_nothing_and_builds_nothing(done):
    whole = times(done)
    figures_of(done)
    figures_of(done, "--task", "qa")
    assert times(done) == whole
    for kind in ("memory", "corpus"):
        folder = done / "appended-0002" / kind
        folder.rename(done / "away")
        with pytest.raises(data.UserError, match=f"{folder} is missing; remove {folder.parent} and append"):
            train.open_run(done)
        assert not folder.exists()
        (done / "away").rename(folder)

def test_a_missing_run_gives_one_sentence_with_a_command_that_works(tmp_path):
    with pytest.raises(data.UserError, match="python train.py --stage tome --out") as error:
        train.open_run(tmp_path / "no")
    advice = str(error.value).split("python train.py ")[1].split()
    assert train.parse_arguments(advice).out == str(tmp_path / "no")
    assert not (tmp_path / "no").exists()

def test_a_truncated_line_of_the_log_does_not_spoil_the_next_one(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"stage": "tome", "step": 4}\n{"stage": "to')
    for step in (5, 6):
        train.log(tmp_path, {"stage": "tome", "step": step})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines[1] == '{"stage": "to'
    assert [json.loads(lines[i])["step"] for i in (0, 2, 3)] == [4, 5, 6]

@slow
def test_without_held_out_text_the_run_prints_no_figures(tmp_path, corpus_file):
    lines = [json.loads(line) | {"split": "train"} for line in corpus_file.read_text().splitlines()]
    data.write_lines(corpus_file, lines)
    said = works("tome", tmp_path / "run", "--corpus", corpus_file, "--eval-mentions", 20)
    assert "tokens " not in said and "after the fit" not in said

def test_a_command_ends_with_the_report_of_eval_py(before, monkeypatch):
    """eval.py runs in its own process, with the stage's flags."""
    out, lines = before("tome"), []

    def in_this_process(line):
        lines.append(line)
        return SimpleNamespace(returncode=evaluation.main(line[2:]))
    monkeypatch.setattr(train.subprocess, "run", in_this_process)
    flags = "--stage tome --blocks 2 --n-search 3 --steps 1 --out".split()
    code, said, _ = quietly(train.main, [*flags, out])
    assert code == 0 and "shuffled" in said
    assert lines[0][1] == ROOT / "eval.py" and {"--n-search=3", "--blocks=2"} <= {*lines[0]}

# ---- The claims of the paper ---------------------------------------------------------------------

@slow
def test_a_trained_run_answers_from_new_text_as_soon_as_it_is_in_the_memory(tmp_path, monkeypatch):
    """The model answers questions about a new world once its text is in the memory, and hardly any
    before. Starts from the run that the README's first command makes."""
    monkeypatch.undo()                      # the full toy world
    made, out = ROOT / "runs/toy", tmp_path / "run"
    if not (made / "tome-1.pt").exists():
        pytest.skip("runs/toy is missing: the README's first command makes it")
    lines, examples = data.toy_world(1)
    known = {line["title"] for line in data.toy_world(0)[0]}
    questions = [q for q in examples["qa.one_hop.test"] if q["subject"] not in known
                 and q["relations"][0] in ("director", "star", "location")]    # stated in one article
    data.write_lines(tmp_path / "new.jsonl", questions)
    subjects = {q["subject"] for q in questions}
    data.write_lines(tmp_path / "more.jsonl", (x for x in lines if x["title"] in subjects))
    works("finetune --task qa", out, "--from", made, "--steps", 150)

    def accuracy():
        loaded, tome, table = train.open_run(out, "qa")
        asked = train.task_examples(loaded, "qa", tmp_path / "new.jsonl")
        judged = train.judged_examples(loaded, tome, "qa", asked, table)
        return np.mean([item.is_correct for item in judged])
    before = accuracy()
    works("memory", out, "--append", tmp_path / "more.jsonl")
    assert len(questions) > 50 and before < 0.1 and accuracy() > 0.4
