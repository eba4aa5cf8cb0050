"""Gradient accumulation with autocast and clipping, as nanoGPT has it."""

import torch
from networks import GPT, next_token_loss, save

torch.manual_seed(0)
model = GPT(width=128)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=6e-4)
data = torch.randint(0, 256, (4096,))
micro_steps = 4


def get_batch():
    starts = torch.randint(len(data) - 256, (4,)).tolist()
    return torch.stack([data[i : i + 256] for i in starts])


batch = get_batch()
for step in range(5):
    for _ in range(micro_steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model(batch), batch) / micro_steps
        batch = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print("step", step, loss.item() * micro_steps)
save(model=model)
