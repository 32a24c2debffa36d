"""Distil a larger classifier, trained at the start, into a smaller one."""

import json

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class TeacherNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


class StudentNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(12, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


def make_rings(count, num_classes=5):
    """Return points (count, 16) on noisy shells around the origin, and the number of each point's shell."""
    labels = torch.randint(num_classes, (count,))
    directions = F.normalize(torch.randn(count, 16), dim=1)
    return TensorDataset(directions * (1 + labels.unsqueeze(1)) + 0.05 * torch.randn(count, 16), labels)


def train_teacher(model, train_loader, epochs, learning_rate, device):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for _ in range(epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()


@torch.no_grad()
def evaluate(model, test_loader, device):
    model.eval()
    correct = 0
    for inputs, labels in test_loader:
        correct += (model(inputs.to(device)).argmax(1) == labels.to(device)).sum().item()
    return 100 * correct / len(test_loader.dataset)


def train_knowledge_distillation(teacher, student, loaders, epochs, learning_rate, temperature, weight, device):
    train_loader, test_loader = loaders
    optimizer = optim.SGD(student.parameters(), lr=learning_rate, momentum=0.9, nesterov=True)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=25, gamma=0.5)
    progress = {"step": 0, "best_accuracy": 0.0}
    teacher.eval()

    for epoch in range(epochs):
        student.train()
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / temperature, dim=-1)
            soft_prob = F.log_softmax(student_logits / temperature, dim=-1)
            soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * temperature**2
            label_loss = F.cross_entropy(student_logits, labels)
            loss = weight * soft_loss + (1 - weight) * label_loss

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress["step"] += 1
            print(json.dumps({"step": progress["step"], "loss": loss.item(), "label_loss": label_loss.item()}))

        accuracy = evaluate(student, test_loader, device)
        progress["best_accuracy"] = max(progress["best_accuracy"], accuracy)
        print(f"epoch {epoch + 1}/{epochs}: accuracy {accuracy:.2f} %, best {progress['best_accuracy']:.2f} %")


if __name__ == "__main__":
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader = DataLoader(make_rings(480), batch_size=40, shuffle=True)
    test_loader = DataLoader(make_rings(200), batch_size=100, shuffle=False)
    loaders = (train_loader, test_loader)

    teacher = TeacherNet().to(device)
    train_teacher(teacher, train_loader, epochs=8, learning_rate=0.005, device=device)
    print(f"teacher accuracy: {evaluate(teacher, test_loader, device):.2f} %")

    student = StudentNet().to(device)
    train_knowledge_distillation(
        teacher, student, loaders, epochs=5, learning_rate=0.05, temperature=2, weight=0.5, device=device
    )
    print(f"student accuracy: {evaluate(student, test_loader, device):.2f} %")
