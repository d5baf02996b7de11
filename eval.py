"""What a trained TOME knows, and where it knows it from (paper §4, app. B–D).

    python eval.py --out runs/toy                 report: figures, and what mentions retrieve
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

An entity is "seen" if a training passage links it; an "unseen" one came with the memory; one that
is "withheld" (--set withheld=0.25) stands in training passages, but no loss of pre-training named
it.
"gain" is "memory" minus "emptied", the mean over mentions, with its 95% interval.
This program only reads: it neither trains nor builds.
"""
import argparse
import html
import json
import re
import sys

import numpy as np
import torch

import data
import train
from encoder import CheckpointError
from memory import MentionMemory, attention_weights
from tome import answer_question, claim_logits, predict_entity

# ------------------------------------------------------ figures; a cell holds those of n items

def masked_mention_figures(run, tome, memory, n=1000):
    """The keys "masked_mention" and "same_entity_mass" of --json: at most n held-out mentions of
    each kind of entity, each masked alone in its passage. Figures of no mention are None. And the
    pairs of train.evaluate_memory."""
    masked, mass = {}, {}
    mentions = train.sample_eval_mentions(run, n)
    measured, pairs = train.evaluate_memory(run, tome, memory, mentions)
    if pairs:
        ranks = bm25_ranks(run, memory.passage.unique().tolist(), mentions)
        kinds = run.entity_kind[run.corpus.mention_entity[mentions]]
    for kind, values in measured.items():
        count = values.pop("n")
        if pairs:
            of_kind = ranks[kinds == train.KINDS.index(kind)]
            values["bm25_entity"] = np.count_nonzero(of_kind <= 1) / max(count, 1)
            values["bm25_entity@20"] = np.count_nonzero(of_kind <= 20) / max(count, 1)
        values = {name: value if count > 0 else None for name, value in values.items()}
        mass[kind] = {x: values.pop(f"mass_{x}") for x in ("visible", "masked")} | {"n": count}
        masked[kind] = {"memory": values.pop("accuracy")} | values | {"n": count}
    return {"masked_mention": masked, "same_entity_mass": mass}, pairs

def task_figures(run, tome, memory, task, path=None):
    """The key "claims" or "qa" of --json. path: examples, instead of the toy world's tests.

    In the toy world a cell each for one and two hops, and for subjects seen and unseen; recall@20
    is then the mean over all of their questions."""
    if path:
        return {task: figures_of(run, tome, memory, task, train.read_examples(run, task, path))}
    figures, cells = {"one_hop": {}, "two_hop": {}}, []
    for hops, kinds in figures.items():
        for kind, split in (("seen", "test"), ("unseen", "unseen")):
            path = train.toy_examples(run, task, hops, split)
            kinds[kind] = task_figures(run, tome, memory, task, path)[task]
        cells += kinds.values()
    n = [cell["n"] for cell in cells]
    for name in sorted({"recall@20", "bm25_recall@20"} & cells[0].keys()):
        figures[name] = float(np.average([cell[name] for cell in cells], weights=n))
    return {task: figures}

def figures_of(run, tome, memory, task, examples):
    """The cell of these examples, with what controls they allow and each figure's 95% interval.
    "answer_is_entity": the share of questions that can be right, as the corpus has an answer."""
    asked = (run, tome, task, examples)
    cell = train.task_accuracy(*asked, memory)
    n = cell.pop("n")
    cell = {"memory": cell.pop("accuracy"), **cell}
    cell["without_memory"] = train.task_accuracy(*asked, memory, attend=False)["accuracy"]
    if isinstance(memory, MentionMemory):
        cell["emptied"] = train.task_accuracy(*asked, memory.emptied())["accuracy"]
        # Only where every example names an article: nothing would be removed for the others.
        for name, field in (("fact_removed", "subject"), ("bridge_removed", "bridge")):
            titles = [example.info.get(field) for example in examples]
            if all(isinstance(t, str) and t in run.corpus.article_index for t in titles):
                cell[name] = train.task_accuracy(*asked, memory, without=field)["accuracy"]
        if task == "qa":
            cell["bm25_recall@20"] = bm25_recall(run, memory.passage.tolist(), examples)
    truths = [example.label for example in examples]
    if task == "qa":
        truths = [answer for example in examples for answer in set(example.answers)]
        known = [e for e in examples if run.corpus.entity_index.keys() & set(e.answers)]
        cell["answer_is_entity"] = len(known) / n
    cell["majority"] = float(np.unique(truths, return_counts=True)[1].max() / n)
    return cell | {"n": n, "interval": {name: wilson(share, n) for name, share in cell.items()}}

def wilson(share, n, z=1.96):
    """Wilson's 95% interval of a share of n, sound also for few items and shares near 0 and 1."""
    scale = 1 + z * z / n
    centre = share + z * z / (2 * n)
    half = z * (share * (1 - share) / n + (z / (2 * n)) ** 2) ** 0.5
    return [max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)]

class BM25:
    """Robertson's BM25 over these passages of the corpus. For the tokens t of a query, each tf
    times in passage p and in df of the P passages:

        score of p = sum over t of log(1 + (P - df + 0.5) / (df + 0.5)) · tf (k1 + 1) / (tf + norm)

    with norm = k1 (1 - b + b |p| / mean |p|)."""

    def __init__(self, corpus, passages, k1=0.9, b=0.4):
        self.k1, self.n_passages, self.n = k1, len(set(passages)), len(corpus.article)
        place = np.repeat(np.arange(self.n), np.diff(corpus.passage_start))     # of each token
        kept = np.isin(place, passages) & ~np.isin(corpus.tokens, list(corpus.special.values()))
        order = np.flatnonzero(kept)[np.argsort(corpus.tokens[kept], kind="stable")]
        self.place, self.tokens = place[order], corpus.tokens[order]            # sorted by token
        length = np.bincount(self.place, minlength=self.n)
        self.norm = k1 * (1 - b + b * length * self.n_passages / max(len(order), 1))    # (n,)

    def best(self, tokens, k, without=-1):
        """The numbers and scores of the k best passages, but not of passage `without`."""
        scores = np.zeros(self.n)
        for t in tokens:
            first, last = np.searchsorted(self.tokens, [t, t + 1])
            tf = np.bincount(self.place[first:last], minlength=self.n)
            df = np.count_nonzero(tf)
            idf = np.log1p((self.n_passages - df + 0.5) / (df + 0.5))
            scores += idf * tf * (self.k1 + 1) / (tf + self.norm)
        if without >= 0:
            scores[without] = 0
        order = np.argsort(-scores, kind="stable")[:k]
        order = order[scores[order] > 0]
        return order, scores[order]

def bm25_recall(run, passages, examples, k=20):
    """Recall@20 beside TOME's (app. B.4): is a mention of an answer in one of the k best passages?
    A passage holds more than one of TOME's memories: this favours BM25, as in the paper; but there,
    an answer's words also count where not linked."""
    corpus, bm25, hits = run.corpus, BM25(run.corpus, passages), []
    for example in examples:
        question = run.tokenizer.encode(example.text, add_special_tokens=False).ids
        best, _ = bm25.best(question, k)
        answers = [corpus.entity_index.get(answer, -1) for answer in example.answers]
        hits.append(any(np.isin(corpus.passage_entities(p), answers).any() for p in best))
    return float(np.mean(hits))

def bm25_ranks(run, passages, mentions, k=20):
    """The entity of masked mentions by BM25: each of the k best passages for the rest of the
    mention's passage votes with its score for its entities, but for those that stand there too.
    (n,) how many entities have at least the votes of the right one; infinite if it has none."""
    corpus, bm25, ranks = run.corpus, BM25(run.corpus, passages), []
    for m in mentions:
        p, entity = int(corpus.passage_of(m)), corpus.mention_entity[m]
        first, last = corpus.passage_start[p:p + 2]
        tokens = corpus.tokens[first:last]
        rest = np.delete(tokens, slice(corpus.mention_start[m], corpus.mention_end[m] + 1))
        votes = np.zeros(len(corpus.entity_names))
        for passage, score in zip(*bm25.best(rest, k, without=p)):
            votes[np.unique(corpus.passage_entities(passage))] += score
        others = corpus.passage_entities(p)
        votes[others[others != entity]] = votes[0] = 0
        ranks.append(np.count_nonzero(votes >= votes[entity]) if votes[entity] > 0 else np.inf)
    return np.array(ranks)

# ------------------------------------------------------ what a mention retrieves (tables 3, 4, 12)

def sources(run, memory, name, retrieved, m):
    """A line for each of the three memories that weigh most for mention m."""
    weights, order = attention_weights(retrieved.scores[m]).sort(descending=True)
    for weight, row in zip(weights[:3].tolist(), retrieved.ids[m][order].tolist()):
        if weight > 0:
            yield f"    {name}  {weight:.2f}  {run.corpus.show_mention(memory.mention[row].item())}"

@torch.no_grad()
def look(run, tome, memory, text, batch, words, task=None):
    """Lines: a text, what each mention {m: its words} of its batch retrieves in each layer, and
    what the model says: the words of a mask, the label of a claim or the answer to a question."""
    H, found = tome.eval()(batch.tokens, batch.attention_mask, batch, memory)
    yield f"\n{text}"
    for m in words:
        yield f"  {words[m]}"
        for i, retrieved in enumerate(found, 1):
            yield from sources(run, memory, f"layer {i}", retrieved, m)
    if task == "claims":
        probability, label = claim_logits(tome, H, batch)[0].softmax(-1).max(-1)
        yield f"  says: {data.CLAIM_LABELS[label]}   (probability {probability:.2f})"
    elif task == "qa":
        answer = answer_question(tome, H, batch, memory)
        best = predict_entity(answer.scores, answer.entity)
        name = run.corpus.entity_names[best.entity[0]] or "nothing"
        yield f"  says: {name}   (probability {best.probability[0]:.2f})"
        yield from sources(run, memory, "answer", answer, 0)
    elif len(batch.target) > 0:
        filled = tome.mlm_logits(H, batch.target_index).argmax(-1)
        right = "right" if torch.equal(filled, batch.target) else "wrong"
        yield f"  says: {run.tokenizer.decode(filled.tolist())}   ({right})"

def show_masked(run, tome, memory, n=5):
    """The first held-out mentions, n seen and n unseen, each masked: what it retrieves, and what
    the model fills in. One row at a time: two mentions can stand in one passage."""
    for mention in train.sample_eval_mentions(run, n):
        batch = data.eval_batch(run.corpus, np.array([mention])).to(run.device)
        words = {batch.mention.tolist().index(mention): data.MASK}
        yield from look(run, tome, memory, run.corpus.show_mention(mention), batch, words)

def show_where_it_helps(run, pairs, n=10):
    """The first n held-out mentions that only the model with its memory fills in rightly, and the
    first n that only the model without does. pairs: train.evaluate_memory's, of which the first
    300 of each kind are read."""
    shares = {m: pair for of_kind in pairs.values() for m, pair in list(of_kind.items())[:300]}
    for title, sign in (("Right with the memory alone:", 1), ("Right without it alone:", -1)):
        yield f"\n{title}"
        found = [m for m, (share, alone) in shares.items() if (share == 1) - (alone == 1) == sign]
        yield from [f"  {run.corpus.show_mention(m)}" for m in found[:n]]
        yield f"  ({len(found)} of {len(shares)})"

def show_examples(run, tome, memory, task, examples):
    """What the mentions of examples retrieve, and what the model says (task None: nothing)."""
    for example in examples:
        batch = train.examples_batch(run, task, [example]).to(run.device)
        words = [example.text[m.start:m.end] for m in example.mentions] + [data.MASK]
        words = {m: words[i] for m, i in enumerate(batch.mention)}      # i = -1: the one asked for
        yield from look(run, tome, memory, example.text, batch, words, task)
        yield from [f"  truth: {answer}" for answer in example.answers]
        if example.label is not None:
            yield f"  truth: {data.CLAIM_LABELS[example.label]}"

def example_of(run, text):
    """An example of a text that somebody typed. Its mentions are the names of entities, and what
    stands in [brackets]: no entity is called "teacher", yet in "Where was Ida Hale's [teacher]
    born?" the second hop starts there."""
    bracketed = r"\[([^\[\]]+)\]"
    plain = re.sub(bracketed, r"\1", text)
    mentions = data.find_mentions(plain, run.corpus.entity_names + re.findall(bracketed, text))
    if not mentions:
        raise data.UserError(f"no mention in {text!r}: name an entity of the corpus, or put what "
                             "is mentioned in [brackets]")
    return data.Example(plain, mentions, None, [], {})

# ------------------------------------------------------ report and command line

def rows(figures, name=""):
    """A line for each cell: its place in --json, then its figures, "memory" with its interval."""
    lines, row = [], f"{name:<23}"
    for key, value in figures.items():
        if isinstance(value, float):
            row += f"   {key} {value:.3f}"
        elif key == "gain" and value:
            row += "   gain {:.3f} ({:.3f} to {:.3f})".format(*value)
        elif not isinstance(value, dict):
            row += f"   {key} {value}"
        elif key != "interval":
            lines += rows(value, f"{name} {key}".strip())
        if key == "memory" and "interval" in figures:
            row += " ({:.3f} to {:.3f})".format(*figures["interval"][key])
    return lines or [row]

def output(run, tome, memory, args):
    """The lines to print: what --show or --ask ask for, also of examples without a label or an
    answer; else figures, and after stage tome a few retrievals. Training ends with these, so it is
    no error that a run has no tests."""
    model, task = (run, tome, memory), args.task
    if args.show and not args.show.isdecimal():
        return show_examples(*model, task, [example_of(run, args.show)])
    if args.show and task:
        path = args.examples or train.toy_examples(run, task)
        examples = train.read_examples(run, task, path, known=False)
        return show_examples(*model, task, examples[:int(args.show)])
    if args.show:
        return show_masked(*model, int(args.show))
    if task and not (args.examples or args.json or (run.out / "world").exists()):
        return ["--examples FILE measures it"]
    if task:
        figures = task_figures(*model, task, args.examples)
    else:
        figures, pairs = masked_mention_figures(*model)
    if args.json:
        return [json.dumps(figures)]
    if task or not isinstance(memory, MentionMemory):
        return rows(figures)
    mentions, lines = train.sample_eval_mentions(run, 300), rows(figures)
    for share in (0.1, 0.5):
        part = memory.sample(share)
        measured, _ = train.masked_mentions(run, tome, part, mentions)
        shares = [f"{kind} {x['accuracy']:.3f}" for kind, x in measured.items() if x["n"]]
        lines.append(f"  with {share:.0%} of the memory: {', '.join(shares) or 'not measured'}")
    return [*lines, *show_where_it_helps(run, pairs), *show_masked(*model, 3)]

def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate a run of train.py.", allow_abbrev=False)
    parser.add_argument("--out", default="runs/toy", help="folder of the run")
    parser.add_argument("--task", choices=("claims", "qa"), help="default: masked mentions")
    parser.add_argument("--examples", help="a file of examples (default: the toy world's tests)")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="keep a share of it")
    parser.add_argument("--html", metavar="FILE", help="write a page instead of printing")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--n-search", type=data.at_least(1))
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="print the figures as a JSON object")
    kind.add_argument("--show", nargs="?", const="5", metavar="N|TEXT", help="what these retrieve")
    kind.add_argument("--ask", metavar="TEXT", help="answer a question or judge a claim")
    args = parser.parse_args(argv)
    if args.ask:
        args.task, args.show = args.task or "qa", args.ask
    if args.examples and not args.task:
        parser.error("--examples wants --task qa or --task claims")
    if not 0 <= args.memory_fraction <= 1:
        parser.error("--memory-fraction wants a number from 0 to 1")
    try:
        run, tome, memory = train.open_run(args.out, args.task, args.device, args.n_search)
        if isinstance(memory, MentionMemory):
            memory = memory.sample(args.memory_fraction)
        elif args.show or args.memory_fraction < 1:
            raise data.UserError(f"{args.out} is a baseline: it has no mention memory")
        text = data.printable("\n".join(output(run, tome, memory, args)))
        if args.html:
            page = f'<!DOCTYPE html><meta charset="utf-8"><pre>{html.escape(text)}</pre>\n'
            data.write_file(args.html, lambda file: file.write(page.encode()))
        else:
            print(text)
        return 0
    except (data.UserError, CheckpointError, OSError) as error:
        return data.complain("eval.py", error)
    except KeyboardInterrupt:
        print("eval.py: stopped; nothing was changed", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")       # for a terminal that is not UTF-8
    sys.exit(main())
