"""What a trained TOME knows, and from where (paper §4, app. B–D).

    python eval.py --out runs/toy                       accuracy on masked mentions, with the memory and without
    python eval.py --out runs/toy --task qa             claims or questions; with the subject's passages taken away
    python eval.py --out runs/toy --task qa --ask "Who was the teacher of Mona Varga?"
    python eval.py --out runs/toy --show                what the first held-out mentions retrieve

Every figure has its controls beside it: the memory emptied, its values shuffled, or the passages that state the fact
removed. "Seen" entities are linked somewhere in the training passages, "unseen" ones never: they came with the memory.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

import data
import train
from encoder import CheckpointError
from memory import MemoryFolderError, load_memory
from tome import predict_entity
from train import RunError, answer_question, claim_logits, evaluate_memory, task_accuracy

CLAIM = ("REFUTES", "SUPPORTS")


def open_run(out, task=None, device=None):
    """(run, trained TOME, whole memory) of a run folder."""
    saved = train.read_run_file(out)
    args = argparse.Namespace(out=out, preset=saved["preset"], seed=None, blocks=None, corpus=None, init=None,
                              device=device)
    run = train.make_run(args)
    tome, fingerprint = train.load_tome(run, task or "tome")
    return run, tome, load_memory(run.out / "memory", fingerprint, run.device, corpus=run.corpus.fingerprint)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def masked_mention_figures(run, tome, memory, n=1000):
    """The keys "masked_mention" and "same_entity_mass" of --json."""
    measured = evaluate_memory(run, tome, memory, train.sample_eval_mentions(run, n))
    return {"masked_mention": {kind: {"memory": m["accuracy"], "emptied": m["emptied"], "shuffled": m["shuffled"],
                                      "entity": m["entity"], "n": m["n"]} for kind, m in measured.items()},
            "same_entity_mass": {kind: {"visible": m["mass_visible"], "masked": m["mass_masked"], "n": m["n"]}
                                 for kind, m in measured.items()}}


def task_figures(run, tome, memory, task, examples=None):
    """The key "claims" or "qa" of --json: by hops and entities seen or not, on the toy world's test questions, or on a
    file of examples. "fact_removed": the subject's article is out of the memory; "bridge_removed": the bridge's."""
    if examples:
        return {task: figures_of(run, tome, memory, task, data.read_examples(examples, task))}
    result = {}
    for hops in ("one_hop", "two_hop"):
        for kind, split in (("seen", "test"), ("unseen", "unseen")):
            path = run.out / "world" / f"{task}.{hops}.{split}.jsonl"
            if not path.exists():
                raise RunError(f"{path}: no such file; this run is not of the toy world, give --examples FILE")
            cell = figures_of(run, tome, memory, task, data.read_examples(path, task))
            result.setdefault(hops, {})[kind] = cell
    if task == "qa":
        cells = [cell for hops in result.values() for cell in hops.values()]
        result["recall@20"] = sum(c["recall@20"] * c["n"] for c in cells) / sum(c["n"] for c in cells)
    return {task: result}


def figures_of(run, tome, memory, task, examples):
    measured = task_accuracy(run, tome, task, examples, memory)
    cell = {"memory": measured.pop("accuracy"), **measured}
    for name, field in (("fact_removed", "subject"), ("bridge_removed", "bridge")):
        if examples and all(field in e.info for e in examples):
            cell[name] = task_accuracy(run, tome, task, examples, memory, without=field)["accuracy"]
    return cell


# ---------------------------------------------------------------------------------------------------------------------
# Looking: what a mention retrieves (tables 3, 4 and 7 of the paper)


@torch.no_grad()
def retrievals(run, tome, memory, batch, n=3):
    """For each mention of a batch: [(layer, [(weight, corpus mention), …])], the n memories with most attention."""
    H, found = tome(batch.tokens, batch.attention_mask, batch, memory)
    result = [[] for _ in range(len(batch.row))]
    for layer, retrieved in enumerate(found, 1):
        weights, place = retrieved.weights.topk(min(n, retrieved.weights.shape[1]))
        ids = retrieved.ids.gather(1, place)
        for mention in range(len(batch.row)):
            result[mention].append((layer, [(w, int(memory.mention[i])) for w, i in
                                            zip(weights[mention].tolist(), ids[mention].tolist()) if w > 0]))
    return H, result


def show_masked(run, tome, memory, n=5, out=sys.stdout):
    """The first held-out mentions, n seen and n unseen, none chosen: what was masked, what the model says, and what
    the masked mention retrieved."""
    for kind, mentions in zip(("seen in training", "never seen in training"), split_eval_mentions(run, n)):
        print(f"\nMasked mentions of entities {kind}:", file=out)
        if not len(mentions):
            continue
        batch = data.eval_batch(run.corpus, mentions).to(run.device)
        H, found = retrievals(run, tome, memory, batch)
        predicted = tome.mlm_logits(H, batch.target_index).argmax(-1)
        for i, mention in enumerate(mentions):
            which = int((batch.mention == mention).nonzero()[0])
            words = run.tokenizer.decode(predicted[batch.target_mention == which].tolist())
            truth = run.tokenizer.decode(batch.target[batch.target_mention == which].tolist())
            print(f"  {run.corpus.show_mention(mention)}", file=out)
            print(f"    says: {words}   ({'right' if words == truth else 'wrong'})", file=out)
            for layer, memories in found[which]:
                for weight, m in memories[:2]:
                    print(f"    layer {layer}  {weight:.2f}  {run.corpus.show_mention(m)}", file=out)


def split_eval_mentions(run, n):
    mentions = train.sample_eval_mentions(run, n)
    seen = run.corpus.entity_count[run.corpus.mention_entity[mentions]] > 0
    return mentions[seen], mentions[~seen]


@torch.no_grad()
def ask(run, tome, memory, task, text, out=sys.stdout):
    """Answer a question or judge a claim, and print the passages it was read from. Returns (answer, probability)."""
    mentions = data.find_mentions(text, run.corpus.entity_names[1:])
    example = data.Example(text, mentions, 0 if task == "claims" else None, [], {})      # a label makes it a claim
    entity_index = {name: i for i, name in enumerate(run.corpus.entity_names)}
    batch = data.example_batch([example], run.tokenizer, entity_index).to(run.device)
    if not len(batch.row):
        raise RunError(f"no known entity is mentioned in {text!r}, so nothing can be looked up; name one of the corpus")
    tome.eval()
    if task == "claims":
        probabilities = claim_logits(tome, batch, memory).softmax(-1)[0]
        answer, probability = CLAIM[int(probabilities.argmax())], float(probabilities.max())
    else:
        found = answer_question(tome, batch, memory)
        best = predict_entity(found.scores, found.entity)
        answer, probability = run.corpus.entity_names[int(best.entity[0])], float(best.probability[0])
    print(f"{answer}   (probability {probability:.2f})", file=out)
    if task == "qa":
        print("  answered from:", file=out)
        for score, i in list(zip(found.scores.softmax(-1)[0].tolist(), found.ids[0].tolist()))[:3]:
            print(f"    {score:.2f}  {run.corpus.show_mention(int(memory.mention[i]))}", file=out)
    _, per_mention = retrievals(run, tome, memory, batch)
    for m, found in enumerate(per_mention):
        row, start, end = int(batch.row[m]), int(batch.start[m]), int(batch.end[m])
        words = run.tokenizer.decode(batch.tokens[row, start + 1:end].tolist(), skip_special_tokens=False)
        for layer, memories in found:
            for weight, i in memories[:1]:
                print(f"  [{words}] layer {layer}  {weight:.2f}  {run.corpus.show_mention(i)}", file=out)
    return answer, probability


# ---------------------------------------------------------------------------------------------------------------------
# Reports and command line


def print_masked(figures):
    print("\nHeld-out mentions, each masked alone: share of its words filled in rightly")
    print("  entities              with the memory   emptied   shuffled      "
          "attention on the same entity: visible  masked")
    for kind, name in (("seen", "seen in training"), ("unseen", "never seen")):
        m, mass = figures["masked_mention"][kind], figures["same_entity_mass"][kind]
        if m["n"]:
            print(f"  {name:<18}    {m['memory']:>12.2f}   {m['emptied']:>10.2f}   {m['shuffled']:>8.2f}"
                  f"   {mass['visible']:>37.2f}   {mass['masked']:>5.2f}     ({m['n']} mentions)")


def print_task(figures, task):
    print(f"\n{'Claims judged' if task == 'claims' else 'Questions answered'} rightly")
    figures = figures[task]
    cells = [(f"{hops.replace('_', ' ')}, {kind}", cell) for hops, kinds in figures.items() if hops.endswith("hop")
             for kind, cell in kinds.items()] or [("examples", figures)]
    for name, cell in cells:
        controls = "   ".join(f"{control.replace('_', ' ')} {cell[control]:.2f}"
                              for control in ("fact_removed", "bridge_removed", "recall@20") if control in cell)
        print(f"  {name:<18} {cell['memory']:.2f}   {controls}   ({cell['n']})")


def report(run, stage, task):
    """What train.py prints at the end: what was learnt, and where it lies."""
    if stage == "batch-tome":
        train.say(f"Mention Encoder and BATCH-TOME are in {run.out / 'batch-tome.pt'}, curves in {run.out / 'log.jsonl'}.")
        return
    if train.ann.rank_and_size()[1] > 1:
        train.say(f"Done; python eval.py --out {run.out} shows what was learnt.")
        return
    tome, fingerprint = train.load_tome(run, task or "tome")
    memory = load_memory(run.out / "memory", fingerprint, run.device)
    if stage == "tome":
        figures = masked_mention_figures(run, tome, memory)
        print_masked(figures)
        mentions = train.sample_eval_mentions(run, 300)
        for fraction in (0.1, 0.5):
            part = train.masked_mentions(tome, run.corpus, memory.sample(fraction), mentions, run.device)
            print(f"  with {fraction:.0%} of the memory: "
                  + ", ".join(f"{kind} {m['accuracy']:.2f}" for kind, m in part.items() if m["n"]))
        show_masked(run, tome, memory, n=3)
        print(f"\nTOME is in {run.out / 'tome.pt'}, its memory in {run.out / 'memory'}, "
              f"curves in {run.out / 'log.jsonl'}.")
    elif (run.out / "world").exists():
        print_task(task_figures(run, tome, memory, task), task)
        print(f'\nAsk it: python eval.py --out {run.out} --task {task} --ask "…"')


def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate a run of train.py.", allow_abbrev=False)
    parser.add_argument("--out", default="runs/toy", help="folder of the run")
    parser.add_argument("--task", choices=("claims", "qa"), help="a fine-tuned model (default: masked mentions)")
    parser.add_argument("--examples", help="examples to evaluate on (default: the toy world's tests)")
    parser.add_argument("--memory-fraction", type=float, default=1.0, help="of the memory's passages, uniform sample")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    parser.add_argument("--show", nargs="?", type=int, const=5, help="what the first N held-out mentions retrieve")
    parser.add_argument("--ask", metavar="TEXT", help="answer a question, or judge a claim (with --task)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    if not 0 <= args.memory_fraction <= 1:
        parser.error("--memory-fraction wants a number from 0 to 1")
    if args.ask and not args.task:
        parser.error("--ask wants --task qa or --task claims")
    try:
        run, tome, memory = open_run(args.out, args.task, args.device)
        memory = memory.sample(args.memory_fraction)
        if args.ask:
            ask(run, tome, memory, args.task, args.ask)
        elif args.show:
            show_masked(run, tome, memory, args.show)
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
    except (RunError, data.DataError, MemoryFolderError, CheckpointError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
