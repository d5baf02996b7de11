"""The stages of training (paper §2.3, §2.4, §4.3, §4.4, app. A, B.1), and their one loop.

    stage        what learns                      from                   losses
    batch-tome   Mention Encoder and BATCH-TOME   related passages       MLM + coreference
    memory       nothing: the Mention Encoder reads the corpus; its keys and values are the memory
    tome         TOME over that frozen memory     passages at random     MLM + entity prediction
                                                                         (mini: + linking)
    finetune     TOME over that frozen memory     claims and clozes,     labels; eq. 10 where asked
                                                  or questions           for, + linking

A cloze is a true claim with one entity masked. Linking is entity prediction once more, from the
queries of the last memory layer. On real text (preset mini) tome begins with teacher forcing: each
mention is given memories of its own entity, and MLM is the only loss. In the later steps half of
the mentions are still given them, and the others search.

    python train.py --stage tome                                all but finetune, on the toy world
    python train.py --stage tome --corpus my.jsonl.gz --preset mini --out runs/mine
    torchrun --nproc_per_node 2 train.py --stage tome           the same work, in two processes

A stage runs the unfinished ones before it first, and goes on where it stopped. Every batch, mask
and dropout of a step follows from (seed, stage, step, process) alone: a run that was cut off and
taken up again ends, on a CPU, with the same bits.

H (B, T, hidden) is the last block's output, z a mention's encoding, for eq. 10 or for coreference
(app. A.2), `memory` a MentionMemory or a baseline's EntityTable. In order: settings, the stages,
the loop, initial weights, what is measured; then files of examples, the run folder and the command
line.
"""
import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import ann
import data
from data import UserError, checksum, intact, read_json, write_file, write_json
from encoder import Config, beside, low_precision, precision_on, weights_files
from memory import GivenMemory, MentionMemory, build_memory, encode_passages, load_memory
from tome import (TOME, BatchTOME, claim_logits, coreference_loss, entity_prediction_loss,
                  fit_retrieval, mlm_loss, part_of, predict_entity, read_published, retrieve_answer,
                  share_of_mean, split_into_blocks, start_positions)

# Entities are seen: linked in a training passage; unseen: in none; or withheld: linked there, but
# named by no loss of pre-training, and not in the memory that tome trains with.
GROUPS = ("seen", "unseen", "withheld")

@dataclass
class Schedule:
    """How long and how fast a stage learns; --steps, --batch and --lr replace its fields."""
    steps: int
    lr: float
    warmup: int             # steps of linear warm-up, at most a tenth; linear decay to zero follows
    batch: int              # passages or examples a step, of all processes; claims add clozes

@dataclass
class Settings:
    """All settings of a run but those of its model (encoder.Config). The defaults are the paper's,
    where it gives them (app. A, B.1)."""
    passage_length: int = 128       # tokens of text
    max_length: int = 512           # at most so many positions: text, markers, [CLS] and [SEP]
    vocab: int = 30522              # WordPiece entries, where the tokenizer is trained here
    cluster: int = 256              # related passages that stand together (app. A.1)
    mentions: int = 24              # at most, per passage on average; of more, a sample is used
    mention_rate: float = 0.2       # share of mentions that are drawn to be masked
    token_rate: float = 0.1         # share of other tokens that are masked
    coref_weight: float = 0.15      # of coreference in batch-tome; MLM has the rest
    entity_weight: float = 0.15     # of entity prediction in tome; MLM has the rest
    coref_entities: int = 1_000_000     # coreference only over the most frequent entities
    memory_fraction: float = 38 / 150   # of the memory, in stage tome (§4.1)
    memory_dtype: str = "float16"
    beta2: float = 0.999
    weight_decay: float = 0.01
    clip: float = 1.0
    # From here on what the paper lacks, and `schedule` (with steps of our own for claims and qa).
    memory_from: float = 0.0        # share of batch-tome's steps before fit_retrieval runs and the
                                    # memory is switched on; 0: it is on at once, nothing is fitted
    fit_passages: int = 4000        # passages that fit_retrieval reads
    all_of_entity: int = 0          # 1: with a masked mention all of its entity in the passage
    withheld: float = 0.0           # share of entities that pre-training does not name, to be
                                    # evaluated on
    lower_rate: float = 1.0         # multiple of the learning rate for embeddings and layers below
                                    # the memory: in every stage with --init, else in fine-tuning
    cloze_weight: float = 0.3       # of each of the two losses of clozes; that of labels is 1
    k_finetune: int = 4096          # memories that eq. 10 compares in fine-tuning, in place of
                                    # k_answer: an answer that is not among them teaches nothing
    linking_weight: float = 0.0     # of linking in tome (of Entities as Experts: entity_weight)
    teacher_forcing: float = 0.0    # share of tome's steps, the first ones, that learn to read
                                    # memories which are given (memory.GivenMemory)
    still_given: float = 0.0        # share of mentions that are given memories in all later steps
    log_every: int = 1000           # steps between evaluations, and lines of the log
    save_every: int = 1000
    eval_mentions: int = 1000       # of each of GROUPS
    schedule: dict = field(default_factory=lambda: {
        "batch-tome": Schedule(1_000_000, 1e-4, 50_000, 4096),
        "tome": Schedule(500_000, 1e-4, 25_000, 4096),
        "claims": Schedule(20_000, 1e-5, 1000, 32), "qa": Schedule(20_000, 1e-5, 1000, 32)})

# What differs from the paper's numbers. toy: minutes on a laptop. mini: a few hundred articles.
# Their models are small and their steps few, so rates are six to a hundred times the paper's.
# Each process offers all k, so that the search is exact whatever their number.
SMALL = dict(key_dim=64, value_dim=128, coref_dim=64, dropout=0.0, k=64, k_shard=64, k_answer=64,
             k_answer_shard=64, k_finetune=256, n_initial=3, n_upper=1, cluster=64,
             memory_fraction=1.0, memory_dtype="float32", beta2=0.98)
PRESETS = {
    "base": data.TEXT_PRESETS["base"],
    "mini": SMALL | data.TEXT_PRESETS["mini"] | dict(
        hidden=128, n_heads=8, intermediate=512, max_positions=256, key_dim=128, value_dim=256,
        n_upper=2, k=256, k_shard=256, k_answer=256, k_answer_shard=256, memory_from=0.95,
        coref_weight=0.5, entity_weight=0.3, linking_weight=0.3, teacher_forcing=0.29,
        still_given=0.5, mention_rate=0.5, all_of_entity=1, token_rate=0.07, lower_rate=0.25,
        log_every=200, save_every=100, eval_mentions=100, schedule={
            "batch-tome": Schedule(700, 6e-4, 50, 64), "tome": Schedule(1400, 8e-4, 20, 64),
            "claims": Schedule(600, 2e-4, 60, 32), "qa": Schedule(600, 2e-4, 60, 32)}),
    "toy": SMALL | data.TEXT_PRESETS["toy"] | dict(
        hidden=96, n_heads=6, intermediate=192, max_positions=128, mention_rate=0.4,
        init_std=0.05, memory_from=0.3, fit_passages=768, lower_rate=0.1, precision="float32",
        log_every=200, save_every=200, eval_mentions=100, schedule={
            "batch-tome": Schedule(2900, 2e-3, 100, 64), "tome": Schedule(700, 1e-3, 50, 64),
            "claims": Schedule(2400, 1e-3, 50, 64), "qa": Schedule(1600, 1e-3, 40, 64)}),
}

# ---- The stages ----------------------------------------------------------------------------------
# Each but `memory` (memory.encode_passages) is a model, its batches and its losses; one loop,
# further down, serves all. A loss is this process's part of the mean over the whole batch: the sum
# of all processes' gradients is then the gradient of the whole batch, whatever their number.
#
# `run` is an open run folder (class Run, below):
#
#     settings, config, seed      Settings; Config (batch_tome_config: with one memory layer;
#                                 task_config: eq. 10 over k_finetune memories)
#     corpus, tokenizer, device
#     is_withheld, entity_group   (E,) of entities: whether withheld; index into GROUPS
#     init, has_batch_tome        a path to published weights; whether these are a BATCH-TOME's
#     is_baseline                 it has no mention memory
#     out, saved, folder(kind)    its folder; what run.json holds; where a corpus or memory lies
#
# `recipe` is a plain dictionary of all that determines a stage's result: kind (the stage's name:
# "batch-tome", "tome", "claims" or "qa"), steps, lr, batch, …

class Stage(NamedTuple):
    """What train_stage asks of a stage."""
    model: torch.nn.Module
    next_batch: Callable            # step -> Batch of all processes
    losses: Callable                # Batch of this process, step -> {name: (weight, loss)}
    evaluate: Callable              # () -> figures for the log. Where one of them is "score" (in
                                    # fine-tuning), the weights of its best value are kept
    fingerprint: str = None         # of the Mention Encoder that wrote the memory, if one did
    before_step: Callable = lambda step: None

def endless(order):
    """at(step, n): the n items of a step, out of order(0), order(1), … joined. order(epoch) is an
    array of items; all have one length. Computed from the step, so no position is saved."""
    order = lru_cache(maxsize=3)(order)         # the first one, for its length, and those of a step
    def at(step, n):
        length = len(order(0))
        return np.array([order(i // length)[i % length] for i in range(step * n, step * n + n)])
    return at

def epochs_of(run, number, items):
    """Epochs of these items in random order. number: which of the run's random streams this is."""
    return endless(lambda epoch: np.random.default_rng([run.seed, number, epoch])
                   .permutation(items))

def masked_batch(run, passages, number, step):
    """A batch for MLM: whole mentions and single tokens are masked (app. A)."""
    settings, rng = run.settings, np.random.default_rng([run.seed, number, step])
    return data.make_batch(run.corpus, passages, rng, settings.mention_rate, settings.token_rate,
                           settings.mentions, run.is_withheld, settings.all_of_entity)

def training_passages(run):
    """Numbers of the passages that have a linked mention and are not held out."""
    passages = run.corpus.passage_of(np.flatnonzero(run.corpus.mention_entity))
    passages = np.unique(passages[~run.corpus.held_out[passages]])
    if not len(passages):
        raise UserError(f"{run.saved['corpus']}: all passages with a linked mention are held out, "
                        "none is left to train on; add texts with \"split\": \"train\"")
    if len(passages) < ann.rank_and_size()[1]:
        raise UserError(f"there are fewer passages to train on than processes; start at most "
                        f"{len(passages)}")
    return passages

def batch_tome_stage(run, recipe):
    """Mention Encoder and BATCH-TOME, on related passages (§2.3, app. A.1)."""
    settings, corpus = run.settings, run.corpus
    passages = training_passages(run)

    def clusters(epoch):
        """Numbers of an epoch's passages, cluster after cluster."""
        found = data.related_clusters(corpus, settings.cluster, run.seed * 1000 + epoch, passages)
        if len(found) > 1:
            found = [c for c in found if len(c) == settings.cluster]    # the last may be smaller
        order = np.random.default_rng([run.seed, epoch]).permutation(len(found))
        return np.concatenate([found[i] for i in order])

    items = endless(clusters)
    mentions = sample_eval_mentions(run, settings.eval_mentions)
    support = supporting_passages(corpus, mentions)
    # Coreference is only over the most frequent entities that are not withheld.
    count = corpus.entity_count
    least = max(1, np.sort(count)[-min(settings.coref_entities, len(count))])
    frequent = torch.from_numpy((count >= least) & ~run.is_withheld).to(run.device)
    is_begun = (run.out / "batch-tome.pt").exists()         # then its weights come from there
    model = BatchTOME(TOME(run.batch_tome_config)) if is_begun else new_batch_tome(run, run.seed)
    # From this step on, the memory is on.
    fit_step = max(1, int(recipe["steps"] * settings.memory_from)) if settings.memory_from else 0

    def evaluate():
        """Over a small memory, for speed. It is attended to here before the fit, too. No loss
        trains the answer head in this stage, so "entity" and "recall@20" say little."""
        rank, size = ann.rank_and_size()
        rows = encode_passages(model, corpus, support[rank::size], run.device)
        memory = MentionMemory(**rows, device=run.device)
        return masked_mentions(run, model.tome, memory, mentions)[0]

    def before_step(step):
        """At fit_step, fit_retrieval sets the retrieval layers in closed form: freshly initialised
        ones would find nothing. Prints the attention before and after."""
        if step == fit_step > 0:
            say_figures(evaluate(), f"batch-tome {step}, before the fit ")
            sample = np.random.default_rng(run.seed).permutation(passages)[:settings.fit_passages]
            rng = np.random.default_rng([run.seed, 7])
            batches = []
            for part in np.array_split(sample, -(-len(sample) // 32)):
                batch = data.make_batch(corpus, part, rng, mention_rate=0.5, token_rate=0.1,
                                        max_mentions=None, is_withheld=run.is_withheld)
                batch.entity[run.is_withheld[batch.entity.numpy()]] = 0     # not linked for the fit
                batches.append(batch.to(run.device))
            fit_retrieval(model.eval(), batches)
            ann.copy_from_first(model.parameters())
            say_figures(evaluate(), f"batch-tome {step}, after the fit ")
            model.train()

    def losses(batch, step):
        """MLM makes the batch memory useful. Coreference makes the encoder store in a mention what
        its passage says about the entity; without it TOME loses 2 to 8 points (app. B.5). Before
        the fit it is also applied to H0, from which queries are made: there a masked mention must
        already know whom to look for."""
        if step < fit_step:
            H0 = model.tome.read_initial(batch.tokens, batch.attention_mask)
            H, _ = model.tome.read_blocks(H0, batch.attention_mask)
            outputs = [H0, H]
        else:
            H, _ = model(batch)
            outputs = [H]
        entity = torch.where(frequent[batch.entity], batch.entity, 0)
        coref = [coreference_loss(model.coref(output, batch.row, batch.start, batch.end), entity,
                                  batch.passage) for output in outputs]
        logits = model.tome.mlm_logits(H, batch.is_target)
        mlm = mlm_loss(logits, batch.unmasked[batch.is_target])
        return {"mlm": (1 - settings.coref_weight, mlm),
                "coref": (settings.coref_weight, sum(coref) / len(coref))}

    return Stage(model, lambda step: masked_batch(run, items(step, recipe["batch"]), 1, step),
                 losses, evaluate, before_step=before_step)

def tome_stage(run, recipe, start=None):
    """TOME over the frozen memory, on passages at random (§2.4)."""
    weight, config = run.settings.entity_weight, run.config
    if run.is_baseline:             # without a stage batch-tome: its steps are this one's, too
        batch_tome, fingerprint = new_batch_tome(run, run.seed), None
    else:
        batch_tome, _ = load_model(run, "batch-tome")
        fingerprint = batch_tome.fingerprint
    model = TOME(config).to(run.device)
    model.load_state_dict(split_into_blocks(batch_tome.tome.state_dict(), config))
    start_from(run, model, start)
    memory, training_memory = open_memory(run, model, fingerprint, recipe["n_search"])
    is_withheld = torch.from_numpy(run.is_withheld).to(run.device)
    forcing = still_given = 0
    if not run.is_baseline:
        training_memory = training_memory.sample(run.settings.memory_fraction, run.seed)
        if is_withheld.any():
            # Memories of withheld entities, never right, would teach queries not to find them.
            training_memory = training_memory.select(~is_withheld[training_memory.entity])
        forcing, still_given = run.settings.teacher_forcing, run.settings.still_given
    if forcing or still_given:
        given = GivenMemory(training_memory, len(run.corpus.entity_names))
    items = epochs_of(run, 2, training_passages(run))
    mentions = sample_eval_mentions(run, run.settings.eval_mentions)
    linking_weight = weight if run.is_baseline else run.settings.linking_weight

    def losses(batch, step):
        """A mention never retrieves from its own passage: its memory there was made of the unmasked
        text and would give the answer away.

        Teacher forcing: while all linked mentions are given memories, the layers below stand still
        (but for the word embeddings, which are the MLM head's, too). Later a share of them are, or
        reading is unlearnt again: attention rarely finds the entity (on real text a tenth of a
        masked mention's)."""
        all_given = step < forcing * recipe["steps"]
        given_share = 1.0 if all_given else still_given
        named = torch.where(is_withheld[batch.entity], 0, batch.entity)     # 0: no loss names it
        asked_for, attended = named, training_memory        # asked_for: by eq. 10
        if given_share > 0:
            is_given = torch.rand(len(named), device=named.device) < given_share
            given.wanted, given.others_search = torch.where(is_given, named, 0), not all_given
            asked_for = torch.where(is_given, 0, named)     # a given one's z has read the answer
            attended = given
        with torch.set_grad_enabled(not all_given):
            H0 = model.read_initial(batch.tokens, batch.attention_mask)
        H, retrieved = model.read_blocks(H0, batch.attention_mask, batch, attended)
        mlm = mlm_loss(model.mlm_logits(H, batch.is_target), batch.unmasked[batch.is_target])
        if all_given:
            return {"mlm": (1.0, mlm)}
        asked = asked_for > 0
        found = retrieve_answer(model, H, batch, training_memory, asked)
        entity = entity_prediction_loss(found.scores, found.entity, asked_for[asked])
        result = {"mlm": (1 - weight, mlm), "entity": (weight, entity)}
        # The same for the queries of the last memory layer. (The paper does not speak of it; its
        # code has such a loss, "el_im_weight".) TOME-1's query is made before anything is read:
        # there mentions that are given memories count, too.
        if linking_weight and retrieved[-1] is not None:
            # given.found: what would have been found by a search
            found = given.found if given_share > 0 else retrieved[-1]
            linked_to = named if config.n_blocks == 1 else asked_for
            linking = entity_prediction_loss(found.scores, found.entity, linked_to)
            result["linking"] = (linking_weight, linking)
        return result

    return Stage(model, lambda step: masked_batch(run, items(step, recipe["batch"]), 3, step),
                 losses, lambda: masked_mentions(run, model, memory, mentions)[0], fingerprint)

def finetune_stage(run, recipe, start=None, examples=None):
    """TOME on claims (§4.3; FEVER's labels) or questions (§4.4; eq. 10 at an appended [MASK]);
    app. B.1. start, examples: paths.

    Each batch of claims adds equally many clozes: true claims with one entity masked, which has to
    be found. Labels alone do not teach what to retrieve where a claim takes two facts."""
    task = recipe["kind"]
    model, fingerprint = load_model(run)
    model.config = run.task_config
    memory, training_memory = open_memory(run, model, fingerprint, recipe["n_search"])
    start_from(run, model, start)
    path = examples or toy_file(run, task, split="train")
    training, dev = read_task_examples(run, task, path)
    clozes = []
    if task == "claims":
        # Labels that no example has are ruled out: they need not be unlearnt, and are never given.
        absent = set(range(len(data.CLAIM_LABELS))) - {e.label for e in training}
        bias = model.claim.bias.data
        bias[bias < -1e3] = 0               # where the weights of --start ruled them out
        bias[list(absent)] = -1e4
        if run.settings.cloze_weight:
            rng = np.random.default_rng([run.seed, 6])
            clozes = [cloze for example in training for cloze in clozes_of(run, example, rng)]
    weight = 1.0 if task == "qa" else run.settings.cloze_weight         # of asking for an entity
    items = epochs_of(run, 4, len(training))
    cloze_items = epochs_of(run, 5, len(clozes))

    def next_batch(step):
        """Examples, and behind them equally many clozes."""
        chosen = [training[i] for i in items(step, recipe["batch"])]
        if clozes:
            chosen += [clozes[i] for i in cloze_items(step, recipe["batch"])]
        return examples_batch(run, task, chosen)

    def losses(batch, step):
        """Labels of claims from the mean of their mentions (claim_logits). Answers, also of clozes,
        by eq. 10 with z of the answer head ("answer"), and over what the last memory layer found
        ("linking"): so it learns what to retrieve."""
        H, retrieved = model(batch.tokens, batch.attention_mask, batch, training_memory)
        result = {}
        if task == "claims":
            known = batch.label >= 0
            logits = claim_logits(model, H, batch)[known].float()
            wrong = F.cross_entropy(logits, batch.label[known], reduction="none")
            result["claims"] = (1.0, share_of_mean(wrong))
        if task == "qa" or clozes:
            asked = batch.answer > 0
            answer = batch.answer[asked]
            found = retrieve_answer(model, H, batch, training_memory, asked)
            result["answer"] = (weight, entity_prediction_loss(found.scores, found.entity, answer))
            if (last := retrieved[-1]) is not None:
                linking = entity_prediction_loss(last.scores[asked], last.entity[asked], answer)
                result["linking"] = (weight, linking)
        return result

    return Stage(model, next_batch, losses, lambda: {
        "score": task_accuracy(run, model, task, dev, memory)["accuracy"]}, fingerprint)

STAGES = {"batch-tome": batch_tome_stage, "tome": tome_stage, "claims": finetune_stage,
          "qa": finetune_stage}

# ---- The loop ------------------------------------------------------------------------------------
# A checkpoint holds weights, the optimizer's state and the step, and nothing random: batches, masks
# and dropout are seeded by the step. Losses and weights that are not numbers are never saved.

def optimizer_for(run, model, kind):
    """AdamW; no weight decay on layer norms and biases (app. A). With --init, and in fine-tuning,
    embeddings and layers below the memory learn at lower_rate. These make the queries, which two
    facts need; one hardly does, so training on both may wear them away before two are learnt."""
    groups, is_lowered = {}, run.init or kind in ("claims", "qa")
    for name, parameter in model.named_parameters():
        is_lower = name.removeprefix("tome.").startswith(("embeddings.", "initial."))
        rate = run.settings.lower_rate if is_lower and is_lowered else 1.0
        decay = run.settings.weight_decay if parameter.dim() > 1 else 0.0
        group = {"params": [], "rate": rate, "weight_decay": decay}
        groups.setdefault((rate, decay), group)["params"].append(parameter)
    return torch.optim.AdamW(groups.values(), betas=(0.9, run.settings.beta2), fused=True)

def learning_rate(recipe, step):
    """Linear warm-up, then linear decay to zero."""
    steps, warmup = recipe["steps"], recipe["warmup"]
    return recipe["lr"] * min((step + 1) / max(warmup, 1), (steps - step) / (steps - warmup))

def train_step(run, stage, recipe, optimizer, step):
    """One step. Returns {loss: its mean over the batch of all processes}."""
    rank, size = ann.rank_and_size()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step) * group["rate"]
    # The seed of dropout, and of which memories are given.
    torch.manual_seed(zlib.crc32(f"{run.seed} {recipe['kind']} {step} {rank}".encode()))
    stage.before_step(step)
    batch_of_all = stage.next_batch(step)
    batch = batch_of_all.part(rank, size).to(run.device)
    with low_precision(run.config, run.device):
        losses = stage.losses(batch, step)
        loss = sum(weight * share for weight, share in losses.values())
    optimizer.zero_grad()
    loss.backward()
    ann.sum_gradients(stage.model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(stage.model.parameters(), run.settings.clip)
    values = {name: float(ann.sum_over_processes(share, run.device))
              for name, (_, share) in losses.items()}
    if not np.isfinite([*values.values(), norm.item()]).all():
        passages = batch_of_all.passage.unique().tolist()[:64]          # -1: examples
        raise diverged(run, recipe, f"the loss is not a number at step {step} ({values}; "
                       f"passages {str(passages)[1:-1]})")
    optimizer.step()
    return values

def diverged(run, recipe, what):
    """The error of a training that blew up, with a command that goes on from before it did."""
    kind, lr = recipe["kind"], recipe["lr"] / 3
    return UserError(f"{kind}: {what}; {run.out / kind}.pt keeps the last good step, if there was "
                     f"one: with --stage {stage_of(kind)} --lr {lr:.1g} training goes on")

def train_stage(run, stage, recipe, checkpoint=None):
    """Trains stage.model and leaves OUT/<kind>.pt. It saves before it evaluates: after an
    interruption only the evaluation is repeated. With steps = 0 the weights are saved as they are.
    """
    kind, steps, settings = recipe["kind"], recipe["steps"], run.settings
    # In fine-tuning, where it decides which weights are kept, it belongs to the recipe.
    log_every = recipe.get("log_every", settings.log_every)
    rank, path = ann.rank_and_size()[0], run.out / f"{kind}.pt"
    model = stage.model.to(run.device).train()
    optimizer = optimizer_for(run, model, kind)
    # sums: of the losses since the last evaluation. best: the weights with the best dev score.
    state = {"step": 0, "evaluated": 0, "sums": {}, "best": None, "best_score": -1.0}
    if checkpoint:
        state = {name: checkpoint[name] for name in state}
        with intact(path):
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        say(f"{kind}: going on at step {state['step']}.")
    signals, began = [], time.time()

    def save():
        """Leaves the checkpoint of this step, if all its weights are numbers."""
        if not all(t.isfinite().all() for t in model.state_dict().values()):
            raise diverged(run, recipe, f"a weight is not a number at step {state['step']}")
        if rank == 0:
            values = dict(recipe=recipe, encoder=stage.fingerprint, model=model.state_dict(),
                          optimizer=optimizer.state_dict(), **state,
                          vocab=run.corpus.meta["crc32"]["vocab.txt"])
            write_file(path, lambda file: torch.save(values, file))

    def evaluate():
        """Measures, prints and logs; remembers the weights of the best dev score."""
        measured = stage.evaluate()
        model.train()
        n = state["sums"].pop("steps")
        record = {name: round(value / n, 4) for name, value in state["sums"].items()}
        say_figures(record | measured, f"{kind} {state['step']:5d} ")
        log(run.out, {"stage": kind, "step": state["step"], "seconds": round(time.time() - began),
                      "lr": learning_rate(recipe, state["step"] - 1), **record, **measured})
        if measured.get("score", -1.0) > state["best_score"]:
            best = {name: t.cpu().clone() for name, t in model.state_dict().items()}
            state.update(best_score=measured["score"], best=best)
        state.update(evaluated=state["step"], sums={})

    def stopped():
        """Whether a process of this run was told to stop."""
        return int(ann.sum_over_processes(len(signals), run.device)) > 0

    with (tqdm(total=steps, initial=state["step"], desc=kind, disable=rank > 0) as progress,
          signals_to(lambda number, _: signals.append(number))):
        while True:
            step = state["step"]
            if step > state["evaluated"] and (step % log_every == 0 or step == steps):
                evaluate()
            if step == steps:
                break
            values = train_step(run, stage, recipe, optimizer, step)
            state["step"] = step = step + 1
            # After a record, or where teacher forcing ends, and with it its only loss.
            if state["sums"].keys() != {*values, "steps"}:
                state["sums"] = dict.fromkeys([*values, "steps"], 0)
            for name, value in {**values, "steps": 1}.items():
                state["sums"][name] += value
            progress.update()
            progress.set_postfix(values, refresh=False)
            stop = stopped()
            if stop or step == steps or 0 in (step % log_every, step % settings.save_every):
                save()
            if stop:
                raise KeyboardInterrupt(f"Stopped at step {step} of {kind} and saved")
        save()              # the last evaluation decides on the best weights
        ann.barrier()       # nobody reads the checkpoint before it is written
        if stopped():       # while it was evaluated
            raise KeyboardInterrupt(f"Stopped after {kind}, which is saved")

# ---- Weights that a stage starts from ------------------------------------------------------------
# TOME starts from BATCH-TOME's weights (§2.3): then its queries fit the keys in the memory. A
# memory is of one Mention Encoder; no TOME learns to read another one's (app. B.6).

def new_batch_tome(run, seed):
    """BATCH-TOME with fresh weights of a seed, or with those of run.init: a BERT's folder, or a
    file of the paper's own code. Says what such a file lacks."""
    torch.manual_seed(seed)
    model = BatchTOME(TOME(run.batch_tome_config))
    if not run.init:
        start_positions(model)
        return model
    _, state, lacks, unused = read_published(run.init, run.config)
    model.load_state_dict(state, strict=False)
    say_of_file(run.init, lacks, unused)
    tome, special = model.tome, run.corpus.special
    if run.has_batch_tome:
        tome.entity_query.load_state_dict(model.key.state_dict())       # z starts as a key
    # The markers took unused entries of the vocabulary, which BERT never trained. They start as the
    # quotation mark, which also surrounds names.
    quote = run.tokenizer.token_to_id('"')
    if quote is not None and not run.has_batch_tome:
        word = tome.embeddings.word.weight.data
        word[[special[data.E_START], special[data.E_END]]] = word[quote].clone()
    if "mlm" in lacks:
        # It starts at the words' frequencies: to learn these alone takes a thousand steps.
        in_training = np.repeat(~run.corpus.held_out, np.diff(run.corpus.passage_start))
        tokens = run.corpus.tokens[in_training][:10 ** 7]
        words = tokens[run.corpus.maskable[tokens]]
        counts = np.bincount(words, minlength=run.config.vocab_size) + 1
        tome.mlm.bias.data = torch.from_numpy(np.log(counts / counts.sum())).float()
    return model

def say_of_file(path, lacks, unused):
    """Says what a published file lacks, and what of it is not used."""
    say(f"{path} has no weights of {', '.join(lacks)}: made fresh.")
    if unused:
        say(f"{path}: passed over {', '.join(unused)}, of another stage or task.")

def start_from(run, tome, start):
    """--start (app. B.6): the weights of another checkpoint of ours or of the paper's own code, or
    "scratch": fresh ones (with --init: BERT's). Their seed is not BATCH-TOME's, else they would be
    the very weights from which the memory's encoder was trained. What the checkpoint lacks, such as
    memory layers, is fresh."""
    if start is None:
        return
    state = split_into_blocks(new_batch_tome(run, run.seed + 1).tome.state_dict(), run.config)
    saved = {}
    if start != "scratch" and zipfile.is_zipfile(start):
        checkpoint = read_checkpoint(start, "give another --start")
        if checkpoint["vocab"] != run.corpus.meta["crc32"]["vocab.txt"]:
            raise UserError(f"--start {start}: it has the vocabulary of another corpus")
        saved = checkpoint["best"] or checkpoint["model"]
    elif start != "scratch":
        _, published, lacks, unused = read_published(start, run.config)
        lacks = [part for part in lacks if part not in ("key", "value", "coref")]   # BATCH-TOME's
        say_of_file(start, lacks, unused)
        saved = part_of(published, "tome.")
    needed = {name for name in state if name.startswith("initial.") or ".transformer." in name}
    layers = {name for name in saved if ".transformer." in name}
    shared = state.keys() & saved.keys()
    is_other_shape = any(saved[name].shape != state[name].shape for name in shared)
    if saved and (needed - saved.keys() or layers - state.keys() or is_other_shape):
        raise UserError(f"--start {start}: no TOME of these dimensions is in it")
    tome.load_state_dict(state | {name: t for name, t in saved.items() if name in state})

def open_memory(run, tome, fingerprint, n_search=None):
    """The memory of the whole corpus, and the part that training sees: passages that are not held
    out. A baseline has its table of entities for both."""
    if tome.entities is not None:
        return tome.entities, tome.entities
    folder = run.folder("memory")
    needs(folder.exists(), folder, "memory")
    memory = load_memory(folder, fingerprint, run.device).changed(n_search=n_search)
    in_training = torch.from_numpy(~run.corpus.held_out).to(run.device)[memory.passage]
    return memory, memory if bool(in_training.all()) else memory.select(in_training)

# ---- What is measured while training: does the memory tell what the passage does not? ------------
# Every process reads the same whole batch, and searches its own shards for it: several are no
# faster here than one.

@torch.no_grad()
def masked_mentions(run, tome, memory, mentions, batch_size=64):
    """Masks one held-out mention at a time, reads its passage, and counts rightly filled tokens.

    mentions: corpus numbers (data.eval_mentions). Returns, for each of GROUPS that there can be, a
    dictionary:

    accuracy        share of masked tokens filled in rightly
    entity          share of masked mentions whose entity eq. 10 names
    recall@20       share of them with a memory of their entity among the 20 best of eq. 10. For
                    these two, entities that stand visibly in the passage are no candidates; the
                    masked mention's never does (data.eval_mentions)
    mass_masked     attention of the last memory layer on memories of the masked mention's entity
    mass_visible    … the same for the other mentions, if two passages of the memory have theirs
    n               masked mentions

    and of each mention the share of its tokens filled in rightly, an array as `mentions`."""
    tome.eval()
    E, device = len(run.corpus.entity_names), run.device
    # Entities that two passages have: of another one nothing can be found, since a mention's own
    # passage is excluded, and it does not count in mass_visible.
    is_elsewhere = torch.ones(E, dtype=torch.bool, device=device)
    if isinstance(memory, MentionMemory):
        pairs = torch.unique(torch.stack([memory.entity, memory.passage]), dim=1)
        is_elsewhere = ann.sum_over_processes(pairs[0].bincount(minlength=E), device) > 1
    # A row per mention. Of masked ones: tokens, how many of these are right, if eq. 10 names the
    # entity, if it is among the 20 best, attention on it. Of visible ones: entity, attention.
    masked, visible = [np.zeros((0, 5))], [np.zeros((0, 2))]
    for first in range(0, len(mentions), batch_size):
        part = mentions[first:first + batch_size]                                       # (B,)
        batch = data.eval_batch(run.corpus, part).to(device)
        B, asked = len(part), torch.from_numpy(part).to(device)[batch.row] == batch.mention
        H, retrieved = tome(batch.tokens, batch.attention_mask, batch, memory)
        mass = torch.zeros(len(batch.entity), device=device)                            # (M,)
        if retrieved[-1] is not None:
            mass = (retrieved[-1].weights * (retrieved[-1].entity == batch.entity[:, None])).sum(-1)
        filled = tome.mlm_logits(H, batch.is_target).argmax(-1)                         # (L,)
        right = filled == batch.unmasked[batch.is_target]
        row, n_tokens = batch.is_target.nonzero()[:, 0], batch.is_target.sum(1)         # (L,), (B,)
        n_right = torch.bincount(row[right], minlength=B)
        found = retrieve_answer(tome, H, batch, memory, asked)
        stands_there = torch.zeros(B, E, dtype=torch.bool, device=device)
        stands_there[batch.row[~asked], batch.entity[~asked]] = True
        excluded = stands_there.gather(1, found.entity)                                 # (B, K)
        scores = found.scores.masked_fill(excluded, -torch.inf)
        entity = batch.entity[asked]
        is_named = predict_entity(scores, found.entity) == entity
        recalled = (best_entities(scores, found.entity) == entity[:, None]).any(1)
        masked.append(torch.stack([n_tokens, n_right, is_named, recalled, mass[asked]], 1).cpu())
        counted = (batch.entity > 0) & ~asked & is_elsewhere[batch.entity]
        visible.append(torch.stack([batch.entity[counted], mass[counted]], 1).cpu())
    masked, visible = np.concatenate(masked), np.concatenate(visible)
    group = run.entity_group[run.corpus.mention_entity[mentions]]
    visible_group = run.entity_group[visible[:, 0].astype(int)]
    figures = {}
    for i, name in enumerate(GROUPS if run.settings.withheld else GROUPS[:2]):
        n_tokens, n_right, is_named, recalled, mass = masked[group == i].T
        mass_visible = visible[visible_group == i, 1]
        n = max(len(mass), 1)
        figures[name] = {"accuracy": n_right.sum() / max(n_tokens.sum(), 1),
                         "entity": is_named.sum() / n, "recall@20": recalled.sum() / n,
                         "mass_masked": mass.sum() / n,
                         "mass_visible": mass_visible.sum() / max(len(mass_visible), 1),
                         "n": len(mass)}
    return figures, masked[:, 1] / masked[:, 0].clip(1)

def best_entities(scores, entity, k=20):
    """Entities of the k best memories (B, k), or -1. Those of an EntityTable come unsorted."""
    scores, best = scores.topk(min(k, scores.shape[1]))
    return entity.gather(1, best).masked_fill(scores.isneginf(), -1)

def sample_eval_mentions(run, n):
    """n mentions of each of GROUPS (data.eval_mentions), always the same."""
    mentions = np.random.default_rng(0).permutation(data.eval_mentions(run.corpus))
    group = run.entity_group[run.corpus.mention_entity[mentions]]
    return np.concatenate([mentions[group == i][:n] for i in range(len(GROUPS))])

def supporting_passages(corpus, mentions, each=4, others=512):
    """Passages of a small memory for these mentions, while the Mention Encoder still changes: all
    of their articles'; those of `each` random mentions of each of their entities; random others."""
    rng, entity = np.random.default_rng(0), corpus.mention_entity
    own = np.isin(corpus.article, corpus.article[corpus.passage_of(mentions)])
    same = rng.permutation(np.flatnonzero(np.isin(entity, entity[mentions])))
    same = same[np.argsort(entity[same], kind="stable")]        # entity after entity
    place = np.arange(len(same)) - np.searchsorted(entity[same], entity[same])  # 0, 1, … in each
    return np.unique(np.concatenate([np.flatnonzero(own), corpus.passage_of(same[place < each]),
                                     rng.integers(0, len(corpus.article), others)]))

@torch.no_grad()
def task_accuracy(run, tome, task, examples, memory, without=None, attend=True, batch_size=64):
    """{"accuracy", "n"}, and of questions "recall@20".

    without: the field of an example ("subject", "bridge") whose article is taken out of the memory.
    attend: False switches the memory layers off; answers are still retrieved."""
    tome.eval()
    corpus, right, recalled = run.corpus, [], []
    if without:
        memory = memory.by_article(corpus.article)
    for first in range(0, len(examples), batch_size):
        chosen = examples[first:first + batch_size]
        batch = examples_batch(run, task, chosen).to(run.device)
        if without:
            article = [corpus.article_index.get(e.info.get(without), -1) for e in chosen]
            batch.passage = torch.tensor(article, device=run.device)[batch.row]
        H, _ = tome(batch.tokens, batch.attention_mask, batch, memory if attend else None)
        if task == "claims":
            right += (claim_logits(tome, H, batch).argmax(-1) == batch.label).tolist()
            continue
        found = retrieve_answer(tome, H, batch, memory, batch.answer >= 0)
        predicted = predict_entity(found.scores, found.entity).tolist()
        best = best_entities(found.scores, found.entity).tolist()
        for example, entity, entities in zip(chosen, predicted, best):
            answers = {corpus.entity_index.get(answer) for answer in example.answers}
            right.append(entity in answers)
            recalled.append(not answers.isdisjoint(entities))
    result = {"accuracy": float(np.mean(right)) if right else 0.0, "n": len(right)}
    return result | ({"recall@20": float(np.mean(recalled))} if recalled else {})

# ---- Examples ------------------------------------------------------------------------------------

def examples_batch(run, task, examples):
    """A batch of examples as this run reads them; task None: only their texts."""
    return data.example_batch(
        examples, task, run.tokenizer, run.corpus.entity_index, max_length=run.settings.max_length)

def toy_file(run, task, hops="one_hop", split="test"):
    """A file of the toy world's examples."""
    path = run.out / "world" / f"{task}.{hops}.{split}.jsonl"
    if run.saved["corpus"] or not path.is_file():
        raise UserError(f"{path}: no such file; --examples wants a file of JSON lines (README)")
    data.open_folder(path.parent, "toy world", lambda name: name == path.name)
    return path

def clozes_of(run, example, rng):
    """The cloze of a true claim: [the example with one known entity as answer, and no label]; []
    for any other claim."""
    known = [m.entity for m in example.mentions if run.corpus.entity_index.get(m.entity)]
    if example.label != data.CLAIM_LABELS.index("SUPPORTS") or not known:
        return []
    # The toy world says which mention the others determine: the object.
    known = [entity for entity in known if entity == example.info.get("object")] or known
    return [example._replace(label=None, answers=[known[rng.integers(len(known))]])]

# ==== Set apart: files of examples ================================================================

def dev_files(path):
    """[the file of that name with "dev" for "train"], or []."""
    dev = Path(path).parent / re.sub("(.*)train", r"\1dev", Path(path).name)
    return [dev] if dev != Path(path) and dev.is_file() else []

def labelled_examples(path, task):
    """The examples of a file that have a label, or are questions."""
    examples = [e for e in data.read_examples(path, task) if task == "qa" or e.label is not None]
    if not any(e.label is not None or e.answers for e in examples):
        raise UserError(f"{path}: no example has a label or an answer")
    return examples

def task_examples(run, task, path):
    """labelled_examples, each with its mentions."""
    examples = labelled_examples(path, task)
    missing = sum(e.mentions is None for e in examples)
    if missing:
        how, find = data.mention_finder(run.corpus.entity_names)
        say(f"{path}: mentions of {missing:,} examples found by {how}.", sys.stderr)
        examples = [e._replace(mentions=find(e.text)) if e.mentions is None else e
                    for e in tqdm(examples, "mentions", leave=False, disable=None)]
    passages = data.example_passages(examples, task, run.tokenizer, run.settings.max_length)
    n_read = sum(i >= 0 for passage in passages for i in passage.index)
    cut = sum(len(e.mentions) for e in examples) - n_read
    nothing = sum(not e.mentions for e in examples)
    if cut or nothing:
        say(f"{path}: {cut:,} mentions overlap others, stand behind max_length or are more than 32 "
            f"in an example, and are not read; {nothing:,} of {len(examples):,} examples have no "
            "mention to read about.", sys.stderr)
    return examples

def read_task_examples(run, task, path):
    """(training, dev) examples. Questions whose answer is no entity teach nothing and are left out
    of training; in evaluation they count as wrong (§4.4)."""
    examples = task_examples(run, task, path)
    dev = [e for file in dev_files(path) for e in task_examples(run, task, file)]
    if not dev:
        order, n_dev = np.random.default_rng(0).permutation(len(examples)), -(-len(examples) // 10)
        dev, examples = ([examples[i] for i in part] for part in (order[:n_dev], order[n_dev:]))
    if task == "qa":
        n, entities = len(examples), run.corpus.entity_index
        examples = [e for e in examples if any(answer in entities for answer in e.answers)]
        say(f"{len(examples):,} of {n:,} questions to train on have an answer that is an entity of "
            "the corpus; the others are left out.")
    if not examples:
        raise UserError(f"{path}: no example to train on is left: of some a tenth is for dev, and "
                        "answers have to be entities of the corpus; give more of them")
    return examples, dev

# ---- The run folder ------------------------------------------------------------------------------
# run.json holds the flags that a run was started with. Six artefacts follow from them: corpus,
# batch-tome, memory, tome, claims and qa. A stage leaves a file, such as tome.pt. The corpus and
# the memory are folders, whose names contain their recipe's identity, such as memory-1f2e3d4c.
#
# The recipe of an artefact is all that determines it: settings, flags of its stage, and the
# recipes of what it is made from. Each artefact holds its recipe, and is used only where that is
# the one wanted now: nothing stale is used by mistake, whatever is changed or removed in between.
#
# Files are written whole, and folders have another name until they are. So whenever a command
# dies, the same command goes on.

NEW_RUN = {"format": data.FORMAT, "preset": "toy", "seed": 0, "blocks": 1, "set": {},
           "corpus": None, "text": None,        # a path, and the file's checksum
           "init": None, "published": None,     # a path, and what describe_published says of it
           "appended": [],                      # checksums of the files of --append
           "stages": {}}                        # of each stage: its flags, such as {"steps": 800}
CHECKPOINT = {"recipe", "encoder", "vocab", "model", "optimizer", "step", "evaluated", "sums",
              "best", "best_score"}
SOURCES = {"batch-tome": ["corpus"], "memory": ["corpus", "batch-tome"],
           "tome": ["corpus", "batch-tome"], "claims": ["corpus", "tome"], "qa": ["corpus", "tome"]}
# Settings that change the weights of no stage (or whose values stand elsewhere in its recipe), and
# by stage those that do not change its own: BATCH-TOME is the same for TOME-1 and TOME-2.
NO_RESULT = {"save_every", "eval_mentions", "schedule", "vocab_size", "n_entities"}
NOT_READ = {"batch-tome": {"n_blocks", "memory_dtype", "k", "k_shard", "k_answer", "k_answer_shard",
                           "entity_weight", "linking_weight", "teacher_forcing", "still_given",
                           "memory_fraction", "cloze_weight", "k_finetune", "log_every"},
            "tome": {"cloze_weight", "k_finetune", "log_every"},
            "claims": set(), "qa": {"cloze_weight"}}
# The fields of Config that a BERT, or how it is divided, decides.
OF_BERT = ("vocab_size", "hidden", "n_heads", "intermediate", "max_positions", "gelu", "n_initial",
           "n_upper", "n_blocks")
OF_BATCH_TOME = (*OF_BERT, "key_dim", "value_dim", "coref_dim")     # … of a BATCH-TOME
# The types of all that --set can name. n_blocks is --blocks; the other three are no single values
# or follow from the corpus.
SETTABLE = {name: type(value) for name, value in (vars(Settings()) | vars(Config())).items()
            if name not in ("schedule", "n_blocks", "vocab_size", "n_entities")}
# The words that a setting may be, or the least and the most. Other whole numbers are from 1 to
# 1,000,000, those of the model to 10,000; other numbers from 0 to 1.
ALLOWED = {
    "memory_dtype": ("float16", "float32"), "precision": ("float32", "bfloat16"),
    "memory": ("mentions", "entities", "none"), "gelu": ("none", "tanh"), "n_initial": (1, 100),
    "all_of_entity": (0, 1),
    "vocab": (200, 10 ** 6), "passage_length": (8, 10 ** 6), "max_length": (16, 10 ** 6),
    "steps": (0, 10 ** 9), "lr": (1e-12, 10), "dropout": (0, 0.9), "beta2": (0, 0.999999),
    "clip": (1e-6, 10 ** 6), "lower_rate": (0, 100), "cloze_weight": (0, 100), "n_upper": (1, 100),
    "memory_from": (0, 0.99)}

def check_value(flag, name, value):
    """Raises UserError for a value that a setting, or a flag of a stage, cannot have."""
    largest = 10 ** 4 if hasattr(Config, name) else 10 ** 6
    allowed = ALLOWED.get(name, (1, largest) if isinstance(value, int) else (0, 1))
    if isinstance(value, str):
        fits, wanted = value in allowed, f"one of {', '.join(allowed)}"
    else:
        least, most = allowed
        fits, wanted = least <= value <= most, f"from {least:g} to {most:g}"    # NaN does not fit
    if not fits:
        raise UserError(f"{flag}{name}={value}: it is {wanted}")

def settings_of(saved):
    """(Settings, Config) of run.json. --set replaces the preset's values, and the dimensions of
    published weights replace both. Raises UserError where these cannot be trained."""
    bert = (saved["published"] or {}).get("config", {})
    values = PRESETS[saved["preset"]] | saved["set"] | bert | {"n_blocks": saved["blocks"]}
    settings, config = (
        replace(defaults, **{name: values[name] for name in vars(defaults) if name in values})
        for defaults in (Settings(), Config()))
    for name, value in values.items():
        if name in SETTABLE:
            check_value("--set ", name, value)
    if config.hidden % 2 or config.hidden % config.n_heads:
        raise UserError("--set: hidden must be even, and a multiple of n_heads")
    if config.n_upper % config.n_blocks and config.n_upper > 1:
        raise UserError("--set: n_upper must be 1 or a multiple of --blocks")
    if settings.max_length > config.max_positions and (bert or not saved["init"]):
        raise UserError("--set: max_length must be at most max_positions")
    for name, value in saved["set"].items():
        if bert.get(name, value) != value:
            raise UserError(f"--set {name}: it is {bert[name]} in what --init names; leave it out")
    return settings, config

def stage_of(kind):
    """What --stage calls it."""
    return f"finetune --task {kind}" if kind in ("claims", "qa") else kind

def needs(there, path, kind, how="missing"):
    """Raises UserError where an artefact that a command needs is not there."""
    if not there:
        raise UserError(f"{path} is {how}; run python train.py --stage {stage_of(kind)} "
                        f"--out {path.parent}")

def identity(recipe):
    """A recipe in one word: equal for equal recipes, whatever their order."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()

def compare(path, made, wanted):
    """Raises UserError where an artefact was made by another recipe than is wanted. Names the first
    field that differs, with both values, or the artefact that it should have been made from."""
    for name in [*wanted, *made]:
        if made.get(name) != wanted.get(name):
            flag = {"n_blocks": "--blocks "}.get(name, f"--{name.replace('_', '-')} ")
            if name in SETTABLE:
                flag = f"--set {name}="
            how = f"with {flag}{made.get(name)}, not {wanted.get(name)}; give the first again,"
            if name in ("start", "examples"):           # known by their checksums only
                how = f"with other --{name}; give them again,"
            if made.get(name) is None:
                how = f"without {flag.strip(' =')}; leave it out,"
            if name in ("corpus", "batch-tome", "tome", "published", "appended"):
                flags = {"published": "--init", "appended": "--append"}
                how = f"from another {flags.get(name, name)};"
            raise UserError(f"{path} was made {how} remove it to make it again, or choose another "
                            "--out")

def is_done(checkpoint):
    """Whether a stage has made, and evaluated, its last step."""
    return checkpoint is not None and checkpoint["evaluated"] >= checkpoint["recipe"]["steps"]

def read_checkpoint(path, remedy="remove it to train this stage again"):
    """The dictionary of a .pt file. Objects are never unpickled: a stranger's file runs no code."""
    with intact(path, remedy=remedy):
        with zipfile.ZipFile(path) as file:             # torch.load compares no checksums
            damaged = file.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} differs")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint.keys() != CHECKPOINT or checkpoint["recipe"]["format"] != data.FORMAT:
            raise ValueError("it is of another format")
        return checkpoint

class Run:
    """A run folder, as run.json (`saved`) describes it. open() adds its corpus, tokenizer and
    device, and the sizes of config that follow from the corpus. Neither writes anything."""

    def __init__(self, out, saved):
        self.out, self.saved = Path(out), saved
        self.seed = saved["seed"]
        self.settings, self.config = settings_of(saved)
        # A path to published weights, or None. In a file of the paper's own code batch-tome comes
        # trained.
        self.init = saved["init"]
        self.has_batch_tome = bool(self.init) and saved["published"]["trained"]
        # Entities as Experts, or no memory at all: there is no Mention Encoder.
        self.is_baseline = self.config.memory != "mentions"

    def open(self, device=None):
        """Returns the run. Raises UserError where the corpus is missing, damaged or another."""
        folder = self.folder("corpus")
        needs(folder.exists(), folder, "tome")
        self.corpus = data.Corpus(folder)
        compare(folder, self.corpus.meta["recipe"], self.recipe("corpus"))
        self.tokenizer = self.corpus.tokenizer
        self.device = choose_device(device)
        n_entities = len(self.corpus.entity_names) if self.is_baseline else 0
        self.config = replace(self.config, vocab_size=self.corpus.vocab_size, n_entities=n_entities)
        # BATCH-TOME has one memory layer, with all layers above it (tome.split_into_blocks).
        self.batch_tome_config = replace(self.config, n_blocks=1)
        k, config = self.settings.k_finetune, self.config   # each process's part grows alike
        self.task_config = replace(config, k_answer=k,
                                   k_answer_shard=config.k_answer_shard * k // config.k_answer)
        return self

    @cached_property
    def is_withheld(self):
        """(E,) bool: entities that no loss of pre-training names, chosen by their names'
        checksums; what the model knows of them comes from the memory alone."""
        names = self.corpus.entity_names
        crc32 = np.array([zlib.crc32(name.encode()) for name in names])
        return (crc32 < self.settings.withheld * 2 ** 32) & (np.arange(len(names)) > 0)

    @cached_property
    def entity_group(self):
        """(E,) index into GROUPS: an entity that a training passage links is seen or withheld."""
        return np.where(self.corpus.entity_count == 0, 1, np.where(self.is_withheld, 2, 0))

    def stages_to(self, kind):
        """The stages that lead to this one, and itself at the end."""
        stages = ["tome", kind] if self.is_baseline else ["batch-tome", "memory", "tome", kind]
        if self.is_baseline and kind in ("batch-tome", "memory"):
            raise UserError(f"--stage {kind}: a baseline has no mention memory; use --stage tome")
        return stages[:stages.index(kind) + 1]

    def schedule(self, kind):
        """The preset's Schedule of a stage. A baseline has no batch-tome: its tome also makes the
        steps of that one. A batch-tome that comes trained makes none."""
        first, schedule = self.settings.schedule["batch-tome"], self.settings.schedule[kind]
        if kind == "tome" and self.is_baseline:
            return replace(first, steps=first.steps + schedule.steps)
        if kind == "batch-tome" and self.has_batch_tome:
            return replace(first, steps=0)
        return schedule

    def recipe(self, kind):
        """All that determines an artefact, in plain values."""
        run, settings = self, self.settings
        recipe = {"kind": kind, "format": data.FORMAT}
        if kind == "corpus":        # known by its text, not its path: it may have moved
            vocab = self.saved["published"]["vocab"] if self.init else settings.vocab
            return recipe | {"text": self.saved["text"], "appended": self.saved["appended"],
                             "vocab": vocab, "passage_length": settings.passage_length,
                             "max_length": settings.max_length}
        recipe["published"] = self.saved["published"]       # before what follows from it: compare
        if kind == "memory":
            recipe["memory_dtype"] = settings.memory_dtype
        else:                       # what was appended is never trained on
            run = Run(self.out, self.saved | {"appended": []})
            unread = NO_RESULT | NOT_READ[kind]
            if not self.init and kind in ("batch-tome", "tome"):        # see optimizer_for
                unread = unread | {"lower_rate"}
            read = {name: value for name, value in (vars(settings) | vars(self.config)).items()
                    if name not in unread}
            flags = {**vars(self.schedule(kind)), "start": None, "examples": None,
                     "n_search": None, **self.saved["stages"].get(kind, {})}
            flags["warmup"] = min(flags["warmup"], flags["steps"] // 10)
            recipe |= {"preset": self.saved["preset"], "seed": self.seed, **read, **flags}
        # What it is made from follows from the recipe of that: here its identity is enough.
        sources = {source: identity(run.recipe(source)) for source in SOURCES[kind]}
        return recipe | sources

    def folder(self, kind):
        """Where the corpus or memory is. Another recipe has another folder."""
        return self.out / f"{kind}-{identity(self.recipe(kind))[:8]}"

    def sweep(self, kind):
        """Removes what earlier commands left of this kind. What cannot be removed stays."""
        for path in self.out.glob(f"{kind}-????????*"):
            # A user's own folder, such as memory-20261128, stays: its name is not its recipe's.
            is_ours = re.fullmatch(kind + r"-[0-9a-f]{8}(\.[0-9a-f]{8})?\.part", path.name)
            with suppress(OSError, ValueError, LookupError):
                recipe = read_json(path / "meta.json")["recipe"]
                is_ours = is_ours or path.name == f"{kind}-{identity(recipe)[:8]}"
            if is_ours and path.name.removesuffix(".part") != self.folder(kind).name:
                with suppress(OSError):             # or what cannot be removed is known no more
                    path = path.rename(path.with_suffix(".part"))
                shutil.rmtree(path, ignore_errors=True)

    def checkpoint(self, kind):
        """The checkpoint of a stage, begun or done, or None. Raises UserError where the one that
        is there was made by another recipe. A stage that is not done may go on at another --lr.
        """
        path, wanted = self.out / f"{kind}.pt", self.recipe(kind)
        if not path.exists():
            return None
        checkpoint = read_checkpoint(path)
        with intact(path):
            made = checkpoint["recipe"]
            compare(path, made if is_done(checkpoint) else made | {"lr": wanted["lr"]}, wanted)
        return checkpoint

def load_model(run, kind="tome"):
    """(model, fingerprint of its memory's Mention Encoder or None) of a stage that is done."""
    path, checkpoint = run.out / f"{kind}.pt", run.checkpoint(kind)
    needs(is_done(checkpoint), path, kind, "unfinished" if checkpoint else "missing")
    config = run.task_config if kind in ("claims", "qa") else run.config
    model = TOME(config) if kind != "batch-tome" else BatchTOME(TOME(run.batch_tome_config))
    with intact(path):
        model.load_state_dict(checkpoint["best"] or checkpoint["model"])
    return model.to(run.device).eval(), checkpoint["encoder"]

def read_run(out):
    """The Run of OUT/run.json, not opened."""
    path = Path(out) / "run.json"
    needs(path.exists(), path, "tome")
    with intact(path, remedy="choose another --out"):
        saved = read_json(path)
        if saved.keys() != NEW_RUN.keys() or saved["format"] != data.FORMAT:
            raise ValueError(f"format {saved.get('format')}, this version reads {data.FORMAT}")
        return Run(out, saved)

def open_run(out, task=None, device=None, n_search=None):
    """(run, trained TOME, whole memory) of a run folder. A reader: writes and builds nothing."""
    fast_matmul()
    run = read_run(out).open(device)
    tome, fingerprint = load_model(run, task or "tome")
    return run, tome, open_memory(run, tome, fingerprint, n_search)[0]

# ---- What a command changes in it ----------------------------------------------------------------

def settle(args):
    """The Run that this command asks for: its flags, and those of earlier commands. Mistakes in
    these and in examples (of --start: another kind or width) are found here, before anything is
    written or trained. It is an error, too, if what is there, up to the stage named, was made by
    other recipes."""
    out, kind, before = Path(args.out), args.task or args.stage, NEW_RUN
    choose_device(args.device)              # only for its error
    if (out / "run.json").exists():
        before = read_run(out).saved
    saved = before | {name: value for name, value in vars(args).items()
                     if name in NEW_RUN and value is not None}
    saved["set"] = before["set"] | (args.set or {})
    corpus = saved["corpus"]
    # The toy world follows from its seed. A file is known by its checksum: so it may be moved.
    if corpus is None:
        saved["text"] = f"toy world {saved['seed']}"
    elif os.path.isfile(corpus):
        saved["text"] = checksum(corpus)
    if args.init or saved["init"] and os.path.exists(saved["init"]):
        saved["published"] = describe_published(saved | {"published": None})
    run = Run(out, saved)
    # Where the file is gone, the tokenised corpus will do.
    is_there = corpus is None or os.path.isfile(corpus)
    if not is_there and (args.corpus or not run.folder("corpus").exists()):
        raise UserError(f"{corpus}: no such file; --corpus wants a file of JSON lines")
    flags = flags_of_stage(run, args)
    # What is left out stays, but for files, which are named again. (A stage that has begun has read
    # its --start.)
    files = {"examples"} if (out / f"{kind}.pt").exists() else {"examples", "start"}
    begun = saved["stages"].get(kind, {})
    flags = {name: begun[name] for name in begun if name not in files} | flags
    if args.task:       # it decides which weights are kept: of this task alone, as --steps
        flags = {"log_every": run.settings.log_every} | flags           # or that of `begun`
        flags["log_every"] = (args.set or {}).get("log_every", flags["log_every"])
    run.saved["stages"] = saved["stages"] | {kind: flags}
    for name in run.stages_to(kind):
        run.checkpoint(name)
    return run

def flags_of_stage(run, args):
    """What the command says of the stage named. Files are known by their checksums."""
    flags = {name: getattr(args, name) for name in ("steps", "batch", "lr", "n_search")
             if getattr(args, name) is not None}
    for name, value in flags.items():
        check_value("--", name, value)
    if run.is_baseline and "n_search" in flags:
        raise UserError("--n-search: a baseline has no mention memory; leave it out")
    if args.start is not None:
        if args.start == "scratch" and run.has_batch_tome:
            raise UserError("--start scratch: the weights of --init are trained; leave --start out")
        flags["start"] = "scratch" if args.start == "scratch" else checksum(args.start)
        made, hidden = {"kind": "tome"}, run.config.hidden          # the rest start_from compares
        if args.start.endswith(".pt") or zipfile.is_zipfile(args.start):
            made = read_checkpoint(args.start, "give another --start")["recipe"]
        elif args.start != "scratch":
            config, state, _, _ = read_published(args.start, run.config)
            made["hidden"] = config.hidden
            if "key.linear.weight" in state:
                raise UserError(f"--start {args.start}: it is a BATCH-TOME; give it to --init")
        if made["kind"] == "batch-tome" or made.get("hidden", hidden) != hidden:
            raise UserError(f"--start {args.start}: no TOME with hidden={hidden} is in it")
    if args.examples is not None:
        files = [args.examples, *dev_files(args.examples)]
        for file in files:
            examples = labelled_examples(file, args.task)               # only for their errors
            if args.task == "claims" and len({e.label for e in examples}) == 1:
                raise UserError(f"{file}: its claims have one label; give some of another, too")
        flags["examples"] = [checksum(file) for file in files]
    elif args.task and run.saved["corpus"]:
        raise UserError(f"{args.task} of a corpus of your own want --examples FILE (README)")
    return flags

def describe_published(saved):
    """What run.json holds of --init: its dimensions, identities of its vocabulary and weights, and
    whether it is trained, as a BATCH-TOME of the paper's own code is."""
    init = saved["init"]
    config, state, _, _ = read_published(init, settings_of(saved)[1])
    trained, vocab = "key.linear.weight" in state, beside(init, "vocab.txt")
    if vocab is None:
        raise UserError(f"--init {init}: put the vocab.txt of its BERT there (of the paper's: that "
                        "of bert-base-uncased)")
    words = data.load_tokenizer(vocab).get_vocab_size()
    if words != config.vocab_size:
        raise UserError(f"--init {init}: vocab.txt has {words:,} entries, the weights "
                        f"{config.vocab_size:,}")
    if os.path.isfile(init) and not (trained and config.n_blocks == 1):
        raise UserError(f"--init {init}: no BATCH-TOME with one memory layer; a TOME goes to "
                        "--stage tome --start")
    sizes = {name: getattr(config, name) for name in (OF_BATCH_TOME if trained else OF_BERT)}
    return {"config": sizes, "vocab": checksum(vocab), "trained": trained,
            "weights": [checksum(file) for file in weights_files(init)]}

def prepare(run):
    """Writes run.json, and makes the toy world and the corpus where there are none. The first
    process does it; the others wait. What was appended is not in --corpus: where it is lost, that
    is said once, and the next command starts without it."""
    ann.barrier()               # the others have read what is there
    if ann.rank_and_size()[0] == 0:
        file, folder = run.out / "run.json", run.folder("corpus")
        if run.saved["appended"] and not folder.exists():
            write_json(file, run.saved | {"appended": []})
            raise UserError(f"{folder} is missing, and with it all that was appended; the same "
                            "command makes the corpus again: then append those files again")
        write_json(file, run.saved)
        make_corpus(run, run.saved["corpus"] or make_world(run.out / "world", run.seed))
        run.sweep("corpus")
    ann.barrier()

def make_world(folder, seed):
    """The toy world of that seed, in place of another seed's. Returns its corpus file. A world that
    somebody changed, or a folder that is none, stays as it is: an error."""
    is_there = os.path.lexists(folder)
    if is_there and data.open_folder(folder, "toy world")["seed"] == seed:
        return folder / "corpus.jsonl"
    say(f"No --corpus: making the toy world in {folder}.")
    part = folder.with_name("world.part")
    data.remove(part)
    if is_there:
        os.rename(folder, part)         # so that it is gone as a whole
        data.remove(part)
    data.toy(part, seed)
    data.commit_folder(part, folder, format=data.FORMAT, seed=seed)
    return folder / "corpus.jsonl"

def make_corpus(run, source, old=None):
    """Tokenises `source` into the corpus of the run, if it is not there yet. Of a run `old` the
    corpus and tokenizer stay, and the source follows."""
    recipe, folder = run.recipe("corpus"), run.folder("corpus")
    if folder.exists():
        return
    say(f"Tokenising {source}.")
    if old:
        tokenizer = old.tokenizer
    elif run.init:
        tokenizer = data.load_tokenizer(beside(run.init, "vocab.txt") or run.init)
    else:
        texts = (text.text for text in data.read_corpus(source))
        tokenizer = data.train_tokenizer(texts, recipe["vocab"])
    corpus = data.Corpus.build(source, folder, tokenizer, recipe["passage_length"],
                               recipe["max_length"], recipe, old and old.corpus)
    counts = corpus.meta["counts"]
    say(f"  {counts['passages']:,} passages, {counts['mentions']:,} mentions "
        f"({counts['linked']:,} linked) of {counts['entities']:,} entities")

def make_memory(run, file=None):
    """The Mention Encoder reads the whole corpus (§2.1.2). file: a corpus file to be added to it,
    without training. run.json names the run's corpus, so it is written last."""
    encoder, old_folder = load_model(run, "batch-tome")[0], None
    is_first, folder = ann.rank_and_size()[0] == 0, run.folder("memory")
    if folder.exists():         # the same recipe gives other bits on another number of processes
        about = data.open_folder(folder, "memory", wanted=lambda name: False)
        if about["encoder"] != encoder.fingerprint:
            raise UserError(f"{folder} is of another batch-tome.pt; remove it, and tome.pt, which "
                            "learnt from it, to make them again")
    if file is not None and checksum(file) not in run.saved["appended"]:
        old, old_folder, n = run, folder, len(run.corpus.article)
        run = Run(old.out, old.saved | {"appended": [*old.saved["appended"], checksum(file)]})
        if is_first:
            make_corpus(run, file, old)
        ann.barrier()
        run.open(old.device.type)
        n_there = run.corpus.meta["counts"].get("texts_already_there", 0)
        say(f"memory: {len(run.corpus.article) - n:,} passages of {file} added to {n:,}"
            + (f"; {n_there:,} texts were there, and stay as they are." if n_there else "."))
    folder = run.folder("memory")
    if not folder.exists():
        build_memory(encoder, run.corpus, folder, run.device, np.dtype(run.settings.memory_dtype),
                     run.recipe("memory"), old_folder)
    if is_first:
        if file is not None:
            write_json(run.out / "run.json", run.saved)
        run.sweep("corpus")
        run.sweep("memory")
    ann.barrier()
    about = data.open_folder(folder, "memory", wanted=lambda name: False)   # whether all are there
    say(f"memory: {about['n']:,} linked mentions in {folder}.")

def log(out, record):
    """Appends a line to log.jsonl, durably. After a crash a step can stand there twice, equally."""
    if ann.rank_and_size()[0] == 0:
        with open(out / "log.jsonl", "ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):         # a crash cut the last line off
                file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")
        data.sync(out / "log.jsonl")

@contextmanager
def alone_in(out):
    """Makes the run folder and locks it: other commands are kept out, and the system takes the lock
    back however this one ends. Nothing is written through a link, to what lies outside. A new
    folder in which nothing was written is removed again."""
    is_new = not os.path.exists(out)
    os.makedirs(out, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another train.py is at work there") from None
        except OSError:
            say(f"{out} cannot be locked: start no second train.py there.")
        for path in (*Path(out).glob("*.part"), Path(out, "log.jsonl")):
            if path.is_symlink():
                raise UserError(f"{path} is a link; remove it: nothing is written outside of --out")
        yield
    finally:
        os.close(folder)
        if is_new:
            with suppress(OSError):     # it is not empty
                os.rmdir(out)

# ==== Set apart: the command line =================================================================

@contextmanager
def signals_to(handler):
    """Ctrl-C and SIGTERM call handler(number, frame)."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

def fast_matmul():
    """Faster float32 products on processors without AMX: there oneDNN's setting "bf16" still
    computes in float32, on AMD's in half of MKL's time. Undone where a test product is not exact.
    It must be on wherever bits are to agree.

    oneDNN, and PyTorch beside it, keep a compiled product for each shape, and batches have many
    shapes: 1,024 of them take gigabytes (and time), so fewer are kept."""
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "128")         # read at the first product
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision") or torch.cpu._is_amx_tile_supported():
        return
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    x = torch.full((64, 64), 1 + 2 ** -12)
    if not torch.equal(x @ torch.eye(64), x):
        matmul.fp32_precision = before

def say(text, file=None):
    """Prints above the progress bar, in the first process."""
    if ann.rank_and_size()[0] == 0:
        tqdm.write(data.printable(text), file)

def say_figures(figures, place=""):
    """Says figures, a line for each dictionary in them: its place, then its figures, with their 95%
    intervals where it has them."""
    if figures.get("n") == 0:
        return
    line = f"{place:<24}"
    inner = [key for key, value in figures.items() if isinstance(value, dict) and key != "interval"]
    for key, value in figures.items():
        if value is not None and key not in (*inner, "interval"):
            # A gain is a list that holds its bounds; those of the others are in "interval".
            number, *bounds = [*np.ravel(value), *figures.get("interval", {}).get(key, [])]
            line += f"   {key} {number:.3f}" if isinstance(number, float) else f"   {key} {number}"
            line += f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    if line.strip() != place.strip():
        say(line)
    for key in inner:
        say_figures(figures[key], f"{place}{key} ")

def choose_device(name=None):
    """The torch.device of --device; with several processes, a GPU for each."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch sees no CUDA device; leave --device out")
    if name != "cpu" and torch.cuda.is_available():
        index, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= n:
            raise UserError(f"this machine has {n} GPUs: start {n} processes, or give --device cpu")
        return torch.device("cuda", index)
    return torch.device("cpu")

def join_processes(device):
    """Where torchrun started several: this one joins the others. A process that dies closes its
    connections, so the others know at once. The time limit is for the living, which wait while the
    first one tokenises the corpus."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        device = choose_device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=1))

def setting(text):
    """NAME=VALUE -> (name, value), of the type that the field has."""
    name, _, value = text.partition("=")
    if name not in SETTABLE:
        raise argparse.ArgumentTypeError(f"{name} is no setting; there are {', '.join(SETTABLE)}")
    return name, SETTABLE[name](value)      # argparse names what this cannot convert

TRAINED = ("batch-tome", "tome", "finetune")
GOES_WITH = {"steps": TRAINED, "batch": TRAINED, "lr": TRAINED, "start": ("tome", "finetune"),
             "append": ("memory",), "task": ("finetune",), "examples": ("finetune",),
             "n_search": ("tome", "finetune")}

def parse_arguments(argv):
    """The command line. A flag that would do nothing is refused: it was meant for another stage."""
    parser = argparse.ArgumentParser(description="Train TOME, stage by stage.", allow_abbrev=False)
    add = parser.add_argument
    add("--stage", choices=("batch-tome", "memory", "tome", "finetune"), required=True)
    add("--preset", choices=list(PRESETS))
    add("--corpus", type=os.path.abspath, metavar="FILE",
        help="JSON lines, plain or .gz (README); none: the toy world")
    add("--out", help="folder of the run (default: runs/<preset>)")
    add("--blocks", type=int, choices=(1, 2), help="TOME-1 or TOME-2")
    add("--task", choices=("claims", "qa"), help="of --stage finetune")
    add("--examples", metavar="FILE", help="to learn from (default: the toy world's, of one fact)")
    add("--steps", type=data.at_least(0), help="of the stage named, instead of the preset's")
    add("--batch", type=data.at_least(1), help="passages or examples a step, likewise")
    add("--lr", type=float, help="largest learning rate, likewise")
    add("--seed", type=data.at_least(0))
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--init", type=os.path.abspath, metavar="PATH", help="a BERT's folder that batch-tome "
        "starts from, or a BATCH-TOME file of the paper's own code, which is taken as trained")
    add("--append", metavar="FILE", help="add a corpus file to the memory, without training")
    add("--start", metavar="FILE", help="start from the weights of this .pt file, or of a TOME "
        "file of the paper's own code (with --steps 0: taken as trained), or from scratch")
    add("--set", action="append", type=setting, metavar="NAME=VALUE", help="a field of "
        "Settings or Config, such as memory=entities (a baseline); may be repeated")
    add("--n-search", type=data.at_least(1), help="search the memory in so many of 4 sqrt(N) "
        "buckets (app. C.1) for N memories in a process (default: exactly)")
    add("--quiet", action="store_true", help="no report at the end")
    args = parser.parse_args(argv)
    for flag, stages in GOES_WITH.items():
        if getattr(args, flag) is not None and args.stage not in stages:
            parser.error(f"--{flag.replace('_', '-')} goes with --stage {' or '.join(stages)}")
    if args.stage == "finetune" and not args.task:
        parser.error("--stage finetune needs --task")
    args.set = dict(args.set) if args.set else None
    args.out = args.out or f"runs/{args.preset or 'toy'}"
    return args

def train(args):
    """The stage named, after the stages before it that are not done; then what --append adds."""
    run, named = settle(args), args.task or args.stage
    if args.append is not None:
        data.open_bytes(args.append).close()        # only for its errors
    prepare(run)
    run.open(args.device)
    for kind in run.stages_to(named):
        checkpoint, recipe, started = run.checkpoint(kind), run.recipe(kind), time.time()
        ann.barrier()               # all have read what this stage may write
        if kind == "memory":
            make_memory(run)
        elif is_done(checkpoint):
            say(f"{kind}: already trained ({run.out / kind}.pt).")
        else:
            say(f"Stage {kind}, in {precision_on(run.config, run.device)}.")
            files = {name: getattr(args, name) for name in ("start", "examples")
                     if kind == named and getattr(args, name)}
            if recipe["start"] and not (checkpoint or "start" in files):
                raise UserError(f"{kind} is to start from other weights: name them again, with "
                                f"--stage {stage_of(kind)} --start")
            train_stage(run, STAGES[kind](run, recipe, **files), recipe, checkpoint)
            how = "done" if recipe["steps"] else "taken as trained"
            say(f"Stage {kind} {how} in {time.time() - started:.0f} s.")
    if args.append is not None:
        make_memory(run, args.append)

def report(args):
    """eval.py's report, as a command of its own. Returns the exit status. Several processes only
    name the command: a memory that fills them all may be too much for one."""
    flags = [f"--{name}={getattr(args, name)}" for name in ("out", "task", "device")
             if getattr(args, name)]
    flags_of_run = read_run(args.out).saved["stages"].get(args.task or args.stage, {})
    if "n_search" in flags_of_run:      # perhaps of an earlier command
        flags.append(f"--n-search={flags_of_run['n_search']}")
    if ann.rank_and_size()[1] > 1:
        say(f"Done; python eval.py {' '.join(flags)} shows what was learnt.")
        return 0
    sys.stdout.flush()
    torch.cuda.empty_cache()            # eval.py needs what this process no longer uses
    return subprocess.run([sys.executable, Path(__file__).with_name("eval.py"), *flags]).returncode

def main(argv=None):
    """Returns the exit status: 0, 1 with a sentence on stderr, 130 after Ctrl-C or SIGTERM."""
    args, status = parse_arguments(argv), 0
    try:
        # In the loop of train_stage another handler lets the step at work be ended and saved first.
        with signals_to(signal.default_int_handler):
            fast_matmul()
            join_processes(args.device)
            with alone_in(args.out) if ann.rank_and_size()[0] == 0 else nullcontext():
                train(args)
            if args.stage in ("tome", "finetune") and not args.quiet:
                status = report(args)
    except KeyboardInterrupt as stop:
        say(f"{str(stop) or 'Stopped'}; the same command goes on from there.")
        status = 130
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            error.filename = error.filename or args.out
        status = data.complain("train.py", error)
    except (RuntimeError, MemoryError) as error:
        reason = f"out of memory ({' '.join(str(error).split()):.150})"
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
            reason = f"another process has ended or cannot be reached ({reason}); mend what it says"
        elif not data.is_out_of_memory(error):
            raise
        status = data.complain("train.py", f"{reason}; the same command goes on from the last "
                               "checkpoint")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return status

if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):     # a terminal that is not UTF-8
        stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
