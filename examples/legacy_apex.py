"""A training script in the legacy style: the vendor guide's own usage; only the import line differs.

With apex it would say ``from apex import amp, optimizers``.
"""

import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers


def main() -> float:
    """Train a small classifier and return its last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, combine_grad=True)

    prototypes = torch.randn(10, 1, 8, 8)
    for step in range(1, 61):
        labels = torch.randint(10, (32,))
        images = prototypes[labels] + 0.5 * torch.randn(32, 1, 8, 8)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    print(f"weights {model[0].weight.dtype}, saved as {model.state_dict()['0.weight'].dtype}")
    return loss.item()


if __name__ == "__main__":
    main()
