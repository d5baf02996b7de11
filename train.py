"""The stages of training and the loop that they share (§2.3, §2.4, §4.3, §4.4, app. A, B.1).

    stage        what is trained                  on                     losses
    batch-tome   Mention Encoder and BATCH-TOME   related passages       MLM + coreference
    memory       nothing; the Mention Encoder turns the corpus into the memory
    tome         TOME over that frozen memory     random passages        MLM + entity prediction
    finetune     TOME over that frozen memory     claims, or questions   labels, entity prediction

    python train.py --stage tome                            the first three stages, on the toy world
    python train.py --stage tome --corpus my.jsonl.gz --preset mini --out runs/mine
    torchrun --nproc_per_node 2 train.py --stage tome       the same work in two processes

A command first runs the earlier stages that have no result yet. An interrupted stage continues
where it stopped. The random choices of a step (batch, masks, dropout) depend only on (seed, stage,
step, process). So on a CPU, with the same numbers of threads and processes, a resumed run is
bit-identical to an uninterrupted one.

Shapes: a batch has B passages of T tokens and M mentions. H (B, T, hidden) is the output of the
last block; in training, it is zero where batch.is_used is false. `memory` is a MentionMemory, or
the EntityTable of a baseline."""
import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import ann
import data
from data import UserError, checksum, intact, read_json, write_file, write_json
from encoder import Config, beside, low_precision, precision_on, setting, weights_files
from memory import GivenMemory, MentionMemory, build_memory, encode_passages, load_memory
from tome import (TOME, BatchTOME, claim_logits, coreference_loss, entity_prediction_loss,
                  fit_retrieval, mlm_loss, part_of, predict_entity, read_published,
                  retrieve_entities, share_of_mean, sinusoidal_positions, split_into_blocks)

GROUPS = ("seen", "unseen")     # entities that training passages link, and all others (§4.5)

@dataclass
class Schedule:
    """How long and how fast a stage trains."""
    steps: int = setting(0, (0, 10**9), "steps of the stage")
    lr: float = setting(1e-4, (1e-12, 10), "peak learning rate of the stage")
    warmup: int = 0         # steps of linear warm-up; stage_plan limits it to a tenth of `steps`
    batch: int = setting(32, (1, 10**6), "passages or examples per step; clozes are extra")

@dataclass
class Settings:
    """The settings of a run, except the model's (encoder.Config). Every setting except the schedule
    is a flag, such as --passage-length. Defaults are the paper's values where the paper gives them
    (app. A, B.1)."""
    passage_length: int = setting(128, (8, 10**6), "maximum tokens of text per passage", "corpus")
    max_length: int = setting(512, (16, 10**6), "maximum positions per passage, with "
                              "markers", "corpus")
    vocab: int = setting(30522, (200, 10**6), "maximum vocabulary size, without --init", "corpus")
    unseen: float = setting(0.0, (0, 0.9), "fraction of entities to keep out of training", "corpus")
    cluster: int = setting(256, (1, 10**6), "related passages per cluster (app. A.1)")
    max_mentions: int = setting(24, (1, 10**6), "maximum mean number of mentions per passage")
    mention_rate: float = setting(0.2, (0, 1), "fraction of mentions that are masked")
    token_rate: float = setting(0.1, (0, 1), "fraction of tokens outside mentions that are masked")
    coref_weight: float = setting(0.15, (0, 1), "weight of the coreference loss; MLM gets the rest")
    coref_entities: int = setting(10**6, (1, 10**9), "the coreference loss uses only this many of "
                                  "the most frequent entities (eq. 10 uses all)")
    beta2: float = setting(0.999, (0, 0.999999), "AdamW's second beta")
    weight_decay: float = setting(0.01, (0, 1), "AdamW's weight decay")
    clip: float = setting(1.0, (1e-6, 10**6), "maximum norm of the gradient")
    memory_dtype: str = setting("float16", ("float16", "float32"), "type of the stored keys and "
                                "values", "memory")
    memory_fraction: float = setting(38 / 150, (0, 1), "share of the memory to train stage tome on",
                                     "tome")
    entity_weight: float = setting(0.15, (0, 1), "weight of eq. 10's loss in stage tome", "tome")
    # The next settings, up to cloze_weight, are not in the paper. They control the start of
    # batch-tome and its fit, masking, learning rates, linking, teacher forcing, the end of stage
    # tome, and clozes.
    memory_from: float = setting(0.0, (0, 0.99), "initial fraction of batch-tome's steps in which "
                                 "nothing is retrieved; then fit_retrieval runs")
    own_values_from: float = setting(0.0, (0, 1), "initial fraction of the steps before the fit in "
                                     "which mentions are not even given their own values")
    fit_passages: int = setting(4000, (1, 10**6), "number of passages for fit_retrieval")
    all_of_entity: int = setting(0, (0, 1), "1: mask all mentions of a masked entity in a passage, "
                                 "so that its name cannot be copied")
    lower_lr_scale: float = setting(1.0, (0, 100), "learning-rate scale of embeddings and layers "
                                    "below the memory, in fine-tuning and with --init")
    linking_weight: float = setting(0.0, (0, 1), "weight, in stage tome, of entity prediction from "
                                    "the last memory layer's queries", "tome")
    teacher_forcing_until: float = setting(0.0, (0, 1), "initial fraction of stage tome's steps in "
                                           "which all linked mentions are given memories of their "
                                           "entity", "tome")
    teacher_forcing_rate: float = setting(0.0, (0, 1), "fraction of mentions that are given "
                                          "memories of their entity in the later steps", "tome")
    sharpen: float = setting(1.0, (0.01, 100), "factor by which stage tome multiplies TOME-1's "
                             "queries before its last step", "tome")
    cloze_weight: float = setting(0.3, (0, 100), "weight of each cloze loss", "finetune")
    # As in pre-training. (The paper fine-tunes with 32 processes; 32 each would make only 1,024.)
    k_finetune: int = setting(4096, (1, 10**6), "--k-answer in fine-tuning, which learns only from "
                              "answers among these memories", "finetune")
    # log_every decides at which steps fine-tuning is evaluated, and so which weights can be kept as
    # the best. Apart from that, the next three settings affect no result.
    log_every: int = setting(1000, (1, 10**6), "steps between evaluations", "finetune")
    save_every: int = setting(1000, (1, 10**6), "steps between checkpoints", "finetune")
    eval_mentions: int = setting(1000, (1, 10**6), "maximum number of masked mentions per "
                                 "evaluation, for seen and for unseen entities", "finetune")
    # Each stage's steps, lr, warmup, batch. Optional keys such as "qa-2" replace "qa" for TOME-2.
    schedule: dict = field(default_factory=lambda: {
        "batch-tome": Schedule(1_000_000, 1e-4, 50_000, 4096),
        "tome": Schedule(500_000, 1e-4, 25_000, 4096),
        "claims": Schedule(20_000, 1e-5, 1000, 32), "qa": Schedule(20_000, 1e-5, 1000, 32)})

@dataclass
class Plan(Schedule):
    """How a stage is trained; stored in the stage's file."""
    kind: str = "batch-tome"        # or "tome", "claims", "qa"
    blocks: int = 1                 # TOME-1 or TOME-2
    n_search: int = setting(0, (0, 10**9), "number of buckets to search, out of the memory's 4 "
                            "sqrt(rows); 0: exact search")
    start: list | None = None       # --start: [[path, checksum]]; [["scratch", 0]]: new weights
    examples: list | None = None    # --examples and its dev file: [path, checksum] each

    @property
    def name(self):
        """The name of the stage's file without ".pt": "batch-tome", "tome-1", "qa-2"."""
        return self.kind if self.kind == "batch-tome" else f"{self.kind}-{self.blocks}"

    @property
    def flags(self):
        """What follows --stage on the command line: "finetune --task qa --blocks 2"."""
        flags = f"finetune --task {self.kind}" if self.kind in ("claims", "qa") else self.kind
        return flags + " --blocks 2" * (self.blocks == 2)

# ---- The stages ----------------------------------------------------------------------------------
# A stage has a model, next_batch(step), losses(batch, step), evaluate() and fit_step: evaluation
# begins after more than fit_step steps. One loop, below, trains all stages except `memory`, which
# memory.build_memory performs. Each loss is this process's share of the mean over the whole batch,
# so the sum of all processes' gradients is the batch's gradient.
#
# `run` is an open run folder (class Run, below). It has settings, seed, corpus, tokenizer, device,
# is_toy, is_baseline, entity_group (E,) of names from GROUPS, and three Configs: config,
# task_config (for fine-tuning) and, for BATCH-TOME with its one memory layer, batch_tome_config.

def endless(order):
    """Returns a function at(step, n), called `items` in a stage: the n items of a step, taken from
    the concatenation of order(0), order(1) and so on. order(epoch) is an array of the same length
    for every epoch. The items depend only on step and n, so checkpoints need no position in the
    data."""
    order = lru_cache(maxsize=3)(order)     # epoch 0, for its length, and the step's epochs
    def at(step, n):
        length = len(order(0))
        return np.array([order(i // length)[i % length] for i in range(step * n, step * n + n)])
    return at

# Random seeds are [seed, number, step or epoch], with number 1 for the masks of batch-tome, 2 and 3
# for the order and masks of tome, 4 and 5 for the order of examples and of clozes. Seeds without a
# step have number 6 for the entities of clozes, 7 for the fit's masks, 1 for the memory's sample.
# Clusters use 1000 * seed + epoch, and their order [seed, epoch]. Some seeds coincide harmlessly.

def epochs_of(run, number, items):
    """endless() in a new random order for every epoch. items: an array, or n for 0 … n - 1. number:
    see above."""
    return endless(lambda epoch: np.random.default_rng([run.seed, number, epoch])
                   .permutation(items))

def masked_batch(run, passages, number, step):
    """A batch for MLM, in which whole mentions and single tokens are masked (app. A)."""
    settings, rng = run.settings, np.random.default_rng([run.seed, number, step])
    batch = data.corpus_batch(run.corpus, passages)
    batch = data.sample_mentions(batch, settings.max_mentions, rng)
    return data.mask_batch(batch, run.corpus, rng, settings.mention_rate, settings.token_rate,
                           settings.all_of_entity)

def training_passages(run):
    """Numbers of the passages that have a linked mention and are not held out. Raises UserError."""
    passages = run.corpus.passage_of(np.flatnonzero(run.corpus.mention_entity))
    passages = np.unique(passages[~run.corpus.held_out[passages]])
    if not len(passages):
        raise UserError(f"{run.out / 'corpus'}: all passages with a linked mention are held out, "
                        "so there is nothing to train on; add texts with \"split\": \"train\"")
    if len(passages) < ann.rank_and_size()[1]:
        raise UserError(f"there are only {len(passages)} passages to train on; start at most that "
                        "many processes")
    return passages

def refuse_large_batch(plan, n):
    """Raises UserError if the batch size exceeds both the n items and the paper's 4,096. (Preset
    base also uses 4,096 on small corpora. Items then occur several times in a batch.)"""
    if plan.batch > max(n, 4096):
        raise UserError(f"--batch {plan.batch}: there are only {n:,} items to train on")

def first_memory_step(settings, steps):
    """The step of batch-tome (`steps` in all) at which fit_retrieval runs and the memory is
    switched on; 0: the memory is on from the start, and nothing is fitted."""
    return max(1, int(steps * settings.memory_from)) if settings.memory_from else 0

class BatchTOMEStage:
    """Mention Encoder and BATCH-TOME on related passages (§2.3, app. A.1).

    A model learns to use its memory only if retrieval finds something useful (app. B.6). So presets
    toy and mini train in three parts. Preset base, with a million steps, has only the third.
    1. Own values: the coreference loss trains the encodings at the markers to identify the entity.
       Each mention gets its own value (OwnValues), so MLM teaches the layers above to read values.
       (Own values cost time, so preset mini leaves them out in the first 40% of this part.)
    2. The fit: fit_retrieval sets keys, queries and eq. 10's z, so that similar mentions are found.
    3. Retrieval: mentions attend to mentions in other passages of the batch, as in the paper."""
    def __init__(self, run, plan):
        self.run, self.plan, corpus = run, plan, run.corpus
        self.passages = training_passages(run)
        refuse_large_batch(plan, len(self.passages))
        self.items = endless(self.clusters)
        self.eval_mentions = sample_eval_mentions(run, run.settings.eval_mentions)
        self.support = supporting_passages(corpus, self.eval_mentions)
        count = corpus.entity_count
        # The count of the rarest entity used; at least 1, to exclude entity 0 and unseen entities.
        least = max(1, np.sort(count)[-min(run.settings.coref_entities, len(count))])
        self.is_frequent = torch.from_numpy(count >= least).to(run.device)              # (E,)
        if run.path(plan).exists():                             # weights come from the checkpoint
            self.model = BatchTOME(TOME(run.batch_tome_config))
        else:
            self.model = new_batch_tome(run, run.seed)
        self.fit_step = first_memory_step(run.settings, plan.steps)

    def clusters(self, epoch):
        """The passages of an epoch, cluster by cluster."""
        size, seed = self.run.settings.cluster, self.run.seed
        found = data.related_clusters(self.run.corpus, size, seed * 1000 + epoch, self.passages)
        if len(found) > 1:
            found = [c for c in found if len(c) == size]    # so all epochs are equally long
        order = np.random.default_rng([seed, epoch]).permutation(len(found))
        return np.concatenate([found[i] for i in order])

    def next_batch(self, step):
        """The batch of a step. The first batch with a memory is preceded by the fit."""
        if step == self.fit_step > 0:
            self.fit(step)
        return masked_batch(self.run, self.items(step, self.plan.batch), 1, step)

    def losses(self, batch, step):
        """{loss: (weight, value)}. MLM trains the batch memory to be useful. Coreference trains the
        encoder to store in a mention's encoding what the passage says about the entity. Without the
        coreference loss, TOME loses 2 to 8 points (app. B.5).

        Before the fit, coreference is applied to H without a memory, from which keys are made, and
        to H0, from which queries are made. So both encode what identifies the entity. For a masked
        mention, H0 can only encode what its passage says about the entity. This identifies the
        entity, because related passages say the same."""
        model, before_fit = self.model, step < self.fit_step
        attends_to = "batch memory"
        if before_fit:
            is_early = step < self.run.settings.own_values_from * self.fit_step
            attends_to = "nothing" if is_early else "own values"
        H0, alone, H, _ = model(batch, attends_to, batch.is_used)
        entity = torch.where(self.is_frequent[batch.entity], batch.entity, 0)
        outputs = [H0, alone] if before_fit else [H]
        coref = [coreference_loss(model.coref(output, batch.row, batch.start, batch.end), entity,
                                  batch.passage) for output in outputs]
        logits = model.tome.mlm_logits(H, batch.is_target)
        mlm = mlm_loss(logits, batch.unmasked[batch.is_target])
        weight = self.run.settings.coref_weight
        return {"mlm": (1 - weight, mlm), "coref": (weight, sum(coref) / len(coref))}

    def fit(self, step):
        """Sets the retrieval layers in closed form, since freshly initialised ones retrieve nothing
        useful. Prints the figures after the fit."""
        run, rng = self.run, np.random.default_rng([self.run.seed, 7])
        sample = np.random.default_rng(run.seed).permutation(self.passages)
        sample = sample[:run.settings.fit_passages]
        parts = np.array_split(sample, -(-len(sample) // 32))
        # Half of the mentions are masked, so that masked and visible ones count equally in the fit.
        batches = [data.mask_batch(data.corpus_batch(run.corpus, part), run.corpus, rng,
                                   mention_rate=0.5, token_rate=0.1).to(run.device)
                   for part in parts]
        fit_retrieval(self.model.eval(), batches)
        ann.copy_from_first(self.model.parameters())        # rounding may differ between processes
        say_figures(self.evaluate(), f"batch-tome {step}, after the fit ")
        self.model.train()

    def evaluate(self):
        """The figures of masked_mentions with a small memory, for speed. As in stage tome, this
        memory is made from unmasked text and searched. The head of eq. 10 is not trained here (only
        the fit sets it), so "entity" and "recall@20" mean little."""
        run, (rank, size) = self.run, ann.rank_and_size()
        rows = encode_passages(self.model, run.corpus, self.support[rank::size], run.device)
        memory = MentionMemory(**rows, device=run.device)
        return masked_mentions(run, self.model.tome, memory, self.eval_mentions)[0]

class TOMEStage:
    """TOME over the frozen memory, on random passages (§2.4)."""
    fit_step = 0            # nothing is fitted

    def __init__(self, run, plan):
        self.run, self.plan, self.model = run, plan, TOME(run.config).to(run.device)
        if run.is_baseline:     # it has no batch-tome, and trains here for the steps of both stages
            batch_tome = new_batch_tome(run, run.seed)              # only for its initial weights
        else:
            batch_tome = load_model(run, "batch-tome")
        self.model.load_state_dict(split_into_blocks(batch_tome.tome.state_dict(), run.config))
        start_from(run, self.model, plan)       # only with --start
        self.memory, self.training_memory = open_memories(run, self.model, plan.n_search,
                                                          run.settings.memory_fraction)
        passages = training_passages(run)
        refuse_large_batch(plan, len(passages))
        self.items = epochs_of(run, 2, passages)
        self.eval_mentions = sample_eval_mentions(run, run.settings.eval_mentions)

    def next_batch(self, step):
        """The batch of a step. Before the last step, TOME-1's queries are multiplied by `sharpen`:
        training works better with soft attention, prediction with sharp attention. (TOME-2 would
        then learn two facts a little less well in fine-tuning.)"""
        if step == self.plan.steps - 1 and self.plan.blocks == 1:
            for name, parameter in self.model.named_parameters():
                if ".memory_attention.query." in name:
                    parameter.data *= self.run.settings.sharpen
        return masked_batch(self.run, self.items(step, self.plan.batch), 3, step)

    def losses(self, batch, step):
        """MLM and entity prediction. A mention never retrieves from its own passage, since that
        passage's memories come from the unmasked text and would give the answer away."""
        H, retrieved = self.model(batch.tokens, batch.attention_mask, batch, self.training_memory,
                                  batch.is_used)
        return self.weighted_losses(batch, H, batch.entity, retrieved[-1], batch.entity)

    def weighted_losses(self, batch, H, asked_entity, last, linked_entity):
        """{loss: (weight, value)}. asked_entity (M,): what eq. 10 has to predict; 0: nothing. last:
        the Retrieved of the last memory layer. linked_entity (M,): what this layer should retrieve
        (loss "linking"). asked_entity and linked_entity differ only under teacher forcing, where
        asked_entity is 0 for mentions that were given memories of their entity."""
        settings = self.run.settings
        mlm = mlm_loss(self.model.mlm_logits(H, batch.is_target), batch.unmasked[batch.is_target])
        asked = asked_entity > 0
        found = retrieve_entities(self.model, H, batch, self.training_memory, asked)
        prediction = entity_prediction_loss(found.scores, found.entity, asked_entity[asked])
        weight = settings.entity_weight
        result = {"mlm": (1 - weight, mlm), "entity": (weight, prediction)}
        # Entities as Experts always has the linking loss. TOME has it if linking_weight is not 0
        # (el_im_weight in the public code).
        linking_weight = weight if self.run.is_baseline else settings.linking_weight
        if linking_weight and last is not None:
            linking = entity_prediction_loss(last.scores, last.entity, linked_entity)
            result["linking"] = (linking_weight, linking)
        return result

    def evaluate(self):
        return masked_mentions(self.run, self.model, self.memory, self.eval_mentions)[0]

class FinetuneStage:
    """Fine-tunes TOME (app. B.1) on claims with FEVER's labels (§4.3), or on questions, which are
    answered by eq. 10 at an appended [MASK] (§4.4).

    Each batch of claims comes with the same number of clozes, true claims in which one entity is
    masked and has to be predicted. Labels alone do not teach which two facts a claim needs. Clozes
    and linking are not in the paper (README, "What differs")."""
    fit_step = 0            # nothing is fitted

    def __init__(self, run, plan):
        self.run, self.plan, self.task = run, plan, plan.kind
        self.model = load_model(run, "tome", run.task_config)       # k_answer = k_finetune
        start_from(run, self.model, plan)
        self.memory, self.training_memory = open_memories(run, self.model, plan.n_search)
        self.training, self.dev = read_task_examples(run, plan)
        refuse_large_batch(plan, len(self.training))
        self.clozes = []
        if self.task == "claims" and run.settings.cloze_weight:
            rng = np.random.default_rng([run.seed, 6])
            self.clozes = [cloze for example in self.training
                           for cloze in clozes_of(run, example, rng)]
        self.items = epochs_of(run, 4, len(self.training))
        self.cloze_items = epochs_of(run, 5, len(self.clozes))

    def next_batch(self, step):
        """Examples and, if the task is claims, the same number of clozes."""
        chosen = [self.training[i] for i in self.items(step, self.plan.batch)]
        if self.clozes:
            chosen += [self.clozes[i] for i in self.cloze_items(step, self.plan.batch)]
        return examples_batch(self.run, self.task, chosen)

    def losses(self, batch, step):
        """Claims are judged from the MLM head's hidden layer, averaged over their mentions (see
        claim_logits). Answers (also those of clozes) are predicted by eq. 10 ("answer") and from
        what the last memory layer retrieved ("linking"). The loss "linking" teaches that layer what
        to retrieve."""
        H, retrieved = self.model(batch.tokens, batch.attention_mask, batch, self.training_memory,
                                  batch.is_used)
        result = {}
        if self.task == "claims":
            known = batch.label >= 0
            logits = claim_logits(self.model, H, batch)[known].float()
            wrong = F.cross_entropy(logits, batch.label[known], reduction="none")
            result["claims"] = (1.0, share_of_mean(wrong))
        if self.task == "qa" or self.clozes:
            weight = 1.0 if self.task == "qa" else self.run.settings.cloze_weight
            asked = batch.answer > 0
            answer, last = batch.answer[asked], retrieved[-1]
            found = retrieve_entities(self.model, H, batch, self.training_memory, asked)
            result["answer"] = (weight, entity_prediction_loss(found.scores, found.entity, answer))
            if last is not None:
                linking = entity_prediction_loss(last.scores[asked], last.entity[asked], answer)
                result["linking"] = (weight, linking)
        return result

    def evaluate(self):
        """{"score": the accuracy on the dev examples}. The loop keeps the best-scoring weights."""
        items = judged_examples(self.run, self.model, self.task, self.dev, self.memory)
        return {"score": mean([item.is_correct for item in items])}

def new_stage(run, plan):
    if plan.kind == "batch-tome":
        return BatchTOMEStage(run, plan)
    if plan.kind in ("claims", "qa"):
        return FinetuneStage(run, plan)
    is_forced = run.settings.teacher_forcing_until or run.settings.teacher_forcing_rate
    if is_forced and not run.is_baseline:
        return TeacherForcedTOMEStage(run, plan)
    return TOMEStage(run, plan)

# ---- The loop ------------------------------------------------------------------------------------
# An unfinished checkpoint contains weights (in fine-tuning also the best so far), the optimizer's
# state and the step, which seeds batches, masks and dropout. A finished one contains only the last
# weights or, in fine-tuning, the best.

def optimizer_for(run, model, kind):
    """AdamW, without weight decay on layer norms and biases (app. A; for fine-tuning, app. B.1 says
    Adam, with the same weight decay). Where the losses are new to a trained model (in fine-tuning,
    and with --init), lower_lr_scale multiplies the learning rate of everything below the memory.

    This protects the first memory layer's queries, which are made from H0, the output of the layers
    below. TOME-2 is fine-tuned on one-fact and two-fact questions. For one-fact questions, eq. 10's
    search is enough. At the full learning rate, training on them would change H0, and so make the
    first memory layer's queries useless, before two-fact questions are learned."""
    groups, is_scaled = {}, run.init or kind in ("claims", "qa")
    for name, parameter in model.named_parameters():
        is_below_memory = name.removeprefix("tome.").startswith(("embeddings.", "initial."))
        scale = run.settings.lower_lr_scale if is_scaled and is_below_memory else 1.0
        decay = run.settings.weight_decay if parameter.dim() > 1 else 0.0
        group = {"params": [], "scale": scale, "weight_decay": decay}
        groups.setdefault((scale, decay), group)["params"].append(parameter)
    return torch.optim.AdamW(groups.values(), betas=(0.9, run.settings.beta2), fused=True)

def learning_rate(plan, step):
    """Linear warm-up, then linear decay to zero."""
    return plan.lr * min((step + 1) / max(plan.warmup, 1),
                         (plan.steps - step) / (plan.steps - plan.warmup))

class Training:
    """A stage in training. `progress` is the part of a checkpoint that says how far training has
    got: the step, the last evaluated step, sums and step counts of the losses since then, and the
    best dev score."""
    def __init__(self, run, plan, checkpoint=None):
        self.run, self.plan, self.stage = run, plan, new_stage(run, plan)
        self.model = self.stage.model.to(run.device).train()
        self.optimizer = optimizer_for(run, self.model, plan.kind)
        self.progress = {"step": 0, "evaluated": 0, "sums": {}, "best_score": -1.0}
        self.best = None                # the weights with the best dev score
        self.signals, self.began = [], time.time()
        if checkpoint:
            self.resume(checkpoint)

    def resume(self, checkpoint):
        with intact(self.run.path(self.plan)):
            about, self.best = checkpoint["about"], checkpoint["best"]
            self.progress = {name: about[name] for name in self.progress}
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
        say(f"{self.plan.name}: resumed at step {self.progress['step']:,}.")
        for name, n in machine().items():
            if about[name] != n:
                say(f"{self.plan.name}: the number of {name} was {about[name]} and is now {n}, so "
                    "the result matches an uninterrupted run only up to rounding.")

    def train_step(self):
        """One step. Returns {loss: its mean over the batch of all processes}."""
        run, plan, progress, step = self.run, self.plan, self.progress, self.progress["step"]
        rank, size = ann.rank_and_size()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(plan, step) * group["scale"]
        # Seeds dropout and, in teacher forcing, which memories are given, and to which mentions.
        torch.manual_seed(zlib.crc32(f"{run.seed} {plan.kind} {step} {rank}".encode()))
        batch_of_all = self.stage.next_batch(step)
        batch = batch_of_all.part(rank, size).to(run.device)
        with low_precision(run.config, run.device):
            losses = self.stage.losses(batch, step)
            loss = sum(weight * share for weight, share in losses.values())
        self.optimizer.zero_grad()
        loss.backward()
        ann.sum_gradients(self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), run.settings.clip)
        values = {name: float(ann.sum_over_processes(share, run.device))
                  for name, (_, share) in losses.items()}
        if not np.isfinite([*values.values(), norm.item()]).all():
            passages = batch_of_all.passage.unique().tolist()[:64]          # -1: examples
            raise self.diverged(f"the loss or gradient is not finite at step {step} ({values}; "
                                f"passages {str(passages)[1:-1]})")
        self.optimizer.step()
        progress["step"] += 1
        for name, value in values.items():
            total, n = progress["sums"].get(name, (0.0, 0))
            progress["sums"][name] = total + value, n + 1
        return values

    def evaluate(self):
        """Evaluates, prints and logs; remembers the weights with the best dev score."""
        progress, step = self.progress, self.progress["step"]
        # Until the fit, retrieval is random. The fit precedes the step with number fit_step.
        measured = self.stage.evaluate() if step > self.stage.fit_step else {}
        self.model.train()
        losses = {name: round(total / n, 4) for name, (total, n) in progress["sums"].items()}
        say_figures(losses | measured, f"{self.plan.name} {step:5d} ")
        log(self.run.out, {"stage": self.plan.name, "step": step,
                           "seconds": round(time.time() - self.began),
                           "lr": learning_rate(self.plan, step - 1), **losses, **measured})
        if "score" in measured and measured["score"] > progress["best_score"]:
            progress["best_score"] = measured["score"]
            self.best = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
        progress.update(evaluated=step, sums={})

    def save(self, finished=False):
        """Writes the checkpoint. Raises UserError if a weight is not finite."""
        weights = self.model.state_dict()
        if not all(t.isfinite().all() for t in weights.values()):
            raise self.diverged(f"a weight is not finite at step {self.progress['step']}")
        if ann.rank_and_size()[0] > 0:
            return
        about = {"format": data.FORMAT, "finished": finished, **vars(self.plan),
                 "made_from": self.run.made_from(self.plan.kind),
                 "vocab": self.run.corpus.meta["crc32"]["vocab.txt"]}   # for --start in other runs
        if finished:
            values = {"model": self.best or weights}
        else:
            about |= self.progress | machine()
            values = {"model": weights, "optimizer": self.optimizer.state_dict(), "best": self.best}
        # As JSON text, equal values always give equal bytes, which pickle does not guarantee.
        values = {"about": json.dumps(about), **values}
        write_file(self.run.path(self.plan), lambda file: torch.save(values, file))

    def diverged(self, what):
        """The error for a diverged stage, with the flags that continue it."""
        path, lr = self.run.path(self.plan), self.plan.lr / 3
        return UserError(f"{self.plan.name}: {what}; {path} has the last checkpoint, if there was "
                         f"one. Continue with --stage {self.plan.flags} --lr {lr:.1g}")

    def is_stopped(self):
        """Whether any process has received a signal to stop."""
        return int(ann.sum_over_processes(len(self.signals), self.run.device)) > 0

def machine():
    """The numbers of threads and processes, on which rounding depends."""
    return {"threads": torch.get_num_threads(), "processes": ann.rank_and_size()[1]}

def train_stage(run, plan, checkpoint=None):
    """Trains a stage and writes its file. Ctrl-C and SIGTERM stop it after the current step, which
    is saved. Weights are saved before they are evaluated, so an interrupted evaluation is repeated.
    With steps = 0 the initial weights are saved unchanged."""
    training = Training(run, plan, checkpoint)
    progress, settings = training.progress, run.settings
    bar = tqdm(total=plan.steps, initial=progress["step"], desc=plan.name,
               disable=ann.rank_and_size()[0] > 0)
    with bar, signals_to(lambda number, _: training.signals.append(number)):
        while True:
            step = progress["step"]
            log_is_due = step % settings.log_every == 0 or step == plan.steps
            if log_is_due and step > progress["evaluated"]:
                training.evaluate()
            if step == plan.steps:
                break
            values = training.train_step()
            step = progress["step"]
            bar.update()
            bar.set_postfix(values, refresh=False)
            stop = training.is_stopped()
            save_is_due = 0 in (step % settings.log_every, step % settings.save_every)
            if stop or save_is_due or step == plan.steps:
                training.save()
            if stop:
                raise KeyboardInterrupt(f"Stopped at step {step} of {plan.name} and saved")
        training.save(finished=True)
        ann.barrier()       # no process reads the checkpoint before it is written
        if training.is_stopped():
            raise KeyboardInterrupt(f"Stopped after {plan.name}, which is saved")

# ---- Initial weights, and the memories -----------------------------------------------------------
# TOME starts from BATCH-TOME's weights (§2.3), so that its queries fit the keys in the memory.
# TOME does not learn to use a memory made by a different Mention Encoder (app. B.6).

def new_batch_tome(run, seed):
    """BATCH-TOME with random weights, or with those of run.init: a BERT folder, or a file of the
    paper's own code. Prints what the published weights lack."""
    torch.manual_seed(seed)
    model = BatchTOME(TOME(run.batch_tome_config))
    if run.init:
        return with_published(run, model)
    sinusoidal_positions(model)
    return model

def open_memories(run, tome, n_search, fraction=1.0):
    """(the memory of the whole corpus, its part for training: a fraction of the passages that are
    not held out). For a baseline both are its EntityTable, which is part of the model."""
    if tome.entities is not None:
        return tome.entities, tome.entities
    memory = open_memory(run, n_search)
    return memory, memory.of_passages(~run.corpus.held_out).sample(fraction, run.seed)

# ---- Evaluation during training: does the memory supply what the passage lacks? ------------------
# Every process computes the same whole batch, and searches its own part of the memory for the
# queries of all processes. So several processes are no faster than one.

class MaskedMention(NamedTuple):
    """How a model treats one masked mention and the visible mentions of its passage. "Attention" is
    the weight that the last memory layer gives to memories of the mention's own entity. is_named
    and is_recalled leave out the entities of visible mentions; data.eval_mentions ensures that the
    answer is not one of them."""
    group: str              # one of GROUPS
    n_tokens: int           # masked tokens
    n_correct: int          # … predicted correctly
    is_named: bool          # eq. 10 picks the mention's entity
    is_recalled: bool       # a memory of this entity is among the 20 best of eq. 10
    attention: float
    visible: list           # (group, attention) of each visible mention whose entity is linked in
                            # at least two passages of the memory, so not only in its own

    @property
    def share(self):
        """The fraction of the masked tokens that are predicted correctly."""
        return self.n_correct / max(self.n_tokens, 1)

def mean(values):
    """The mean of a list of numbers, 0 for an empty list."""
    return float(np.mean(values)) if len(values) else 0.0

def masked_mentions(run, tome, memory, mentions, batch_size=64, progress=None):
    """(figures, items): masks the mentions one at a time, and predicts the tokens of each.

    mentions: corpus numbers, from data.eval_mentions. progress: the title of a progress bar.
    items: a MaskedMention for each mention. figures: for each of GROUPS a dictionary with

    tokens              the fraction of masked tokens predicted correctly
    entity              the fraction of masked mentions with is_named
    recall@20           the fraction of masked mentions with is_recalled
    attention           mean attention of the masked mentions
    attention_visible   mean attention of the visible mentions
    n                   the number of masked mentions"""
    tome.eval()
    is_elsewhere, items = in_two_passages(run, memory), []
    starts = range(0, len(mentions), batch_size)
    for first in tqdm(starts, progress, leave=False, disable=None if progress else True):
        part = mentions[first:first + batch_size]
        items += fill_in(run, tome, memory, part, is_elsewhere)
    figures = {}
    for group in GROUPS:
        masked = [item for item in items if item.group == group]
        visible = [mass for item in items for g, mass in item.visible if g == group]
        n_tokens = sum(item.n_tokens for item in masked)
        figures[group] = {
            "tokens": sum(item.n_correct for item in masked) / max(n_tokens, 1),
            "entity": mean([item.is_named for item in masked]),
            "recall@20": mean([item.is_recalled for item in masked]),
            "attention": mean([item.attention for item in masked]),
            "attention_visible": mean(visible),
            "n": len(masked)}
    return figures, items

def in_two_passages(run, memory):
    """(E,) whether at least two passages of the memory link an entity. Otherwise mentions of the
    entity cannot retrieve it: their own passage is excluded. All true for an EntityTable."""
    n_entities = len(run.corpus.entity_names)
    if not isinstance(memory, MentionMemory):
        return torch.ones(n_entities, dtype=torch.bool, device=run.device)
    pairs = torch.unique(memory.entity.long() * 2 ** 32 + memory.passage)       # each pair once
    n_passages = torch.bincount(pairs >> 32, minlength=n_entities)
    return ann.sum_over_processes(n_passages, run.device) > 1

@torch.no_grad()
def fill_in(run, tome, memory, mentions, is_elsewhere):
    """A MaskedMention for each of these B mentions: one batch of masked_mentions."""
    batch = data.eval_batch(run.corpus, mentions).to(run.device)
    masked = torch.from_numpy(mentions).to(run.device)[batch.row] == batch.mention  # (M,), B true
    H, retrieved = tome(batch.tokens, batch.attention_mask, batch, memory)
    # Masked tokens.
    is_correct = torch.zeros_like(batch.is_target)                                  # (B, T)
    predicted = tome.mlm_logits(H, batch.is_target).argmax(-1)                      # (L,)
    is_correct[batch.is_target] = predicted == batch.unmasked[batch.is_target]
    # Eq. 10 without the entities of visible mentions (never the answer), as for BM25 in eval.py.
    found, entity = retrieve_entities(tome, H, batch, memory, masked), batch.entity[masked]
    is_visible = torch.zeros(len(mentions), len(is_elsewhere), dtype=torch.bool, device=run.device)
    is_visible[batch.row[~masked], batch.entity[~masked]] = True                    # (B, E)
    scores = found.scores.masked_fill(is_visible.gather(1, found.entity), -torch.inf)
    is_named = predict_entity(scores, found.entity) == entity
    is_recalled = (best_entities(scores, found.entity) == entity[:, None]).any(1)
    # Attention to memories of the mention's own entity.
    last, attention = retrieved[-1], torch.zeros(len(batch.entity), device=run.device)      # (M,)
    if last is not None:
        attention = (last.weights * (last.entity == batch.entity[:, None])).sum(-1)
    counted = ~masked & (batch.entity > 0) & is_elsewhere[batch.entity]
    visible = [[] for _ in mentions]
    rows, entities, masses = (x[counted].tolist() for x in (batch.row, batch.entity, attention))
    for row, e, mass in zip(rows, entities, masses):
        visible[row].append((run.entity_group[e], mass))
    columns = (batch.is_target.sum(1), is_correct.sum(1), is_named, is_recalled, attention[masked])
    columns = [column.tolist() for column in columns]       # in the order of MaskedMention's fields
    group = run.entity_group[entity.tolist()]
    return [MaskedMention(*item) for item in zip(group, *columns, visible)]

def best_entities(scores, entity, k=20):
    """(B, min(k, K)) entities of the k best memories, -1 for none. scores, entity (B, K)."""
    scores, best = scores.topk(min(k, scores.shape[1]))
    return entity.gather(1, best).masked_fill(scores.isneginf(), -1)

def sample_eval_mentions(run, n):
    """At most n mentions of each of GROUPS, from data.eval_mentions, the same in every call."""
    mentions = np.random.default_rng(0).permutation(data.eval_mentions(run.corpus))
    group = run.entity_group[run.corpus.mention_entity[mentions]]
    return np.concatenate([mentions[group == name][:n] for name in GROUPS])

def supporting_passages(corpus, mentions, n_same=4, n_others=512, n_own=8):
    """Passages of a small memory for evaluating these mentions while the Mention Encoder is still
    being trained: those of at most n_same random mentions of every entity that these mentions
    name, n_others random passages, and at most n_own random passages of each mention's article."""
    rng, entity, article = np.random.default_rng(0), corpus.mention_entity, corpus.article
    def some_of_each(items, group, n):
        """At most n random items of each group. group: the group of every item."""
        items = rng.permutation(items)
        items = items[np.argsort(group[items], kind="stable")]
        # 0 for the first item of a group, 1 for its second, …
        place = np.arange(len(items)) - np.searchsorted(group[items], group[items])
        return items[place < n]
    same = some_of_each(np.flatnonzero(np.isin(entity, entity[mentions])), entity, n_same)
    others = rng.integers(0, len(article), n_others)
    own = np.flatnonzero(np.isin(article, article[corpus.passage_of(mentions)]))
    own = some_of_each(own, article, n_own)
    return np.unique(np.concatenate([own, corpus.passage_of(same), others]))

class Judged(NamedTuple):
    """How a model treats one claim or question."""
    is_correct: bool
    is_recalled: bool       # a memory of a correct answer is among eq. 10's 20 best; None: a claim

@torch.no_grad()
def judged_examples(run, tome, task, examples, memory, without=None, attend=True, batch_size=64,
                    progress=None):
    """A Judged for each example.

    without: "subject" or "bridge", a field of the examples. The article that it names is hidden
    from the example. attend=False switches the memory layers off; answers are still retrieved.
    progress: the title of a progress bar."""
    tome.eval()
    corpus, items = run.corpus, []
    if without:
        memory = memory.by_article(corpus.article)
    starts = range(0, len(examples), batch_size)
    for first in tqdm(starts, progress, leave=False, disable=None if progress else True):
        chosen = examples[first:first + batch_size]
        batch = examples_batch(run, task, chosen).to(run.device)
        if without:         # after by_article, passage numbers are article numbers
            article = [corpus.article_index.get(e.info.get(without), -1) for e in chosen]
            batch.passage = torch.tensor(article, device=run.device)[batch.row]
        H, _ = tome(batch.tokens, batch.attention_mask, batch, memory if attend else None)
        if task == "claims":
            is_correct = claim_logits(tome, H, batch).argmax(-1) == batch.label
            items += [Judged(correct, None) for correct in is_correct.tolist()]
            continue
        found = retrieve_entities(tome, H, batch, memory, batch.answer >= 0)
        predicted = predict_entity(found.scores, found.entity).tolist()
        best = best_entities(found.scores, found.entity).tolist()
        for example, entity, entities in zip(chosen, predicted, best):
            answers = {corpus.entity_index.get(answer) for answer in example.answers}
            items.append(Judged(entity in answers, not answers.isdisjoint(entities)))
    return items

# ---- Examples ------------------------------------------------------------------------------------

def examples_batch(run, task, examples):
    """A Batch of these examples; task None: only their texts."""
    return data.example_batch(examples, task, run.tokenizer, run.corpus.entity_index,
                              max_length=run.settings.max_length)

def toy_file(run, task, hops, split):
    """The path of a file of toy examples, such as qa.one_hop.train.jsonl. Raises UserError."""
    path = run.out / "world" / f"{task}.{hops}.{split}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; give --examples a file of JSON lines (README)")
    # Called only for its errors: it verifies these files' checksums.
    data.open_folder(path.parent, "toy world", lambda name: name.startswith(f"{task}.{hops}."))
    return path

def clozes_of(run, example, rng):
    """A list with the cloze of a true claim: the example with one known entity as its answer, and
    without its label. Empty for other claims, and if no entity is known."""
    known = [m.entity for m in example.mentions if run.corpus.entity_index.get(m.entity)]
    if example.label != data.CLAIM_LABELS.index("SUPPORTS") or not known:
        return []
    # In the toy world only the object follows from the other mentions, so only it is asked for.
    known = [entity for entity in known if entity == example.info.get("object")] or known
    return [example._replace(label=None, answers=[known[rng.integers(len(known))]])]

# ==== Set apart: teacher forcing ==================================================================

class TeacherForcedTOMEStage(TOMEStage):
    """TOME that is given memories of the correct entity (memory.GivenMemory), so that it learns to
    read memories before its attention finds them. Used by preset mini, because on real text
    attention rarely finds the entity of a masked mention."""
    def __init__(self, run, plan):
        super().__init__(run, plan)
        self.given = GivenMemory(self.training_memory, len(run.corpus.entity_names))

    def losses(self, batch, step):
        """At first every linked mention is given memories, while the queries and the layers below
        the memory are frozen, except the word embeddings, which the MLM head shares. Later, only a
        fraction of the mentions is given memories; without any, the model forgets how to read."""
        settings, model = self.run.settings, self.model
        all_are_given = step < settings.teacher_forcing_until * self.plan.steps
        rate = 1.0 if all_are_given else settings.teacher_forcing_rate
        is_given = torch.rand(len(batch.entity), device=batch.entity.device) < rate
        self.given.wanted = torch.where(is_given, batch.entity, 0)
        self.given.others_search = not all_are_given
        with torch.set_grad_enabled(not all_are_given):
            H0 = model.forward_initial(batch.tokens, batch.attention_mask)
        H, _ = model.forward_blocks(H0, batch.attention_mask, batch, self.given, batch.is_used)
        if all_are_given:
            logits = model.mlm_logits(H, batch.is_target)
            return {"mlm": (1.0, mlm_loss(logits, batch.unmasked[batch.is_target]))}
        # A mention that was given memories encodes the answer, so eq. 10 is not trained on it. The
        # query (linking) of TOME-1 is made before memories are read, so it is always trained.
        asked_entity = torch.where(is_given, 0, batch.entity)
        linked_entity = batch.entity if self.run.config.n_blocks == 1 else asked_entity
        return self.weighted_losses(batch, H, asked_entity, self.given.found, linked_entity)

# ==== Set apart: files of examples ================================================================

def dev_files(path):
    """[the file whose name has "dev" in place of "train"], or [] if there is none."""
    dev = Path(path).parent / re.sub("(.*)train", r"\1dev", Path(path).name)
    return [dev] if dev != Path(path) and dev.is_file() else []

def labelled_examples(path, task):
    """The claims of a file that have a label, or all of its questions. Raises UserError."""
    examples = [e for e in data.read_examples(path, task) if task == "qa" or e.label is not None]
    if not any(e.label is not None or e.answers for e in examples):
        raise UserError(f"{path}: no example has a label or an answer")
    return examples

def task_examples(run, task, path):
    """labelled_examples, with mentions detected where the field is missing. Prints some counts."""
    examples = labelled_examples(path, task)
    n_found = sum(e.mentions is None for e in examples)
    if n_found:
        how, find = data.mention_finder(run.corpus.entity_names)
        say(f"{path}: the mentions of {n_found:,} examples were found using {how}.", sys.stderr)
        examples = [e._replace(mentions=find(e.text)) if e.mentions is None else e
                    for e in tqdm(examples, "mentions", leave=False, disable=None)]
    passages = data.example_passages(examples, task, run.tokenizer, run.settings.max_length)
    n_used = sum(i >= 0 for passage in passages for i in passage.index)
    n_left_out = sum(len(e.mentions) for e in examples) - n_used
    n_without = sum(not e.mentions for e in examples)
    if n_left_out:
        say(f"{path}: mentions not used: {n_left_out:,} (they overlap others, are beyond "
            "--max-length, or come after the first 32 of an example).", sys.stderr)
    if n_without:
        say(f"{path}: examples without a mention: {n_without:,} of {len(examples):,}.", sys.stderr)
    return examples

def read_task_examples(run, plan):
    """(training, dev) examples of a plan. Without a dev file, dev is a tenth of the examples.
    If none of a question's answers is an entity in the corpus, the question is left out of training
    and counts as answered incorrectly in dev (§4.4). Raises UserError."""
    paths = [path for path, _ in plan.examples or []]
    if not paths:
        path = toy_file(run, plan.kind, "both" if plan.blocks == 2 else "one_hop", "train")
        paths = [path, *dev_files(path)]
    training, *dev = [task_examples(run, plan.kind, path) for path in paths]
    if not dev:
        order, n_dev = np.random.default_rng(0).permutation(len(training)), -(-len(training) // 10)
        dev = [[training[i] for i in order[:n_dev]]]
        training = [training[i] for i in order[n_dev:]]
    if plan.kind == "qa":
        n, entities = len(training), run.corpus.entity_index
        training = [e for e in training if any(answer in entities for answer in e.answers)]
        if len(training) < n:
            say(f"{n - len(training):,} of {n:,} training questions are left out: none of their "
                "answers is an entity of the corpus.")
    if not training:
        raise UserError(f"{paths[0]}: no example is left to train on; add examples (answers must "
                        "be entities of the corpus; without a dev file, a tenth is kept for dev)")
    return training, dev[0]

# ==== Set apart: published weights ================================================================

def with_published(run, model):
    """Loads the weights of --init into a BATCH-TOME. Prints what they lack. Raises UserError."""
    if [checksum(file) for file in weights_files(run.init)] != run.saved["init"]["weights"]:
        raise UserError(f"--init {run.init}: the weights there have changed since {run.out} was "
                        "made; restore them, or choose another --out")
    _, state, lacks, unused = read_published(run.init, run.config)
    model.load_state_dict(state, strict=False)
    say_of_file(run.init, lacks, unused)
    tome, corpus, quote = model.tome, run.corpus, run.tokenizer.token_to_id('"')
    if run.has_batch_tome:
        tome.entity_query.load_state_dict(model.key.state_dict())   # not published; z must fit keys
    elif quote is not None:
        # The markers took unused entries of the vocabulary, which BERT never trained. So both start
        # with the embedding of the quotation mark, since quotation marks also surround names.
        word = tome.embeddings.word.weight.data
        word[[corpus.special[data.E_START], corpus.special[data.E_END]]] = word[quote].clone()
    if "mlm" in lacks:
        # The bias of a new MLM head starts as the log frequencies of words in training passages,
        # which would otherwise take many steps to learn.
        in_training = np.repeat(~corpus.held_out, np.diff(corpus.passage_start))
        tokens = corpus.tokens[in_training][:10 ** 7]
        words = tokens[corpus.maskable[tokens]]
        counts = np.bincount(words, minlength=run.config.vocab_size) + 1
        tome.mlm.bias.data = torch.from_numpy(np.log(counts / counts.sum())).float()
    return model

def say_of_file(path, lacks, unused):
    """Prints what a published file lacks, and which of its tensors are not used."""
    say(f"{path} has no weights for {', '.join(lacks)}; this run initialises them.")
    if unused:
        say(f"{path}: not used: {', '.join(unused)}.")

def read_start(run, path):
    """The weights of --start: a checkpoint of this project or of the paper's own code. Raises
    UserError if it contains no TOME with the run's --hidden."""
    if zipfile.is_zipfile(path) or path.endswith(".pt"):
        checkpoint = read_checkpoint(path, "give another --start")
        saved, meta = checkpoint["model"], run.out / "corpus/meta.json"
        if meta.exists() and read_json(meta)["crc32"]["vocab.txt"] != checkpoint["about"]["vocab"]:
            raise UserError(f"--start {path}: it has the vocabulary of another corpus")
    else:
        _, saved, lacks, unused = read_published(path, run.config)
        if "key.linear.weight" in saved:
            raise UserError(f"--start {path}: it is a BATCH-TOME; give it to --init")
        lacks = [part for part in lacks if part not in ("key", "value", "coref")]   # BATCH-TOME's
        say_of_file(path, lacks, unused)
        saved = part_of(saved, "tome.")
    words = saved.get("embeddings.word.weight")
    if words is None or words.shape[1] != run.config.hidden:
        raise UserError(f"--start {path}: it contains no TOME with --hidden {run.config.hidden}")
    return saved

def start_from(run, tome, plan):
    """Loads the weights of --start (app. B.6), if given, and initialises the rest, such as memory
    layers, randomly. "scratch" initialises everything (with --init: from BERT). The seed differs
    from BATCH-TOME's, so that TOME does not start from the same random weights as BATCH-TOME."""
    if plan.start is None or run.path(plan).exists():
        return
    path, fresh = plan.start[0][0], new_batch_tome(run, run.seed + 1).tome.state_dict()
    tome.load_state_dict(split_into_blocks(fresh, run.config))
    if path != "scratch":
        saved = read_start(run, path)
        what = "it contains no TOME with the run's dimensions"
        with intact(f"--start {path}:", what, "give another"):
            lacks, unused = tome.load_state_dict(saved, strict=False)   # raises if a shape differs
            if layers := [name for name in lacks + unused if "layers." in name]:
                raise ValueError(f"its layers differ: {', '.join(layers)}")

# ==== Set apart: presets ==========================================================================
# base keeps the defaults of Settings and Config, the paper's values. toy takes minutes on a laptop,
# and mini is for a few hundred articles. Both have small models and few steps, so their learning
# rates are 6 to 100 times the paper's. Each process offers k memories (k_shard = k), so search is
# exact for any number of processes. In mini the fit comes late (memory_from), and the model learns
# in stage tome to read what it retrieves.

PRESETS = {
    "base": data.TEXT_PRESETS["base"],
    "mini": data.TEXT_PRESETS["mini"] | dict(
        hidden=128, n_heads=8, intermediate=512, max_positions=256, n_initial=3, n_upper=2,
        key_dim=128, value_dim=256, coref_dim=64, dropout=0.0, k=256, k_shard=256, k_answer=256,
        k_answer_shard=256, k_finetune=256, cluster=64, mention_rate=0.5, all_of_entity=1,
        token_rate=0.07, coref_weight=0.5, memory_from=0.95, own_values_from=0.4, fit_passages=1000,
        memory_fraction=1.0, memory_dtype="float32", entity_weight=0.3, linking_weight=0.3,
        teacher_forcing_until=0.35, teacher_forcing_rate=0.5, beta2=0.98, lower_lr_scale=0.25,
        log_every=200, save_every=100, eval_mentions=100, schedule={
            "batch-tome": Schedule(410, 6e-4, 50, 64), "tome": Schedule(380, 8e-4, 20, 64),
            "claims": Schedule(600, 2e-4, 60, 32), "qa": Schedule(600, 2e-4, 60, 32)}),
    "toy": data.TEXT_PRESETS["toy"] | dict(
        hidden=96, n_heads=6, intermediate=192, max_positions=128, n_initial=3, n_upper=1,
        key_dim=64, value_dim=128, coref_dim=64, dropout=0.0, k=64, k_shard=64, k_answer=64,
        k_answer_shard=64, k_finetune=256, cluster=64, mention_rate=0.4, memory_from=0.63,
        memory_fraction=1.0, memory_dtype="float32", fit_passages=768, lower_lr_scale=0.1,
        sharpen=1.5, init_std=0.05, beta2=0.98, precision="float32", log_every=250, save_every=250,
        eval_mentions=100, schedule={
            "batch-tome": Schedule(2100, 2.5e-3, 100, 64), "tome": Schedule(300, 1e-3, 50, 64),
            "tome-2": Schedule(400, 1e-3, 50, 64), "claims": Schedule(1200, 1e-3, 50, 64),
            "claims-2": Schedule(2400, 1e-3, 50, 64), "qa": Schedule(250, 1e-3, 25, 64),
            "qa-2": Schedule(800, 1e-3, 40, 64)}),
}
STAGES = ("corpus", "batch-tome", "memory", "tome", "finetune")
FLAGS = {f.name: f for f in (*fields(Settings), *fields(Config)) if f.metadata}
STAGE_FLAGS = {f.name: f for f in fields(Plan) if f.metadata}       # steps, lr, batch, n_search
# The values that check_values checks. A warm-up has no flag and is checked like a number of steps.
CHECKED = FLAGS | STAGE_FLAGS | {"seed": setting(0, (0, 10**9), "seed of all random numbers"),
                                 "warmup": STAGE_FLAGS["steps"]}

def flag(name):
    """The flag of a setting: "hidden" -> "--hidden", "key_dim" -> "--key-dim"."""
    return "--" + name.replace("_", "-")

def check_values(values):
    """Raises UserError for a value that has the wrong type or is not allowed."""
    for name, value in values.items():
        kind, allowed = type(CHECKED[name].default), CHECKED[name].metadata["allowed"]
        if kind is str:
            fits, wanted = value in allowed, f"one of {', '.join(allowed)}"
        else:
            least, most = allowed
            fits = type(value) in (int, kind) and least <= value <= most       # NaN does not fit
            wanted = f"between {least:g} and {most:g}"
        if not fits:
            raise UserError(f"{flag(name)} {value}: must be {wanted}")

# ==== Set apart: the run folder ===================================================================
#
#   run.json            what defines the run: preset, seed, corpus, --init, all settings
#   world/ corpus/      the toy world's files; the tokenised corpus
#   batch-tome.pt       a checkpoint, finished or not; also tome-1.pt (TOME-1), qa-2.pt (TOME-2), …
#   memory/             key, value and entity of every linked mention
#   appended-0001/      corpus/ and memory/ after --append; eval.py uses the highest-numbered folder
#   log.jsonl           losses and evaluations
#
# Each of these files but log.jsonl is written under a temporary name and renamed; each folder is
# built as NAME.part. So a command may be killed at any moment; if it is run again, it continues
# where it stopped. Each result contains the checksums of the results that it was made from
# (made_from), and is rejected if one of those results has changed.

def missing(path, stage, how="missing"):
    """The error for a result that a command needs, but that is missing or (`how`) unfinished."""
    advice = f"run python train.py --stage {stage} --out {shlex.quote(str(path.parent))}"
    if any(part.is_file() for part in path.parents):
        advice = "give the folder of a run, such as runs/toy"
    if re.fullmatch(r"appended-\d{4}", path.parent.name):
        advice = f"remove {path.parent} and append its file again"
    return UserError(f"{path} is {how}; {advice}")

@contextmanager
def values_of(path, remedy):
    """Like data.intact. Also adds the path to a UserError about a value in the file (for example
    from check_values)."""
    with intact(path, remedy=remedy):
        try:
            yield
        except UserError as error:
            raise UserError(f"{path} is damaged: {error}") from error

def read_checkpoint(path, remedy="remove it to train this stage again"):
    """The contents of a .pt file: "about" is parsed, and the stage's Plan is added as "plan". Only
    tensors and plain values are unpickled, so a stranger's file runs no code. Raises UserError."""
    with values_of(path, remedy):
        with zipfile.ZipFile(path) as file:             # torch.load does not verify checksums
            damaged = file.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} differs")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        about = json.loads(checkpoint["about"])
        if about["format"] != data.FORMAT:
            raise ValueError(f"it has format {about['format']}, not {data.FORMAT}")
        if about["finished"] is not True:
            counts = [about[name] for name in ("step", "evaluated", "threads")]
            counts += [n for _, n in about["sums"].values()]
            numbers = [about["best_score"], *(total for total, _ in about["sums"].values())]
            if {*map(type, counts)} != {int} or {*map(type, numbers)} != {float}:
                raise ValueError("its progress has values of the wrong type")
        check_values({name: about[name] for name in (*STAGE_FLAGS, "warmup")})
        plan = Plan(**{f.name: about[f.name] for f in fields(Plan)})
        return {**checkpoint, "about": about, "plan": plan}

def with_values(defaults, values):
    """A copy of a dataclass instance. Fields that occur in the dictionary `values` are replaced."""
    return replace(defaults, **{name: values[name] for name in vars(defaults) if name in values})

class Run:
    """A run folder as described by the contents of run.json (`saved`), for TOME-1 or TOME-2
    (`blocks`). open() adds the attributes base (the folder that contains corpus/ and memory/),
    corpus, tokenizer, entity_group, device, batch_tome_config and task_config, and completes config
    (vocab_size, n_entities). Raises UserError for settings that are not allowed or contradict each
    other."""

    def __init__(self, out, saved, blocks=1):
        self.out, self.saved, self.blocks, self.seed = Path(out), saved, blocks, saved["seed"]
        check_values(saved["settings"] | {"seed": self.seed})
        for schedule in saved["schedule"].values():
            check_values(schedule)
        self.settings = with_values(Settings(), saved["settings"])
        self.settings.schedule = {kind: Schedule(**schedule)
                                  for kind, schedule in saved["schedule"].items()}
        self.config = config = with_values(Config(n_blocks=blocks), saved["settings"])
        if config.hidden % 2 or config.hidden % config.n_heads:
            raise UserError("--hidden must be even, and a multiple of --n-heads")
        if config.n_upper % blocks and config.n_upper > 1:
            raise UserError("--n-upper must be 1 or a multiple of --blocks")
        if self.settings.max_length > config.max_positions:
            raise UserError("--max-length must be at most --max-positions")
        self.is_toy = saved["corpus"] is None
        # init: the path of --init, or None. has_batch_tome: whether it is a BATCH-TOME, not a BERT.
        self.init = saved["init"] and saved["init"]["path"]
        self.has_batch_tome = bool(self.init) and saved["init"]["trained"]
        # Entities as Experts, or a model without memory. Neither has a Mention Encoder.
        self.is_baseline = config.memory != "mentions"
        self.read_checkpoint = cache(read_checkpoint)       # so that each file is read only once

    def open(self, device=None, appended=False):
        """Opens the corpus and returns the run. appended: if true, opens the corpus that includes
        the text of --append, otherwise the corpus used in training. Raises UserError if the corpus
        is missing or damaged, or was not made as run.json says."""
        self.base = self.appended() if appended else self.out
        folder = self.base / "corpus"
        if not folder.exists():
            raise missing(folder, "tome")
        self.corpus, self.device = data.Corpus(folder), choose_device(device)
        self.check_sources(folder, self.corpus.meta.get("made_from"), self.corpus_made_from())
        self.tokenizer = self.corpus.tokenizer
        self.entity_group = np.where(self.corpus.entity_count > 0, *GROUPS)
        n_entities = len(self.corpus.entity_names) if self.is_baseline else 0
        self.config = replace(self.config, vocab_size=self.corpus.vocab_size, n_entities=n_entities)
        # BATCH-TOME has only one memory layer, below all n_upper layers (tome.split_into_blocks).
        self.batch_tome_config = replace(self.config, n_blocks=1)
        k, config = self.settings.k_finetune, self.config   # k_answer_shard grows in proportion
        self.task_config = replace(config, k_answer=k,
                                   k_answer_shard=config.k_answer_shard * k // config.k_answer)
        return self

    def plan(self, kind):
        """The default Plan of a stage. A baseline has no batch-tome, so its stage tome gets the
        schedule of batch-tome, with the steps of both. A published BATCH-TOME gets no steps."""
        schedules = self.settings.schedule
        first, schedule = schedules["batch-tome"], schedules.get(f"{kind}-{self.blocks}",
                                                                 schedules[kind])
        if kind == "tome" and self.is_baseline:
            schedule = replace(first, steps=first.steps + schedule.steps)
        if kind == "batch-tome" and self.has_batch_tome:
            schedule = replace(first, steps=0)
        return Plan(**vars(schedule), kind=kind, blocks=1 if kind == "batch-tome" else self.blocks)

    def path(self, plan):
        return self.out / f"{plan.name}.pt"

    def stages_to(self, kind):
        """The stages that lead to this one, and the stage itself."""
        stages = ["tome"] if self.is_baseline else ["batch-tome", "memory", "tome"]
        if self.is_baseline and kind in ("batch-tome", "memory"):
            raise UserError(f"--stage {kind}: a baseline has no mention memory; use --stage tome")
        return stages[:stages.index(kind) + 1] if kind in stages else [*stages, kind]

    def appended(self):
        """The folder appended-NNNN with the highest number, or the run folder if there is none."""
        return max(self.out.glob("appended-[0-9][0-9][0-9][0-9]"), default=self.out)

    def corpus_made_from(self):
        """What the corpus must be made from: {name: checksum, setting or "toy world SEED"}."""
        vocab = self.saved["init"]["vocab"] if self.init else self.settings.vocab
        text = f"toy world {self.seed}" if self.is_toy else self.saved["corpus"]["checksum"]
        return {"text": text, "vocabulary": vocab, "passage length": self.settings.passage_length,
                "maximum length": self.settings.max_length, "unseen": self.settings.unseen}

    def made_from(self, kind):
        """{name: checksum} of the corpus and the checkpoints that a stage is made from, if they
        exist. The memory is left out, since it depends only on the corpus and batch-tome."""
        plans = [self.plan(stage) for stage in self.stages_to(kind)[:-1] if stage != "memory"]
        paths = {"corpus": self.out / "corpus/meta.json"} | {p.name: self.path(p) for p in plans}
        return {name: checksum(path) for name, path in paths.items() if path.exists()}

    def check_sources(self, path, made_from, wanted):
        """Raises UserError if `made_from`, stored in the result `path`, differs from `wanted`."""
        with intact(path, remedy="remove it to have it rebuilt"):
            others = [name for name, crc32 in wanted.items() if made_from.get(name) != crc32]
        if others:
            source = self.out / f"{others[0]}.pt"
            if source.exists():
                self.read_checkpoint(source)            # raises if the source is damaged
            raise UserError(f"{path} was made with a different {others[0]}; remove {path} to have "
                            "it rebuilt, or choose another --out")

    def checkpoint(self, plan):
        """The checkpoint of a stage, finished or not; None if there is none. Raises UserError."""
        path = self.path(plan)
        if not path.exists():
            return None
        checkpoint = self.read_checkpoint(path)
        if checkpoint["plan"].name != plan.name:
            raise UserError(f"{path} contains {checkpoint['plan'].name}; rename it or remove it")
        self.check_sources(path, checkpoint["about"].get("made_from"), self.made_from(plan.kind))
        return checkpoint

def load_model(run, kind="tome", config=None):
    """The trained model of a stage. config: another Config for it, with the same sizes. Raises
    UserError if the model is missing or unfinished."""
    plan = run.plan(kind)
    path, checkpoint = run.path(plan), run.checkpoint(plan)
    if checkpoint is None or not checkpoint["about"]["finished"]:
        raise missing(path, plan.flags, "unfinished" if checkpoint else "missing")
    config = config or (run.task_config if kind in ("claims", "qa") else run.config)
    model = BatchTOME(TOME(run.batch_tome_config)) if kind == "batch-tome" else TOME(config)
    with intact(path):
        model.load_state_dict(checkpoint["model"])
    return model.to(run.device).eval()

def open_memory(run, n_search=0):
    """The memory of run.corpus, without the rows from replaced articles. Raises UserError."""
    folder, encoder = run.base / "memory", run.path(run.plan("batch-tome"))
    for path, stage in ((folder, "memory"), (encoder, "batch-tome")):
        if not path.exists():
            raise missing(path, stage)
    memory, made_from = load_memory(folder, run.device)
    corpus = {"corpus": checksum(run.base / "corpus/meta.json")}
    run.check_sources(folder, made_from, run.made_from("memory") | corpus)
    return memory.of_passages(~run.corpus.replaced).changed(n_search=n_search)

def read_run(out, blocks=1):
    """The Run that OUT/run.json describes, not yet opened. Raises UserError."""
    path = Path(out) / "run.json"
    if not path.exists():
        raise missing(path, "tome")
    with values_of(path, "choose another --out"):
        saved = read_json(path)
        if saved["format"] != data.FORMAT:
            raise ValueError(f"it has format {saved['format']}, not {data.FORMAT}")
        if saved["settings"].keys() != FLAGS.keys():
            raise ValueError("settings are missing or unknown")
        for name, keys in (("corpus", {"path", "checksum"}),
                           ("init", {"path", "vocab", "weights", "trained"})):
            if saved[name] is not None and saved[name].keys() != keys:
                raise ValueError(f"{name} does not have the right keys")
        return Run(out, saved, blocks)

def open_run(out, task=None, blocks=1, device=None, n_search=0):
    """(run, trained TOME, memory). Corpus and memory include appended text. Writes nothing."""
    fast_matmul()
    run = read_run(out, blocks).open(device, appended=True)
    tome = load_model(run, task or "tome")
    return run, tome, tome.entities or open_memory(run, n_search)

# ---- What a command asks for ---------------------------------------------------------------------

def with_flags(saved, args):
    """The contents of run.json with the flags of this command applied. Raises UserError."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    settings = saved["settings"] | {name: given[name] for name in FLAGS if name in given}
    saved = saved | {name: given[name] for name in ("preset", "seed", "from") if name in given}
    if args.corpus is not None:
        saved["corpus"] = {"path": args.corpus, "checksum": checksum(args.corpus)}
    if args.init is not None:
        saved["init"], sizes = describe_published(args.init, with_values(Config(), settings))
        for name, value in sizes.items():
            if given.get(name, value) != value:
                raise UserError(f"{flag(name)} {given[name]}: --init has {value}; omit the flag")
        settings |= sizes
    return saved | {"settings": settings}

def describe_published(path, config):
    """(entry for --init in run.json, {setting: value} fixed by its weights). Raises UserError."""
    config, state, _, _ = read_published(path, config)
    trained, vocab = "key.linear.weight" in state, beside(path, "vocab.txt")
    if vocab is None:
        raise UserError(f"--init {path}: vocab.txt is missing; put the vocab.txt of its BERT there "
                        "(for the paper's weights, that of bert-base-uncased)")
    words = data.load_tokenizer(vocab).get_vocab_size()
    if words != config.vocab_size:
        raise UserError(f"--init {path}: vocab.txt has {words:,} entries, but the weights have "
                        f"{config.vocab_size:,}; put the matching vocab.txt there")
    if os.path.isfile(path) and not (trained and config.n_blocks == 1):
        raise UserError(f"--init {path}: it is not a BATCH-TOME with one memory layer; give a TOME "
                        "to --stage tome --start")
    names = ["hidden", "n_heads", "intermediate", "max_positions", "gelu", "n_initial", "n_upper"]
    names += ["key_dim", "value_dim", "coref_dim"] * trained
    init = {"path": path, "vocab": checksum(vocab), "trained": trained,
            "weights": [checksum(file) for file in weights_files(path)]}
    return init, {name: getattr(config, name) for name in names}

def differences(before, now):
    """Yields (name, new, old) for each value that differs: ("lr", "--lr 0.1", "with --lr 0.2").
    Files are compared by checksum, since they may have been moved, and shown by path."""
    def split(value):               # what is shown, what is compared
        if isinstance(value, dict):         # a file in run.json
            return value["path"], value | {"path": None}
        if isinstance(value, list):         # files of a stage: [[path, checksum], …]
            return value[0][0], [crc32 for _, crc32 in value]
        return value, value
    for name, value in now.items():
        (old, old_content), (new, new_content) = split(before.get(name)), split(value)
        if old_content != new_content:
            made = f"without {flag(name)}" if old is None else f"with {flag(name)} {old}"
            yield name, f"{flag(name)} {new}", made

def run_values(saved):
    """The values in run.json that are set by flags."""
    return {name: saved[name] for name in ("preset", "seed", "from", "corpus", "init")} \
        | saved["settings"]

def inherit(args):
    """--from OLD: makes a new run folder from OLD's settings and this command's flags, and links
    OLD's results of the stages before --stage. Raises UserError if one of these results depends on
    a changed setting. All of them depend on --preset, --seed, --corpus and --init."""
    out, before_it = Path(args.out), STAGES[:STAGES.index(args.stage)]
    origin = getattr(args, "from")              # `from` is a keyword in Python
    if origin is None or (out / "run.json").exists():
        return
    old = read_run(origin)
    saved = with_flags(old.saved, args)
    for name, given, made in differences(run_values(old.saved), run_values(saved)):
        since = FLAGS[name].metadata["since"] if name in FLAGS else "corpus"
        if since in before_it and name != "from":
            raise UserError(f"{given}: {old.out} was made {made}, and its stages before "
                            f"{args.stage} depend on it; leave the flag out, or start a new run "
                            "without --from")
    Run(out, saved, args.blocks)                    # only for its errors
    results = {"corpus": ["world", "corpus"], "batch-tome": ["batch-tome.pt"], "memory": ["memory"],
               "tome": ["tome-1.pt", "tome-2.pt"]}
    part = Path(f"{out}.part")
    with alone_in(part):
        for path in part.iterdir():                 # left by a command that was killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in sum((results[stage] for stage in before_it), []):
            source = old.out / name
            if source.is_dir():
                shutil.copytree(source, part / name, copy_function=data.link)
                data.sync_folder(part / name)
            elif source.exists() and read_checkpoint(source)["about"]["finished"]:
                data.link(source, part / name)
        write_json(part / "run.json", saved)
        os.rename(part, out)                        # fails if `out` exists and is not empty
        data.sync_folder(out.absolute().parent)

def settle(args):
    """(Run, Plans of the stages up to --stage, except memory). Flags such as --steps apply only to
    the Plan of --stage itself. Mistakes in flags, examples and --start are found before anything is
    written or trained."""
    out, kind = Path(args.out), args.task or args.stage
    choose_device(args.device)          # only for its error
    if (out / "run.json").exists():
        run = read_run(out, args.blocks)
        now = run_values(with_flags(run.saved, args))
        for _, given, made in differences(run_values(run.saved), now):
            raise UserError(f"{given}: {out} was made {made}; leave the flag out, or choose "
                            "another --out")
    else:
        results = [*out.glob("*.pt"), *out.glob("memory")]
        if results:
            raise UserError(f"{results[0]} exists, but {out / 'run.json'} is missing; restore it, "
                            "or choose another --out")
        preset = args.preset or "toy"
        values = {name: f.default for name, f in FLAGS.items()} | PRESETS[preset]
        schedule = values.pop("schedule", Settings().schedule)
        saved = {"format": data.FORMAT, "preset": preset, "seed": 0, "from": None, "corpus": None,
                 "init": None, "settings": values,
                 "schedule": {name: vars(stage) for name, stage in schedule.items()}}
        run = Run(out, with_flags(saved, args), args.blocks)
    return run, [stage_plan(run, stage, args if stage == kind else None)
                 for stage in run.stages_to(kind) if stage != "memory"]

def stage_plan(run, kind, args=None):
    """The Plan of a stage. If the stage has begun, its file contains the Plan. Otherwise it is the
    run's default, changed by the flags in `args`. Raises UserError for a flag that is impossible or
    contradicts the file."""
    plan, flags = run.plan(kind), stage_flags(run, args) if args else {}
    path, checkpoint = run.path(plan), run.checkpoint(plan)
    if checkpoint is None:
        plan = replace(plan, **flags)
        return replace(plan, warmup=min(plan.warmup, plan.steps // 10))
    plan = checkpoint["plan"]
    for name, given, made in differences(vars(plan), flags):
        # An unfinished stage, which may have diverged, can continue with a lower learning rate.
        if name != "lr" or flags["lr"] > plan.lr or checkpoint["about"]["finished"]:
            raise UserError(f"{given}: {path} was made {made}; leave the flag out, remove {path} "
                            "to train again, or choose another --out")
    return replace(plan, **flags)

def stage_flags(run, args):
    """{name: value} of the Plan's fields that this command's flags specify. Raises UserError."""
    flags = {name: getattr(args, name) for name in STAGE_FLAGS if getattr(args, name) is not None}
    check_values(flags)
    if run.is_baseline and flags.get("n_search"):
        raise UserError("--n-search: a baseline has no mention memory; leave it out")
    if args.start == "scratch" and run.has_batch_tome:
        raise UserError("--start scratch: --init has trained weights; leave --start out")
    if args.start == "scratch":
        flags["start"] = [["scratch", 0]]
    elif args.start is not None:
        flags["start"] = [[args.start, checksum(args.start)]]
        read_start(run, args.start)                                     # only for its errors
    if args.examples is not None:
        paths = [args.examples, *map(str, dev_files(args.examples))]
        flags["examples"] = [[path, checksum(path)] for path in paths]
        for path in paths:
            examples = labelled_examples(path, args.task)               # only to find errors
            if args.task == "claims" and len({e.label for e in examples}) == 1:
                raise UserError(f"{path}: all claims have the same label; add claims with another "
                                "label")
    elif args.task and not run.is_toy and not run.path(run.plan(args.task)).exists():
        raise UserError(f"--task {args.task} on your own corpus needs --examples FILE (README)")
    return flags

def needs_memory(run, plan, args):
    """Whether the memory has to be built right after this stage (true only for batch-tome)."""
    return (plan.kind == "batch-tome" and args.stage != "batch-tome"
            and not (run.out / "memory").exists())

def announce(run, plans, args):
    """Prints which stages will be trained, for how many steps, and whether the memory will be built
    or a file appended."""
    parts = []
    for plan in plans:
        checkpoint, is_default = run.checkpoint(plan), plan.steps == run.plan(plan.kind).steps
        if checkpoint is None:
            why = f"preset {run.saved['preset']}" if is_default else "--steps"
            parts.append(f"{plan.name} ({plan.steps:,} steps, {why})")
        elif not checkpoint["about"]["finished"]:
            step = checkpoint["about"]["step"]
            parts.append(f"{plan.name} (from step {step:,} to {plan.steps:,})")
        if needs_memory(run, plan, args):
            parts.append("memory")
    if args.append is not None:
        parts.append(f"append {args.append}")
    say(f"{run.out}: {', '.join(parts) or 'nothing is left to train'}.")

# ---- What a command makes ------------------------------------------------------------------------

def prepare(run, source):
    """The first process makes the corpus and run.json if they are missing. All other processes
    wait. source: the file of --corpus, or None to read the corpus from the path in run.json."""
    ann.barrier()               # wait until all processes have read the existing files
    if ann.rank_and_size()[0] == 0:
        if not (run.out / "corpus").exists():
            if run.is_toy:
                source = make_world(run.out / "world", run.seed)
            make_corpus(run, source or run.saved["corpus"]["path"], run.out / "corpus")
        if not (run.out / "run.json").exists():
            write_json(run.out / "run.json", run.saved)
    ann.barrier()

def make_world(folder, seed):
    """Makes the toy world of this seed, unless it exists. Returns its corpus file."""
    if not folder.exists():
        say(f"No --corpus: making the toy world in {folder}.")
        part = Path(f"{folder}.part")
        shutil.rmtree(part, ignore_errors=True)
        data.toy(part, seed)
        names = sorted(path.name for path in part.glob("*.jsonl"))
        data.commit_folder(part, folder, names, format=data.FORMAT, seed=seed)
    if data.open_folder(folder, "toy world")["seed"] != seed:
        raise UserError(f"{folder} is the toy world of another --seed; choose another --out")
    return folder / "corpus.jsonl"

def make_corpus(run, source, folder, old=None, replace_articles=False, appended=()):
    """Tokenises `source` into the folder. old: a Corpus whose tokenizer is used and whose passages
    come first, unchanged. appended: [checksum, replace_articles] of each appended file, the last of
    which is `source`."""
    settings, made_from = run.settings, run.corpus_made_from()
    if old is not None:
        tokenizer = old.tokenizer
    elif run.init:
        tokenizer = data.load_tokenizer(beside(run.init, "vocab.txt") or run.init)
    else:
        say(f"Learning a vocabulary from {source}.")
        texts = (text.text for text in data.read_corpus(source))
        tokenizer = data.train_tokenizer(texts, settings.vocab)
    say(f"Tokenising {source}.")
    corpus = data.Corpus.build(source, folder, tokenizer, settings.passage_length,
                               settings.max_length, settings.unseen, old, replace_articles,
                               made_from=made_from, appended=list(appended))
    expected = appended[-1][0] if appended else made_from["text"]
    if checksum(source) != expected and (appended or not run.is_toy):
        shutil.rmtree(folder)
        raise UserError(f"{source} changed while it was being read; run the command again")
    counts = corpus.meta["counts"]
    say(f"  {counts['passages']:,} passages, {counts['mentions']:,} mentions "
        f"({counts['linked']:,} linked) of {counts['entities']:,} entities")

def make_memory(run, corpus, folder, old_folder=None):
    """Builds the memory of a corpus (§2.1.2). old_folder: the memory before --append."""
    made_from = run.made_from("memory") | {"corpus": checksum(corpus.folder / "meta.json")}
    build_memory(load_model(run, "batch-tome"), corpus, folder, run.device,
                 np.dtype(run.settings.memory_dtype), made_from, old_folder)

def append(run, file, replace_articles):
    """Makes a new folder appended-NNNN, which contains the corpus and the memory extended by a
    corpus file. Training never uses this folder. replace_articles: whether articles in the file
    replace existing articles with the same title."""
    run.open(run.device.type, appended=True)
    done, record = run.corpus.meta["appended"], [checksum(file), replace_articles]
    # With --replace, only the last appended file is compared, since a later file may have replaced
    # the articles of an earlier one.
    if record in (done[-1:] if replace_articles else done):
        say(f"{run.base} already contains {file}; nothing is left to do.")
        return
    open_memory(run)                                    # only for its errors
    folder, is_first = run.out / f"appended-{len(done) + 1:04d}", ann.rank_and_size()[0] == 0
    part = Path(f"{folder}.part")
    if is_first:
        append_corpus(run, file, part, replace_articles, [*done, record])
    ann.barrier()
    new, n = data.Corpus(part / "corpus"), len(run.corpus.article)
    if not (part / "memory").exists():
        make_memory(run, new, part / "memory", run.base / "memory")
    if is_first:
        os.rename(part, folder)
        data.sync_folder(run.out)
    ann.barrier()
    say(f"Added {len(new.article) - n:,} passages from {file} to the existing {n:,}.")

def append_corpus(run, file, part, replace_articles, appended):
    """Makes the corpus of --append in `part`, unless a killed command has already made it. Prints
    the words that the vocabulary does not contain."""
    corpus = part / "corpus"
    if corpus.exists() and data.open_folder(corpus, "tokenised corpus")["appended"] == appended:
        return
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    data.sync_folder(run.out)
    unknown = data.unknown_words(run.tokenizer, (text.text for text in data.read_corpus(file)))
    if unknown:
        shown = ", ".join(unknown[:10]) + (", …" if len(unknown) > 10 else "")
        say(f"{file}: {len(unknown):,} words are not in the vocabulary, so names that contain them "
            f"may not be recognised: {shown}")
    make_corpus(run, file, corpus, run.corpus, replace_articles, appended)

def log(out, record):
    """Appends `record` to log.jsonl, as one line. After a crash, the same evaluation can be there
    twice; the two lines then differ only in "seconds"."""
    if ann.rank_and_size()[0] == 0:
        with open(out / "log.jsonl", "ab+") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):         # a crash left the last line incomplete
                file.write(b"\n")
            file.write(json.dumps(record).encode() + b"\n")
        data.sync(out / "log.jsonl")

@contextmanager
def alone_in(out):
    """Makes the folder `out` and locks it until the `with` block ends or the command is killed. A
    new folder that is still empty after the block is removed. Raises UserError if another command
    has locked the folder."""
    is_new, folder = not os.path.exists(out), None
    os.makedirs(out, exist_ok=True)
    data.sync_folder(Path(out).absolute().parent)
    try:
        import fcntl
        folder = os.open(out, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(f"--out {out}: another train.py is running there; wait for it") from None
    except (ImportError, OSError):          # Windows; some network drives
        say(f"{out} cannot be locked; do not start a second train.py there.")
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):         # not empty, or renamed (by inherit)
                os.rmdir(out)
        if folder is not None:
            os.close(folder)

# ==== Set apart: the command line =================================================================

@contextmanager
def signals_to(handler):
    """Inside the `with` block, Ctrl-C and SIGTERM call handler(number, frame). Python can set
    handlers only in the main thread. In any other thread, nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

def fast_matmul():
    """Speeds up float32 products on processors without AMX (Intel's matrix instructions). The
    setting "bf16" selects the library oneDNN, which is faster than the default (MKL) on AMD and,
    without AMX, still computes in float32. If a test product is inexact, the setting is undone.
    Runs are bit-identical only if all of them call this function."""
    # oneDNN caches the code that it compiles for each shape of a product. Batches have many shapes,
    # and with the default limit of 1,024 the cache takes gigabytes.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")          # oneDNN reads these at the first product
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    has_amx = torch.cpu.get_capabilities().get("amx_tile", False)
    if has_amx or not hasattr(matmul, "fp32_precision"):
        return
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    x = torch.full((64, 64), 1 + 2 ** -12)          # in bfloat16 this would be rounded to 1
    if not torch.equal(x @ torch.eye(64), x):
        matmul.fp32_precision = before

def say(text, file=None):
    """Prints above the progress bar, in the first process only."""
    if ann.rank_and_size()[0] == 0:
        tqdm.write(data.printable(text), file)

def say_figures(figures, place=""):
    """Prints `place` (stage and step) and figures as one aligned line, if there are any figures.
    The mean losses come first. Then come "tokens" and "attention" of masked_mentions in percent,
    each for seen/unseen entities, or in fine-tuning the accuracy on dev examples. Training.evaluate
    also writes all figures to log.jsonl; BatchTOMEStage.fit only prints them."""
    losses = [f"{name} {value:.2f}" for name, value in figures.items()
              if isinstance(value, float) and name != "score"]
    groups = [figures[group] for group in GROUPS if figures.get(group, {}).get("n")]
    measured = []
    if groups:
        for name in ("tokens", "attention"):
            shares = "/".join(f"{100 * group[name]:.0f}" for group in groups)
            measured.append(f"{name} {shares}%")
    if "score" in figures:
        measured.append(f"dev accuracy {figures['score']:.3f}")
    if losses or measured:
        left = f"{place:<17}{'  '.join(losses)}"
        say(f"{left:<52}  {'  '.join(measured)}".rstrip())

def choose_device(name=None):
    """The torch.device for --device. With CUDA, each process gets its own GPU. Raises UserError."""
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not is_there.get(name, True):
        raise UserError(f"--device {name}: this PyTorch sees no such device; leave --device out")
    if name == "mps" or name == "cpu" or not is_there["cuda"]:
        return torch.device(name or "cpu")
    index, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= n:
        raise UserError(f"number of GPUs on this machine: {n}; start at most that many processes, "
                        "or give --device cpu")
    return torch.device("cuda", index)

def join_processes(device):
    """Connects this process to the others that torchrun started, if any. Gives up after a few
    minutes. Once connected, a process may wait for up to a day, because the first process tokenises
    the corpus alone. If a process dies, its closed connections tell the others at once. Raises
    UserError if torchrun's environment variables are wrong."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size == "1":
        return
    try:
        rank, _, port = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"))
        if not (0 <= rank < int(world_size) and 0 < port < 2**16 and os.environ["MASTER_ADDR"]):
            raise ValueError
    except (ValueError, LookupError):
        raise UserError(f"WORLD_SIZE is {world_size!r}, but torchrun's variables are missing or "
                        "wrong; use torchrun for several processes, or unset WORLD_SIZE") from None
    device = choose_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    minutes, day = timedelta(minutes=2), timedelta(days=1)
    with signals_to(signal.SIG_DFL):        # while C++ connects, Python's handlers cannot run
        store, rank, size = next(dist.rendezvous("env://", timeout=minutes))
        store.set(f"process {rank}", "here")
        store.wait([f"process {i}" for i in range(size)], minutes)
        store.set_timeout(day)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=size, timeout=day)

def options(f):
    """The arguments of argparse's add_argument for a setting."""
    if isinstance(f.default, str):
        return {"choices": f.metadata["allowed"], "help": f.metadata["help"]}
    kind = type(f.default)
    return {"type": kind, "metavar": kind.__name__.upper(), "help": f.metadata["help"]}

PATH = {"type": os.path.abspath, "metavar": "PATH"}
ARGUMENTS = {       # flags that are not settings, in groups, with their arguments for add_argument
    "the command": {
        "stage": {"choices": STAGES[1:], "required": True},
        "out": {"help": "folder of the run (default: runs/<preset>)"},
        "device": {"choices": ("cpu", "cuda", "mps"),
                   "help": "default: cuda if found, otherwise cpu"},
        "quiet": {"action": "store_true", "help": "no report at the end"}},
    "a new run; in an existing folder these may be left out": {
        "preset": {"choices": list(PRESETS)}, "seed": options(CHECKED["seed"]),
        "corpus": PATH | {"help": "JSON lines, plain or .gz (README); default: the toy world"},
        "init": PATH | {"help": "start batch-tome from the BERT in this folder, or use a trained "
                        "BATCH-TOME from a file of the paper's own code"},
        "from": PATH | {"help": "reuse the results of earlier stages from the run in PATH, without "
                        "its appended text; settings that do not affect those results may be "
                        "changed"}},
    "the stage (all flags except --append and --replace are stored in its file)": {
        "blocks": {"type": int, "choices": (1, 2), "help": "TOME-1 (default) or TOME-2"},
        "start": {"help": "initial weights (stored as they are with --steps 0): a .pt file, a TOME "
                  'file of the paper\'s own code, or "scratch" for new weights (random, or those '
                  "of --init)"},
        "task": {"choices": ("claims", "qa"), "help": "the task for --stage finetune"},
        "examples": {"help": "a file to train on (default: the toy world's examples)"},
        "append": {"help": "add a corpus file to the memory, without training"},
        "replace": {"action": "store_true", "default": None,
                    "help": "with --append: new articles replace old ones with the same title"}}}
GOES_WITH = {       # stages, and the flags that have no effect in other stages
    ("batch-tome", "tome", "finetune"): ("steps", "batch", "lr"),
    ("tome", "finetune"): ("start", "n_search", "blocks"),
    ("memory",): ("append", "replace"), ("finetune",): ("task", "examples")}

def parse_arguments(argv):
    """The parsed command line. A flag in GOES_WITH that --stage would not use is an error."""
    parser = argparse.ArgumentParser(description="Train TOME, stage by stage.", allow_abbrev=False)
    for title, flags in (*ARGUMENTS.items(), ("settings of the stage", STAGE_FLAGS),
                         ("settings of a new run (default: the preset's)", FLAGS)):
        group = parser.add_argument_group(title)
        for name, f in flags.items():
            group.add_argument(flag(name), **(f if isinstance(f, dict) else options(f)))
    args = parser.parse_args(argv)
    for stages, names in GOES_WITH.items():
        for name in names:
            if getattr(args, name) is not None and args.stage not in stages:
                parser.error(f"{flag(name)} goes with --stage {' or '.join(stages)}")
    if args.stage == "finetune" and not args.task:
        parser.error("--stage finetune needs --task")
    if args.replace and args.append is None:
        parser.error("--replace goes with --append")
    args.blocks = args.blocks or 1
    args.out = args.out or f"runs/{args.preset or 'toy'}"
    return args

def train(args):
    """Trains the unfinished stages up to --stage, builds a missing memory if --stage needs it, and
    carries out --append. Returns the last Plan."""
    if args.append is not None:
        data.open_bytes(args.append).close()        # only for its errors
    ann.barrier()               # wait for the first process: with --from, it makes the new folder
    run, plans = settle(args)
    announce(run, plans, args)
    prepare(run, args.corpus)
    run.open(args.device)
    for plan in plans:
        started, checkpoint = time.time(), run.checkpoint(plan)
        ann.barrier()               # wait until all processes have read this stage's old file
        if checkpoint is None or not checkpoint["about"]["finished"]:
            say(f"Starting stage {plan.name} in {precision_on(run.config, run.device)}.")
            train_stage(run, plan, checkpoint)
            run.read_checkpoint.cache_clear()       # the stage's file has changed
            how = "finished" if plan.steps else "loaded, without training,"
            say(f"Stage {plan.name} {how} in {time.time() - started:.0f} s.")
        if needs_memory(run, plan, args):
            make_memory(run, run.corpus, run.out / "memory")
    if args.append is not None:
        append(run, args.append, bool(args.replace))
    if args.stage == "memory":
        folder = run.appended() / "memory"
        n = data.open_folder(folder, "memory", wanted=lambda name: False)["n"]
        say(f"{folder} contains {n:,} linked mentions.")
    return plans[-1]

def report(args, plan):
    """Runs eval.py, in a new process because it imports this file, and returns its exit status.
    With several processes, only prints the command, since the memory may not fit into one
    process."""
    flags = [f"--{name}={getattr(args, name)}" for name in ("out", "blocks", "task", "device")
             if getattr(args, name)]
    if plan.n_search:
        flags.append(f"--n-search={plan.n_search}")
    if ann.rank_and_size()[1] > 1:
        say(f"Finished. For the report, run python eval.py {' '.join(flags)}")
        return 0
    sys.stdout.flush()
    torch.cuda.empty_cache()            # makes room for eval.py
    return subprocess.run([sys.executable, Path(__file__).with_name("eval.py"), *flags]).returncode

def main(argv=None):
    """Returns the exit status: 0, 1 (with a sentence on stderr) or 130 (Ctrl-C or SIGTERM)."""
    args, status = parse_arguments(argv), 0
    try:
        # Ctrl-C and SIGTERM raise KeyboardInterrupt; in train_stage, only once the step is saved.
        with signals_to(signal.default_int_handler):
            fast_matmul()
            join_processes(args.device)
            is_first = ann.rank_and_size()[0] == 0
            if is_first:
                inherit(args)
            with alone_in(args.out) if is_first else nullcontext():
                plan = train(args)
            if args.stage in ("tome", "finetune") and not args.quiet:
                status = report(args, plan)
    except KeyboardInterrupt as stop:
        say(f"{str(stop) or 'Stopped'}; run the same command again to continue.")
        status = 130
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            error.filename = error.filename or args.out
        status = data.complain("train.py", error)
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split("\nException raised from")[0].split())
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            status = data.complain("train.py", "another process has ended, or the processes cannot "
                                   f"reach each other ({reason:.500}); fix the cause and rerun")
        elif data.is_out_of_memory(error):
            status = data.complain("train.py", f"out of memory ({reason:.150}); run the same "
                                   "command again to continue from the last checkpoint")
        else:
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return status

if __name__ == "__main__":
    data.print_any_text()
    sys.exit(main())
