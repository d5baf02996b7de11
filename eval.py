"""What a trained TOME knows, and where it knows it from (paper §4, app. B–D).

    python eval.py --out runs/toy                 report: learning curve, figures, retrievals
    python eval.py --out runs/toy --task qa       the same of the model fine-tuned on questions
    python eval.py --ask "Who taught Walter Lorenz?"        an answer and its sources
    python eval.py --show 5                       what held-out mentions retrieve

An accuracy alone says little about a memory. Beside "memory", that with it, stand its controls:

    emptied          without any row of the memory
    shuffled         each value is another mention's; what is retrieved stays the same
    fact_removed     without the article of the subject, which states the fact
    bridge_removed   without the article between two facts: Rome, in "the mayor of X's birthplace"
    without_memory   the memory layers are off; the answer to a question is still retrieved
    majority         the most frequent label or answer, always given

An entity is "seen" if a training passage links it; an "unseen" one came with the memory.
This program only reads: it neither trains nor builds.
"""
import argparse
import html
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import data
import train
from encoder import CheckpointError
from memory import MentionMemory, attention_weights
from tome import answer_question, claim_logits, predict_entity

# ------------------------------------------------------ figures; a cell holds those of n items

def masked_mention_figures(run, tome, memory, n=1000):
    """The keys "masked_mention" and "same_entity_mass" of --json: at most n held-out mentions seen
    and n unseen, each masked alone in its passage. Figures of no mention are None."""
    masked, mass = {}, {}
    measured = train.evaluate_memory(run, tome, memory, train.sample_eval_mentions(run, n))
    for kind, values in measured.items():
        if not values["n"]:
            values = dict.fromkeys(values) | {"n": 0}
        masked[kind] = {"memory": values["accuracy"]}
        if isinstance(memory, MentionMemory):
            masked[kind] |= {"emptied": values["emptied"], "shuffled": values["shuffled"]}
        masked[kind] |= {"entity": values["entity"], "n": values["n"]}
        mass[kind] = {"visible": values["mass_visible"], "masked": values["mass_masked"],
                      "n": values["n"]}
    return {"masked_mention": masked, "same_entity_mass": mass}

def task_figures(run, tome, memory, task, path=None):
    """The key "claims" or "qa" of --json. path: examples, instead of the toy world's tests.

    In the toy world a cell each for one and two hops, and for subjects seen and unseen; recall@20
    is then the mean over all of their questions."""
    def cell(path):
        return figures_of(run, tome, memory, task, train.read_examples(run, task, path))

    if path:
        return {task: cell(path)}
    figures, cells = {}, []
    for hops in ("one_hop", "two_hop"):
        figures[hops] = {"seen": cell(train.toy_examples(run, task, hops, "test")),
                         "unseen": cell(train.toy_examples(run, task, hops, "unseen"))}
        cells += figures[hops].values()
    n = sum(cell["n"] for cell in cells)
    for name in ("recall@20", "bm25_recall@20"):
        if name in cells[0]:
            figures[name] = sum(cell[name] * cell["n"] for cell in cells) / n
    return {task: figures}

def figures_of(run, tome, memory, task, examples):
    """The cell of these examples, with what controls they allow and each figure's 95% interval.
    "answer_is_entity": the share of questions that can be right, as the corpus has an answer."""
    def accuracy(memory, **control):
        return train.task_accuracy(run, tome, task, examples, memory, **control)["accuracy"]

    cell = train.task_accuracy(run, tome, task, examples, memory)
    n = cell.pop("n")
    cell["memory"] = cell.pop("accuracy")
    cell["without_memory"] = accuracy(memory, attend=False)
    if isinstance(memory, MentionMemory):
        cell["emptied"] = accuracy(memory.emptied())
        # Only where every example names an article: nothing would be removed for the others.
        for name, field in (("fact_removed", "subject"), ("bridge_removed", "bridge")):
            titles = [example.info.get(field) for example in examples]
            if all(isinstance(t, str) and t in run.corpus.article_index for t in titles):
                cell[name] = accuracy(memory, without=field)
        if task == "qa":
            bm25 = BM25(run.corpus, np.unique(memory.passage.cpu().numpy()))
            cell["bm25_recall@20"] = bm25_recall(run, bm25, examples)
    truths = [[e.label] if task == "claims" else set(e.answers) for e in examples]
    counts = Counter(truth for several in truths for truth in several)
    cell["majority"] = max(counts.values()) / n
    if task == "qa":
        known = set(run.corpus.entity_names)
        cell["answer_is_entity"] = sum(not known.isdisjoint(truth) for truth in truths) / n
    intervals = {name: wilson(share, n) for name, share in cell.items()}
    return cell | {"n": n, "interval": intervals}

def wilson(share, n, z=1.96):
    """Wilson's 95% interval of a share of n, sound also for few items and shares near 0 and 1."""
    scale = 1 + z * z / n
    centre = share + z * z / (2 * n)
    half = z * (share * (1 - share) / n + (z / (2 * n)) ** 2) ** 0.5
    return [max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)]

class BM25:
    """Robertson's ranking of P passages p by the tokens t that they share with a query q:

        sum over t in q of  log(1 + (P - df + 0.5) / (df + 0.5)) · tf (k1 + 1) / (tf + norm_p)

    with norm_p = k1 (1 - b + b |p| / mean |p|). Token t stands in place[first[t]:first[t + 1]]."""

    def __init__(self, corpus, passages, k1=0.9, b=0.4):
        """passages: the numbers of those to rank, (P,)."""
        self.passages, self.k1 = passages, k1
        place = np.full(len(corpus.article), -1)
        place[passages] = np.arange(len(passages))
        place = np.repeat(place, np.diff(corpus.passage_start))                 # of each token
        kept = (place >= 0) & ~np.isin(corpus.tokens, list(corpus.special.values()))
        tokens, place = corpus.tokens[kept], place[kept]
        order = np.argsort(tokens, kind="stable")
        self.place = place[order]
        self.first = np.searchsorted(tokens[order], np.arange(corpus.vocab_size + 1))
        length = np.bincount(place, minlength=len(passages))                    # (P,)
        self.norm = k1 * (1 - b + b * length * len(passages) / max(len(tokens), 1))

    def search(self, tokens, k=20):
        """The best passages for these token ids, at most k that share a token: numbers, scores."""
        P = len(self.passages)
        scores = np.zeros(P)
        for t in tokens:
            tf = np.bincount(self.place[self.first[t]:self.first[t + 1]], minlength=P)      # (P,)
            df = np.count_nonzero(tf)
            idf = np.log1p((P - df + 0.5) / (df + 0.5))
            scores += idf * tf * (self.k1 + 1) / (tf + self.norm)
        best = np.argsort(-scores, kind="stable")[:k]
        best = best[scores[best] > 0]
        return self.passages[best], scores[best]

def bm25_recall(run, bm25, examples):
    """Recall@20 of BM25, beside TOME's (app. B.4): is a mention of an answer one of TOME's 20 best
    memories, or in one of BM25's 20 best passages? This favours BM25, as in the paper; but there,
    a passage is also a hit where the answer's words are not linked."""
    index, hits = run.corpus.entity_index, 0
    for example in examples:
        answers = [index[answer] for answer in example.answers if answer in index]
        found, _ = bm25.search(run.tokenizer.encode(example.text, add_special_tokens=False).ids)
        hits += any(np.isin(run.corpus.passage_entities(p), answers).any() for p in found)
    return hits / len(examples)

# ------------------------------------------------------ what a mention retrieves (tables 3, 4, 12)
# What is shown is a list of (text, says, mentions). says: what the model makes of the text, "" if
# it was asked nothing. mentions: of each, (its words, {layer: its heaviest memories}).

def heaviest(memory, retrieved, m, n=3):
    """Of mention m: [(weight, corpus mention), …] of the n memories with most attention."""
    weights, order = retrieved.weights[m].topk(min(n, retrieved.weights.shape[1]))
    pairs = zip(weights.tolist(), retrieved.ids[m][order].tolist())
    return [(weight, int(memory.mention[i])) for weight, i in pairs if weight > 0]

@torch.no_grad()
def show_masked(run, tome, memory, n=5):
    """The first held-out mentions, n seen and n unseen, each masked: what the model fills in there,
    and what the mention retrieves. One row at a time: two mentions can stand in one passage."""
    shown = []
    for mention in train.sample_eval_mentions(run, n):
        batch = data.eval_batch(run.corpus, np.array([mention])).to(run.device)
        H, found = tome.eval()(batch.tokens, batch.attention_mask, batch, memory)
        filled = tome.mlm_logits(H, batch.target_index).argmax(-1)
        right = "right" if torch.equal(filled, batch.target) else "wrong"
        count = run.corpus.entity_count[run.corpus.mention_entity[mention]]
        seen = "seen" if count else "never seen"
        says = f"{run.tokenizer.decode(filled.tolist())}   ({right}; entity {seen} in training)"
        m = batch.mention.tolist().index(mention)
        layers = {f"layer {i}": heaviest(memory, r, m) for i, r in enumerate(found, 1)}
        shown.append((run.corpus.show_mention(mention), says, [(data.MASK, layers)]))
    return shown

@torch.no_grad()
def show_examples(run, tome, memory, task, examples):
    """What the model says of examples (task None: nothing), and what their mentions retrieve."""
    shown = []
    for example in examples:
        batch = train.examples_batch(run, task, [example]).to(run.device)
        H, found = tome.eval()(batch.tokens, batch.attention_mask, batch, memory)
        mentions, says = [], ""
        for m, number in enumerate(batch.mention.tolist()):
            words = data.MASK                   # -1: the mention that a question ends in
            if number >= 0:
                words = example.text[slice(*example.mentions[number][:2])]
            layers = {f"layer {i}": heaviest(memory, r, m) for i, r in enumerate(found, 1)}
            mentions.append((words, layers))
        if task == "claims":
            probability, label = claim_logits(tome, H, batch)[0].softmax(-1).max(-1)
            truth = [] if example.label is None else [data.CLAIM_LABELS[example.label]]
            says = verdict(data.CLAIM_LABELS[label], probability, truth)
        elif task == "qa":
            answer = answer_question(tome, H, batch, memory)
            answer = answer._replace(weights=attention_weights(answer.scores))
            best = predict_entity(answer.scores, answer.entity)
            name = run.corpus.entity_names[best.entity[0]] or "nothing"
            says = verdict(name, best.probability[0], example.answers)
            mentions[batch.answer_mention[0]][1]["answer"] = heaviest(memory, answer, 0)
        shown.append((example.text, says, mentions))
    return shown

def verdict(says, probability, truth):
    """What the model says, and whether it is one of truth; [] = not known."""
    right = f"; {'right' if says in truth else 'wrong'}" if truth else ""
    return f"{says}   (probability {float(probability):.2f}{right})"

def example_of(run, text):
    """An example of a text that somebody typed. Its mentions are the names of entities, and what
    stands in [brackets]: no entity is called "teacher", yet in "Where was Ida Hale's [teacher]
    born?" the second hop starts there."""
    bracketed = r"\[\s*([^\[\]]*[^\[\]\s])\s*\]"
    plain = re.sub(bracketed, r"\1", text)
    names = [*run.corpus.entity_names, *re.findall(bracketed, text)]
    mentions = data.find_mentions(plain, names)
    if not mentions:
        raise data.UserError(f"no mention in {text!r}: name an entity of the corpus, or put what "
                             "is mentioned in [brackets]")
    return data.Example(plain, mentions, None, [], {})

def print_shown(run, shown, path=None):
    """Prints what is shown; or writes it to path as a web page, with whole passages, escaped."""
    lines = []
    for text, says, mentions in shown:
        lines.append(f"\n{text}")
        if says:
            lines.append(f"  says: {says}")
        for words, layers in mentions:
            lines.append(f"  {words}")
            for layer, memories in layers.items():
                for weight, m in memories:
                    passage = run.corpus.show_mention(m, width=10 ** 9 if path else 80)
                    lines.append(f"    {layer}  {weight:.2f}  {passage}")
    if path is None:
        print(data.printable("\n".join(lines)))
        return
    title, text = html.escape(f"What {run.out} retrieves"), html.escape("\n".join(lines))
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"></head>
<body><h1>{title}</h1><pre style="white-space: pre-wrap">{text}</pre></body></html>
"""
    data.write_file(path, lambda file: file.write(page.encode("utf-8", "replace")))

# ------------------------------------------------------ report and command line

def print_figures(figures, name=""):
    """Figures below the name of their cell, which is its place in --json, with their intervals."""
    intervals = figures.get("interval", {})
    texts = {}
    for key, value in figures.items():
        if value is None:
            texts[key] = "not measured: no such mention"
        elif not isinstance(value, dict):
            texts[key] = f"{value:.3f}" if isinstance(value, float) else str(value)
    if intervals:
        print(f"\n{name}")
        for key, text in texts.items():
            if key in intervals:
                low, high = intervals[key]
                text += f"   95%: {low:.3f} to {high:.3f}"
            print(f"  {key:<20}{text}")
    elif texts:
        print(f"{name:<24}" + "   ".join(f"{key} {text}" for key, text in texts.items()))
    for key, value in figures.items():
        if isinstance(value, dict) and value is not intervals:
            print_figures(value, f"{name} {key}".strip())

def print_curve(out, stage):
    """What log.jsonl says of a stage, each series drawn from its smallest value to its largest.

    A bar is the mean of a sixtieth of the values; the first and the last one stand beside it."""
    records = [r for _, r in train.read_log(Path(out) / "log.jsonl") if r["stage"] == stage]
    if len(records) < 2:
        return
    series = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, dict) and value.get("n"):      # seen and unseen
                name, value = f"masked, {name}", value.get("accuracy")
            if isinstance(value, float) and name != "lr":
                series.setdefault(name, []).append(value)
    print(f"{stage}, steps {records[0]['step']:,} to {records[-1]['step']:,}")
    for name, values in series.items():
        means = np.array([part.mean() for part in np.array_split(values, min(60, len(values)))])
        heights = 7 * (means - means.min()) / max(np.ptp(means), 1e-9)
        bars = "".join("▁▂▃▄▅▆▇█"[round(height)] for height in heights)
        print(f"  {data.printable(name):<16}{values[0]:8.3f} {bars} {values[-1]:.3f}")

def report(run, tome, memory, args):
    """Figures; without --json also the learning curve and, of the whole memory after stage tome,
    what a part of it gives and a few retrievals."""
    if not args.task:
        figures = masked_mention_figures(run, tome, memory)
    elif args.examples or args.json or (run.out / "world").exists():
        figures = task_figures(run, tome, memory, args.task, args.examples)
    else:
        figures = {"to measure it": {"add": "--examples FILE"}}
    if args.json:
        print(json.dumps(figures))
        return
    print_curve(run.out, args.task or "tome")
    print_figures(figures)
    if isinstance(memory, MentionMemory) and not args.task and args.memory_fraction == 1:
        mentions = train.sample_eval_mentions(run, 300)
        for share in (0.1, 0.5):
            part = memory.sample(share)
            measured = train.masked_mentions(tome, run.corpus, part, mentions, run.device)
            shares = [f"{kind} {values['accuracy']:.3f}" for kind, values in measured.items()
                      if values["n"]]
            print(f"  with {share:.0%} of the memory: {', '.join(shares) or 'not measured'}")
        print_shown(run, show_masked(run, tome, memory, 3))

def show(run, tome, memory, args):
    """What --show and --ask ask for: a text that somebody typed, or a number of held-out mentions
    or of examples. Of examples, also those without a label or an answer."""
    if not args.show.isdecimal():
        example, longest = example_of(run, args.show), run.settings.max_length
        cut = data.count_cut_mentions([example], run.tokenizer, longest)
        if cut:
            train.say(f"{cut} mentions stand behind max_length ({longest} tokens) and are not "
                      "read; give a shorter text.", sys.stderr)
        return show_examples(run, tome, memory, args.task, [example])
    if not args.task:
        return show_masked(run, tome, memory, int(args.show))
    path = args.examples or train.toy_examples(run, args.task)
    examples = train.read_examples(run, args.task, path, known=False)[:int(args.show)]
    return show_examples(run, tome, memory, args.task, examples)

def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate a run of train.py.", allow_abbrev=False)
    parser.add_argument("--out", default="runs/toy", help="folder of the run")
    parser.add_argument("--task", choices=("claims", "qa"), help="default: masked mentions")
    parser.add_argument("--examples", help="a file of examples (default: the toy world's tests)")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="keep a share of it")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the figures as a JSON object")
    output.add_argument("--show", nargs="?", const="5", metavar="N|TEXT", help="what a text "
                        "retrieves, or N held-out mentions seen and N unseen, or N examples")
    output.add_argument("--ask", metavar="TEXT", help="answer a question or judge a claim and show "
                        "the sources; [brackets] mark a mention that is no name")
    parser.add_argument("--html", metavar="FILE", help="write what --show prints as a page")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    train.add_search_arguments(parser)
    args = parser.parse_args(argv)
    if args.ask is not None:
        args.task, args.show = args.task or "qa", args.ask
    if args.examples and not args.task:
        parser.error("--examples wants --task qa or --task claims")
    if args.html and args.show is None:
        parser.error("--html goes with --show or --ask")
    if not 0 <= args.memory_fraction <= 1:
        parser.error("--memory-fraction wants a number from 0 to 1")
    try:
        if args.html and not Path(args.html).absolute().parent.is_dir():
            raise data.UserError(f"--html {args.html}: make its folder first")
        run, tome, memory = train.open_run(args.out, args.task, args.device, args.search,
                                           args.n_search)
        if isinstance(memory, MentionMemory):
            memory = memory.sample(args.memory_fraction)
        elif args.show is not None or args.memory_fraction < 1:
            raise data.UserError(f"{args.out} is a baseline: it has no mention memory")
        if args.show is not None:
            print_shown(run, show(run, tome, memory, args), args.html)
        else:
            report(run, tome, memory, args)
        return 0
    except (data.UserError, CheckpointError, OSError) as error:
        print(f"eval.py: {data.printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eval.py: stopped; nothing was changed", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")       # for a terminal that is not UTF-8
    sys.exit(main())
