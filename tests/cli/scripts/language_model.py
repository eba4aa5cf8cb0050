"""Flat, with an evaluation, a schedule, accumulation, checkpoints and resume: as nanoGPT's train.py."""

import math
import os
import sys

import helper  # beside the script
import torch

out, steps, resume = "out", 4, False
for argument in sys.argv[1:]:
    name, value = argument[2:].split("=")
    globals()[name] = type(globals()[name])(eval(value)) if not isinstance(globals()[name], str) else value
os.makedirs(out, exist_ok=True)
torch.manual_seed(1337)
model = helper.model()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
start, path = 0, os.path.join(out, "ckpt.pt")
if resume:
    kept = torch.load(path, weights_only=False)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    start = kept["step"]


def get_batch():
    rows = torch.randint(1000, (16,))
    data = torch.arange(2000)
    x = torch.stack([data[i : i + 64] % 97 for i in rows])
    y = torch.stack([data[i + 1 : i + 65] % 97 for i in rows])
    return x, y


@torch.no_grad()
def evaluate():
    model.eval()
    state = torch.get_rng_state()
    loss = sum(model(*get_batch())[1].item() for _ in range(2))
    torch.set_rng_state(state)
    model.train()
    return loss


x, y = get_batch()
for step in range(start, steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 10))
    if step == 2:
        random = kept["random"] if resume else torch.get_rng_state()
        torch.set_rng_state(random)
        print("evaluated", repr(evaluate()))
        if not resume:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": random}
            torch.save(kept, path)
        x, y = get_batch()
    for _ in range(2):
        logits, loss = model(x, y)
        loss = loss / 2
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print("step", step, repr(loss.item() * 2))
torch.save(model.state_dict(), os.path.join(out, "last.pt"))
