"""A 3D segmentation in MONAI, as in its tutorials: dictionary transforms, SegResNet, DiceLoss, sliding windows."""

import argparse
import os

import nibabel
import numpy
import torch
from monai.data import DataLoader, Dataset, create_test_image_3d, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import SegResNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()
os.makedirs(arguments.out, exist_ok=True)
set_determinism(0)

files = []
for i in range(3):
    numbers = numpy.random.RandomState(i)
    image, label = create_test_image_3d(32, 32, 32, rad_max=10, rad_min=4, num_seg_classes=1, random_state=numbers)
    pair = {name: os.path.join(arguments.out, f"{name}{i}.nii.gz") for name in ("image", "label")}
    for name, volume in (("image", image), ("label", label)):
        nibabel.save(nibabel.Nifti1Image(volume, numpy.eye(4)), pair[name])
    files.append(pair)
keys = ["image", "label"]
loaded = [LoadImaged(keys=keys), EnsureChannelFirstd(keys=keys), ScaleIntensityd(keys=keys)]
cropped = RandCropByPosNegLabeld(keys=keys, label_key="label", spatial_size=(24, 24, 24), pos=1, neg=1, num_samples=2)
train_transforms = Compose([*loaded, cropped, RandRotate90d(keys=keys, prob=0.5, spatial_axes=(0, 2))])
train_ds = Dataset(files[:2], train_transforms)
train_loader = DataLoader(train_ds, batch_size=1, shuffle=True)
val_loader = DataLoader(Dataset(files[2:], Compose(loaded)), batch_size=1)

model = SegResNet(init_filters=8, in_channels=1, out_channels=2, blocks_down=(5, 1), blocks_up=(1,))
loss_function = DiceLoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
dice_metric = DiceMetric(include_background=False, reduction="mean")
post_pred, post_label = AsDiscrete(argmax=True, to_onehot=2), AsDiscrete(to_onehot=2)
path, first_epoch = os.path.join(arguments.out, "best_metric_model.pth"), 0
if arguments.resume:
    kept = torch.load(path)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    first_epoch = kept["epoch"]


def validate():
    model.eval()
    with torch.no_grad():
        for val_data in val_loader:
            val_outputs = sliding_window_inference(val_data["image"], (24, 24, 24), 2, model)
            val_outputs = [post_pred(i) for i in decollate_batch(val_outputs)]
            val_labels = [post_label(i) for i in decollate_batch(val_data["label"])]
            dice_metric(y_pred=val_outputs, y=val_labels)
    metric = dice_metric.aggregate().item()
    dice_metric.reset()
    return metric


for epoch in range(first_epoch, arguments.steps // 2):
    set_determinism(epoch)
    train_transforms.set_random_state(epoch)
    model.train()
    epoch_loss, step = 0, 0
    for batch_data in train_loader:
        step += 1
        inputs, labels = batch_data["image"], batch_data["label"]
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_function(outputs, labels)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
        print("step", epoch, step, repr(loss.item()))
    print("dice", repr(validate()))
    if epoch == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, path)
torch.save(model.state_dict(), os.path.join(arguments.out, "last.pt"))
