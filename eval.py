"""What a trained TOME knows, and where it knows it from (paper §4, app. B, D).

    python eval.py --out runs/toy                 report: figures, and what mentions retrieve
    python eval.py --out runs/toy --task qa       figures of the model fine-tuned on questions
    python eval.py --ask "Who taught Oskar Jarvis?"        an answer and its sources
    python eval.py --show 5                       what held-out mentions retrieve

An accuracy alone says little about a memory. So the report has "memory", the accuracy with it, and
beside it controls:

    emptied          without any row of the memory
    shuffled         each value is another mention's; what is retrieved stays the same
    fact_removed     without the article of the subject, which states the fact
    bridge_removed   without the article of the entity between two facts: in "the mayor of X's
                     birthplace" that of the birthplace
    without_memory   the memory layers are off; the answer to a question is still retrieved
    majority         the most frequent label or answer, always given

An entity is "seen" if a training passage links it; an "unseen" one is linked in the memory alone.
A "withheld" one (--set withheld=0.25) is linked in training passages, but no loss of pre-training
named it, and TOME trained without its memories. "gain" is "memory" minus "emptied", the mean over
mentions. Intervals are of 95%.
This program only reads: it neither trains nor builds.
"""
import argparse
import json
import re
import sys
from functools import partial

import numpy as np
import torch

import data
import train
from memory import attention_weights
from tome import claim_logits, predict_entity, retrieve_answer

# ---- Figures: a cell holds those of n items ------------------------------------------------------

def masked_mention_figures(run, tome, memory, n=1000):
    """Returns (figures, pairs). figures: the keys "masked_mention" and "same_entity_mass" of
    --json: train.masked_mentions' figures of at most n held-out mentions of each of train.GROUPS,
    None if it has none. Except of a baseline there are also the accuracy with the memory emptied
    and with its values shuffled, the gain (mean and 95% interval of paired differences), and how
    often BM25's vote names the entity. pairs: the mentions, and the share of each one's tokens that
    are right with the memory and with it emptied; of a baseline ()."""
    corpus, mentions = run.corpus, train.sample_eval_mentions(run, n)
    measured, shares = train.masked_mentions(run, tome, memory, mentions)
    pairs, figures = (), {"masked_mention": {}, "same_entity_mass": {}}
    if not run.is_baseline:
        emptied, alone = train.masked_mentions(run, tome, memory.sample(0), mentions)
        shuffled, _ = train.masked_mentions(run, tome, memory.shuffled(), mentions)
        pairs = mentions, shares, alone
        group_of = run.entity_group[corpus.mention_entity[mentions]]
        queries = [(data.eval_batch(corpus, [m]).tokens[0].tolist(), [corpus.mention_entity[m]],
                    [corpus.passage_of(m)]) for m in mentions]
        ranks = bm25_ranks(corpus, memory.passage.tolist(), queries)
    for i, (kind, cell) in enumerate(measured.items()):
        n_mentions = cell.pop("n")
        if pairs:
            cell |= {"emptied": emptied[kind]["accuracy"], "shuffled": shuffled[kind]["accuracy"]}
            gains = (shares - alone)[group_of == i]
            if n_mentions > 1:
                half = 1.96 * gains.std(ddof=1) / n_mentions ** 0.5
                cell["gain"] = [gains.mean() + x for x in (0, -half, half)]
            for name, last in (("bm25_entity", 1), ("bm25_entity@20", 20)):
                cell[name] = (ranks[group_of == i] <= last).sum() / max(n_mentions, 1)
        if n_mentions == 0:
            cell = dict.fromkeys(cell)
        mass = {x: cell.pop(f"mass_{x}") for x in ("visible", "masked")}
        figures["same_entity_mass"][kind] = mass | {"n": n_mentions}
        figures["masked_mention"][kind] = {"memory": cell.pop("accuracy"), **cell, "n": n_mentions}
    return figures, pairs

def task_figures(run, tome, memory, task, path=None):
    """The key "claims" or "qa" of --json: the cell of a file, or cells of the toy world's tests, of
    one and two hops and subjects seen and unseen; recall@20 also over all of their questions."""
    if path:
        return figures_of(run, tome, memory, task, train.task_examples(run, task, path))
    figures, cells = {"one_hop": {}, "two_hop": {}}, []
    for hops, kinds in figures.items():
        for kind, split in (("seen", "test"), ("unseen", "unseen")):
            path = train.toy_file(run, task, hops, split)
            kinds[kind] = task_figures(run, tome, memory, task, path)
        cells += kinds.values()
    for name in sorted({"recall@20", "bm25_recall@20"} & cells[0].keys()):
        n = [cell["n"] for cell in cells]
        figures[name] = np.average([cell[name] for cell in cells], weights=n)
    return figures

def figures_of(run, tome, memory, task, examples):
    """The cell of these examples, with what controls they allow and each figure's interval.
    "answer_is_entity": the share of questions with an answer among the corpus's entities: only
    these can be answered."""
    corpus, index = run.corpus, run.corpus.entity_index
    known = [[index[answer] for answer in e.answers if answer in index] for e in examples]
    measure = partial(train.task_accuracy, run, tome, task, examples)
    cell = measure(memory)
    n = cell.pop("n")
    cell = {"memory": cell.pop("accuracy"), **cell}
    cell["without_memory"] = measure(memory, attend=False)["accuracy"]
    if not run.is_baseline:
        cell["emptied"] = measure(memory.sample(0))["accuracy"]
        # Only where every example names an article: nothing would be removed for the others.
        for name, field in (("fact_removed", "subject"), ("bridge_removed", "bridge")):
            titles = [e.info.get(field) for e in examples]
            if all(isinstance(title, str) and title in corpus.article_index for title in titles):
                cell[name] = measure(memory, without=field)["accuracy"]
        if task == "qa":
            # A passage holds more than one of TOME's memories: this favours BM25 (app. B.4).
            texts = [run.tokenizer.encode(e.text, add_special_tokens=False).ids for e in examples]
            queries = [(text, answers, []) for text, answers in zip(texts, known)]
            ranks = bm25_ranks(corpus, memory.passage.tolist(), queries)
            cell["bm25_recall@20"] = np.mean(ranks < np.inf)    # only the 20 best passages vote
    # The share that is right if the most frequent label or answer is always given.
    truths = [e.label for e in examples]
    if task == "qa":
        truths = [answer for e in examples for answer in set(e.answers)]
        cell["answer_is_entity"] = np.mean([len(answers) > 0 for answers in known])
    cell["majority"] = np.unique(truths, return_counts=True)[1].max() / n
    return cell | {"n": n, "interval": {name: wilson(share, n) for name, share in cell.items()}}

def wilson(share, n, z=1.96):
    """Wilson's 95% interval of a share of n, sound also for few items and shares near 0 and 1."""
    scale = 1 + z * z / n
    centre = share + z * z / (2 * n)
    half = z * (share * (1 - share) / n + (z / (2 * n)) ** 2) ** 0.5
    return [max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)]

def bm25_ranks(corpus, passages, queries, k=20, k1=0.9, b=0.4):
    """Robertson's BM25 over these passages of the corpus. Each of a query's k best passages adds
    its score to the votes of every entity that it links. Returns for each query the rank of the
    right entities in these votes, infinite where they have none. A query: its tokens, the right
    entities, and its own passages; these do not vote, and their other entities are no rivals, as in
    train.masked_mentions. Of equal votes the right one's comes last.

        score of p = sum over t of log(1 + (n - df + 0.5) / (df + 0.5)) · tf (k1 + 1) / (tf + norm)

    Token t of a query stands in df of n passages and tf times in p; norm grows with p's length."""
    P, n, ranks = len(corpus.article), len(set(passages)), []
    passage = np.repeat(np.arange(P), np.diff(corpus.passage_start))            # of each token
    kept = np.isin(passage, passages) & ~np.isin(corpus.tokens, list(corpus.special.values()))
    postings, tf = np.unique(corpus.tokens[kept].astype(np.int64) * P + passage[kept],
                             return_counts=True)
    token, passage = np.divmod(postings, P)                                     # token after token
    first = np.searchsorted(token, np.arange(corpus.vocab_size + 1))
    norm = k1 * (1 - b + b * np.bincount(passage, tf, P) * n / max(tf.sum(), 1))  # (P,)
    df = np.bincount(token)[token]
    terms = np.log1p((n - df + 0.5) / (df + 0.5)) * tf * (k1 + 1) / (tf + norm[passage])
    for tokens, right, own in queries:
        scores = np.zeros(P)
        for t, count in zip(*np.unique(tokens, return_counts=True)):
            of_token = slice(first[t], first[t + 1])
            scores[passage[of_token]] += terms[of_token] * count
        scores[own] = 0
        votes = np.zeros(len(corpus.entity_names))
        # Rounded: what is equal stays so, whatever order a machine adds in.
        for p in np.argsort(-scores.round(9), kind="stable")[:k]:
            votes[np.unique(corpus.passage_entities(p))] += scores[p]
        visible = [e for p in own for e in corpus.passage_entities(p)]
        rivals = np.delete(votes, [0, *right, *visible])
        most = votes[right].max(initial=0)
        ranks.append(1 + np.count_nonzero(rivals > most - 1e-9) if most > 0 else np.inf)
    return np.array(ranks)

# ---- What mentions retrieve (tables 3, 4, 12) ----------------------------------------------------

def example_of(run, text):
    """A text that somebody typed, as an example. Its mentions are what stands in [brackets], and
    the names of entities: in "Where was Ida Hale's [teacher] born?" the second hop starts there."""
    parts = re.split(r"\[([^][]*)\]", text)         # every second one stood in brackets
    plain, place = "".join(parts), np.cumsum([0, *map(len, parts)]).tolist()
    mentions = [data.Mention(a, b, None) for a, b in zip(place[1::2], place[2::2]) if a < b]
    bracketed = {i for mention in mentions for i in range(mention.start, mention.end)}
    for mention in data.find_mentions(plain, data.name_index(run.corpus.entity_names)):
        if bracketed.isdisjoint(range(mention.start, mention.end)):
            mentions.append(mention)
    if not mentions:
        raise data.UserError(f"no mention in {text!r}: name an entity, or put it in [brackets]")
    return data.Example(plain, sorted(mentions, key=lambda m: m.start), None, [], {})

@torch.no_grad()
def show(run, tome, memory, task, item):
    """Prints what the mentions of an Example retrieve in each layer, and what the model says; or
    the same for a held-out mention (its number), the only one that is masked in its passage."""
    corpus = run.corpus
    if isinstance(item, data.Example):
        text, batch = item.text, train.examples_batch(run, task, [item])
        words = {i: text[m.start:m.end] for i, m in enumerate(item.mentions)} | {-1: data.MASK}
        if n_left := len(item.mentions) - int((batch.mention >= 0).sum()):
            train.say(f"\nOf the text's mentions {n_left} are not read.")
    else:
        text, batch, task = corpus.show_mention(item), data.eval_batch(corpus, [item]), None
        words = {item: data.MASK}                       # of the mentions to be shown
    batch = batch.to(run.device)
    H, retrieved = tome.eval()(batch.tokens, batch.attention_mask, batch, memory)
    found = []                      # what it is called, Retrieved, which of its rows
    for m, i in enumerate(batch.mention.tolist()):
        if i in words:
            found += [(f"{words[i]}, layer {n}", layer, m) for n, layer in enumerate(retrieved, 1)]
    if task == "claims":
        said = data.CLAIM_LABELS[claim_logits(tome, H, batch)[0].argmax()]
    elif task == "qa":
        answer = retrieve_answer(tome, H, batch, memory, batch.answer >= 0)
        said = corpus.entity_names[predict_entity(answer.scores, answer.entity)[0]]
        found.append(("answer", answer, 0))
    else:
        said = run.tokenizer.decode(tome.mlm_logits(H, batch.is_target).argmax(-1).tolist())
    train.say(f"\n{text}")
    for name, what, m in found:
        train.say(f"  {name}")
        weights = attention_weights(what.scores[m]).tolist()
        for weight, row in zip(weights[:3], what.ids[m].tolist()):
            if weight > 0:
                train.say(f"    {weight:.2f}  {corpus.show_mention(memory.mention[row].item())}")
    if task or batch.is_target.any():
        train.say(f"  says: {said or 'nothing'}")

def show_where_it_helps(run, mentions, shares, alone):
    """The first ten held-out mentions that the model only fills in with its memory, and the first
    ten that it only fills in without. Arguments: see masked_mention_figures."""
    helped, harmed = mentions[(shares == 1) & (alone < 1)], mentions[(shares < 1) & (alone == 1)]
    for title, found in (("with the memory", helped), ("without it", harmed)):
        train.say(f"\nRight only {title}: {len(found)} of {len(mentions)}")
        train.say("\n".join(f"  {run.corpus.show_mention(m)}" for m in found[:10]))

# ==== Set apart: report and command line ==========================================================

def say_by_size(run, tome, memory, shares=(0.1, 0.5)):
    """The share of masked tokens that are right with a part of the memory (figure 2)."""
    mentions = train.sample_eval_mentions(run, 300)
    for share in shares:
        measured, _ = train.masked_mentions(run, tome, memory.sample(share), mentions)
        right = [f"{kind} {values['accuracy']:.3f}" for kind, values in measured.items()
                 if values["n"]]
        train.say(f"  with {share:.0%} of the memory: {', '.join(right)}")

def main(argv=None):
    """Returns the exit status: 0, 1 with a sentence on stderr, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description="Evaluate a run of train.py.", allow_abbrev=False)
    parser.add_argument("--out", default="runs/toy", help="folder of the run")
    parser.add_argument("--task", choices=("claims", "qa"), help="default: masked mentions")
    parser.add_argument("--examples", help="a file of examples (default: the toy world's tests)")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="keep a share of it")
    parser.add_argument("--n-search", type=data.at_least(1), help="buckets (default: exact search)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the figures as a JSON object")
    output.add_argument("--show", nargs="?", const="5", metavar="N|TEXT", help="what they retrieve")
    output.add_argument("--ask", metavar="TEXT", help="answer a question or judge a claim")
    args = parser.parse_args(argv)
    if args.ask is not None:
        args.task, args.show = args.task or "qa", args.ask
    if args.show == "":
        args.show = " "                             # a text: without a mention
    if not 0 <= args.memory_fraction <= 1:          # NaN is not, either
        parser.error("--memory-fraction is from 0 to 1")
    if args.examples and (args.show or not args.task):
        parser.error("--examples goes with --task qa or --task claims, to be measured")
    try:
        run, tome, memory = train.open_run(args.out, args.task, args.device, args.n_search)
        if run.is_baseline and (args.show or args.memory_fraction < 1 or args.n_search):
            raise data.UserError(f"{args.out} is a baseline: it has no mention memory")
        if not run.is_baseline:
            memory = memory.sample(args.memory_fraction)
        # items: what `show` is to show, of a text or of held-out mentions.
        task, items, figures, pairs = args.task, [], {}, ()
        if args.show and (args.ask or not args.show.isdecimal()):
            items = [example_of(run, args.show)]
        elif args.show:
            items = train.sample_eval_mentions(run, int(args.show))
            if not len(items):
                raise data.UserError(f"{args.out}: no held-out passage names an entity that "
                                     "another one names too; give --show a text")
        elif not task:
            figures, pairs = masked_mention_figures(run, tome, memory)
        elif args.examples or run.saved["corpus"] is None:
            figures[task] = task_figures(run, tome, memory, task, args.examples)
        elif args.json:
            raise data.UserError(f"no figures: give --task {task} --examples FILE")
        else:                   # no error: training ends with this report
            train.say(f"No figures: give eval.py --task {task} --examples FILE")
        if args.json:
            print(json.dumps(figures))
        else:
            train.say_figures(figures)
        if pairs and not args.json:
            if args.memory_fraction == 1 and len(pairs[0]):     # else it would be sampled twice
                say_by_size(run, tome, memory)
            show_where_it_helps(run, *pairs)
            items = train.sample_eval_mentions(run, 3)
        for item in items:
            show(run, tome, memory, task, item)
        return 0
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
    sys.stdout.reconfigure(errors="backslashreplace")       # for a terminal that is not UTF-8
    sys.exit(main())
