"""An evaluation on larger batches after every second step, and a checkpoint of the best."""

import torch
from networks import GPT, next_token_loss, save

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out, best = torch.randint(0, 256, (8, 256)), float("inf")
for step in range(8):
    model.train()
    tokens = torch.randint(0, 256, (8, 256))
    loss = next_token_loss(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 1:
        model.eval()
        with torch.no_grad():
            validation = next_token_loss(model(held_out), held_out).item()
        if validation < best:
            best = validation
            save(model=model)
        print("validated", step, validation)
    print("step", step, loss.item())
save(model=model)
