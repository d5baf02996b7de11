"""What a trained TOME knows, and from where (paper §4, app. B–D).

    python eval.py --out runs/toy                       accuracy on masked mentions, with the memory and without
    python eval.py --out runs/toy --task qa             claims or questions; with the subject's passages taken away
    python eval.py --out runs/toy --ask "Who was the teacher of Walter Lorenz?"
    python eval.py --out runs/toy --task qa --examples FILE         examples of one's own, or of a published task
    python eval.py --out runs/toy --show                what the first held-out mentions retrieve; --html FILE: a page
    python eval.py --table claims                       a table of the paper in miniature, with the runs that it needs: hours

Every figure has its controls beside it: the memory emptied, its values shuffled, or the passages that state the fact
removed. "Seen" entities are linked somewhere in the training passages, "unseen" ones never: they came with the memory.
"""
import argparse
import html
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import data
import train
from encoder import CheckpointError
from data import UserError
from memory import MentionMemory, attention_weights
from tome import answer_question, claim_logits, predict_entity
from train import evaluate_memory, task_accuracy


def open_run(out, task=None, device=None, search="exact", n_search=None):
    """(run, trained TOME, whole memory) of a run folder."""
    saved = train.read_run_file(out)
    args = argparse.Namespace(out=out, preset=saved["preset"], seed=None, blocks=None, corpus=None, init=None,
                              set=None, device=device, search=search, n_search=n_search)
    run = train.make_run(args)
    tome, fingerprint = train.load_tome(run, task or "tome")
    return run, tome, train.open_memory(run, tome, fingerprint)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def masked_mention_figures(run, tome, memory, n=1000):
    """The keys "masked_mention" and "same_entity_mass" of --json."""
    measured = evaluate_memory(run, tome, memory, train.sample_eval_mentions(run, n))
    controls = [name for name in ("emptied", "shuffled") if name in measured["seen"]]        # a baseline has none
    return {"masked_mention": {kind: {"memory": m["accuracy"], **{name: m[name] for name in controls},
                                      "entity": m["entity"], "n": m["n"]} for kind, m in measured.items()},
            "same_entity_mass": {kind: {"visible": m["mass_visible"], "masked": m["mass_masked"], "n": m["n"]}
                                 for kind, m in measured.items()}}


def task_figures(run, tome, memory, task, examples=None):
    """The key "claims" or "qa" of --json: by hops and entities seen or not, on the toy world's test questions, or on a
    file of examples. "fact_removed": the subject's article is out of the memory; "bridge_removed": the bridge's."""
    mentions = isinstance(memory, MentionMemory)
    bm25 = BM25(run.corpus, np.unique(memory.passage.cpu().numpy())) if task == "qa" and mentions else None
    if examples:
        return {task: example_figures(run, tome, memory, task, train.read_examples(run, task, examples), bm25)}
    result = {}
    for hops in ("one_hop", "two_hop"):
        for kind, split in (("seen", "test"), ("unseen", "unseen")):
            chosen = train.read_examples(run, task, toy_examples(run, task, hops, split))
            result.setdefault(hops, {})[kind] = figures_of(run, tome, memory, task, chosen, bm25)
    if task == "qa":
        cells = [cell for hops in result.values() for cell in hops.values()]
        for name in ("recall@20", "bm25_recall@20")[:1 + mentions]:
            result[name] = sum(c[name] * c["n"] for c in cells) / sum(c["n"] for c in cells)
    return {task: result}


def toy_examples(run, task, hops="one_hop", split="test"):
    path = run.out / "world" / f"{task}.{hops}.{split}.jsonl"
    if not path.exists():
        raise UserError(f"{path}: no such file; this run is not of the toy world, give --examples FILE")
    return path


def figures_of(run, tome, memory, task, examples, bm25=None):
    measured = task_accuracy(run, tome, task, examples, memory)
    cell, articles = {"memory": measured.pop("accuracy"), **measured}, run.corpus.article_index
    for name, field in (("fact_removed", "subject"), ("bridge_removed", "bridge")):
        if isinstance(memory, MentionMemory) and examples and all(str(e.info.get(field)) in articles for e in examples):
            cell[name] = task_accuracy(run, tome, task, examples, memory, without=field)["accuracy"]
    if bm25 is not None:
        cell["bm25_recall@20"] = bm25_recall(run, bm25, examples)
    return cell


def example_figures(run, tome, memory, task, examples, bm25=None):
    """figures_of a file of examples, its controls, and their 95% intervals. "without_memory": the memory layers are
    off; "majority": the label or the answer that most of these examples have, always given; "answer_is_entity": the
    share that can be right."""
    cell = figures_of(run, tome, memory, task, examples, bm25)
    if isinstance(memory, MentionMemory):
        cell["emptied"] = task_accuracy(run, tome, task, examples, memory.emptied())["accuracy"]
    cell["without_memory"] = task_accuracy(run, tome, task, examples, memory, attend=False)["accuracy"]
    right = Counter(answer for e in examples for answer in ([e.label] if task == "claims" else set(e.answers)))
    cell["majority"] = max(right.values()) / len(examples)
    if task == "qa":
        known = set(run.corpus.entity_names)
        cell["answer_is_entity"] = sum(not known.isdisjoint(e.answers) for e in examples) / len(examples)
    cell["interval"] = {name: wilson(share, cell["n"]) for name, share in cell.items() if name != "n"}
    return cell


def wilson(share, n, z=1.96):
    """Wilson's 95% interval of a share of n: honest also for few examples and for shares near 0 and 1."""
    centre, half = share + z * z / (2 * n), z * (share * (1 - share) / n + (z / (2 * n)) ** 2) ** 0.5
    return [max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))]


class BM25:
    """Robertson's ranking of passages by the words that they share with a question, here WordPiece tokens:

        sum over t in q of  log(1 + (P - df + 0.5) / (df + 0.5)) * tf (k1 + 1) / (tf + k1 (1 - b + b |p| / mean |p|))

    An inverted index: the passages of token t are place[first[t]:first[t + 1]], what t adds to each is weight."""

    def __init__(self, corpus, passages, k1=0.9, b=0.4):
        """passages: their numbers, rising."""
        lengths, P, kept = np.diff(corpus.passage_start), len(passages), np.zeros(len(corpus.article), bool)
        kept[passages] = True
        tokens, which = corpus.tokens[np.repeat(kept, lengths)], np.repeat(np.arange(P), lengths[passages])
        word = ~np.isin(tokens, list(corpus.special.values()))
        pairs, tf = np.unique(tokens[word] * np.int64(max(P, 1)) + which[word], return_counts=True)    # (nnz,)
        token, self.place = pairs // max(P, 1), pairs % max(P, 1)
        self.first, self.passages = np.searchsorted(token, np.arange(corpus.vocab_size + 1)), passages
        length, df = np.bincount(which[word], minlength=P), np.diff(self.first)[token]
        norm = k1 * (1 - b + b * length / max(length.mean(), 1)) if P else length
        self.weight = np.log1p((P - df + 0.5) / (df + 0.5)) * tf * (k1 + 1) / (tf + norm[self.place])

    def search(self, tokens, k=20):
        """The best passages for these token ids, at most k that share a token: numbers, scores."""
        scores = np.zeros(len(self.passages))
        for t in tokens:
            here = slice(self.first[t], self.first[t + 1])
            scores[self.place[here]] += self.weight[here]
        best = np.flatnonzero(scores)
        if len(best) > k:
            best = best[scores[best] >= np.partition(scores[best], -k)[-k]]         # more than k if some are equal
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return self.passages[best], scores[best]


def bm25_recall(run, bm25, examples):
    """Recall@20 of BM25 over the memory's passages, beside TOME's as in app. B.4.

    TOME has a hit if one of its 20 best memories is a mention of an answer; BM25 if one of its 20 best passages holds
    such a memory. That favours BM25, which is shown all the mentions of 20 passages, and is how the paper compares,
    but for one thing: its baselines have a hit wherever the answer's words stand, ours needs the linked mention."""
    corpus, hits = run.corpus, 0
    entity_index = corpus.entity_index
    for example in examples:
        answers = [entity_index[a] for a in example.answers if a in entity_index]
        found, _ = bm25.search(run.tokenizer.encode(example.text, add_special_tokens=False).ids)
        hits += any(np.isin(corpus.passage_entities(p), answers).any() for p in found)
    return hits / len(examples)


# ---------------------------------------------------------------------------------------------------------------------
# Looking: what a mention retrieves (tables 3, 4 and 12 of the paper)


class Shown(NamedTuple):
    text: str
    says: str           # what the model makes of it; "" where it was asked nothing
    mentions: list      # (mention as the model reads it, [(layer, [(weight, corpus mention), …]), …])


@torch.no_grad()
def retrievals(run, tome, memory, batch, n=3):
    """H, and for each mention of a batch what Shown.mentions holds of it: the n memories with most attention."""
    H, found = tome.eval()(batch.tokens, batch.attention_mask, batch, memory)
    result = []
    for m, (row, start, end) in enumerate(zip(batch.row.tolist(), batch.start.tolist(), batch.end.tolist())):
        words = run.tokenizer.decode(batch.tokens[row, start + 1:end].tolist(), skip_special_tokens=False)
        result.append((words, [(f"layer {layer}", heaviest(memory, r.weights[m], r.ids[m], n))
                               for layer, r in enumerate(found, 1)]))
    return H, result


def heaviest(memory, weights, ids, n):
    """[(weight, corpus mention), …] of the n largest of weights (K,) at memory rows ids (K,)."""
    weights, place = weights.topk(min(n, len(weights)))
    return [(w, int(memory.mention[i])) for w, i in zip(weights.tolist(), ids[place].tolist()) if w > 0]


def show_masked(run, tome, memory, n=5):
    """The first held-out mentions, n seen and n unseen, none chosen: what was masked, what the model says, and what
    the masked mention retrieved. A list of Shown."""
    shown, mentions = [], train.sample_eval_mentions(run, n)
    if not len(mentions):
        return shown
    batch = data.eval_batch(run.corpus, mentions).to(run.device)
    H, found = retrievals(run, tome, memory, batch)
    predicted = tome.mlm_logits(H, batch.target_index).argmax(-1)
    for mention in mentions:
        which = int((batch.mention == mention).nonzero()[0])
        words, truth = (run.tokenizer.decode(ids[batch.target_mention == which].tolist())
                        for ids in (predicted, batch.target))
        seen = run.corpus.entity_count[run.corpus.mention_entity[mention]] > 0
        shown.append(Shown(run.corpus.show_mention(mention), f"{words}   ({'right' if words == truth else 'wrong'}; "
                           f"entity {'seen' if seen else 'never seen'} in training)", [found[which]]))
    return shown


def verdict(says, probability, truth):
    """What the model says, and whether it is one of truth; [] = not known."""
    right = f"; {'right' if says in truth else 'wrong'}" if truth else ""
    return f"{says}   (probability {float(probability):.2f}{right})"


@torch.no_grad()
def show_examples(run, tome, memory, task, examples):
    """What the model makes of examples, and what their mentions retrieved: a list of Shown. task None: read only."""
    shown = []
    for example in examples:
        batch = train.examples_batch(run, task, [example]).to(run.device)
        H, mentions = retrievals(run, tome, memory, batch)
        says = ""
        if task == "claims":
            probabilities = claim_logits(tome, H, batch).softmax(-1)[0]
            truth = [] if example.label is None else [data.CLAIM_LABELS[example.label]]
            says = verdict(data.CLAIM_LABELS[int(probabilities.argmax())], probabilities.max(), truth)
        elif task == "qa":
            found = answer_question(tome, H, batch, memory)
            best = predict_entity(found.scores, found.entity)
            name = run.corpus.entity_names[int(best.entity[0])] or "nothing"
            says = verdict(name, best.probability[0], example.answers)
            weights = attention_weights(found.scores)[0]
            mentions[int(batch.answer_mention)][1].append(("answer", heaviest(memory, weights, found.ids[0], 3)))
        shown.append(Shown(example.text, says, mentions))
    return shown


def example_of(run, text):
    """An example of a text that somebody typed. Its mentions are those found, and what stands in [brackets]: no
    entity is named "teacher", but the second hop of "Who taught Kira Hale's [teacher]?" starts there."""
    plain, marked = "", []
    for i, piece in enumerate(re.split(r"\[\s*([^\[\]]*[^\[\]\s])\s*\]", text)):
        if i % 2:                                               # these stood in brackets
            marked.append(data.Mention(len(plain), len(plain) + len(piece), None))
        plain += piece
    how, find = data.mention_finder(run.corpus.entity_names)
    mentions = marked + [m for m in find(plain) if all(m.end <= b.start or b.end <= m.start for b in marked)]
    if not mentions:
        raise UserError(f"no mention in {text!r}, so nothing can be looked up; name an entity of the corpus, or put what is "
                       f"mentioned in [brackets]. Mentions are found by {how}")
    return data.Example(plain, sorted(mentions), None, [], {})


def print_shown(run, shown):
    for item in shown:
        print(f"\n{item.text}" + (f"\n  says: {item.says}" if item.says else ""))
        for words, layers in item.mentions:
            print(f"  {words}")
            for layer, memories in layers:
                for weight, m in memories:
                    print(f"    {layer}  {weight:.2f}  {run.corpus.show_mention(m)}")


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 46rem; margin: auto; padding: 1rem; overflow-wrap: anywhere }}
section {{ border-top: 1px solid #8886; margin-top: 2rem }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.1rem }} h3 {{ font-size: 1rem; margin: 1.2rem 0 0 }}
p {{ margin: .4rem 0 }} .memory {{ border-left: .2rem solid #48c; padding-left: .7rem; font-size: .95rem }}
.memory small {{ display: block; opacity: .75 }}
</style></head><body><h1>{title}</h1>
<p>Of each mention, the memories with most attention, by layer, with their weights; the memory mention in brackets.</p>
{sections}</body></html>
"""


def html_page(run, shown):
    """print_shown as one page that needs nothing else; whole passages. Every string of the data is escaped."""
    def section(item):
        yield f"<section><h2>{html.escape(item.text)}</h2>"
        if item.says:
            yield f"<p>Says: <b>{html.escape(item.says)}</b></p>"
        for words, layers in item.mentions:
            yield f"<h3>{html.escape(words)}</h3>"
            for layer, memories in layers:
                for weight, m in memories:
                    title, left, name, right = map(html.escape, run.corpus.mention_parts(m))
                    yield (f'<p class="memory"><small>{layer} · {weight:.2f} · <b>{title}</b></small>'
                           f"{left}<b>[{name}]</b>{right}</p>")
        yield "</section>"

    return PAGE.format(title=html.escape(f"What {run.out} retrieves"),
                       sections="\n".join(line for item in shown for line in section(item)))


# ---------------------------------------------------------------------------------------------------------------------
# The paper's tables in miniature, on the toy world: --table all, or one by its name

# What train.py gets besides --out and --seed ({0}: the tables' folder), and the runs that come before: the first one's
# stages before tome are shared.
RUNS = {                                              # in an order in which nothing waits long
    "tome-1": ([], []),
    "no-memory": (["--set", "memory=none"], []),
    "entities-as-experts": (["--set", "memory=entities"], []),
    "tome-2": (["--blocks", "2"], ["tome-1"]),
    "all-entities": ([], []),                         # the second world is trained on too
    "no-coreference": (["--set", "coref_weight=0"], []),
    "no-entity-prediction": (["--set", "entity_weight=0"], ["tome-1"]),
    "from-warm-up": (["--start", "{0}/no-memory-0/tome.pt"], ["tome-1", "no-memory"]),
    "from-scratch": (["--start", "scratch"], ["tome-1"]),
    "mlm-alone": (["--set", "coref_weight=0", "--set", "entity_weight=0"], ["no-coreference"]),
}
MAIN = ["no-memory", "entities-as-experts", "tome-1", "tome-2"]     # the rows of claims and questions
SEEDED = ("claims", "questions", "recall")            # tables over all seeds; the others show the first
SIZES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
ONE, TWO = "one_hop", "two_hop"
TWO_HOP_STEPS = 1600
# The parts of a run, the longest first: masked mentions at the end of stage tome, where no task is named yet, and each task
# with its hops, fine-tuned from there.
MASKED, CLAIMS, QUESTIONS = (), [("claims", TWO), ("claims", ONE)], [("qa", TWO), ("qa", ONE)]
ONE_HOP = [CLAIMS[1], QUESTIONS[1]]
PARTS = [MASKED, CLAIMS[0], QUESTIONS[0], *ONE_HOP]


def python(script, *args):
    """Runs a script of this folder on one thread, so that as many as there are cores run at once. eval.py's JSON."""
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, args)]
    tqdm.write(f"{time.strftime('%H:%M:%S')} {script} {' '.join(command[2:])}", sys.stderr)
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command[1:])}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return json.loads(done.stdout) if script == "eval.py" else None


SHARED = ("world", "corpus", "batch-tome.pt", "memory")         # what runs have in common, as links


def share(folder, base, names):
    """Gives a new run folder the first files of another run, as links."""
    for name in names:
        for path in sorted((base / name).rglob("*") if (base / name).is_dir() else [base / name]):
            here = folder / path.relative_to(base)
            if path.is_file() and not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, here)


def make_world(folder, seed, all_entities=False):
    """The toy world of a run; all_entities: nothing of its second world is held out of training."""
    if not (folder / "world" / "corpus.jsonl").exists():
        lines, examples = data.toy_world(seed)
        if all_entities:
            trained = {line["title"] for line in lines if line["split"] == "train"}
            lines = [line if line["title"] in trained else line | {"split": "train"} for line in lines]
        data.write_toy(folder / "world", lines, examples)


def place(folder, name, seed, part):
    """The folder of one part of a run; that of the run itself is where stage tome was trained."""
    return folder / "-".join([name, str(seed), *part])


def table_run(folder, name, seed, part, before):
    """Trains one part of a run and measures it. Its figures, also left in figures.json: what is there is not done again.
    before(name, part): waits for another part of this seed."""
    path = place(folder, name, seed, part) / "figures.json"
    if not path.exists():
        work = pretrained if part == MASKED else finetuned
        data.write_json(path, work(folder, name, seed, path.parent, before, *part))
    return data.read_json(path)


def pretrained(folder, name, seed, out, before):
    """Figures of masked mentions after stage tome. The stages before it are those of the run that it needs, if any."""
    args, needs = RUNS[name]
    for earlier in needs:
        before(earlier, MASKED)
    if needs:
        base = place(folder, needs[0], seed, MASKED)
        share(out, base, SHARED)
        run = train.read_run_file(base)
        run["set"] = dict(train.one_setting(value) for flag, value in zip(args, args[1:]) if flag == "--set")
        run["blocks"] = 2 if "--blocks" in args else 1
        data.write_json(out / "run.json", run)
    else:
        make_world(out, seed, name == "all-entities")
    python("train.py", "--stage", "tome", "--quiet", "--seed", seed, "--out", out, *(arg.format(folder) for arg in args))
    return python("eval.py", "--json", "--out", out)


def finetuned(folder, name, seed, out, before, task, hops):
    """Figures of a task. For two hops the examples are of both, and there are more steps of them; claims begin with those of
    one, but not until all is learnt: then two are not (README)."""
    before(name, MASKED)

    def finetune(out, *args):
        share(out, place(folder, name, seed, MASKED), (*SHARED, "run.json", "tome.pt"))
        python("train.py", "--stage", "finetune", "--task", task, "--quiet", "--seed", seed, "--out", out, *args)

    if hops == ONE:
        finetune(out)
    else:
        more = []
        if task == "claims":
            first = out.with_name(out.name + "-first")
            finetune(first, "--steps", 300)
            more = ["--lr", 1e-3, "--cloze", "--start", first / "claims.pt"]
        examples = place(folder, name, seed, MASKED) / "world" / f"{task}.both.train.jsonl"
        finetune(out, "--steps", TWO_HOP_STEPS, "--examples", examples, *more)
    return python("eval.py", "--json", "--task", task, "--out", out)[task][hops]


def all_runs(folder, tables, n_seeds):
    """{(name, seed): {"masked": figures, task: {hops: figures}}} of what these tables need, as many at once as there are
    cores."""
    jobs = []
    for seed in range(n_seeds):
        wanted = {(name, part) for table in tables for name, parts in TABLES[table][0].items() for part in (MASKED, *parts)}
        wanted |= {(name, MASKED) for run, _ in wanted for name in RUNS[run][1]}            # needed, also if not shown
        jobs += [(name, seed, part) for part in PARTS for name in RUNS if (name, part) in wanted]
    done, results = {}, {}
    with ThreadPoolExecutor(1 if torch.cuda.is_available() else torch.get_num_threads()) as pool:
        for name, seed, part in jobs:   # in order, so that what one waits for has begun
            done[name, seed, part] = pool.submit(table_run, folder, name, seed, part,
                                                 lambda n, p, seed=seed: done[n, seed, p].result())
        try:
            for job in tqdm(as_completed(done.values()), "runs", len(done)):
                job.result()
        except BaseException:               # a run that failed, or Ctrl-C: those that have not begun do not
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for (name, seed, part), job in done.items():
        figures = results.setdefault((name, seed), {})
        if part == MASKED:
            figures["masked"] = job.result()
        else:
            task, hops = part
            figures.setdefault(task, {})[hops] = job.result()
    return results


def figure(results, name, *path):
    """One figure of a run: a list of its values, one a seed."""
    values = [value for (run, _), value in results.items() if run == name]
    for key in path:
        values = [value[key] for value in values if key in value]
    return values


def task_table(task, paper):
    def table(folder, results):
        yield ["", "one hop: seen", "unseen", "subject removed", "two hops: seen", "unseen", "bridge removed", *paper[""]]
        for name in MAIN:
            yield [name, *(figure(results, name, task, *path) for path in (
                (ONE, "seen", "memory"), (ONE, "unseen", "memory"), (ONE, "seen", "fact_removed"),
                (TWO, "seen", "memory"), (TWO, "unseen", "memory"), (TWO, "seen", "bridge_removed"))), *paper.get(name, [])]
    return table


def size_table(folder, results):
    yield ["fraction of the memory", *(f"{task}: {kind}" for task in ("claims", "questions") for kind in ("seen", "unseen"))]
    cells = {size: [] for size in SIZES}
    for task in ("claims", "qa"):
        run, tome, memory = open_run(place(folder, "tome-1", 0, (task, ONE)), task)
        for split in ("test", "unseen"):
            examples = train.read_examples(run, task, toy_examples(run, task, ONE, split))
            for size in SIZES:
                cells[size].append([task_accuracy(run, tome, task, examples, memory.sample(size))["accuracy"]])
    for size, row in cells.items():
        yield [f"{size:.0%}", *row]


def unseen_table(folder, results):
    yield ["entities of the second world", "claims", "questions", "paper: TriviaQA", "CWQ"]
    for name, label, paper in (("tome-1", "only in the memory of the evaluation", (17.6, 16.7)),
                               ("all-entities", "in training too", (17.4, 16.4))):
        yield [label, *(figure(results, name, task, ONE, "unseen", "memory")[:1] for task in ("claims", "qa")), *paper]


def recall_table(folder, results):
    yield ["recall@20, questions", "one hop: seen", "unseen", "two hops: seen", "unseen", "paper: EntityQuestions"]
    for name, key, label, paper in (("tome-1", "bm25_recall@20", "BM25", 71.2), ("tome-1", "recall@20", "tome-1", 83.3),
                                    ("tome-2", "recall@20", "tome-2", 83.8)):
        yield [label, *(figure(results, name, "qa", hops, kind, key) for hops in (ONE, TWO) for kind in ("seen", "unseen")),
               paper]


def ablation_table(rows, paper):
    def table(folder, results):
        yield ["", "masked mentions: seen", "unseen", "claims: seen", "unseen", "questions: seen", "unseen", *paper]
        for name, label, figures in rows:
            yield [label, *(figure(results, name, "masked", "masked_mention", kind, "memory")[:1] for kind in
                            ("seen", "unseen")),
                   *(figure(results, name, task, ONE, kind, "memory")[:1] for task in ("claims", "qa")
                     for kind in ("seen", "unseen")), *figures]
    return table


def retrieval_table(folder, results):
    yield ["attention on the same entity", "visible", "masked", "paper", ""]
    for name, stage, paper in (("no-coreference", "batch-tome", 55), ("mlm-alone", "tome", 41), ("tome-1", "batch-tome", ""),
                               ("tome-1", "tome", "")):
        records = train.read_log(place(folder, name, 0, MASKED) / "log.jsonl")
        last = [record for _, record in records if record["stage"] == stage][-1]["seen"]
        yield [f"{name}, end of {stage}", [last["mass_visible"]], [last["mass_masked"]], paper]
    yield ["best memory states the fact (test claims)", "layer 1: first fact", "second", "layer 2: first fact", "second"]
    for name, hops in (("tome-1", ONE), ("tome-2", ONE), ("tome-1", TWO), ("tome-2", TWO)):
        run, tome, memory = open_run(place(folder, name, 0, ("claims", hops)), "claims")
        examples = train.read_examples(run, "claims", toy_examples(run, "claims", hops))
        states = deciding(run, tome, memory, examples)
        yield [f"{name}, {hops.replace('_', ' ')}", *([states[cell]] if cell in states else "" for cell in
                                                     ((1, 1), (1, 2), (2, 1), (2, 2)))]
    yield ["tome-2, first test claims about two facts", "layer 1: best memory", "layer 2"]      # the last model above
    for item in show_examples(run, tome, memory, "claims", examples[:5]):
        yield [f"{item.text} {item.says}"]
        for words, layers in item.mentions:
            yield [f"    {words}", *(run.corpus.show_mention(memories[0][1]) if memories else "-" for _, memories in layers)]


@torch.no_grad()
def deciding(run, tome, memory, examples):
    """{(layer, n): share of the toy world's examples where the best memory of one of the mentions, in that layer, stands
    in a passage that states the n-th fact}: that links both its subject and its object."""
    index, hits = run.corpus.entity_index, {}
    for example in examples:
        batch = train.examples_batch(run, "claims", [example]).to(run.device)
        _, found = tome(batch.tokens, batch.attention_mask, batch, memory)
        chain = [index[example.info[name]] for name in ("subject", "bridge", "object") if name in example.info]
        for layer, retrieved in enumerate(found, 1):
            best = retrieved.ids[:, 0]
            linked = [set(run.corpus.passage_entities(p).tolist())
                      for p in memory.passage[best[best >= 0]].unique().tolist()]
            for n, fact in enumerate(zip(chain, chain[1:]), 1):
                hits.setdefault((layer, n), []).append(any(entities.issuperset(fact) for entities in linked))
    return {cell: float(np.mean(values)) for cell, values in hits.items()}


TABLES = {      # what each needs of which runs; its lines: a heading, then a label and cells (values over seeds, or paper's)
    "claims": (dict.fromkeys(MAIN, CLAIMS), task_table("claims", {
        "": ["paper: FEVER", "HoVer"], "entities-as-experts": [63.6, 66.6], "tome-1": [67.8, 72.8], "tome-2": [68.1, 73.1]})),
    "questions": (dict.fromkeys(MAIN, QUESTIONS), task_table("qa", {
        "": ["paper: EntityQuestions", "CWQ"], "entities-as-experts": [32.5, 42.7], "tome-1": [62.1, 44.9],
        "tome-2": [66.0, 47.7]})),
    "sizes": ({"tome-1": ONE_HOP}, size_table),
    "unseen": ({"tome-1": ONE_HOP, "all-entities": ONE_HOP}, unseen_table),
    "recall": ({"tome-1": QUESTIONS, "tome-2": QUESTIONS}, recall_table),
    "objectives": ({"tome-1": ONE_HOP, "no-coreference": ONE_HOP, "no-entity-prediction": ONE_HOP}, ablation_table([
        ("tome-1", "tome-1", [70.5, 50.8]), ("no-coreference", "without coreference loss", [68.4, 42.5]),
        ("no-entity-prediction", "without entity prediction", [70.7, 49.4])], ["paper: FEVER", "TriviaQA"])),
    "initialisation": ({"tome-1": ONE_HOP, "from-warm-up": ONE_HOP, "from-scratch": ONE_HOP}, ablation_table([
        ("tome-1", "from BATCH-TOME", []), ("from-warm-up", "from the warm-up Transformer", []),
        ("from-scratch", "from scratch", [])], [])),
    "retrieved": ({"tome-1": CLAIMS, "tome-2": CLAIMS, "mlm-alone": []}, retrieval_table),
}


def plot(path, heading, rows):
    """Draws columns of rows (label "20%", values over seeds) against their labels, as figure 2 of the paper."""
    from matplotlib.figure import Figure        # optional: no display and no global state, only a file
    axes = (figure := Figure()).subplots()
    for name, *column in zip(heading[1:], *(row[1:] for row in rows)):
        axes.plot([float(row[0].rstrip("%")) for row in rows], [np.mean(cell) for cell in column], "o-", label=name)
    axes.set(xlabel=f"{heading[0]}, %", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(path)


def make_tables(folder, names, n_seeds, with_plot=False):
    """Trains what the tables need, prints them and leaves each in folder/NAME.json; with_plot: sizes in sizes.png too."""
    if with_plot and not find_spec("matplotlib"):        # before hours of training
        raise UserError("--plot draws with matplotlib, which is not installed: pip install matplotlib, or leave --plot out")
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(1, n_seeds + 1):         # a seed takes an hour or two: what is known by then is shown
        results = all_runs(folder, names, n)
        for name in names:
            lines = list(TABLES[name][1](folder, results))
            data.write_json(folder / f"{name}.json", {"lines": lines})
            if with_plot and name == "sizes":
                plot(folder / "sizes.png", lines[0], lines[1:])
            print_table(name if n == 1 else f"{name}, {n} seeds", lines)
        names = [name for name in names if name in SEEDED]
        if not names:
            break


def print_table(title, lines):
    print(f"\n{title}")
    for label, *cells in lines:
        widths = [max(11, len(head)) for head in lines[0][1:]]
        print(f"| {label:<42} | " + " | ".join(f"{as_text(c):<{w}}" for c, w in zip_longest(cells, widths, fillvalue=""))
              + " |", flush=True)


def as_text(cell):
    """A list of values over seeds as mean ± standard deviation (n - 1: seeds are a sample); anything else as it is."""
    if not isinstance(cell, list):
        return str(cell)
    spread = f" ± {np.std(cell, ddof=1):.2f}" if len(cell) > 1 else ""
    return f"{np.mean(cell):.2f}{spread}" if cell else "-"


# ---------------------------------------------------------------------------------------------------------------------
# Reports and command line


def print_masked(figures):
    print("\nHeld-out mentions, each masked alone: share of its words filled in rightly")
    print("  entities              with the memory   emptied   shuffled      "
          "attention on the same entity: visible  masked")
    for kind, name in (("seen", "seen in training"), ("unseen", "never seen")):
        m, mass = figures["masked_mention"][kind], figures["same_entity_mass"][kind]
        if m["n"]:
            emptied, shuffled = (f"{m[control]:.2f}" if control in m else "-" for control in ("emptied", "shuffled"))
            print(f"  {name:<18}    {m['memory']:>12.2f}   {emptied:>10}   {shuffled:>8}"
                  f"   {mass['visible']:>37.2f}   {mass['masked']:>5.2f}     ({m['n']} mentions)")


def print_task(figures, task):
    print(f"\n{'Claims judged' if task == 'claims' else 'Questions answered'} rightly")
    figures = figures[task]
    if "n" in figures:
        if "answer_is_entity" in figures:
            print(f"  for {figures['answer_is_entity']:.1%} of {figures['n']:,} questions an answer is an entity of "
                  "the corpus; the others count as wrong")
        for name, (low, high) in figures["interval"].items():
            if name != "answer_is_entity":
                print(f"  {NAMES.get(name, name.replace('_', ' ')):<26}{figures[name]:.3f}   95%: {low:.3f} to "
                      f"{high:.3f}   ({round(figures[name] * figures['n'])} of {figures['n']})")
        return
    for hops, kinds in figures.items():
        for kind, cell in kinds.items() if hops.endswith("hop") else ():
            controls = "   ".join(f"{NAMES.get(control, control.replace('_', ' '))} {cell[control]:.2f}" for control in
                                  ("fact_removed", "bridge_removed", "recall@20", "bm25_recall@20") if control in cell)
            print(f"  {hops.replace('_', ' ') + ', ' + kind:<18} {cell['memory']:.2f}   {controls}   ({cell['n']})")


NAMES = {"memory": "with the memory", "emptied": "memory emptied", "without_memory": "memory layers off",
         "majority": "always the most frequent", "bm25_recall@20": "BM25's recall@20"}


def print_curve(run, stage):
    """What log.jsonl says of a stage, each series from its smallest value to its largest."""
    records, series = [r for _, r in train.read_log(run.out / "log.jsonl") if r["stage"] == stage], {}
    for record in records:
        values = {name: value for name, value in record.items() if isinstance(value, float) and name != "lr"}
        for kind in ("seen", "unseen"):
            if record.get(kind, {}).get("n"):
                values[f"masked, {kind}"] = record[kind]["accuracy"]
        for name, value in values.items():
            series.setdefault(name, []).append(value)
    if len(records) < 2:
        return
    train.say(f"\n{stage}, steps {records[0]['step']:,} to {records[-1]['step']:,}")
    for name, values in series.items():
        means = np.array([part.mean() for part in np.array_split(values, min(60, len(values)))])
        heights = 7 * (means - means.min()) / max(np.ptp(means), 1e-9)
        bars = "".join("▁▂▃▄▅▆▇█"[round(height)] for height in heights)
        train.say(f"  {name:<16}{values[0]:8.3f} {bars} {values[-1]:.3f}")


def report(run, stage, task):
    """What train.py prints at the end: the curves, what was learnt, and where it lies."""
    print_curve(run, task or stage)
    if stage == "batch-tome":
        train.say(f"Mention Encoder and BATCH-TOME are in {run.out / 'batch-tome.pt'}, "
                  f"curves in {run.out / 'log.jsonl'}.")
        return
    if train.ann.rank_and_size()[1] > 1:
        train.say(f"Done; python eval.py --out {run.out} shows what was learnt.")
        return
    tome, fingerprint = train.load_tome(run, task or "tome")
    memory, _ = train.open_memory(run, tome, fingerprint)
    if stage == "tome":
        figures = masked_mention_figures(run, tome, memory)
        print_masked(figures)
        if not isinstance(memory, MentionMemory):
            print(f"\nThe baseline is in {run.out / 'tome.pt'}, curves in {run.out / 'log.jsonl'}.")
            return
        mentions = train.sample_eval_mentions(run, 300)
        for fraction in (0.1, 0.5):
            part = train.masked_mentions(tome, run.corpus, memory.sample(fraction), mentions, run.device)
            print(f"  with {fraction:.0%} of the memory: "
                  + ", ".join(f"{kind} {m['accuracy']:.2f}" for kind, m in part.items() if m["n"]))
        print_shown(run, show_masked(run, tome, memory, n=3))
        print(f"\nTOME is in {run.out / 'tome.pt'}, its memory in {run.out / 'memory'}, "
              f"curves in {run.out / 'log.jsonl'}.")
    elif (run.out / "world").exists():
        print_task(task_figures(run, tome, memory, task), task)
        print(f'\nAsk it: python eval.py --out {run.out} --task {task} --ask "…"')
    else:
        print(f"\nMeasure it: python eval.py --out {run.out} --task {task} --examples FILE")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate a run of train.py.", allow_abbrev=False)
    parser.add_argument("--out", default="runs/toy", help="folder of the run")
    parser.add_argument("--task", choices=("claims", "qa"), help="a fine-tuned model (default: masked mentions)")
    parser.add_argument("--examples", help="examples to evaluate on (default: the toy world's tests)")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="of the memory's passages, uniform sample")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    parser.add_argument("--show", nargs="?", const="5", metavar="N|TEXT",
                        help="what is retrieved by a text, by N held-out mentions of entities seen and N never seen, or by the "
                        "first N examples (--task)")
    parser.add_argument("--ask", metavar="TEXT", help="answer a question (with --task claims: judge a claim), and show "
                        "where from: --task qa --show TEXT. [brackets]: a mention that is no entity's name")
    parser.add_argument("--html", metavar="FILE", help="write what --show prints as a page")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    train.add_search_arguments(parser)
    parser.add_argument("--table", choices=("all", *TABLES), help="train what this table of the paper needs, on the toy "
                        "world, and print it; hours")
    parser.add_argument("--plot", action="store_true", help="draw the table of sizes too, runs/tables/sizes.png")
    parser.add_argument("--seeds", type=train.whole(1), default=1, help="of the tables " + ", ".join(SEEDED))
    args = parser.parse_args(argv)
    if args.ask is not None:
        args.task, args.show = args.task or "qa", args.ask
    if not 0 <= args.memory_fraction <= 1:
        parser.error("--memory-fraction wants a number from 0 to 1")
    if args.examples and not args.task:
        parser.error("--examples wants --task qa or --task claims")
    if args.plot and args.table not in ("all", "sizes"):
        parser.error("--plot goes with --table sizes or all")
    if args.html and args.show is None:
        parser.error("--html goes with --show or --ask")
    if args.json and args.show is not None:
        parser.error("--json does not go with --show and --ask")
    try:
        if args.table:
            make_tables(Path("runs/tables"), list(TABLES) if args.table == "all" else [args.table], args.seeds,
                        args.plot)
            return 0
        run, tome, memory = open_run(args.out, args.task, args.device, args.search, args.n_search)
        if isinstance(memory, MentionMemory):
            memory = memory.sample(args.memory_fraction)
        elif args.show is not None or args.memory_fraction < 1:
            raise UserError(f"{args.out} is of a baseline: it has no mention memory to show or to take a part of")
        if args.show is not None:
            n = int(args.show) if args.show.isdecimal() else None
            if n is None:
                shown = show_examples(run, tome, memory, args.task, [example_of(run, args.show)])
            elif args.task:
                path = args.examples or toy_examples(run, args.task)
                examples = train.read_examples(run, args.task, path, known=False)[:n]
                shown = show_examples(run, tome, memory, args.task, examples)
            else:
                shown = show_masked(run, tome, memory, n)
            if args.html:
                Path(args.html).write_text(html_page(run, shown), encoding="utf-8")
                print(f"Written to {args.html}.")
            else:
                print_shown(run, shown)
        else:
            figures = task_figures(run, tome, memory, args.task, args.examples) if args.task else \
                masked_mention_figures(run, tome, memory)
            if args.json:
                print(json.dumps(figures))
            elif args.task:
                print_task(figures, args.task)
            else:
                print_masked(figures)
        return 0
    except (UserError, CheckpointError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
