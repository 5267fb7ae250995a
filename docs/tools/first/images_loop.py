from opacus import PrivacyEngine

from indpriv.recording import Recorder, RecordingPolicy, private_generator

optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loss_fn = nn.CrossEntropyLoss(reduction="none")
epochs = 10
model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(train_set, batch_size=128, generator=private_generator()),
    target_epsilon=8.0,
    target_delta=1e-5,
    epochs=epochs,
    max_grad_norm=1.0,
    noise_generator=private_generator(),  # nobody can guess its state
)


def train(epochs):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).mean().backward()
            optimizer.step()
