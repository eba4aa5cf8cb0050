"""A LightningModule with a schedule, validation, clipping, checkpoints and resume."""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.second(F.gelu(self.norm(self.first(x))))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(4)))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.drop(self.blocks(self.stem(x)).mean((2, 3))))

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(self.global_step)  # for dropout: Lightning keeps no state of random numbers in a checkpoint

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        print("step", self.global_step, repr(loss.item()))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val_loss", loss)
        print("validated", repr(loss.item()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


lightning.seed_everything(0)
data = TensorDataset(torch.randn(64, 1, 32, 32), torch.randint(0, 10, (64,)))
held_out = TensorDataset(torch.randn(16, 1, 32, 32), torch.randint(0, 10, (16,)))
kept = lightning.pytorch.callbacks.ModelCheckpoint(arguments.out, filename="{epoch}", save_top_k=-1)
trainer = lightning.Trainer(
    max_epochs=arguments.steps // 2,
    accelerator="cpu",
    gradient_clip_val=1.0,
    callbacks=[kept],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=1,
)
model = Classifier()
trainer.fit(
    model,
    DataLoader(data, batch_size=32),
    DataLoader(held_out, batch_size=16),
    ckpt_path=os.path.join(arguments.out, "epoch=0.ckpt") if arguments.resume else None,
)
torch.save(model.state_dict(), os.path.join(arguments.out, "last.pt"))
