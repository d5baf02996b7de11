"""eval.py (tasks, controls, figures, retrieved memories, BM25) and tables.py.   python -m pytest tests/test_eval.py"""
import ast
import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import train
import tables
from memory import Retrieved

TINY = {**train.PRESETS["toy"], "intermediate": 96, "n_initial": 2, "n_upper": 1, "cluster": 16, "log_every": 4,
        "save_every": 2, "eval_mentions": 20,
        "schedule": {name: train.Schedule(4, 1e-3, 1, 16) for name in ("batch-tome", "tome", "claims", "qa")}}

EVIL = "<script>alert('x')</script> & Co"
NAMES = ["Alma Verran", "Boris Holt", "Clara Marek", "Dario Quist", "Edith Sorel", "Felix Varga", "Greta Dahl",
         "Hugo Orloff", EVIL]
CLAIMS = [f"{a} was taught by {b}." for a, b in zip(NAMES, NAMES[1:])] + ["Nobody is named here."]
QUESTIONS = [(f"Who taught {a}?", b) for a, b in zip(NAMES, NAMES[1:])] + [("What is tea?", "A drink")]

@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a complete run: a TOME-2 with 36 passages, trained and fine-tuned too briefly to learn anything."""
    folder, lines = tmp_path_factory.mktemp("eval"), []
    for a, b, c in zip(NAMES, NAMES[1:] + NAMES, NAMES[2:] + NAMES):
        for split, text in (("train", f"{a} was taught by {b}."), ("train", f"Here {a} met {c} again."),
                            ("held_out", f"{b} taught {a} and {c} tóo."), ("train", f"{a} likes <b>tea</b>.")):
            mentions = [m._asdict() for m in data.find_mentions(text, data.name_index(NAMES))]
            lines.append({"title": a, "text": text, "mentions": mentions, "split": split})
    claims = [{"text": c, "label": data.CLAIM_LABELS[i % 3]} for i, c in enumerate(CLAIMS)]
    questions = [{"question": q, "answers": [a]} for q, a in QUESTIONS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.PRESETS, "toy", TINY)
        for flags in (["tome", "--corpus", write(folder / "corpus.jsonl", lines)],
                      ["finetune", "--task", "claims", "--examples", write(folder / "claims.jsonl", claims)],
                      ["finetune", "--task", "qa", "--examples", write(folder / "qa.jsonl", questions)]):
            command = ["--quiet", "--out", folder / "run", "--blocks", 2, "--stage", *flags]
            assert train.main([*map(str, command)]) == 0
        yield folder / "run"

@pytest.fixture
def run(out, monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)                 # as if not installed, unless a test replaces it
    return out

def weights_by_hand(memory, query, k):
    """The k best rows of a memory for a query, best first, and the softmax of their scores, in plain numpy."""
    scores = memory.keys.double().numpy() @ query.detach().double().numpy()
    rows = np.argsort(-scores)[:k]
    weights = np.exp(scores[rows] - scores.max())
    return rows, weights / weights.sum()

def loss_of_equation_10(memory, query, answer, k):
    """[the loss of eq. 10 over the k memories that a query finds], or [] if none belongs to the answer."""
    rows, weights = weights_by_hand(memory, query, k)
    own = weights[memory.entity.numpy()[rows] == answer].sum()
    return [-math.log(own)] if own > 0 else []

def claim_logits_by_hand(tome, H, batch):
    """Logits (3,) of one claim: the MLM head's hidden layer (tanh GELU) at each mention, their mean, the claim head."""
    judged, mlm = [torch.zeros(H.shape[-1])], tome.mlm
    for start in batch.start.tolist():
        x = mlm.dense.weight @ H[0, start] + mlm.dense.bias
        x = .5 * x * (1 + torch.tanh((2 / np.pi) ** .5 * (x + .044715 * x ** 3)))
        judged.append(mlm.norm.weight * (x - x.mean()) / (x.var(unbiased=False) + mlm.norm.eps) ** .5 + mlm.norm.bias)
    return tome.claim.weight @ (sum(judged) / max(1, len(judged) - 1)) + tome.claim.bias

@pytest.mark.parametrize("kind", ["claims", "qa"])
@torch.no_grad()
def test_a_batch_of_claims_and_clozes_or_of_questions_has_the_losses_of_each_alone(run, kind):
    """Compares a batch's losses with a forward pass of each row alone and eq. 10 by hand."""
    loaded, _, _ = train.open_run(run, blocks=2)
    n, path, supports = len(CLAIMS), run.parent / f"{kind}.jsonl", data.CLAIM_LABELS.index("SUPPORTS")
    plan = dataclasses.replace(loaded.plan(kind), batch=n, examples=[[str(path), data.checksum(path)]])
    stage = train.FinetuneStage(loaded, plan)
    model, batch = stage.model.eval(), stage.next_batch(0)
    losses = stage.losses(batch, 0)
    true = [train.examples_batch(loaded, "claims", [example]).tokens[0].tolist()
            for example in train.task_examples(loaded, kind, path) if example.label == supports]
    asked, training = [], train.open_memories(loaded, model, 0)[1]
    model.blocks[-1].memory_attention.query.register_forward_hook(lambda layer, inputs, query: asked.append(query))
    by_hand = {"answer": [], "linking": []}
    if kind == "claims":
        by_hand["claims"] = []
    assert losses.keys() == by_hand.keys() and len(batch.tokens) == (2 * n if kind == "claims" else n)
    for r in range(len(batch.tokens)):
        one = batch.part(r, len(batch.tokens))
        H, _ = model(one.tokens, one.attention_mask, one, training)
        if kind == "claims" and r < n:
            by_hand["claims"].append(-float(claim_logits_by_hand(model, H, one).log_softmax(0)[one.label[0]]))
            continue
        mention = int((one.answer >= 0).nonzero())
        if kind == "claims":                                            # a true claim with one masked mention
            assert one.unmasked[one.attention_mask].tolist() in true and one.answer[mention] == one.entity[mention]
            place = torch.arange(one.tokens.shape[1])
            is_name = (one.start[mention] < place) & (place < one.end[mention])
            masked = torch.where(is_name, loaded.corpus.special[data.MASK], one.unmasked)
            assert torch.equal(one.tokens, masked) and one.label[0] == -1
        ends = torch.cat([H[0, one.start[mention]], H[0, one.end[mention]]])
        z = model.entity_query.linear.weight @ ends + model.entity_query.linear.bias
        for key, query, k in (("answer", z, model.config.k_answer), ("linking", asked[-1][mention], model.config.k)):
            by_hand[key] += loss_of_equation_10(training, query, int(one.answer[mention]), k)
    assert losses["linking"][0] == (loaded.settings.cloze_weight if kind == "claims" else 1)
    for name, each in by_hand.items():
        assert 0 < len(each) <= n and float(losses[name][1]) == pytest.approx(np.mean(each), abs=1e-4), name

def test_claims_without_clozes_are_trained_on_labels_alone(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")
    (run / "claims-2.pt").unlink()
    path = write(tmp_path / "claims.jsonl", [{"text": c, "label": "REFUTES"} for c in CLAIMS] + [
        {"text": "Nobody is named here.", "label": "SUPPORTS"}])
    assert train.main(["--stage", "finetune", "--task", "claims", "--examples", str(path),
                       "--blocks", "2", "--steps", "2", "--batch", "2", "--quiet", "--out", str(run)]) == 0
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert "claims" in last and "linking" not in last

def evaluate(run, *arguments):
    return evaluation.main(["--out", str(run), "--blocks", "2", *map(str, arguments)])

def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path

PUBLISHED = {
    "fever": [{"id": i, "claim": c, "evidence": [], "label": ["SUPPORTS", "REFUTES", "NOT ENOUGH INFO"][i % 3]}
              for i, c in enumerate(CLAIMS)],
    "hover": [{"uid": i, "claim": c, "label": ["SUPPORTED", "NOT_SUPPORTED"][i % 2]} for i, c in enumerate(CLAIMS)],
    "triviaqa": [{"Question": q, "Answer": {"Value": a, "Aliases": [a]}} for q, a in QUESTIONS],
    "entityquestions": [{"question": q, "answers": [a]} for q, a in QUESTIONS]}

@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tasks_are_measured(run, tmp_path, capsys, name):
    task = "claims" if name in data.CLAIM_TASKS else "qa"
    path = tmp_path / "examples.jsonl"
    data.task(name, [write(tmp_path / "published.json", PUBLISHED[name])], path,
              **({} if task == "claims" else {"corpus": run.parent / "corpus.jsonl"}))
    capsys.readouterr()
    assert evaluate(run, "--task", task, "--examples", path, "--json") == 0
    cell = json.loads(capsys.readouterr().out)[task]                # nothing else on stdout
    controls = {"memory", "emptied", "without_memory", "majority"}
    if task == "claims":
        assert cell["majority"] == max(Counter(r["label"] for r in PUBLISHED[name]).values()) / len(CLAIMS)
    else:
        assert cell["majority"] == max(Counter(a for _, a in QUESTIONS).values()) / len(QUESTIONS)
        controls |= {"recall@20", "bm25_recall@20", "answer_is_entity"}
        assert cell["answer_is_entity"] == (len(QUESTIONS) - 1) / len(QUESTIONS) and cell["emptied"] == 0
        assert cell["bm25_recall@20"] <= cell["answer_is_entity"]   # an answer that is not an entity is missed
    assert cell.keys() == controls | {"n", "interval"}
    assert cell["interval"] == dict.fromkeys(controls), "too few for an interval"
    assert cell["n"] == len(PUBLISHED[name]) and all(0 <= cell[control] <= 1 for control in controls)
    assert evaluate(run, "--task", task, "--examples", path) == 0
    names = {evaluation.TITLES.get(control, control): control for control in controls}
    assert table(capsys.readouterr().out) == {"all": {"n": str(cell["n"])} | {
        title: f"{cell[control]:.3f}" for title, control in names.items()}}

def test_a_file_without_a_label_or_an_answer_is_refused(run, tmp_path, capsys):
    for task, record in (("claims", {"text": "One.", "label": None}), ("qa", {"question": "Who?", "answers": []})):
        path = write(tmp_path / "test.jsonl", [record])
        assert evaluate(run, "--task", task, "--examples", path) == 1
        message = capsys.readouterr().err
        assert f"{path}: no example has a label" in message and message.count("\n") == 1

def test_claims_without_a_label_are_left_out_and_questions_without_an_answer_count(run, tmp_path):
    loaded, tome, memory = train.open_run(run, blocks=2)
    claims = write(tmp_path / "claims.jsonl", [{"text": c, "label": label} for c, label in
                                               zip(CLAIMS, ["SUPPORTS", None, "NOT ENOUGH INFO"])])
    assert [e.label for e in train.task_examples(loaded, "claims", claims)] == [1, 2]
    qa = write(tmp_path / "qa.jsonl", [{"question": "Who is <script>alert('x')</script> & co?", "answers": NAMES},
                                       {"question": "What?", "answers": []}])
    examples = train.task_examples(loaded, "qa", qa)
    assert [len(e.mentions) for e in examples] == [1, 0]
    judged = train.judged_examples(loaded, tome, "qa", examples, memory)
    assert judged == [(True, True), (False, False)]         # every entity answers the first question, none the second

@torch.no_grad()
def test_without_memory_switches_the_memory_layers_off(run):
    """Takes as correct the labels predicted with the blocks' Transformers alone, computed by hand."""
    loaded, tome, memory = train.open_run(run, blocks=2)
    memory.values *= 100                                            # so that attention changes the output
    alone, with_memory = [], []
    examples = [data.Example(claim, data.find_mentions(claim, data.name_index(NAMES)), 0, [], {}) for claim in CLAIMS]
    for example in examples:
        batch = train.examples_batch(loaded, "claims", [example])
        H = tome.initial(tome.embeddings(batch.tokens), batch.attention_mask)
        for block in tome.blocks:
            H = block.transformer(H, batch.attention_mask)
        alone.append((H, batch))
    for seed in range(8):                                           # some heads' labels depend on what is retrieved
        torch.manual_seed(seed)
        torch.nn.init.normal_(tome.claim.weight)
        judged = [example._replace(label=int(claim_logits_by_hand(tome, H, batch).argmax()))
                  for example, (H, batch) in zip(examples, alone)]
        cell = evaluation.figures_of(loaded, tome, memory, "claims", judged)
        assert cell["without_memory"] == 1
        with_memory.append(cell["memory"])
    assert min(with_memory) < 1

def test_mentions_come_from_the_file_or_from_noun_chunks_or_entity_names(run, tmp_path, monkeypatch, capsys):
    loaded, _, _ = train.open_run(run, blocks=2)
    text = "Did the teacher of Alma Verran like the tea?"
    path = write(tmp_path / "qa.jsonl", [
        {"question": text, "answers": NAMES[:1], "mentions": [{"start": 0, "end": 3, "entity": None}]},
        {"question": text, "answers": NAMES[:1]}])

    def found():
        examples = train.task_examples(loaded, "qa", path)
        assert all(type(m) is data.Mention for example in examples for m in example.mentions)
        return [[(text[m.start:m.end], m.entity) for m in example.mentions] for example in examples]

    def chunks(text):
        return types.SimpleNamespace(noun_chunks=[types.SimpleNamespace(start_char=m.start(), end_char=m.end())
                                                  for m in re.finditer(r"the \w+", text)])

    assert found() == [[("Did", None)], [("Alma Verran", "Alma Verran")]]
    assert "mentions of 1 examples were found using entity names" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "spacy", types.SimpleNamespace(load=lambda name, exclude: chunks))
    assert found() == [[("Did", None)], [("the teacher", None), ("the tea", None)]]
    assert "spaCy's noun chunks" in capsys.readouterr().err
    loaded.settings.max_length = 8
    assert found() and "mentions not used: 3 (they overlap others, are beyond --max-length" in capsys.readouterr().err

def table(text):
    """{row: {column: text}} of a printed table, from all blocks before the legend."""
    rows = {}
    for block in re.split(r"\n\n", text.strip("\n"))[:-1]:
        heading, *lines = block.splitlines()
        assert max(map(len, block.splitlines())) <= 80
        for line in lines:
            label, *cells = re.split(r"  +", line)
            rows.setdefault(label, {}).update(x for x in zip(heading.split(), cells) if x[1] != "-")
            assert len(cells) == len(heading.split()) and len(line) == len(heading), "aligned"
    return rows

def test_the_interval_of_clustered_values_covers_their_mean_and_copies_of_a_value_do_not_narrow_it():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):            # 40 articles, each with 1 to 9 similar mentions; the true mean is 0
        groups = np.repeat(np.arange(40), rng.integers(1, 10, 40))
        values = rng.normal(size=40)[groups] + rng.normal(size=len(groups)) / 4
        low, high = evaluation.interval(values, groups, n_draws=300)
        covered += low <= 0 <= high
    assert 0.88 <= covered / 200 <= 0.99
    once, twice = (evaluation.interval(np.tile(values, n), np.tile(groups, n)) for n in (1, 2))
    assert once == pytest.approx(twice) and once[0] < values.mean() < once[1]
    alone = evaluation.interval(values, np.arange(len(values)))
    assert alone[1] - alone[0] < once[1] - once[0]          # too narrow, as if all values were independent

def test_there_is_no_interval_below_30_groups_or_for_equal_values():
    values = np.arange(90) % 2
    assert evaluation.interval(values, np.arange(90) % 29) is None
    assert evaluation.interval(values, np.arange(90) % 31) is not None
    assert evaluation.interval(np.ones(90), np.arange(90)) is None
    assert evaluation.interval((values == 1).tolist(), range(90)) == evaluation.interval(values, np.arange(90))

def test_claims_about_one_fact_are_one_group_of_the_interval(run, monkeypatch):
    loaded = train.open_run(run, "claims", blocks=2)
    seen = []
    monkeypatch.setattr(evaluation, "interval", lambda values, groups: seen.append(groups))
    facts = [("A", ["teacher"]), ("A", ["teacher"]), ("A", ["mayor"]), ("B", ["teacher"])]
    examples = [data.Example(CLAIMS[0], [], 0, [], {"subject": a, "relations": r}) for a, r in facts]
    examples += 2 * [data.Example(CLAIMS[0], [], 0, [], {"subject": "A"})]
    evaluation.figures_of(*loaded, "claims", examples)
    assert [len(set(groups)) for groups in seen] == [5] * len(seen) and seen[0][0] == seen[0][1]

def plain_bm25(corpus, passages, query, special):
    """{passage: its BM25 score}, computed token by token."""
    k1, b = 0.9, 0.4
    words = {int(p): [t for t in corpus.tokens[corpus.passage_start[p]:corpus.passage_start[p + 1]].tolist()
                      if t not in special] for p in passages}
    scores = Counter()
    for t in query:
        df = sum(t in text for text in words.values())
        for p, text in words.items():
            tf, norm = text.count(t), k1 * (1 - b + b * len(text) * len(words) / sum(map(len, words.values())))
            scores[p] += math.log(1 + (len(words) - df + .5) / (df + .5)) * tf * (k1 + 1) / (tf + norm)
    return +scores

def best(scores, k):
    return sorted(scores, key=lambda p: (-round(scores[p], 9), p))[:k]

@pytest.mark.parametrize("passages", [slice(None), slice(3, None, 4), slice(0)])
def test_bm25_is_robertsons_formula_and_a_hit_is_a_passage_that_links_an_answer(run, passages):
    loaded = train.open_run(run, blocks=2)[0]
    corpus, chosen = loaded.corpus, np.arange(len(loaded.corpus.article))[passages]
    for text in ("Who likes tea?", "Clara Marek taught Felix", "Here again was Edith Sorel too", "\u2603", ""):
        tokens = loaded.tokenizer.encode(text, add_special_tokens=False).ids
        scores = plain_bm25(corpus, chosen, tokens, set(corpus.special.values()))
        for k in (1, 3, 20):
            linked = {e for p in best(scores, k) for e in corpus.passage_entities(p)}
            answers = [[corpus.entity_index[a] for a in names] for names in (NAMES[:1], NAMES[2:3], NAMES[5:7], [])]
            ranks = evaluation.bm25_ranks(corpus, chosen.tolist(), [(tokens, right, []) for right in answers], k)
            assert (ranks < np.inf).tolist() == [bool(linked & set(right)) for right in answers]

def test_bm25s_vote_excludes_the_mentions_own_passage_and_its_visible_entities(run):
    loaded = train.open_run(run, blocks=2)[0]
    corpus, mentions, k, ranks, queries = loaded.corpus, train.sample_eval_mentions(loaded, 30), 3, [], []
    every, special = list(range(len(corpus.article))), set(corpus.special.values())
    for m in mentions:
        own, entity = int(corpus.passage_of(m)), corpus.mention_entity[m]
        text = corpus.tokens[corpus.passage_start[own]:corpus.passage_start[own + 1]].tolist()
        number = m - corpus.mention_first[own]                  # index in its passage
        start, end = ([i for i, t in enumerate(text) if t == corpus.special[marker]][number]
                      for marker in (data.E_START, data.E_END))
        rest = text[:start] + text[end + 1:]
        scores = plain_bm25(corpus, every, [t for t in rest if t not in special], special)
        del scores[own]
        there = set(corpus.passage_entities(own).tolist()) - {entity} | {0}
        votes = Counter()
        for p in best(scores, k):
            for e in set(corpus.passage_entities(p).tolist()) - there:
                votes[e] += scores[p]
        ranks.append(sum(vote > votes[entity] - 1e-9 for vote in votes.values()) if entity in votes else math.inf)
        queries.append((rest, [entity], [own]))
    assert evaluation.bm25_ranks(corpus, every, queries, k).tolist() == ranks
    assert min(ranks) <= k and ranks.count(math.inf)

def test_the_record_of_a_masked_mention_agrees_with_a_forward_pass_of_it_alone(run):
    loaded, tome, memory = train.open_run(run, blocks=2)
    mentions = train.sample_eval_mentions(loaded, 40)
    figures, items = train.masked_mentions(loaded, tome, memory, mentions, batch_size=7)
    names = loaded.corpus.entity_names
    in_training = {int(e) for p in np.flatnonzero(~loaded.corpus.held_out) for e in loaded.corpus.passage_entities(p)}
    passages = {e: set(memory.passage[memory.entity == e].tolist()) for e in range(len(names))}
    for m, item in zip(mentions, items):
        batch, entity = data.eval_batch(loaded.corpus, np.array([m])), int(loaded.corpus.mention_entity[m])
        with torch.no_grad():
            H, retrieved = tome(batch.tokens, batch.attention_mask, batch, memory)
            right = tome.mlm_logits(H, batch.is_target).argmax(-1) == batch.unmasked[batch.is_target]
        assert (item.n_tokens, item.n_correct) == (len(right), int(right.sum())) and item.share == right.float().mean()
        assert item.group == ("seen" if entity in in_training else "unseen")
        weights, visible = retrieved[-1].weights, []
        for i, e in enumerate(batch.entity.tolist()):
            mass = weights[i][memory.entity[retrieved[-1].ids[i]] == e].sum().item()
            if batch.mention[i] == m:
                assert item.attention == pytest.approx(mass, abs=1e-4)
            elif e > 0 and len(passages[e]) > 1:
                visible.append(("seen" if e in in_training else "unseen", pytest.approx(mass, abs=1e-4)))
        assert item.visible == visible
    for kind, cell in figures.items():
        chosen = [item for item in items if item.group == kind]
        assert cell["n"] == len(chosen)
        if chosen:
            assert cell["tokens"] == sum(x.n_correct for x in chosen) / sum(x.n_tokens for x in chosen)
            assert cell["entity"] == np.mean([x.is_named for x in chosen])
            assert cell["recall@20"] == np.mean([x.is_recalled for x in chosen])

def test_the_gain_is_the_mean_over_mentions_and_its_interval_resamples_articles(run, monkeypatch):
    loaded, tome, memory = train.open_run(run, blocks=2)
    asked = []
    monkeypatch.setattr(evaluation, "interval", lambda values, groups: asked.append((values, groups)) or [-1, 1])
    measured = evaluation.masked_mention_figures(loaded, tome, memory, n=40)["masked_mention"]
    mentions, gains = train.sample_eval_mentions(loaded, 40), []
    for changed in (memory, memory.sample(0)):
        gains.append([item.share for item in train.masked_mentions(loaded, tome, changed, mentions)[1]])
    gains = np.subtract(*gains)
    of_kind = loaded.entity_group[loaded.corpus.mention_entity[mentions]]
    for kind, (values, groups) in zip(("seen", "unseen"), asked):
        assert values.tolist() == gains[of_kind == kind].tolist()
        titles = [loaded.corpus.show_mention(m).split(":")[0] for m in mentions[of_kind == kind]]
        assert [loaded.corpus.titles[g] for g in groups] == titles
        if titles:
            assert measured[kind]["gain"] == [pytest.approx(values.mean()), -1, 1]

def retrieved(text):
    """[((words, layer), [(weight, passage), …]), …], parsed from the output for one text."""
    shown, layer = [], 0
    for line in text.splitlines():
        if found := re.fullmatch(r"memory layer (\d)", line):
            layer = int(found[1])
        elif found := re.fullmatch(r"    (\d\.\d\d)  (.+: .*\[.+\].*)", line):
            shown[-1][1].append((float(found[1]), found[2]))
        elif found := re.fullmatch(r"  (\S.*)", line):
            shown.append(((found[1], layer), []))
    return shown

def test_an_empty_text_has_no_mention(run, capsys):
    for flag in ("--show", "--ask"):
        assert evaluate(run, "--task", "qa", flag, "") == 1
        assert "no mention in" in capsys.readouterr().err

def test_the_number_of_ignored_mentions_is_reported(run, capsys):
    assert evaluate(run, "--show", "Alma Verran " + "is old and " * 300 + "Boris Holt knows Boris Holt.") == 0
    assert "Mentions ignored: 2 of 3" in capsys.readouterr().err
    assert evaluate(run, "--show", "Alma Verran knows Boris Holt.") == 0 and not capsys.readouterr().err

def test_show_prints_what_each_layer_retrieved(run, capsys):
    opened = evaluation.open_run(run, blocks=2)
    loaded, tome, memory, _ = opened
    text = "Alma Verran was taught by Boris Holt."
    opened.tome.train()                                                 # encode must switch dropout off
    encoded = evaluation.encode(opened, text)
    assert evaluate(run, "--show", text) == 0
    printed = retrieved(capsys.readouterr().out)
    names = ("Alma Verran", "Boris Holt")
    assert [head for head, _ in printed] == [(n, i) for i in (1, 2) for n in names]
    shown = dict(printed)
    batch = train.examples_batch(loaded, "claims", [evaluation.example_of(loaded, text)])
    with torch.no_grad():
        H = tome.initial(tome.embeddings(batch.tokens), batch.attention_mask)
        for layer, block in enumerate(tome.blocks, 1):
            query = block.memory_attention.query(H, batch.row, batch.start, batch.end)
            for m, (mention, name) in enumerate(zip(encoded, names)):
                rows, weights = weights_by_hand(memory, query[m], tome.config.k)
                top = weights[:3].tolist()
                assert [weight for weight, _ in shown[name, layer]] == pytest.approx(top, abs=0.0051)
                assert [source.weight for source in mention.layers[layer - 1]] == pytest.approx(top, abs=1e-5)
                first, source = int(memory.mention[rows[0]]), mention.layers[layer - 1][0]
                assert source.entity == loaded.corpus.entity_names[loaded.corpus.mention_entity[first]]
                assert source.passage == loaded.corpus.show_mention(first, 50) == shown[name, layer][0][1]
            H = block.transformer(block.memory_attention(H, batch, memory)[0], batch.attention_mask)

def test_ask_prints_the_answer_with_its_probability_by_equation_10_and_its_sources(run, capsys):
    opened = evaluation.open_run(run, "qa", blocks=2)
    loaded, tome, memory, _ = opened
    text = "Who taught [the friend] of Alma Verran?"
    answer = evaluation.ask(opened, text)
    example = evaluation.example_of(loaded, text)
    batch = train.examples_batch(loaded, "qa", [example])
    with torch.no_grad():
        H, _ = tome(batch.tokens, batch.attention_mask, batch, memory)
        last = len(batch.row) - 1
        z = tome.entity_query(H, batch.row, batch.start, batch.end)[last]
    rows, weights = weights_by_hand(memory, z, tome.config.k_answer)
    names, votes = [loaded.corpus.entity_names[e] for e in memory.entity[rows].tolist()], Counter()
    for name, weight in zip(names, weights):
        votes[name] += weight
    name, probability = votes.most_common(1)[0]
    assert answer.text == name and answer.probability == pytest.approx(probability, abs=1e-5)
    own = [weight for other, weight in zip(names, weights) if other == name and weight > 1e-30]
    assert [s.weight for s in answer.sources if s.weight > 1e-30] == pytest.approx(own[:3], abs=1e-5)
    assert {s.entity for s in answer.sources} == {name}
    assert [m.words for m in answer.mentions] == ["the friend", "Alma Verran", data.MASK]
    assert torch.allclose(answer.mentions[-1].encoding, z)
    assert [s.weight for s in evaluation.search(opened, z)] == pytest.approx(weights[:3].tolist(), abs=1e-5)
    assert evaluate(run, "--ask", text) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name} (probability {probability:.2f})\n  sources\n")
    assert [head for head, _ in retrieved(printed)] == [("sources", 0)] + [
        (words, layer) for layer in (1, 2) for words in ("the friend", "Alma Verran", data.MASK)]

def test_a_claim_is_judged_by_the_softmax_of_its_labels(run, capsys):
    opened = evaluation.open_run(run, "claims", blocks=2)
    example = evaluation.example_of(opened.run, CLAIMS[0])
    batch = train.examples_batch(opened.run, "claims", [example])
    with torch.no_grad():
        H, _ = opened.tome(batch.tokens, batch.attention_mask, batch, opened.memory)
        share = claim_logits_by_hand(opened.tome, H, batch).softmax(0).numpy()
    answer = evaluation.ask(opened, CLAIMS[0])
    assert answer.text == data.CLAIM_LABELS[share.argmax()] and answer.probability == pytest.approx(share.max(), abs=1e-6)
    assert [s.weight for s in answer.sources] == sorted((s.weight for s in answer.sources), reverse=True)
    assert evaluate(run, "--task", "claims", "--ask", CLAIMS[0]) == 0
    assert capsys.readouterr().out.startswith(f"{answer.text} (probability {share.max():.2f})\n")
    with pytest.raises(data.UserError, match="open the run with task"):
        evaluation.ask(opened._replace(task=None), CLAIMS[0])

def test_without_a_memory_the_answer_is_nothing(run, capsys):
    assert evaluate(run, "--ask", "Who taught Alma Verran?", "--memory-fraction", 0) == 0
    assert capsys.readouterr().out.startswith("nothing (probability 0.00)\n")

def test_the_readmes_python_example_runs(run, capsys, monkeypatch):
    """Runs the README's example with the folder and names of this run."""
    readme = (Path(evaluation.__file__).parent / "README.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", readme, re.S)[1]
    for name, here in (("runs/toy", str(run)), ("Oskar Jarvis", "Alma Verran"), ('task="qa"', 'task="qa", blocks=2')):
        assert name in code
        code = code.replace(name, here)
    exec(compile(code, "README.md", "exec"), {})
    first, *lines = capsys.readouterr().out.splitlines()
    answer = evaluation.ask(evaluation.open_run(run, "qa", blocks=2), "Who was the teacher of Alma Verran?")
    assert first == f"{answer.text} {answer.probability:.2f}" and len(lines) > len(answer.sources)

def test_main_works_in_a_thread_with_the_output_of_a_notebook(run):
    said, status = io.StringIO(), []
    with contextlib.redirect_stdout(said):
        thread = threading.Thread(target=lambda: status.append(evaluate(run, "--ask", "Who taught Alma Verran?")))
        thread.start()
        thread.join()
    assert status == [0] and "(probability" in said.getvalue()

def test_a_closed_pipe_ends_the_program_without_a_message(run):
    with subprocess.Popen(program(run, "--show", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={"OMP_NUM_THREADS": "1"}) as done:
        done.stdout.close()
        assert not done.stderr.read() and done.wait() == 141

def test_articles_are_hidden_only_if_every_example_names_one(run, tmp_path):
    path = write(tmp_path / "claims.jsonl", [{"text": f"{NAMES[0]} met {NAMES[1]}.", "label": "SUPPORTS", "subject": subject}
                                             for subject in (NAMES[0], ["a", "list"], "nobody")])
    loaded = train.open_run(run, "claims", blocks=2)
    examples = train.task_examples(loaded[0], "claims", path)
    assert "fact_removed" in evaluation.figures_of(*loaded, "claims", examples[:1])
    assert "fact_removed" not in evaluation.figures_of(*loaded, "claims", examples)
    for title, info in ("None", {}), ("7", {"subject": 7}), ("None", {"bridge": None}):
        loaded[0].corpus.article_index[title] = 0
        example = data.Example("Alma Verran met.", [], 1, [], info)
        assert not {"fact_removed", "bridge_removed"} & evaluation.figures_of(*loaded, "claims", [example]).keys()

@pytest.mark.parametrize("text, plain, words", (
        ("Alma Verran's [teacher] met Boris Holt.", "Alma Verran's teacher met Boris Holt.",
         ["Alma Verran", "teacher", "Boris Holt"]),
        ("A [teacher] has a teacher, Alma [Verran].", "A teacher has a teacher, Alma Verran.", ["teacher", "Verran"]),
        ("Who taught the [old friend]?", "Who taught the old friend?", ["old friend"]),               # no name at all
        ("[friend of Alma Verran] [Boris Holt] []", "friend of Alma Verran Boris Holt ",
         ["friend of Alma Verran", "Boris Holt"])))
def test_words_in_brackets_are_a_mention(run, text, plain, words):
    opened = evaluation.open_run(run, blocks=2)
    example = evaluation.example_of(opened.run, text)
    assert example.text == plain and [plain[m.start:m.end] for m in example.mentions] == words
    assert [mention.words for mention in evaluation.encode(opened, text)] == words

def test_control_characters_are_escaped_and_flags_that_do_not_fit_are_refused(run, capsys, monkeypatch):
    assert evaluate(run, "--show", "\x1b[31m Nobody \u202e at all.") == 1
    assert "\x1b" not in (said := capsys.readouterr().err) and "Nobody \\u202e at all" in said.replace("\\\\", "\\")
    for flags in (("--show", "--json"), ("--show", "0"), ("--plot", "x.png", "--json"), ("--plot", "x.png", "--task", "qa"),
                  ("--ask", "Who?", "--examples", "x"), ("--memory-fraction", "nan")):
        with pytest.raises(SystemExit):
            evaluate(run, *flags)
        assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr(evaluation, "show_masked", lambda *_: signal.raise_signal(signal.SIGINT))       # Ctrl-C
    assert evaluate(run, "--show", 2) == 130 and capsys.readouterr().err == "eval.py: stopped; nothing was changed\n"

def test_show_n_shows_n_masked_mentions_of_the_groups_in_turn(run, capsys):
    opened = evaluation.open_run(run, blocks=2)
    group = opened.run.entity_group
    group[opened.run.corpus.entity_index["Boris Holt"]] = "unseen"
    mentions = train.sample_eval_mentions(opened.run, 99)
    kinds = group[opened.run.corpus.mention_entity[mentions]]
    assert len(set(kinds)) == 2
    for n in (1, 2, 3, 4, 99):
        shown = [mention.words for mention in evaluation.show_masked(opened, n)]
        assert len(shown) == min(n, len(mentions)) == capsys.readouterr().out.count("predicted: ")
        unseen = sum("Boris Holt" in words for words in shown)
        assert unseen == min(n // 2, sum(kinds == "unseen")) or n == 99

def test_the_prediction_is_that_of_the_masked_mention_if_a_passage_has_two(run, monkeypatch, capsys):
    """The model is made to predict "tea" for each token of the masked mention."""
    opened = evaluation.open_run(run, blocks=2)
    loaded = opened.run
    mentions = train.sample_eval_mentions(loaded, 5)
    passages = loaded.corpus.passage_of(mentions).tolist()
    assert len(set(passages)) < len(passages)
    tea = loaded.tokenizer.encode("tea", add_special_tokens=False).ids[:1]
    logits = torch.nn.functional.one_hot(torch.tensor(tea), loaded.config.vocab_size)
    monkeypatch.setattr(opened.tome, "mlm_logits", lambda H, is_target: logits.expand(int(is_target.sum()), -1))
    for m in mentions:
        monkeypatch.setattr(train, "sample_eval_mentions", lambda *_: np.array([m]))
        evaluation.show_masked(opened, 1)
        said = loaded.tokenizer.decode(int(data.eval_batch(loaded.corpus, m[None]).is_target.sum()) * tea)
        printed = capsys.readouterr().out
        assert printed.startswith(f"\n{loaded.corpus.show_mention(m)}\npredicted: {said}\n")
        name = loaded.corpus.entity_names[loaded.corpus.mention_entity[m]]
        words = f"{data.MASK} ({name})"
        assert [x[0] for x in retrieved(printed)] == [(words, 1), (words, 2)]

def test_the_advice_for_a_missing_run_is_a_command_that_works(run, tmp_path, capsys):
    (tmp_path / "README.md").write_text("text")
    for out in (tmp_path / "none", tmp_path / "two words" / "$HOME", tmp_path):
        assert evaluation.main(["--out", str(out)]) == 1
        advice = capsys.readouterr().err.split("; run python train.py ")[1]
        assert train.parse_arguments(shlex.split(advice)).out == str(out) and not (out / "run.json").exists()
    for out in (tmp_path / "README.md", tmp_path / "README.md" / "run"):        # nothing can be trained there
        assert evaluation.main(["--out", str(out)]) == 1
        said = capsys.readouterr().err
        assert "train.py" not in said and "give the folder of a run" in said

@pytest.mark.parametrize("flags", [(), ("--show", "Alma Verran met $x^$ [him]."), ("--show", "3"),
                                   ("--ask", "Who taught Alma Verran?")])
def test_pictures_are_drawn(run, tmp_path, capsys, flags):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    assert evaluate(run, "--plot", path, *flags) == 0
    assert capsys.readouterr().out.endswith(f"Written: {path}\n") and path.read_bytes().startswith(b"\x89PNG")

def test_the_curves_show_the_log_and_the_accuracy_with_parts_of_the_memory(run, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    opened = evaluation.open_run(run, blocks=2)
    evaluation.draw_run(figure, opened, 2)
    left, right = figure.axes
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    log = [record for record in log if "seen" in record]
    lines = {line.get_label(): line for line in left.lines}
    stages = ("batch-tome", log[-1]["stage"])
    ends = np.cumsum([0] + [max(r["step"] for r in log if r["stage"] == stage) for stage in stages])
    assert lines["attention, seen"].get_ydata().tolist() == [record["seen"]["attention"] for record in log]
    assert lines["tokens, unseen"].get_ydata().tolist() == [record["unseen"]["tokens"] for record in log]
    assert lines["tokens, seen"].get_xdata()[-1] == ends[-1] and lines["stage tome begins"].get_xdata()[0] == ends[1]
    assert lines["fit_retrieval; not measured before"].get_xdata()[0] == int(ends[1] * opened.run.settings.memory_from)
    mentions = train.sample_eval_mentions(opened.run, 300)
    for line in right.lines:
        for share, accuracy in zip(line.get_xdata(), line.get_ydata()):
            measured, _ = train.masked_mentions(*opened[:2], opened.memory.sample(share / 100), mentions)
            assert accuracy == measured[line.get_label()]["tokens"]

def test_plot_without_matplotlib_or_with_an_unknown_suffix_gives_one_sentence(run, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert evaluate(run, "--plot", tmp_path / "picture.doc") == 1
    assert "must end in .png" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert evaluate(run, "--plot", tmp_path / "picture.png") == 1
    assert capsys.readouterr().err == "eval.py: --plot needs matplotlib; run pip install matplotlib\n"
    assert not list(tmp_path.iterdir())

def test_no_function_of_eval_is_longer_than_a_screen():
    for node in ast.walk(ast.parse(Path(evaluation.__file__).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, node.name

def test_figures_without_mentions_are_null(run, monkeypatch, capsys):
    monkeypatch.setattr(train, "sample_eval_mentions", lambda run, n: np.zeros(0, int))
    assert evaluate(run, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    for key in ("masked_mention", "same_entity_mass"):
        for cell in figures[key].values():
            assert cell.pop("n") == 0 and len(cell) > 1 and set(cell.values()) == {None}

def program(run, *flags):
    """The command line that runs eval.py as a separate program."""
    return [sys.executable, evaluation.__file__, "--blocks", "2", "--out", str(run), *flags]

def test_the_report_is_complete_on_a_terminal_that_is_not_utf_8(run, capsys):
    done = subprocess.run(program(run), capture_output=True, text=True,
                          env={"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = table(done.stdout)
    assert rows.keys() == {"seen", "unseen"} and {"memory", "emptied", "gain", "visible", "n"} <= rows["seen"].keys()
    assert evaluate(run, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    for kind, row in rows.items():
        for key, value in (figures["masked_mention"][kind] | figures["same_entity_mass"][kind]).items():
            if value is not None:
                value = value[0] if key == "gain" else value
                shown = f"{value:.3f}" if isinstance(value, float) else str(value)
                assert row[evaluation.TITLES.get(key, key)] == shown

def test_recall_considers_the_best_20_even_if_the_memory_returns_them_unsorted(run):
    """The answer is at place 0 or 40 of 50 memories, with the best or the worst score."""
    loaded, tome, _ = train.open_run(run, blocks=2)
    answer = loaded.corpus.entity_index["Alma Verran"]
    example = data.Example("Who?", [], None, ["Alma Verran"], {})
    for at, score, hit in ((40, 1.0, 1), (0, -1.0, 0), (40, -1.0, 0), (0, 1.0, 1)):
        entity, scores = torch.arange(100, 150)[None], torch.linspace(0.5, 0, 50)[None]
        entity[0, at], scores[0, at] = answer, score
        table = types.SimpleNamespace(retrieve=lambda *_: Retrieved(scores, entity, entity))
        item, = train.judged_examples(loaded, tome, "qa", [example], table, attend=False)
        assert item.is_recalled == hit

def test_cells_are_means_over_seeds():
    assert [tables.as_text(cell) for cell in ([0.5, 1.0], [0.25], [], 66.6, "")] == [
        "0.75 ± 0.35", "0.25", "-", "66.6", ""]

def test_calls_in_cells_run_concurrently_and_each_only_once():
    begun, together = [], threading.Barrier(3, timeout=20)

    @tables.once
    def work(x):
        begun.append(x)
        together.wait()                 # until all three have begun
        return [x]

    filled = tables.filled({"a": [["", "one"], ["x", (work, 1), 7.0, (work, 2)]],
                            "b": [[(work, 3)], [(work, 1)]]})
    assert filled == {"a": [["", "one"], ["x", [1], 7.0, [2]]], "b": [[[3]], [[1]]]}
    assert sorted(begun) == [1, 2, 3]

def test_after_a_failed_command_no_other_begins(tmp_path, monkeypatch, capsys):
    begun = []

    def failing(line, **_):
        begun.append(line)
        return types.SimpleNamespace(returncode=1, stderr="train.py: no room", stdout="")

    monkeypatch.setattr(tables, "FAILED", threading.Event())
    monkeypatch.setattr(tables, "world", lambda out, seed: out)
    monkeypatch.setattr(subprocess, "run", failing)
    assert tables.main(["claims", "--out", str(tmp_path / "tables")]) == 1
    message = capsys.readouterr().err
    assert "no room" in message.splitlines()[-1] or "another command" in message.splitlines()[-1]
    assert len(begun) <= torch.get_num_threads(), "of the four runs that could begin"

@pytest.mark.slow
def test_tables_are_made_from_their_runs(tmp_path, monkeypatch, capsys):
    """Checks that each cell is present, but not its value, with models trained for a few steps."""
    commands = []
    in_turn = types.SimpleNamespace(map=lambda work, items: [work(item) for item in items])      # without threads

    def here(script, *args):
        args = [str(2 if before == "--steps" else arg) for before, arg in zip((None, *args), args)]
        commands.append((script, *args))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert (train if script == "train.py" else evaluation).main(args) == 0
        return said.getvalue()

    for name, n in (("person", 60), ("city", 20), ("country", 10), ("company", 20), ("film", 40)):
        monkeypatch.setitem(data.COUNTS, name, n)
    monkeypatch.setitem(train.PRESETS, "toy", TINY | {"schedule": {
        kind: train.Schedule(2, 1e-3, 1, 16) for kind in TINY["schedule"]}})
    monkeypatch.setattr(tables, "command", here)
    monkeypatch.setattr(tables, "ThreadPoolExecutor", lambda n: contextlib.nullcontext(in_turn))
    monkeypatch.setattr(tables, "TABLES", {name: tables.TABLES[name] for name in ("unseen", "retrieved")})
    assert tables.main(["all", "--out", str(tmp_path)]) == 0
    assert [line for line in capsys.readouterr().out.split("\n") if line in tables.TABLES] == list(tables.TABLES)
    for name in tables.TABLES:
        heading, *rows = data.read_json(tmp_path / f"{name}.json")["lines"]
        values = [value for row in rows for cell in row if isinstance(cell, list) for value in cell]
        assert len(rows) > 1 and len(values) > 3 and all(0 <= value <= 1 for value in values)
    trained = [(args[2], "--blocks" in args) for script, *args in commands if script == "train.py"]
    assert len(set(trained)) == len(trained), "no run is begun twice"
    assert (tmp_path / "tome-1-0/tome-2.pt").exists() and not (tmp_path / "tome-2-0").exists()      # shared BATCH-TOME
    assert (tmp_path / "mlm-alone-0/batch-tome.pt").samefile(tmp_path / "no-coreference-0/batch-tome.pt")
