"""Measures what a trained TOME knows, and where the knowledge comes from (paper §4, app. B–D).

    python eval.py                                          the report on runs/toy
    python eval.py --ask "Who taught Oskar Jarvis?"         an answer and its sources

Accuracy is the fraction of masked tokens predicted correctly ("tokens" in train.py's output) or,
for a fine-tuned model, of questions answered or claims judged correctly. Accuracy alone says
little about a memory. So the report adds these controls to "memory", the accuracy with the memory:

    emptied          the memory has no rows
    shuffled         values are permuted: a query finds the same memories, with wrong values (only
                     for masked tokens; the controls below are only for questions and claims)
    without_memory   the memory layers are skipped, even their LayerNorm; eq. 10 still retrieves the
                     answer to a question
    fact_removed     the article about the subject, which states the (first) fact, is hidden
    bridge_removed   the article about the entity between two facts is hidden, for example the
                     director's article for "Where was X's director born?"
    majority         the most frequent label or answer is always given

A "seen" entity is linked in a training passage; an "unseen" entity is not. LEGENDS, below,
explains the other columns. Nothing in the run folder is changed."""
import argparse
import json
import os
import re
import sys
import textwrap
import warnings
from contextlib import suppress
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import data
import train
from memory import MentionMemory, attention_weights
from tome import TOME, claim_logits, predict_entity

# ---- For use from Python: ask, and see what mentions retrieve (tables 3, 4, 12) ------------------

class Opened(NamedTuple):
    """An open run folder."""
    run: train.Run
    tome: TOME
    memory: MentionMemory       # or a baseline's EntityTable
    task: str | None            # "qa", "claims", or None: pre-trained only

class Source(NamedTuple):
    """A memory that was retrieved."""
    weight: float               # attention weight; the weights of a mention's K memories sum to 1
    entity: str
    passage: str                # "Title: text before [mention] text after"

class EncodedMention(NamedTuple):
    """A mention in a text, after TOME's forward pass over the text."""
    words: str
    encoding: torch.Tensor      # (d_K,) z of eq. 10
    layers: list                # one list per memory layer: the Sources with the largest weights

class Answer(NamedTuple):
    """The model's reply to a question or a claim."""
    text: str                   # one of data.CLAIM_LABELS, or the name of an entity ("nothing" if
                                # nothing was retrieved)
    probability: float          # of this entity in eq. 10, or of the label
    sources: list               # Sources of this entity; for a claim, from the last memory layer
    mentions: list              # EncodedMentions; a question's last one is the appended [MASK]

def open_run(out, task=None, blocks=1, device=None, n_search=0, fraction=1.0):
    """Opens a run folder. Returns an Opened, the first argument of ask, encode and search.

    task: "qa" or "claims" for a fine-tuned model, None for the pre-trained one. blocks: 1 for
    TOME-1, 2 for TOME-2. device: "cpu", "cuda" or "mps"; None: "cuda" if found, otherwise "cpu".
    n_search: how many buckets of the memory to search, 0 for exact search. fraction: the share of
    the memory's passages to keep. Raises data.UserError."""
    run, tome, memory = train.open_run(out, task, blocks, device, n_search)
    if run.is_baseline and (n_search or fraction < 1):
        raise data.UserError(f"{out} is a baseline: it has no mention memory")
    return Opened(run, tome, memory if fraction == 1 else memory.sample(fraction), task)

def ask(opened, text):
    """The Answer to a question (task "qa") or a claim (task "claims").

    Mentions are the names of entities in the text, and words in [brackets]. In "Where was Ida
    Hale's [teacher] born?" the brackets make the description a mention, at which TOME-2 can look up
    the first fact. Raises data.UserError if `opened` has no task or the text has no mention."""
    run, tome, _, task = opened
    if task is None:
        raise data.UserError("to ask, open the run with task=\"qa\" or task=\"claims\"")
    batch, words = text_batch(opened, text)
    H, mentions = forward(opened, batch, words)
    if task == "claims":
        probability, label = claim_logits(tome, H, batch)[0].softmax(-1).max(-1)
        sources = [source for mention in mentions for source in mention.layers[-1]]
        sources = sorted(sources, key=lambda source: -source.weight)[:3]
        return Answer(data.CLAIM_LABELS[label], probability.item(), sources, mentions)
    found = retrieve(opened, mentions[-1].encoding)
    entity = predict_entity(found.scores, found.entity).item()
    probability = attention_weights(found.scores)[found.entity == entity].sum().item()
    name = run.corpus.entity_names[entity] or "nothing"
    return Answer(name, probability, sources_of(opened, found, 0, entity=entity), mentions)

def encode(opened, text):
    """The EncodedMentions of a text (see `ask`), in order; with task "qa" the last is [MASK]."""
    return forward(opened, *text_batch(opened, text))[1]

def search(opened, encoding, n=3):
    """The n Sources with the largest weights of eq. 10 for an encoding (d_K,)."""
    return sources_of(opened, retrieve(opened, encoding), 0, n)

def example_of(run, text):
    """A text as an Example, with its mentions (see `ask`)."""
    parts = re.split(r"\[([^][]*)\]", text)         # every second part was in brackets
    plain, place = "".join(parts), np.cumsum([0, *map(len, parts)]).tolist()    # starts of parts
    mentions = [data.Mention(a, b, None) for a, b in zip(place[1::2], place[2::2]) if a < b]
    bracketed = {i for mention in mentions for i in range(mention.start, mention.end)}
    for mention in data.find_mentions(plain, names_in(run.corpus)):
        if bracketed.isdisjoint(range(mention.start, mention.end)):
            mentions.append(mention)
    if not mentions:
        raise data.UserError(f"no mention in {text!r}: name a known entity, or put a description "
                             "in [brackets]")
    return data.Example(plain, sorted(mentions, key=lambda m: m.start), None, [], {})

@lru_cache(maxsize=1)
def names_in(corpus):
    return data.name_index(corpus.entity_names)

def text_batch(opened, text):
    """(Batch of one text, {mention number: its words}). -1 is the [MASK] after a question."""
    example = example_of(opened.run, text)
    batch = train.examples_batch(opened.run, opened.task, [example]).to(opened.run.device)
    words = {i: example.text[m.start:m.end] for i, m in enumerate(example.mentions)}
    if n_left := len(words) - int((batch.mention >= 0).sum()):
        train.say(f"Mentions ignored: {n_left} of {len(words)} (they overlap others, are beyond "
                  "the run's --max-length, or come after the first 32).", sys.stderr)
    return batch, words | {-1: data.MASK}

@torch.no_grad()
def forward(opened, batch, words):
    """(H, EncodedMentions): TOME's forward pass over a Batch of one text. words: {number: words} of
    the mentions to return. (text_batch gives all mentions, show_masked only the masked one.)"""
    tome = opened.tome.eval()
    H, retrieved = tome(batch.tokens, batch.attention_mask, batch, opened.memory)
    z = tome.entity_query(H, batch.row, batch.start, batch.end)                           # (M, d_K)
    return H, [EncodedMention(words[i], z[m], [sources_of(opened, found, m) for found in retrieved])
               for m, i in enumerate(batch.mention.tolist()) if i in words]

@torch.no_grad()
def retrieve(opened, encoding):
    """Retrieved (1, K): the memories of eq. 10 for an encoding (d_K,)."""
    config, passage = opened.tome.config, torch.tensor([-1], device=encoding.device)
    return opened.memory.retrieve(encoding[None], passage, config.k_answer, config.k_answer_shard)

def sources_of(opened, found, m, n=3, entity=None):
    """The n best Sources in row m of a Retrieved; if `entity` is given, only its Sources."""
    if opened.run.is_baseline:
        return []
    corpus, weights = opened.run.corpus, attention_weights(found.scores[m])
    if entity is not None:
        weights = weights * (found.entity[m] == entity)
    weights, best = weights.topk(min(n, len(weights)))
    mentions = opened.memory.mention[found.ids[m, best[weights > 0]]].tolist()
    return [Source(weight, corpus.entity_names[corpus.mention_entity[mention]],
                   corpus.show_mention(mention, width=50))
            for weight, mention in zip(weights.tolist(), mentions)]

# ---- Figures: the numbers in the report ----------------------------------------------------------

def masked_mention_figures(run, tome, memory, n=1000):
    """The keys "masked_mention" and "same_entity_mass" of eval.py --json. Each is {group: cell}. A
    cell is {name: figure}, from at most n held-out mentions (if there are none, figures are null).

    The figures come from train.masked_mentions. Except for a baseline, "masked_mention" also has
    the controls, the "gain" (memory minus emptied: the mean over mentions and its 95% interval, as
    [mean, low, high], where low and high may be null), and the fractions of mentions whose entity
    is the first, or among the first 20, in BM25's vote (bm25_ranks)."""
    corpus, mentions = run.corpus, train.sample_eval_mentions(run, n)
    measure = partial(train.masked_mentions, run, tome, mentions=mentions)
    measured, items = measure(memory, progress="masked mentions")
    groups = np.array([item.group for item in items])
    if not run.is_baseline:
        emptied, emptied_items = measure(memory.sample(0), progress="memory emptied")
        shuffled, _ = measure(memory.shuffled(), progress="values shuffled")
        gains = np.array([item.share - other.share for item, other in zip(items, emptied_items)])
        articles = corpus.article[corpus.passage_of(mentions)]
        queries = [BM25Query(tokens=data.eval_batch(corpus, [m]).tokens[0].tolist(),
                             correct=[corpus.mention_entity[m]], own=[corpus.passage_of(m)])
                   for m in mentions]
        ranks = bm25_ranks(corpus, memory.passage.tolist(), queries)
    figures = {"masked_mention": {}, "same_entity_mass": {}}
    for group, found in measured.items():
        chosen = groups == group
        mass = {"visible": found["attention_visible"], "masked": found["attention"]}
        cell = {"memory": found["tokens"], "entity": found["entity"],
                "recall@20": found["recall@20"]}
        if not run.is_baseline:
            low, high = interval(gains[chosen], articles[chosen]) or (None, None)
            cell |= {"emptied": emptied[group]["tokens"], "shuffled": shuffled[group]["tokens"],
                     "gain": [train.mean(gains[chosen]), low, high],
                     "bm25_entity": train.mean(ranks[chosen] <= 1),
                     "bm25_entity@20": train.mean(ranks[chosen] <= 20)}
        for name, values in (("masked_mention", cell), ("same_entity_mass", mass)):
            values = values if found["n"] else dict.fromkeys(values)
            figures[name][group] = values | {"n": found["n"]}
    return figures

def toy_figures(run, tome, memory, task):
    """{hops: {group: cell}} for the toy world's examples in splits "test" (group "seen") and
    "unseen". For questions, also "recall@20" and "bm25_recall@20", averaged over all questions."""
    figures, cells = {"one_hop": {}, "two_hop": {}}, []
    for hops, groups in figures.items():
        for group, split in (("seen", "test"), ("unseen", "unseen")):
            examples = train.task_examples(run, task, train.toy_file(run, task, hops, split))
            groups[group] = figures_of(run, tome, memory, task, examples)
        cells += groups.values()
    for name in sorted({"recall@20", "bm25_recall@20"} & cells[0].keys()):
        figures[name] = np.average([c[name] for c in cells], weights=[c["n"] for c in cells])
    return figures

def figures_of(run, tome, memory, task, examples):
    """A cell: {figure: its mean over these examples}, "interval" ({figure: 95% interval}) and "n".
    The figures are the accuracies with the memory and with each control that the examples allow;
    for questions, also recall@20 (eq. 10, BM25) and "answer_is_entity" (in LEGENDS: answerable)."""
    corpus, index = run.corpus, run.corpus.entity_index
    known = [[index[answer] for answer in e.answers if answer in index] for e in examples]
    measure = partial(train.judged_examples, run, tome, task, examples)
    items = measure(memory, progress="memory")
    values = {"memory": [item.is_correct for item in items]}        # of each example
    if task == "qa":
        values["recall@20"] = [item.is_recalled for item in items]
        values["answer_is_entity"] = [len(answers) > 0 for answers in known]
    controls = {"without_memory": (memory, {"attend": False})}
    if not run.is_baseline:
        controls["emptied"] = (memory.sample(0), {})
        # A control is used only if every example names an article that can be removed.
        for name, field in (("fact_removed", "subject"), ("bridge_removed", "bridge")):
            titles = [e.info.get(field) for e in examples]
            if all(isinstance(title, str) and title in corpus.article_index for title in titles):
                controls[name] = (memory, {"without": field})
    for name, (rows, options) in controls.items():
        values[name] = [item.is_correct for item in measure(rows, progress=name, **options)]
    if task == "qa" and not run.is_baseline:
        # BM25 has an advantage: 20 passages have more mentions than TOME's 20 memories (app. B.4).
        texts = [run.tokenizer.encode(e.text, add_special_tokens=False).ids for e in examples]
        queries = [BM25Query(tokens=text, correct=answers, own=[])
                   for text, answers in zip(texts, known)]
        ranks = bm25_ranks(corpus, memory.passage.tolist(), queries)
        values["bm25_recall@20"] = ranks < np.inf       # linked anywhere in the 20 best passages
    truths = [set(e.answers) if task == "qa" else {e.label} for e in examples]
    names, counts = np.unique([truth for each in truths for truth in each], return_counts=True)
    values["majority"] = [names[counts.argmax()] in truth for truth in truths]
    # For `interval`, toy examples about the same fact (a true and a false claim) form a group.
    groups = [f"{e.info.get('subject')} {e.info['relations']}" if "relations" in e.info else str(i)
              for i, e in enumerate(examples)]
    return {name: train.mean(each) for name, each in values.items()} | {
        "n": len(examples), "interval": {name: interval(x, groups) for name, x in values.items()}}

def interval(values, groups, n_draws=1000):
    """[low, high]: the 95% interval of a mean, from a bootstrap over groups (values in a group are
    not independent). values, groups (n,). None if all values are equal or there are fewer than 30
    groups, since the interval would then be too narrow."""
    values, (_, group) = np.asarray(values, float), np.unique(groups, return_inverse=True)
    size, total = np.bincount(group), np.bincount(group, values)
    if len(size) < 30 or np.ptp(values) == 0:
        return None
    rng = np.random.default_rng(0)
    draws = (rng.integers(len(size), size=len(size)) for _ in range(n_draws))
    means = [total[drawn].sum() / size[drawn].sum() for drawn in draws]
    return np.percentile(means, [2.5, 97.5]).tolist()

# ==== Set apart: BM25 =============================================================================

class BM25Query(NamedTuple):
    """A query for BM25. The 20 best passages vote for the entities that they link."""
    tokens: list
    correct: list           # entity numbers
    own: list               # passages that do not vote. Their entities, except the correct ones,
                            # are excluded, as in train.masked_mentions

def bm25(corpus, passages, k1=0.9, b=0.4):
    """Robertson's BM25 over these n of the corpus's P passages. Returns a function from a query's
    tokens to scores (P,), which are 0 for all other passages.

        score of p = sum over t of log(1 + (n - df + 0.5) / (df + 0.5)) · tf (k1 + 1) / (tf + norm)

    Token t of the query occurs in df of n passages, tf times in p. norm grows with p's length."""
    P, n = len(corpus.article), len(set(passages))
    passage = np.repeat(np.arange(P), np.diff(corpus.passage_start))            # of each token
    kept = np.isin(passage, passages) & ~np.isin(corpus.tokens, list(corpus.special.values()))
    postings, tf = np.unique(corpus.tokens[kept].astype(np.int64) * P + passage[kept],
                             return_counts=True)
    token, passage = np.divmod(postings, P)         # of each pair (a "posting"), sorted by token
    first = np.searchsorted(token, np.arange(corpus.vocab_size + 1))
    norm = k1 * (1 - b + b * np.bincount(passage, tf, P) * n / max(tf.sum(), 1))    # (P,)
    df = np.bincount(token)[token]
    terms = np.log1p((n - df + 0.5) / (df + 0.5)) * tf * (k1 + 1) / (tf + norm[passage])

    def scores(tokens):
        chosen = np.concatenate([np.arange(first[t], first[t + 1]) for t in tokens] or [[]])
        return np.bincount(passage[chosen.astype(int)], terms[chosen.astype(int)], P)
    return scores

def bm25_ranks(corpus, passages, queries, k=20):
    """For each BM25Query the best rank of its correct entities in the vote, or inf if they get no
    votes. Each of the k best passages adds its score to the votes of every entity that it links.
    Ties are broken against the correct entity."""
    score, ranks, k = bm25(corpus, passages), [], min(k, len(corpus.article))
    for tokens, correct, own in tqdm(queries, "BM25", leave=False, disable=None):
        scores, votes = score(tokens), np.zeros(len(corpus.entity_names))
        scores[own] = 0
        # Scores are rounded, so that ties do not depend on the order in which a machine adds. Only
        # the k best, and ties with the last of them, are sorted, which is faster.
        rounded = scores.round(9)
        best = np.flatnonzero(rounded >= np.partition(rounded, -k)[-k])
        for p in best[np.argsort(-rounded[best], kind="stable")][:k]:
            votes[np.unique(corpus.passage_entities(p))] += scores[p]
        visible = [e for p in own for e in corpus.passage_entities(p)]
        rivals = np.delete(votes, [0, *correct, *visible])
        most = votes[correct].max(initial=0)
        ranks.append(1 + np.count_nonzero(rivals > most - 1e-9) if most > 0 else np.inf)
    return np.array(ranks)

# ==== Set apart: pictures =========================================================================

def new_figure(path):
    """An empty matplotlib Figure for a file of this name. Raises data.UserError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise data.UserError("--plot needs matplotlib; run pip install matplotlib") from None
    figure = Figure(figsize=(8, 3), layout="constrained")
    if Path(path).suffix[1:] not in figure.canvas.get_supported_filetypes():
        raise data.UserError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    return figure

def draw_run(figure, opened, blocks):
    """Draws training (left), and accuracy against the share of the memory (right), as in the
    paper's figure 2, except that only the memory used for evaluation varies."""
    run, tome, memory, _ = opened
    left, right = figure.subplots(1, 2, sharey=True)
    draw_training(left, run, blocks)
    mentions, shares = train.sample_eval_mentions(run, 300), (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
    measured = []
    for share in shares:
        figures, _ = train.masked_mentions(run, tome, memory.sample(share), mentions,
                                           progress=f"{share:.0%} of the memory")
        measured.append(figures)
    for group in train.GROUPS:
        if measured[0][group]["n"]:
            accuracies = [figures[group]["tokens"] for figures in measured]
            right.plot([100 * share for share in shares], accuracies, ".-", label=group)
    right.set(xlabel="share of the memory (%)", ylabel="masked tokens predicted correctly")
    right.legend(frameon=False)

def draw_training(axis, run, blocks):
    """Plots the fraction of masked tokens predicted correctly, and the attention of masked mentions
    to memories of their entity, over the steps in log.jsonl (in batch-tome, only after the fit)."""
    records, steps, points, end = [], [], [], 0
    for line in (run.out / "log.jsonl").read_text("utf-8").splitlines():
        with suppress(ValueError):                  # a crash may have cut a line off
            records.append(json.loads(line))
    for stage in ("batch-tome", f"tome-{blocks}"):
        # After a crash a step can occur twice, and the last record counts.
        found = {r["step"]: r for r in records if r["stage"] == stage and "seen" in r}
        if end and found:
            axis.axvline(end, color="grey", lw=0.8, label="stage tome begins")
        steps += [end + step for step in found]
        points += found.values()
        end = max(steps, default=0)
        if stage == "batch-tome" and run.settings.memory_from:
            fit_step = train.first_memory_step(run.settings, end)
            axis.axvline(fit_step, color="grey", ls="--", lw=0.8,
                         label="fit_retrieval; not measured before")
    for color, name in (("C0", "tokens"), ("C1", "attention")):
        for group, style in zip(train.GROUPS, ("-", ":")):
            values = [point[group][name] for point in points]
            axis.plot(steps, values, style, color=color, label=f"{name}, {group}")
    axis.set(xlabel="steps", ylabel="fraction", xlim=(0, None), ylim=(-0.03, 1.03))
    axis.legend(frameon=False, fontsize="small")

def draw_mentions(figure, mentions):
    """Draws a panel for each memory layer: mentions, with lines to the memories they attend to."""
    layers = [*zip(*(mention.layers for mention in mentions))]
    figure.set_size_inches(10, sum(0.5 + 0.2 * sum(map(len, layer)) for layer in layers))
    for n, layer in enumerate(layers):
        axis, y = figure.add_subplot(len(layers), 1, n + 1), 0
        axis.set(title=f"memory layer {n + 1}", xlim=(-1, 5))
        axis.axis("off")
        write = partial(axis.text, va="center", fontsize=8, parse_math=False)
        for mention, sources in zip(mentions, layer):
            middle = y - (len(sources) - 1) / 2
            write(-0.05, middle, data.printable(mention.words), ha="right")
            for source in sources:
                axis.plot([0, 1], [middle, y], color="C0", lw=5 * source.weight, alpha=0.6)
                write(1.05, y, f"{source.weight:.2f}  {data.printable(source.passage)}")
                y -= 1

# ==== Set apart: the report and the command line ==================================================

LEGENDS = {
    None: "memory, emptied, shuffled: fraction of masked tokens predicted correctly with the "
          "memory, with an empty memory, and with permuted values. gain, 95%: memory minus "
          "emptied, averaged over mentions, and its 95% interval. entity: fraction of mentions "
          "whose entity eq. 10 picks. bm25: the same for a vote of BM25's 20 best passages for the "
          "entities that they link. recall@20, bm25@20: fraction of mentions whose entity occurs "
          "in eq. 10's 20 best memories, or in the first 20 of the vote. visible, masked: mean "
          "attention of visible and masked mentions to memories of their own entity.",
    "qa": "Fraction of questions answered correctly, with the memory (95%: its interval) and with "
          "each control (listed in eval.py). answerable: fraction with an answer among the "
          "corpus's entities. recall@20, bm25@20: fraction with a correct answer among eq. 10's "
          "20 best memories, or linked in one of BM25's 20 best passages.",
    "claims": "Fraction of claims judged correctly, with the memory (95%: its interval) and with "
              "each control (listed in eval.py)."}
TITLES = {"bm25_entity": "bm25", "bm25_entity@20": "bm25@20", "bm25_recall@20": "bm25@20",
          "answer_is_entity": "answerable"}

def report(opened, args):
    """Prints the figures, as JSON or as a table with its legend."""
    run, tome, memory, task = opened
    if task and not args.examples and not run.is_toy:
        advice = f"there are no examples to evaluate on; give --task {task} --examples FILE"
        if args.json:
            raise data.UserError(advice)
        train.say(advice)                   # not an error: training ends with this report
        return
    if args.examples:
        examples = train.task_examples(run, task, args.examples)
        figures = {task: figures_of(run, tome, memory, task, examples)}
        cells = {"all": figures[task]}
    elif task:
        figures = {task: toy_figures(run, tome, memory, task)}
        cells = {f"{hops} {group}": cell for hops in ("one_hop", "two_hop")
                 for group, cell in figures[task][hops].items()}
        if task == "qa":
            cells["all"] = {name: x for name, x in figures[task].items() if "recall" in name}
    else:
        figures = masked_mention_figures(run, tome, memory)
        cells = {group: cell | figures["same_entity_mass"][group]
                 for group, cell in figures["masked_mention"].items()}
    if args.json:
        print(json.dumps(figures))
    else:
        say_table({name: table_row(cell) for name, cell in cells.items()})
        train.say("\n" + textwrap.fill(LEGENDS[task], 80))

def table_row(cell):
    """A cell as {column: text}. "95%" is the interval of "gain" or, without a gain, of "memory"."""
    row, intervals = {}, cell.get("interval", {})
    for name, value in cell.items():
        if isinstance(value, float):                # not "gain", "interval" or "n"
            row[TITLES.get(name, name)] = f"{value:.3f}"
        elif name == "gain" and value:
            row[name], intervals = f"{value[0]:.3f}", {"gain": value[1:]}
        low, high = intervals.get(name) or (None, None)
        if low is not None and name in ("memory", "gain"):
            row["95%"] = f"{low:.2f}-{high:.2f}"
    return row | {"n": str(cell.get("n", "-"))}

def say_table(rows, width=80):
    """Prints {row: {column: text}} as aligned columns, in blocks that fit the width."""
    names = dict.fromkeys(name for row in rows.values() for name in row if name != "n")
    columns = [[name, *(row.get(name, "-") for row in rows.values())] for name in [*names, "n"]]
    columns = [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    label = [text.ljust(max(map(len, rows))) for text in ("", *rows)]
    blocks = [[label]]
    for column in columns:
        if sum(len(other[0]) + 2 for other in [*blocks[-1], column]) > width + 2:
            blocks.append([label])
        blocks[-1].append(column)
    for block in blocks:
        train.say("\n" + "\n".join("  ".join(line) for line in zip(*block)))

def say_sources(title, sources):
    lines = [f"    {source.weight:.2f}  {source.passage}" for source in sources]
    train.say("\n".join([f"  {title}", *lines]))

def say_mentions(mentions):
    """Prints, layer by layer, what each mention retrieved."""
    for n in range(len(mentions[0].layers)):
        train.say(f"\nmemory layer {n + 1}")
        for mention in mentions:
            say_sources(mention.words, mention.layers[n])

def show_masked(opened, n):
    """Masks n held-out mentions one at a time, seen and unseen in turn, and prints what each of
    them retrieves and what the model predicts. Returns their EncodedMentions."""
    run, corpus, encoded = opened.run, opened.run.corpus, []
    mentions = train.sample_eval_mentions(run, n)
    group = run.entity_group[corpus.mention_entity[mentions]]
    in_turn = zip_longest(*(mentions[group == name] for name in train.GROUPS))
    chosen = [m for pair in in_turn for m in pair if m is not None][:n]
    if not chosen:
        raise data.UserError("--show: the corpus has no held-out mention to evaluate (data.py "
                             "check counts them); give --show a text")
    for m in chosen:
        batch = data.eval_batch(corpus, [m]).to(run.device)
        words = f"{data.MASK} ({corpus.entity_names[corpus.mention_entity[m]]})"
        H, masked = forward(opened, batch, {m: words})
        predicted = opened.tome.mlm_logits(H, batch.is_target).argmax(-1).tolist()
        train.say(f"\n{corpus.show_mention(m)}\npredicted: {run.tokenizer.decode(predicted)}")
        say_mentions(masked)
        encoded += masked
    return encoded

def parse_arguments(argv):
    """The parsed command line. Flags that would have no effect are errors."""
    parser = argparse.ArgumentParser(description="Evaluate a run of train.py.", allow_abbrev=False)
    add = parser.add_argument
    add("--out", default="runs/toy", help="folder of the run (default: runs/toy)")
    add("--blocks", type=int, choices=(1, 2), default=1, help="TOME-1 or TOME-2 (default: 1)")
    add("--task", choices=("claims", "qa"),
        help="fine-tuned model to use (default: the pre-trained one; with --ask: qa)")
    add("--examples", metavar="FILE", help="examples to evaluate on (default: the toy world's)")
    add("--memory-fraction", type=float, default=1.0, metavar="F", help="share of memory to keep")
    add("--n-search", type=data.at_least(0), default=0, metavar="N",
        help="search N buckets (default: 0, exact search)")
    add("--device", choices=("cpu", "cuda", "mps"), help="default: cuda if found, else cpu")
    add("--plot", metavar="FILE.png", help="draw training, and accuracy against memory size; with "
        "--show or --ask, what the mentions retrieve")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help="print the figures as a JSON object")
    add("--show", nargs="?", const="5", metavar="N|TEXT", help="print what N masked mentions "
        "(default: 5), or the mentions of a text, retrieve")
    add("--ask", metavar="TEXT", help="answer a question or, with --task claims, judge a claim")
    args = parser.parse_args(argv)
    shows = args.show is not None or args.ask is not None
    if not 0 <= args.memory_fraction <= 1:          # also refuses NaN
        parser.error("--memory-fraction must be between 0 and 1")
    if args.show is not None and args.show.isdecimal() and int(args.show) == 0:
        parser.error("--show 0 shows nothing; give a number of at least 1, or a text")
    if args.examples and (shows or not args.task):
        parser.error("--examples needs --task qa or claims; leave out --show and --ask")
    if args.plot and (args.json or not shows and (args.task or args.memory_fraction < 1)):
        parser.error("--plot without --show or --ask draws the pre-trained model with its whole "
                     "memory; leave out --json, --task and --memory-fraction")
    if args.ask is not None:
        args.task = args.task or "qa"
    return args

def run_command(args):
    opened = open_run(args.out, args.task, args.blocks, args.device, args.n_search,
                      args.memory_fraction)
    shows = args.show is not None or args.ask is not None
    if opened.run.is_baseline and (shows or args.plot):
        raise data.UserError(f"{args.out} is a baseline: it has no mention memory")
    figure = new_figure(args.plot) if args.plot else None       # first, for its errors
    if args.ask is not None:
        answer = ask(opened, args.ask)
        train.say(f"{answer.text} (probability {answer.probability:.2f})")
        say_sources("sources", answer.sources)
        mentions = answer.mentions
        say_mentions(mentions)
    elif shows and args.show.isdecimal():
        mentions = show_masked(opened, int(args.show))
    elif shows:
        mentions = encode(opened, args.show)
        say_mentions(mentions)
    elif not figure:
        report(opened, args)
    if figure:
        draw_mentions(figure, mentions) if shows else draw_run(figure, opened, args.blocks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # a letter that the font lacks is drawn as a box
            save = partial(figure.savefig, format=Path(args.plot).suffix[1:], bbox_inches="tight")
            data.write_file(args.plot, save)
        train.say(f"Written: {args.plot}")

def main(argv=None):
    """Returns the exit status: 0, 1 with a sentence on stderr, 130 after Ctrl-C, 141 if the reader
    has closed the output."""
    args = parse_arguments(argv)
    try:
        run_command(args)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:                 # the reader has stopped, for example "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (data.UserError, OSError) as error:
        return data.complain("eval.py", error)
    except (RuntimeError, MemoryError) as error:
        if not data.is_out_of_memory(error):
            raise
        return data.complain("eval.py", "out of memory; try --device cpu or --memory-fraction 0.1")
    except KeyboardInterrupt:
        data.complain("eval.py", "stopped; nothing was changed")
        return 130

if __name__ == "__main__":
    data.print_any_text()
    sys.exit(main())
