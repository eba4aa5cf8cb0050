"""Text sorted by length: each batch is padded to its longest sequence, and batches get longer."""

import torch
from networks import GPT, save
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
texts = sorted((torch.randint(1, 256, (int(n),)) for n in torch.randint(40, 300, (80,))), key=len)


def collate(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=0)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, tokens in enumerate(DataLoader(texts, batch_size=8, collate_fn=collate)):
    logits = model(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, tokens.shape[1], loss.item())
save(model=model)
