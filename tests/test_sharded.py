"""Checks that several processes compute the same as one.   python -m pytest tests/test_sharded.py"""
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ann
import data
import memory as memory_file
import train
from memory import ARRAYS, GivenMemory, MentionMemory, load_memory
from traffic import counted

# With k_shard = k, search is exact. Batches of qa are larger, so that some question retrieves its
# answer; otherwise all gradients would be zero.
TINY = {**train.PRESETS["toy"], "intermediate": 96, "n_initial": 1, "cluster": 16,
        "eval_mentions": 20, "memory_from": 0.0, "k_answer": 40, "k_answer_shard": 40,
        "schedule": {name: train.Schedule(2, 1e-3, 1, 40 if name == "qa" else 16)
                     for name in ("batch-tome", "tome", "claims", "qa")}}
STAGES = ("batch-tome", "tome", "claims", "qa")

@pytest.fixture(scope="module")
def folder(small_world, tmp_path_factory):
    """A run with stage tome's result, a memory in shards of 32 passages, and files of examples."""
    out = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.PRESETS, "toy", TINY)
        patch.setattr(memory_file, "PASSAGES_PER_SHARD", 32)
        assert train.main(["--stage", "tome", "--corpus", str(small_world), "--quiet",
                           "--out", str(out)]) == 0
    _, examples = data.toy_world(seed=3)
    titles = {json.loads(line)["title"] for line in small_world.read_text().splitlines()}
    for task in ("claims", "qa"):
        rows = [e for e in examples[f"{task}.one_hop.train"] if e["subject"] in titles][:48]
        data.write_lines(out / f"{task}.jsonl", rows)
    return out

def stage_of(folder, kind):
    """(run, stage object) from the checkpoints in the folder."""
    run = train.read_run(folder).open("cpu")
    plan = run.plan(kind)
    if kind in ("claims", "qa"):
        plan = replace(plan, examples=[[str(folder / f"{kind}.jsonl"), 0]])
    torch.manual_seed(0)        # since batch-tome.pt exists, its stage starts from random weights
    return run, train.new_stage(run, plan)

def first_step(folder, kind, found):
    """Loss, gradients, mentions and bytes sent in a stage's first step. Empties `found`."""
    rank, size = ann.rank_and_size()
    _, stage = stage_of(folder, kind)
    batch = stage.next_batch(0).part(rank, size)
    found.clear()
    stage.model.train()
    with counted() as sent:
        loss = sum(weight * share for weight, share in stage.losses(batch, 0).values())
        loss.backward()
        ann.sum_gradients(stage.model.parameters())
    grads = {name: p.grad for name, p in stage.model.named_parameters() if p.grad is not None}
    return {"sent": dict(sent), "mentions": len(batch.row), "grads": grads,
            "loss": float(ann.sum_over_processes(loss))}

def process(rank, size, folder, stages, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/init", rank=rank,
                            world_size=size)
    train.PRESETS["toy"], memory_file.PASSAGES_PER_SHARD = TINY, 32
    found, n_local, retrieve = [], [], MentionMemory.retrieve

    def watched(self, *arguments):
        found.append(retrieve(self, *arguments))
        n_local[:] = [len(self)]                # rows from training passages
        return found[-1]

    MentionMemory.retrieve = watched
    for stage in stages:
        result = first_step(folder, stage, found)
        if stage == "tome":
            result |= {"ids": [f.ids for f in found], "n_local": n_local[0]}
            run = train.read_run(folder).open("cpu")
            table, _ = load_memory(folder / "memory")
            result["memory"] = {name: getattr(table, name) for name in ARRAYS}
            given = GivenMemory(table, len(run.corpus.entity_names))
            batch = train.masked_batch(run, np.arange(16), 1, rank)
            given.wanted = batch.entity
            read = given.attend(torch.randn(len(batch.entity), 64), batch.passage, 8, 8)
            result["given"] = {"wanted": batch.entity, "passage": batch.passage, "ids": read.ids,
                               "value": read.value, "weights": read.weights}
        torch.save(result, results / f"{stage}.{rank}.pt")
    dist.destroy_process_group()

@pytest.fixture(scope="module")
def alone(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.PRESETS, "toy", TINY)
        return {stage: first_step(folder, stage, []) for stage in STAGES}

@pytest.fixture(scope="module")
def several(folder, tmp_path_factory):
    """{number of processes: {stage: [result of each process]}}. Three processes run only tome."""
    done = {}
    for size, stages in ((2, STAGES), (4, STAGES), (3, ("tome",))):
        results = tmp_path_factory.mktemp(f"{size}")
        mp.start_processes(process, (size, folder, stages, results), size, start_method="fork")
        done[size] = {stage: [torch.load(results / f"{stage}.{rank}.pt") for rank in range(size)]
                      for stage in stages}
    return done

def assert_same_step(one, other):
    """Asserts that two results of first_step have the same loss and gradients, to within 1e-5."""
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert other["grads"].keys() == one["grads"].keys()
    for name, grad in one["grads"].items():
        bound = 1e-5 * max(1.0, float(grad.abs().max()))
        assert (grad - other["grads"][name]).abs().max() <= bound, name

@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_the_loss_and_the_gradients_of_one_process(alone, several, stage, size):
    one, many = alone[stage], several[size][stage]
    for other in many:                              # every process ends with the same sum
        assert_same_step(one, other)
    assert sum(other["mentions"] for other in many) == one["mentions"]
    assert any(float(grad.abs().max()) > 1e-3 for grad in one["grads"].values())

@pytest.mark.slow
@pytest.mark.parametrize("kind", [*STAGES, "TOME-2", "own values", "nothing", "teacher forcing"])
def test_losses_and_gradients_need_the_last_layer_only_where_is_used_is_true(folder, kind, monkeypatch):
    def changed(out, read_run=train.read_run):
        run = read_run(out, 2 if kind == "TOME-2" else 1)
        run.settings.teacher_forcing_rate = 0.5 if kind == "teacher forcing" else 0.0
        run.settings.own_values_from = float(kind == "nothing")
        return run

    monkeypatch.setitem(train.PRESETS, "toy", TINY)
    monkeypatch.setattr(train, "read_run", changed)
    if kind in ("own values", "nothing"):
        monkeypatch.setattr(train, "first_memory_step", lambda settings, steps: 1)
    stage = {"own values": "batch-tome", "nothing": "batch-tome", "teacher forcing": "tome", "TOME-2": "tome"}.get(kind, kind)
    ours = first_step(folder, stage, [])
    monkeypatch.setattr(data.Batch, "is_used", None)                # now every position is computed
    everywhere = first_step(folder, stage, [])
    assert_same_step(everywhere, ours)

@pytest.mark.slow
def test_batch_tome_is_not_evaluated_until_the_fit_has_made_retrieval_useful(folder, monkeypatch):
    monkeypatch.setitem(train.PRESETS, "toy", TINY)
    run = train.read_run(folder).open("cpu")
    training = train.Training(run, run.plan("batch-tome"))
    training.stage.fit_step, logged = 4, []             # the fit follows four steps
    monkeypatch.setattr(train, "log", lambda out, record: logged.append(record))
    for step in (3, 4, 5):
        training.progress["step"] = step
        training.evaluate()
    assert "seen" not in logged[0] | logged[1] and logged[2]["seen"]["n"] > 0

@pytest.mark.slow
def test_a_process_may_get_claims_without_any_mention(folder, monkeypatch):
    """The cloze in each batch goes to the other process."""
    monkeypatch.setitem(train.PRESETS, "toy", TINY)
    claim, *others = data.read_examples(folder / "claims.jsonl", "claims")[:40]
    run, stage = stage_of(folder, "claims")
    theirs = []
    for other in others:
        cloze = other._replace(label=None, answers=[other.mentions[0].entity])
        batch = train.examples_batch(run, "claims", [claim._replace(mentions=[]), cloze])
        losses = stage.losses(batch.part(0, 2), 0)
        shares = {name: share.item() for name, (_, share) in losses.items()}
        assert len(batch.part(0, 2).row) == 0 == shares["answer"] == shares["linking"]
        assert shares["claims"] > 0
        theirs.append(stage.losses(batch.part(1, 2), 0)["answer"][1].item())
    assert max(theirs) > 0              # 0 where no memory of the answer was retrieved

@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_number_of_bytes_sent_per_step_follows_from_the_shapes(several, size):
    """Checks the bytes that a process sends per step of stage tome, with one memory layer."""
    results, preset = several[size]["tome"], train.PRESETS["toy"]
    d_K, d_V, k_shard, k_answer_shard = preset["key_dim"], preset["value_dim"], preset["k_shard"], 40
    mentions = [r["mentions"] for r in results]
    bounds = np.cumsum([0] + [r["n_local"] for r in results])
    # [a, b]: number of rows that process a requests from process b, for the memory layer and eq. 10
    layer, answer = (np.array([np.histogram(ids[ids >= 0].unique(), bounds)[0] for ids in each])
                     for each in zip(*(r["ids"] for r in results)))
    for n in (layer, answer):
        np.fill_diagonal(n, 0)                      # a process sends nothing to itself
    for rank, r in enumerate(results):
        m, M = mentions[rank], sum(mentions)
        assert r["sent"]["gather"] == 2 * (size - 1) * max(mentions) * (4 * d_K + 8)
        assert r["sent"]["candidates"] == (M - m) * (k_shard + k_answer_shard) * (4 + 8)
        assert r["sent"]["ids"] == 8 * (2 * layer[rank].sum() + answer[rank].sum())
        assert r["sent"]["rows"] == (layer[:, rank].sum() * (4 * d_K + 8 + 4 * d_V)
                                     + answer[:, rank].sum() * (4 * d_K + 8))
        assert r["sent"]["gradients"] == 4 * sum(grad.numel() for grad in r["grads"].values())

@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_given_memories_come_from_the_shards_of_all_processes(several, size):
    parts = [r["memory"] for r in several[size]["tome"]]
    entity, passage, values = (torch.cat([part[name] for part in parts])
                               for name in ("entity", "passage", "values"))
    bounds = np.cumsum([0] + [len(part["keys"]) for part in parts])
    for rank, r in enumerate(several[size]["tome"]):
        g, own = r["given"], 0
        for m, ids in enumerate(g["ids"].tolist()):
            found = [i for i in ids if i >= 0]
            assert all(entity[i] == g["wanted"][m] and passage[i] != g["passage"][m] for i in found)
            expected = torch.zeros(values.shape[1])
            for i in set(found):
                expected += g["weights"][m, ids.index(i)] * ids.count(i) * values[i]
            torch.testing.assert_close(g["value"][m], expected, atol=1e-4, rtol=1e-4)
            own += sum(bounds[rank] <= i < bounds[rank + 1] for i in found)
        # Some memories come from this shard, others from other shards.
        assert 0 < own < (g["ids"] >= 0).sum() or len(parts[rank]["keys"]) == 0

@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_memory_written_by_one_process_loads_in_two_three_or_four(folder, several, size):
    parts = [r["memory"] for r in several[size]["tome"]]
    order = np.argsort(np.concatenate([part["mention"].numpy() for part in parts]))
    for name in ARRAYS:                     # read with numpy alone
        written = np.concatenate([np.load(p) for p in sorted(folder.glob(f"memory/{name}-*.npy"))])
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts])[order], written)
