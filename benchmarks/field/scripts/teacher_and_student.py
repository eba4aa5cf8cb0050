"""Distillation: a larger network that does not train, and the one that learns from it, both in one loop."""

import torch
from networks import GPT, save
from torch.nn import functional as F

torch.manual_seed(0)
teacher, student = GPT(width=128, depth=4).eval().requires_grad_(False), GPT(width=64, depth=6)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(7):
    tokens = torch.randint(0, 256, (8, 192))
    with torch.no_grad():
        wanted = teacher(tokens)
    logits = student(tokens)
    loss = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(student=student)
