"""A language model that is saved every second step, and whose best weights are copied."""

import copy

import torch
from networks import GPT, next_token_loss, save

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
best, lowest = None, float("inf")
for step, tokens in enumerate(torch.randint(0, 256, (8, 8, 224))):
    loss = next_token_loss(model(tokens), tokens)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if loss.item() < lowest:
        best, lowest = {name: value.clone() for name, value in model.state_dict().items()}, loss.item()
    if step % 2:
        torch.save({"model": model.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}, "checkpoint.pt")
    print("step", step, loss.item())
print("lowest", lowest, len(best))
save(model=model)
