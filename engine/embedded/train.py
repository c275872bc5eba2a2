"""Train the embedded model: a small GPT-2 that tells simple stories.

    python engine/embedded/train.py --corpus DIR --out DIR [--steps N] [--seed S] [--threads T]

`--corpus` holds one or more `*.txt` files of stories separated by `<|endoftext|>` lines. The
script trains a byte-level BPE tokenizer and then the model on the same text, and writes an
ordinary Hugging Face directory (`config.json`, float16 `model.safetensors`, `tokenizer.json`, …)
plus `training.json` with every number that the model card quotes. The same corpus, seed, thread
count and torch build give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
CONTEXT = 512
PATHS = ("corpus", "out")


def read_stories(corpus: Path) -> list[str]:
    """All stories of a folder, without exact duplicates and without stuttering ones."""
    stories: dict[str, None] = {}
    for file in sorted(corpus.glob("*.txt")):
        for raw in file.read_text(encoding="utf-8").split(END):
            story = raw.strip()
            if len(story) > 80 and story[-1] in '.!?"' and repetition(story) < 0.12:
                stories[story] = None
    return list(stories)


def repetition(text: str, order: int = 6) -> float:
    """Share of word n-grams that already stood earlier in the text (0 = none)."""
    words = text.split()
    grams = [tuple(words[i : i + order]) for i in range(len(words) - order + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def train_tokenizer(stories: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every text begins with the end-of-text token, as stories do in training."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(stories, trainer)
    end = core.token_to_id(END)
    core.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, end)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, stories: list[str]) -> list[list[int]]:
    """Token ids of each story, its leading end-of-text token included."""
    return [list(tokenizer(story)["input_ids"]) for story in stories]


def windows(encoded: list[list[int]], rng: random.Random) -> list[list[int]]:
    """One epoch: shuffled stories end to end; every window of CONTEXT + 1 starts a story."""
    order = encoded[:]
    rng.shuffle(order)
    rows: list[list[int]] = []
    row: list[int] = []
    for story in order:
        row = row + story
        if len(row) > CONTEXT:
            rows.append(row[: CONTEXT + 1])
            row = []
    return rows


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 2 %, then a cosine to a twentieth of the peak."""
    warm = max(1, steps // 50)
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, rows: list[list[int]], batch: int) -> float:
    """Mean cross-entropy (nats a token) on held-out windows."""
    model.eval()
    losses = []
    for at in range(0, len(rows), batch):
        ids = torch.tensor(rows[at : at + batch])
        losses.append(float(model(ids[:, :-1], labels=ids[:, :-1]).loss) * len(ids))
    model.train()
    return sum(losses) / len(rows)


def optimizer_for(model: GPT2LMHeadModel, peak: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def main() -> None:
    """Train, and save after every report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens a step")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--report", type=int, default=250, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    stories = read_stories(args.corpus)
    rng.shuffle(stories)
    tokenizer = train_tokenizer(stories, args.vocab)
    encoded = encode(tokenizer, stories)
    held_out = windows(encoded[:200], random.Random(1))
    encoded = encoded[200:]
    tokens = sum(map(len, encoded))
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=args.vocab, n_positions=CONTEXT, n_embd=args.width, n_layer=args.layers,
        n_head=args.heads, bos_token_id=end, eos_token_id=end, resid_pdrop=args.dropout,
        embd_pdrop=args.dropout, attn_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(stories)} stories, {tokens} tokens, {size} parameters", flush=True)
    optimizer = optimizer_for(model, args.peak)
    model.train()
    queue: list[list[int]] = []
    best, smooth, started = math.inf, None, time.monotonic()
    log: list[dict[str, float]] = []
    for step in range(args.steps):
        if len(queue) < args.batch:
            queue = windows(encoded, rng)
        rows, queue = queue[: args.batch], queue[args.batch :]
        ids = torch.tensor(rows)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % args.report == 0 or step + 1 == args.steps:
            held = evaluate(model, held_out, args.batch)
            best = min(best, held)
            log.append({"step": step + 1, "train_loss": smooth, "held_out_loss": held})
            minutes = (time.monotonic() - started) / 60
            print(
                f"{step + 1:6d}  train {smooth:.3f}  held-out {held:.3f}  {minutes:.1f} min",
                flush=True,
            )
            save(model, tokenizer, args.out, {
                "stories": len(stories), "train_tokens": tokens, "parameters": size,
                "tokens_seen": (step + 1) * args.batch * CONTEXT, "log": log, "minutes": minutes,
                "arguments": {k: str(v) for k, v in vars(args).items() if k not in PATHS},
            })  # fmt: skip


def save(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, out: Path, facts: dict[str, object]
) -> None:
    """Write the directory as float16 without touching the float32 weights being trained."""
    half = GPT2LMHeadModel(model.config)
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
