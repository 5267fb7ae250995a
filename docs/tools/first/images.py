import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # 16: a public constant
labels = torch.tensor(digits.target)
test_set = TensorDataset(images[:360], labels[:360])
train_set = TensorDataset(images[360:], labels[360:])
