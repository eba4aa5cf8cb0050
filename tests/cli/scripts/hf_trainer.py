"""A language model in Hugging Face's Trainer, with evaluation, checkpoints and resume."""

import argparse

import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()


class Tokens(torch.utils.data.Dataset):
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        ids = torch.randint(0, 64, (64,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Printed(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        kept = {name: value for name, value in logs.items() if name in ("loss", "eval_loss", "grad_norm")}
        if kept:
            print("step", state.global_step, sorted(kept.items()))


transformers.set_seed(0)
config = transformers.GPT2Config(
    n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0
)
model = transformers.GPT2LMHeadModel(config)
training_arguments = transformers.TrainingArguments(
    arguments.out,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    max_steps=arguments.steps,
    learning_rate=1e-3,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    seed=0,
)
trainer = transformers.Trainer(
    model=model,
    args=training_arguments,
    train_dataset=Tokens(0, 128),
    eval_dataset=Tokens(1000, 16),
    callbacks=[Printed()],
)
trainer.train(resume_from_checkpoint=f"{arguments.out}/checkpoint-2" if arguments.resume else None)
torch.save(model.state_dict(), f"{arguments.out}/last.pt")
