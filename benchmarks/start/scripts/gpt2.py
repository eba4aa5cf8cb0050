"""A language model: GPT-2 of Transformers, with 12 layers, clipped gradients and a schedule."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=8192, n_positions=256, n_embd=384, n_layer=12, n_head=6))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
model.train()
for step in range(6):
    tokens = torch.randint(0, 8192, (4, 256))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    print("step", step, loss.item())
