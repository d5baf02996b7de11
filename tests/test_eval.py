"""Real tasks, their controls and figures, what was retrieved, BM25.   python -m pytest tests/test_eval.py"""
import contextlib
import html
import io
import json
import math
import re
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
from test_train import TINY, weights

EVIL = "<script>alert('x')</script> & Co"
NAMES = ["Alma Verran", "Boris Holt", "Clara Marek", "Dario Quist", "Edith Sorel", "Felix Varga", "Greta Dahl",
         "Hugo Orloff", EVIL]


def sentence(*parts):
    """Text and mentions of parts of which the names are linked."""
    text, mentions = "", []
    for part in parts:
        if part in NAMES:
            mentions.append({"start": len(text), "end": len(text) + len(part), "entity": part})
        text += part
    return text, mentions


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A TOME-2 over 36 passages, trained for a few steps, so that it has every file of a run and knows nothing."""
    folder = tmp_path_factory.mktemp("eval")
    with open(folder / "corpus.jsonl", "w") as file:
        for i, name in enumerate(NAMES):
            other, third = NAMES[(i + 1) % len(NAMES)], NAMES[(i + 2) % len(NAMES)]
            for n, parts in enumerate(((name, " was taught by ", other, "."), ("Here ", name, " met ", third, " again."),
                                       (other, " taught ", name, " and ", third, " too."), (name, " likes <b>tea</b>."))):
                text, mentions = sentence(*parts)
                print(json.dumps({"title": name, "text": text, "mentions": mentions,
                                  "split": "held_out" if n == 2 else "train"}), file=file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.PRESETS, "toy", {**TINY, "n_initial": 2})
        assert train.main(["--stage", "tome", "--blocks", "2", "--quiet", "--corpus",
                           str(folder / "corpus.jsonl"), "--out", str(folder / "run")]) == 0
        yield folder / "run"


@pytest.fixture
def run(out, monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)                 # not installed, unless a test says so
    data._pipeline.cache_clear()
    for task in ("claims", "qa"):
        (out / f"{task}.pt").unlink(missing_ok=True)
    return out


def finetune(run, task, path):
    return train.main(["--stage", "finetune", "--task", task, "--examples", str(path), "--quiet",
                       "--out", str(run)])


def test_clozes_beside_claims_teach_the_last_memory_layer_and_each_has_its_own_loss(run, tmp_path):
    """One batch of both against each read alone, the sums of eq. 10 by hand."""
    claims = [data.Example(claim, data.find_mentions(claim, NAMES), n % 2, [], {}) for n, claim in enumerate(CLAIMS)]
    path = write(tmp_path / "claims.jsonl", [{"text": e.text, "mentions": [m._asdict() for m in e.mentions],
                                              "label": data.CLAIM_LABELS[e.label]} for e in claims])
    true = [e for e in claims if data.CLAIM_LABELS[e.label] == "SUPPORTS"]
    loaded, _, _ = train.open_run(run)
    recipe = {"kind": "claims", "batch": len(claims), "n_search": None}
    stage = train.finetune_stage(loaded, recipe, examples=path)
    model, batch = stage.model.eval(), stage.next_batch(0)
    with torch.no_grad():
        parts = {name: float(loss) for name, (_, loss) in stage.losses(batch).items()}
    n = len(claims)
    assert parts.keys() == {"claims", "qa", "asked"} and (batch.answer > 0).tolist() == n * [False] + n * [True]
    training, shown, hidden, by_hand = train.open_memory(loaded, model, train.load_model(loaded)[1])[1], [], [], {"claims": [], "qa": [], "asked": []}
    for r, row in enumerate(batch.tokens):
        label, at = int(batch.label[r]), int(batch.answer_mention[r])
        if r < n:
            example = next(e for e in claims if train.examples_batch(loaded, "claims", [e]).tokens[0].tolist() ==
                           row[batch.attention_mask[r]].tolist())
            one, mention = train.examples_batch(loaded, "claims", [example]), -1
        else:           # a true claim, but for the words of the mention that is asked for
            words = loaded.tokenizer.decode(batch.unmasked[r, batch.start[at] + 1:batch.end[at]].tolist())
            name = loaded.corpus.entity_names[int(batch.answer[r])]
            assert words.replace(" ", "").lower() == name.replace(" ", "").lower() or name == EVIL
            example = next(e for e in true if any(m.entity == name for m in e.mentions) and train.examples_batch(
                loaded, "qa", [e]).tokens[0, :-4].tolist() == batch.unmasked[r][batch.attention_mask[r]][:-1].tolist())
            one = train.examples_batch(loaded, "claims", [example._replace(label=None, answers=[name])])
            length = int(batch.attention_mask[r].sum())
            assert one.tokens.shape == (1, length)
            mention = int(one.answer_mention)
            a, b = int(one.start[mention]) + 1, int(one.end[mention])
            assert (one.tokens[0, a:b] == data.special_ids(loaded.tokenizer)[data.MASK]).all()
            shown.append(row[a:b].tolist())
            hidden.append(batch.unmasked[r, a:b].tolist())
            one.tokens = row[None, :length]
        with torch.no_grad():
            H, layers = model(one.tokens, one.attention_mask, one, training)
        if r < n:
            logits = model.claim.weight @ H[0, one.start].mean(0) + model.claim.bias
            by_hand["claims"].append(-float(logits.detach().log_softmax(0)[label]))
            continue
        ends = torch.cat([H[0, one.start[mention]], H[0, one.end[mention]]])
        z = model.answer.linear.weight @ ends + model.answer.linear.bias
        for key, query in (("qa", z), ("asked", layers[-1].query[mention])):
            scores = np.exp(training.keys.numpy().astype(np.float64) @ query.detach().numpy())
            by_hand[key].append(-math.log(scores[training.entity.numpy() == int(one.answer)].sum() / scores.sum()))
    for name, losses in by_hand.items():
        assert len(losses) == n and parts[name] == pytest.approx(np.mean(losses), abs=1e-4), name
    mask = data.special_ids(loaded.tokenizer)[data.MASK]
    assert all(set(tokens) == {mask} for tokens in shown[::2])
    assert all(tokens == before if len(tokens) == len(before) else set(tokens) == {mask}
               for before, tokens in zip(hidden[::2], shown[1::2]))
    assert any(set(tokens) != {mask} for tokens in shown)


def test_claims_of_which_no_true_one_names_an_entity_are_learnt_from_their_labels_alone(run, tmp_path):
    path = write(tmp_path / "claims.jsonl", [{"text": c, "label": "REFUTES"} for c in CLAIMS] + [
        {"text": "Nobody is named here.", "label": "SUPPORTS"}])
    assert train.main(["--stage", "finetune", "--task", "claims", "--examples", str(path),
                       "--steps", "2", "--batch", "2", "--quiet", "--out", str(run)]) == 0
    _, last = train.read_log(run / "log.jsonl")[-1]
    assert "claims" in last and "asked" not in last
    (run / "claims.pt").unlink()


def evaluate(run, *arguments):
    return evaluation.main(["--out", str(run), *map(str, arguments)])


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


# ---------------------------------------------------------------- the published tasks, as data.py task writes them

CLAIMS = [f"{a} was taught by {b}." for a, b in zip(NAMES, NAMES[1:])] + ["Nobody is named here."]
QUESTIONS = [(f"Who taught {a}?", b) for a, b in zip(NAMES, NAMES[1:])] + [("What is tea?", "A drink")]
PUBLISHED = {
    "fever": [{"id": i, "claim": c, "evidence": [], "label": ["SUPPORTS", "REFUTES", "NOT ENOUGH INFO"][i % 3]}
              for i, c in enumerate(CLAIMS)],
    "hover": [{"uid": i, "claim": c, "num_hops": 2, "label": ["SUPPORTED", "NOT_SUPPORTED"][i % 2]}
              for i, c in enumerate(CLAIMS)],
    "fm2": [{"id": i, "text": c, "gold_evidence": [], "label": ["SUPPORTS", "REFUTES"][i % 2]}
            for i, c in enumerate(CLAIMS)],
    "triviaqa": [{"Question": q, "Answer": {"Value": a, "Aliases": [a]}} for q, a in QUESTIONS],
    "complexwebquestions": [{"question": q, "answers": [{"answer": a, "aliases": []}]} for q, a in QUESTIONS],
    "entityquestions": [{"question": q, "answers": [a]} for q, a in QUESTIONS]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_task_is_learnt_from_and_measured(run, tmp_path, capsys, name):
    task = "claims" if name in data.CLAIM_TASKS else "qa"
    path = tmp_path / "examples.jsonl"
    data.task(name, [write(tmp_path / "published.json", PUBLISHED[name])], path,
              **({} if task == "claims" else {"corpus": run.parent / "corpus.jsonl"}))
    capsys.readouterr()
    assert finetune(run, task, path) == 0
    said = capsys.readouterr()
    assert f"mentions of {len(PUBLISHED[name])} examples found by entity names" in said.err
    assert evaluate(run, "--task", task, "--examples", path, "--json") == 0
    cell = json.loads(capsys.readouterr().out)[task]                # nothing else on stdout
    controls = {"memory", "emptied", "without_memory", "majority"}
    if task == "claims":
        labels = Counter(r["label"] for r in PUBLISHED[name])
        assert cell["majority"] == max(labels.values()) / len(CLAIMS)
        assert torch.load(run / "claims.pt", weights_only=True)["model"]["claim.weight"].shape[0] == 3
        assert ("NOT ENOUGH INFO" in labels) == (name == "fever")
    else:
        assert cell["majority"] == max(Counter(a for _, a in QUESTIONS).values()) / len(QUESTIONS)
        controls |= {"recall@20", "bm25_recall@20", "answer_is_entity"}
        assert re.search(r"\d of \d questions to train on have an answer", said.out)
        assert cell["answer_is_entity"] == (len(QUESTIONS) - 1) / len(QUESTIONS) and cell["emptied"] == 0
        assert cell["bm25_recall@20"] <= cell["answer_is_entity"]   # what is no entity counts as missed
    assert cell.keys() == controls | {"n", "interval"} and cell["interval"].keys() == controls
    assert cell["n"] == len(PUBLISHED[name])
    for control in controls:
        low, high = cell["interval"][control]
        assert 0 <= low <= cell[control] <= high <= 1
    assert evaluate(run, "--task", task, "--examples", path) == 0
    assert "95%" in capsys.readouterr().out


@pytest.mark.parametrize("task, records, what", [
    ("claims", [{"text": c, "label": None} for c in CLAIMS], "no claim has a label"),
    ("qa", [{"question": q, "answers": []} for q, _ in QUESTIONS], "no question has an answer")])
def test_a_test_file_is_shown_but_neither_learnt_from_nor_measured(run, tmp_path, capsys, task, records, what):
    path = write(tmp_path / "test.jsonl", records)
    assert finetune(run, task, path) == 1
    message = capsys.readouterr().err
    assert f"{path}: {what}" in message and message.count("\n") == 1
    known = [{**r, "label": "SUPPORTS", "answers": NAMES[:1]} for r in records]
    assert finetune(run, task, write(tmp_path / "known.jsonl", known)) == 0
    assert evaluate(run, "--task", task, "--examples", path) == 1
    assert what in capsys.readouterr().err
    assert evaluate(run, "--task", task, "--examples", path, "--show", 2) == 0
    assert capsys.readouterr().out.count("says: ") == 2


def test_claims_without_a_label_do_not_count_and_questions_without_an_answer_do(run, tmp_path):
    loaded, tome, memory = train.open_run(run)
    claims = write(tmp_path / "claims.jsonl", [{"text": c, "label": label} for c, label in
                                               zip(CLAIMS, ["SUPPORTS", None, "NOT ENOUGH INFO"])])
    assert [e.label for e in train.read_examples(loaded, "claims", claims)] == [1, 2]
    qa = write(tmp_path / "qa.jsonl", [{"question": "Who is <script>alert('x')</script> & co?", "answers": NAMES},
                                       {"question": "What?", "answers": []}])
    examples = train.read_examples(loaded, "qa", qa)
    assert [len(e.mentions) for e in examples] == [1, 0]
    figures = train.task_accuracy(loaded, tome, "qa", examples, memory)
    assert figures == {"accuracy": .5, "recall@20": .5, "n": 2}     # any entity is right for one, none for the other


def test_without_memory_the_layers_are_off(run):
    """By hand: the blocks' Transformers alone, the mean of the markers, the head; that says the labels, so all is right."""
    loaded, tome, memory = train.open_run(run)
    memory.values *= 100                                            # that what is attended to is seen in what is said
    means, with_memory = [], []
    examples = [data.Example(claim, data.find_mentions(claim, NAMES), 0, [], {}) for claim in CLAIMS]
    for example in examples:
        batch = train.examples_batch(loaded, "claims", [example])
        with torch.no_grad():
            H = tome.initial(tome.embeddings(batch.tokens), batch.attention_mask)
            for block in tome.blocks:
                H = block.transformer(H, batch.attention_mask)
            means.append(H[0, batch.start].mean(0) if len(batch.start) else torch.zeros(H.shape[-1]))
    for seed in range(8):                                           # heads of which some tell what was retrieved
        torch.manual_seed(seed)
        torch.nn.init.normal_(tome.claim.weight)
        said = [int((tome.claim.weight @ mean + tome.claim.bias).argmax()) for mean in means]
        judged = [example._replace(label=label) for example, label in zip(examples, said)]
        cell = evaluation.figures_of(loaded, tome, memory, "claims", judged)
        assert cell["without_memory"] == 1
        with_memory.append(cell["memory"])
    assert min(with_memory) < 1
    nobody = [data.Example("Nobody is named here.", [], 0, [], {})]         # nothing to look up is no error
    assert evaluation.figures_of(loaded, tome, memory, "claims", nobody)["n"] == 1


# ---------------------------------------------------------------- mentions of claims and questions

def fake_spacy(monkeypatch, load=None):
    def chunks(text):
        return types.SimpleNamespace(noun_chunks=[types.SimpleNamespace(start_char=m.start(), end_char=m.end())
                                                  for m in re.finditer(r"the \w+", text)])
    spacy = types.SimpleNamespace(util=types.SimpleNamespace(get_installed_models=lambda: ["en_x"]),
                                  load=load or (lambda name, exclude: chunks))
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    data._pipeline.cache_clear()


def test_mentions_are_given_or_noun_chunks_or_entity_names_in_the_same_form(run, tmp_path, monkeypatch, capsys):
    loaded, _, _ = train.open_run(run)
    text = "Did the teacher of Alma Verran like the tea?"
    path = write(tmp_path / "qa.jsonl", [
        {"question": text, "answers": NAMES[:1], "mentions": [{"start": 0, "end": 3, "entity": None}]},
        {"question": text, "answers": NAMES[:1]}])

    def found(example):
        assert all(type(m) is data.Mention for m in example.mentions)
        return [(text[m.start:m.end], m.entity) for m in example.mentions]

    given, names = map(found, train.read_examples(loaded, "qa", path))
    assert given == [("Did", None)] and names == [("Alma Verran", "Alma Verran")]
    assert "mentions of 1 examples found by entity names (noun chunks need spaCy" \
        in capsys.readouterr().err
    fake_spacy(monkeypatch)
    given, chunks = map(found, train.read_examples(loaded, "qa", path))
    assert given == [("Did", None)] and chunks == [("the teacher", None), ("the tea", None)]
    assert "spaCy's noun chunks" in capsys.readouterr().err

    def broken(name, exclude):
        raise OSError("no config.cfg")
    fake_spacy(monkeypatch, broken)
    assert found(train.read_examples(loaded, "qa", path)[1]) == names
    assert "no config.cfg" in capsys.readouterr().err


# ---------------------------------------------------------------- figures

def test_wilsons_interval_holds_the_shares_that_the_count_does_not_reject():
    for right, n in ((0, 10), (3, 10), (10, 10), (115, 234)):
        low, high = evaluation.wilson(right / n, n)
        for bound in (low, high):
            if 0 < bound < 1:       # at either bound the share is 1.96 standard deviations away
                assert abs(right / n - bound) == pytest.approx(1.96 * math.sqrt(bound * (1 - bound) / n))
        assert 0 <= low <= right / n <= high <= 1
    assert evaluation.wilson(0, 10)[0] == 0 and evaluation.wilson(1, 10)[1] == 1


@pytest.mark.parametrize("passages", [slice(None), slice(3, None, 4)])
def test_bm25_is_robertsons_formula(run, passages):
    corpus = train.open_run(run)[0].corpus
    chosen, k1, b = np.arange(len(corpus.article))[passages], 0.9, 0.4
    special = set(corpus.special.values())
    texts = {int(p): [t for t in corpus.tokens[corpus.passage_start[p]:corpus.passage_start[p + 1]].tolist()
                      if t not in special] for p in chosen}
    mean = sum(map(len, texts.values())) / len(texts)
    index = evaluation.BM25(corpus, chosen)
    rng = np.random.default_rng(0)
    for query in ([], [corpus.special["[UNK]"]], *(rng.integers(0, corpus.vocab_size, n).tolist() for n in (1, 4, 40))):
        scores = {}
        for p, words in texts.items():
            score = 0.0
            for t in query:
                df = sum(t in other for other in texts.values())
                tf = words.count(t)
                score += (math.log(1 + (len(texts) - df + .5) / (df + .5)) * tf * (k1 + 1)
                          / (tf + k1 * (1 - b + b * len(words) / mean)))
            if score:
                scores[p] = score
        for k in (3, 20):
            best = sorted(scores, key=lambda p: (-round(scores[p], 9), p))[:k]
            found, found_scores = index.search(query, k)
            assert found_scores.tolist() == pytest.approx([scores[p] for p in best])
            assert sorted(scores[p] for p in found.tolist()) == pytest.approx(sorted(scores[p] for p in best))
    empty = evaluation.BM25(corpus, np.arange(0))
    assert len(empty.search([5, 6])[0]) == 0


def test_bm25_has_a_hit_where_a_passage_holds_a_linked_mention_of_an_answer(run):
    loaded, _, memory = train.open_run(run)
    tea = int(next(p for p in range(len(loaded.corpus.article)) if "tea" in loaded.corpus.passage_text(p)
                   and "Alma" in loaded.corpus.passage_text(p)))
    index = evaluation.BM25(loaded.corpus, np.array([tea]))
    for answers, hit in ((["Alma Verran"], 1), (["Boris Holt", "Alma Verran"], 1), (["Boris Holt"], 0), (["tea"], 0),
                         ([], 0)):
        assert evaluation.bm25_recall(loaded, index, [data.Example("Who likes tea?", [], None, answers, {})]) == hit
    assert evaluation.bm25_recall(loaded, index, [data.Example("Xyz", [], None, ["Alma Verran"], {})]) == 0


# ---------------------------------------------------------------- looking

def test_what_is_shown_is_what_each_layer_retrieved(run, capsys):
    loaded, tome, memory = train.open_run(run)
    text = "Alma Verran was taught by Boris Holt."
    example = evaluation.example_of(loaded, text)
    (shown_text, says, mentions), = evaluation.show_examples(loaded, tome, memory, None, [example])
    assert shown_text == text and says == ""
    assert [words for words, _ in mentions] == ["Alma Verran", "Boris Holt"]
    index = {name: i for i, name in enumerate(loaded.corpus.entity_names)}
    batch = data.example_batch([example], "claims", loaded.tokenizer, index)
    with torch.no_grad():
        H = tome.initial(tome.embeddings(batch.tokens), batch.attention_mask)
        for layer, block in enumerate(tome.blocks, 1):
            query = block.memory_attention.query(H, batch.row, batch.start, batch.end)
            scores = [sorted((q @ memory.keys.T).tolist(), reverse=True) for q in query]
            for (_, layers), best in zip(mentions, scores):
                name, memories = list(layers.items())[layer - 1]
                top = best[:tome.config.k]
                assert name == f"layer {layer}"
                assert [w for w, _ in memories] == pytest.approx(
                    [math.exp(s) / sum(map(math.exp, top)) for s in best[:3]], abs=1e-5)
            H = block.transformer(block.memory_attention(H, batch, memory)[0], batch.attention_mask)
    assert evaluate(run, "--show", text) == 0
    printed = capsys.readouterr().out
    assert printed.count("    layer 1") == printed.count("    layer 2") == 6
    for line in printed.splitlines()[1:]:
        assert not line.startswith("    layer") or re.search(r"layer \d  \d\.\d\d  .+: .*\[.+\]", line)


def test_what_the_model_says_is_judged_where_the_truth_is_known():
    assert evaluation.verdict("Ada", 0.456, ["Bo", "Ada"]) == "Ada   (probability 0.46; right)"
    assert evaluation.verdict("Ada", 1, ["Bo"]) == "Ada   (probability 1.00; wrong)"
    assert evaluation.verdict("Ada", 0, []) == "Ada   (probability 0.00)"


def test_held_out_mentions_are_shown_by_number(run, capsys):
    assert evaluate(run, "--show", 2) == 0
    printed = capsys.readouterr().out
    assert printed.count("says: ") == 2 and "[MASK]" in printed and "layer 2" in printed


def test_what_is_shown_has_no_dropout(run):
    _, tome, memory = loaded = train.open_run(run)
    for module in tome.modules():
        if hasattr(module, "p"):
            module.p = 0.5
    evaluation.masked_mention_figures(*loaded)
    first = evaluation.show_masked(*loaded)
    tome.train()
    assert evaluation.show_masked(*loaded) == first != []


def test_a_subject_that_is_no_article_is_not_taken_away(run, tmp_path):
    path = write(tmp_path / "claims.train.jsonl", [{"text": f"{NAMES[i]} met {NAMES[i + 1]}.", "label": "SUPPORTS", "subject": subject}
                                                   for i, subject in enumerate((NAMES[0], ["a", "list"], "nobody"))])
    finetune(run, "claims", path)
    loaded = train.open_run(run, "claims")
    examples = train.read_examples(loaded[0], "claims", path)
    assert "fact_removed" in evaluation.figures_of(*loaded, "claims", examples[:1])
    assert "fact_removed" not in evaluation.figures_of(*loaded, "claims", examples)


@pytest.mark.parametrize("text, plain, words", (
        ("Alma Verran's [teacher] met Boris Holt.", "Alma Verran's teacher met Boris Holt.", ["Alma Verran", "teacher", "Boris Holt"]),
        ("Who taught the [ old friend ]?", "Who taught the old friend?", ["old friend"]),               # no name at all
        ("[friend of Alma Verran] [Boris Holt] []", "friend of Alma Verran Boris Holt []", ["friend of Alma Verran", "Boris Holt"])))
def test_what_a_typed_text_has_in_brackets_is_a_mention(run, text, plain, words):
    loaded, tome, memory = train.open_run(run)
    example = evaluation.example_of(loaded, text)
    assert example.text == plain and [plain[m.start:m.end] for m in example.mentions] == words
    (_, _, mentions), = evaluation.show_examples(loaded, tome, memory, None, [example])
    assert [name for name, _ in mentions] == words


def test_a_text_without_a_mention_and_flags_that_do_not_fit_are_one_sentence(run, capsys):
    assert evaluate(run, "--show", "Nobody at all.") == 1
    message = capsys.readouterr().err
    assert "no mention in 'Nobody at all.'" in message and message.count("\n") == 1
    for flags in (["--html", "x.html"], ["--examples", "x.jsonl"], ["--show", "--json"]):
        with pytest.raises(SystemExit):
            evaluate(run, *flags)


def test_the_page_holds_what_is_shown_escaped_and_nothing_from_elsewhere(run, tmp_path, capsys):
    assert evaluate(run, "--show", f"{EVIL} was taught by {NAMES[0]}.", "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; Co" in page
    assert not re.search(r"<script|<link|<img|<iframe|src=|href=|url\(|@import|https?:", page)
    assert '<meta name="viewport" content="width=device-width' in page
    assert set(re.findall(r"</?(\w+)", page)) <= set("html head meta title body h1 pre".split()), \
        "what the data says is no markup"
    loaded, tome, memory = train.open_run(run)
    example = evaluation.example_of(loaded, f"{EVIL} was taught by {NAMES[0]}.")
    (_, _, mentions), = evaluation.show_examples(loaded, tome, memory, None, [example])
    text = html.unescape(page)
    for _, layers in mentions:
        for layer, memories in layers.items():
            for weight, m in memories:
                title, left, name, right = loaded.corpus.mention_parts(m)
                assert left + name + right == loaded.corpus.passage_text(loaded.corpus.passage_of(m))
                assert f"{layer}  {weight:.2f}  {title}: {left}[{name}]{right}" in text


# ---------------------------------------------------------------- curves

def test_the_curve_of_a_stage_follows_its_log(out, tmp_path, capsys):
    write(tmp_path / "log.jsonl", [{"stage": stage, "step": 10 * i, "lr": .1, "tokens_per_second": 9, "mlm": 8.0 - i,
                                    "seen": {"accuracy": i / 10, "n": 5}, "unseen": {"accuracy": 0.0, "n": 0}}
                                   for stage in ("tome", "other") for i in range(1, 9)])
    evaluation.print_curve(tmp_path, "tome")
    heading, mlm, seen = capsys.readouterr().out.strip().splitlines()
    assert heading == "tome, steps 10 to 80"
    assert mlm.split() == ["mlm", "7.000", "█▇▆▅▄▃▂▁", "0.000"]
    assert seen.split() == ["masked,", "seen", "0.100", "▁▂▃▄▅▆▇█", "0.800"]
    evaluation.print_curve(tmp_path, "memory")
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- what a user meets

def test_a_verdict_is_of_the_masked_mention_where_two_stand_in_one_passage(run, monkeypatch):
    """The model always says "tea", which no mention is, for each token of the masked mention."""
    loaded, tome, memory = train.open_run(run)
    mentions = train.sample_eval_mentions(loaded, 5)
    passages = loaded.corpus.passage_of(mentions).tolist()
    assert len(set(passages)) < len(passages)
    tea = loaded.tokenizer.encode("tea", add_special_tokens=False).ids[:1]

    def constant(H, target_index):
        logits = torch.zeros(len(target_index), loaded.config.vocab_size)
        logits[:, tea] = 1
        return logits

    monkeypatch.setattr(tome, "mlm_logits", constant)
    shown = evaluation.show_masked(loaded, tome, memory, 5)
    assert len(shown) == len(mentions)
    for mention, (text, says, _) in zip(mentions, shown):
        n = len(data.eval_batch(loaded.corpus, mention[None]).target)
        assert text == loaded.corpus.show_mention(mention)
        assert says.startswith(f"{loaded.tokenizer.decode(n * tea)}   (wrong; entity seen")


@pytest.mark.parametrize("title, info", [
    ("None", {}), ("7", {"subject": 7}), ("None", {"bridge": None})])
def test_an_article_is_only_taken_away_where_an_example_names_it(run, title, info):
    loaded = train.open_run(run)
    loaded[0].corpus.article_index[title] = 0
    example = data.Example("Alma Verran met.", [], 1, [], info)
    cell = evaluation.figures_of(*loaded, "claims", [example])
    assert not {"fact_removed", "bridge_removed"} & cell.keys()


def test_figures_of_no_mention_are_null(run, monkeypatch, capsys):
    monkeypatch.setattr(train, "sample_eval_mentions", lambda run, n: np.zeros(0, int))
    assert evaluate(run, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    for key in ("masked_mention", "same_entity_mass"):
        for cell in figures[key].values():
            assert cell.pop("n") == 0 and len(cell) > 1 and set(cell.values()) == {None}


def test_a_part_of_the_memory_is_not_said_to_give_nothing_where_nothing_was_measured(
        run, monkeypatch, capsys):
    monkeypatch.setattr(train, "sample_eval_mentions", lambda run, n: np.zeros(0, int))
    assert evaluate(run) == 0
    printed = capsys.readouterr().out
    assert "10% of the memory: not measured" in printed and "0.000" not in printed.split("10%")[1]


def test_ctrl_c_is_one_sentence(run, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(train, "evaluate_memory", interrupted)
    assert evaluate(run, "--json") == 130
    message = capsys.readouterr().err
    assert "eval.py: stopped" in message and message.count("\n") == 1


def test_the_report_is_whole_on_a_terminal_that_is_not_utf_8(run):
    """In a program of its own; before --show the curve, figures, and parts of the memory."""
    root = Path(evaluation.__file__).parent
    code = (f"import runpy, sys; sys.path[:0] = [{str(root)!r}, {str(root / 'tests')!r}]; "
            "import train; from test_train import TINY; "
            "train.PRESETS['toy'] = {**TINY, 'n_initial': 2}; "
            f"sys.argv = ['eval.py', '--out', {str(run)!r}]; "
            f"runpy.run_path({str(root / 'eval.py')!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and not done.stderr, done.stderr
    printed = done.stdout
    for part in ("masked_mention seen", "same_entity_mass seen", "10% of the memory", "says: ",
                 "layer 2"):
        assert part in printed


def test_control_characters_do_not_reach_the_terminal(run, capsys):
    assert evaluate(run, "--show", "\x1b[31m Alma Verran \u202e met.") == 0
    printed = capsys.readouterr().out
    assert "Alma Verran" in printed and "\x1b" not in printed and "\u202e" not in printed


def test_a_page_is_not_written_through_a_link(run, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "page.html").symlink_to(tmp_path / "mine")
    assert evaluate(run, "--show", "1", "--html", tmp_path / "page.html") == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert "<!DOCTYPE html>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("record", [
    {"seen": {}}, {"seen": {"n": 1}}, {"seen": {"accuracy": "x", "n": 1}}, {"\x1b[31m": 0.5}])
def test_an_odd_line_of_the_log_breaks_no_curve(tmp_path, capsys, record):
    write(tmp_path / "log.jsonl", [{"stage": "tome", "step": step, **record} for step in (1, 2)])
    evaluation.print_curve(tmp_path, "tome")
    printed = capsys.readouterr().out
    assert "tome, steps 1 to 2" in printed and "\x1b" not in printed


def test_a_typed_mention_behind_max_length_is_said(run, capsys):
    assert evaluate(run, "--show", "Alma Verran met " + "tea " * 300 + "Boris Holt.") == 0
    assert "1 mentions stand behind max_length" in capsys.readouterr().err


def test_a_page_for_a_missing_folder_is_refused_at_once(run, monkeypatch, capsys):
    monkeypatch.setattr(train, "open_run", None)
    assert evaluate(run, "--show", "--html", run / "missing" / "page.html") == 1
    message = capsys.readouterr().err
    assert f"--html {run / 'missing' / 'page.html'}" in message and message.count("\n") == 1


def test_a_folder_without_a_run_is_answered_with_a_command_that_works(tmp_path, capsys):
    assert evaluate(tmp_path / "no run") == 1
    advice, = re.findall(r"python (train\.py .*)$", capsys.readouterr().err, re.MULTILINE)
    assert advice.startswith("train.py --stage tome --out ")
    train.parse_arguments(advice.split()[1:4] + [str(tmp_path / "no run")])


def test_recall_is_of_the_best_20_also_where_a_table_is_in_its_own_order(run):
    """A table of 50 entities: its first 20 rows are not the best ones."""
    loaded, tome, _ = train.open_run(run)
    answer = loaded.corpus.entity_index["Alma Verran"]
    example = data.Example("Who?", [], None, ["Alma Verran"], {})
    for at, score, hit in ((40, 1.0, 1), (0, -1.0, 0), (40, -1.0, 0), (0, 1.0, 1)):
        entity, scores = torch.arange(100, 150)[None], torch.linspace(0.5, 0, 50)[None]
        entity[0, at], scores[0, at] = answer, score
        table = types.SimpleNamespace(retrieve=lambda *_: Retrieved(scores, entity, entity))
        figures = train.task_accuracy(loaded, tome, "qa", [example], table, attend=False)
        assert figures["recall@20"] == hit


# ---------------------------------------------------------------- the tables

def test_cells_are_means_over_seeds():
    assert [tables.as_text(cell) for cell in ([0.5, 1.0], [0.25], [], 66.6, "")] == [
        "0.75 ± 0.35", "0.25", "-", "66.6", ""]


def test_calls_in_cells_are_made_at_once_and_each_only_once():
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


def test_after_a_command_that_failed_no_other_begins(tmp_path, monkeypatch, capsys):
    begun = []

    def failing(line, **_):
        begun.append(line)
        return types.SimpleNamespace(returncode=1, stderr="train.py: no room", stdout="")

    monkeypatch.setattr(tables, "FAILED", threading.Event())
    monkeypatch.setattr(subprocess, "run", failing)
    assert tables.main(["claims", "--out", str(tmp_path / "tables")]) == 1
    message = capsys.readouterr().err
    assert "no room" in message.splitlines()[-1] or "another command" in message.splitlines()[-1]
    assert len(begun) <= torch.get_num_threads(), "of the four runs that could begin"


class InTurn(contextlib.nullcontext):
    """An executor without threads: train.main answers signals, which only the main thread can."""

    def map(self, work, items):
        return [work(item) for item in items]


@pytest.mark.slow
def test_every_table_is_made_from_its_runs(tmp_path, monkeypatch, capsys):
    """Models of a few steps: that each cell is there, not what it says."""
    commands = []

    def here(script, *args):
        args = [str(4 if before == "--steps" else arg) for before, arg in zip((None, *args), args)]
        commands.append((script, *args))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert (train if script == "train.py" else evaluation).main(args) == 0
        return said.getvalue()

    for name, n in (("person", 60), ("city", 20), ("country", 10), ("company", 20), ("film", 40)):
        monkeypatch.setitem(data.COUNTS, name, n)
    monkeypatch.setitem(train.PRESETS, "toy", TINY)
    monkeypatch.setattr(tables, "command", here)
    monkeypatch.setattr(tables, "ThreadPoolExecutor", lambda n: InTurn(InTurn()))
    monkeypatch.setattr(tables, "SIZES", (0.5, 1.0))
    assert tables.main(["all", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.split("\n") if line in tables.TABLES] == list(tables.TABLES)
    assert "| from scratch " in printed and printed.count("; right)") + printed.count("; wrong)") == 5
    for name in tables.TABLES:
        heading, *rows = data.read_json(tmp_path / f"{name}.json")["lines"]
        assert len(rows) > 1
        for row in rows:
            for cell in row:
                assert not isinstance(cell, list) or all(0 <= value <= 1 for value in cell), (name, row)
    claims = {row[0]: row[1:] for row in data.read_json(tmp_path / "claims.json")["lines"]}
    assert all(claims["tome-1"][:6]) and claims["no-memory"][0] and not claims["no-memory"][2]
    trained = [args[2] for script, *args in commands if script == "train.py"]
    assert len(set(trained)) == len(trained), "no run is begun twice"
    base, shared = (weights(tmp_path / f"{name}-0" / "batch-tome.pt")
                    for name in ("tome-1", "from-scratch"))
    assert all(torch.equal(base[key], shared[key]) for key in base)


def test_a_plot_is_drawn_where_matplotlib_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    heading, rows = ["fraction", "seen", "unseen"], [["2%", [0.1, 0.2], [0.05]], ["100%", [0.9, 0.8], [0.7]]]
    from matplotlib.axes import Axes
    draw, drawn = Axes.plot, []

    def recorded(self, x, y, *args, label):
        drawn.append((label, x, [round(v, 9) for v in y]))
        return draw(self, x, y, *args, label=label)

    monkeypatch.setattr(Axes, "plot", recorded)
    tables.plot(tmp_path / "sizes.png", heading, rows)
    assert drawn == [("seen", [2, 100], [0.15, 0.85]), ("unseen", [2, 100], [0.05, 0.7])]
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_what_decides_is_counted_where_both_ends_of_a_fact_are_linked():
    """Three passages; the best memory of the only mention stands in one that links subject and bridge, not the answer."""
    corpus = data.Corpus.__new__(data.Corpus)
    corpus.entity_names, corpus.mention_entity = ["", "S", "B", "O"], np.array([1, 2, 2, 3, 1])
    corpus.mention_first = np.array([0, 2, 4, 5])
    memory = types.SimpleNamespace(passage=torch.tensor([0, 0, 1, 1, 2]))
    found = [types.SimpleNamespace(ids=torch.tensor([[0, 4]])), types.SimpleNamespace(ids=torch.tensor([[2, 0]]))]
    run = types.SimpleNamespace(corpus=corpus, tokenizer=None, device="cpu",
                                settings=types.SimpleNamespace(max_length=9, claim_mask=False))
    batch = types.SimpleNamespace(tokens=None, attention_mask=None)
    batch.to = lambda device: batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "example_batch", lambda *_, **__: batch)
        share = tables.deciding(run, lambda *_: (None, found), memory, [
            types.SimpleNamespace(info={"subject": "S", "bridge": "B", "object": "O"})])
    assert share == {(1, 1): 1.0, (1, 2): 0.0, (2, 1): 0.0, (2, 2): 1.0}
