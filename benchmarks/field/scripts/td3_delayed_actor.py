"""TD3: twin critics in every iteration, the actor and the target networks in every second."""

import copy

import torch
from networks import Block, save
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(24, 64), Block(64), nn.Linear(64, 1)) for _ in range(2))

    def forward(self, state, action):
        x = torch.cat([state, action], 1)
        return self.first(x), self.second(x)


actor = nn.Sequential(nn.Linear(16, 96), *(Block(96) for _ in range(6)), nn.Linear(96, 8), nn.Tanh())
critic = Critic()
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4)
memory = [(torch.randn(16), torch.rand(8) * 2 - 1, torch.randn(16), torch.randn(1)) for _ in range(1024)]
for it in range(10):
    rows = torch.randint(0, len(memory), (1024,)).tolist()
    state, action, next_state, reward = (torch.stack(part) for part in zip(*(memory[row] for row in rows), strict=True))
    with torch.no_grad():
        noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
        target = torch.min(*critic_target(next_state, (actor_target(next_state) + noise).clamp(-1, 1)))
        target = reward + 0.99 * target
    first, second = critic(state, action)
    critic_loss = F.mse_loss(first, target) + F.mse_loss(second, target)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    if it % 2 == 1:
        actor_loss = -critic(state, actor(state))[0].mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for net, slow in ((actor, actor_target), (critic, critic_target)):
            for p, s in zip(net.parameters(), slow.parameters(), strict=True):
                s.data.mul_(0.995).add_(p.data, alpha=0.005)
        print("actor", it, actor_loss.item())
    print("critic", it, critic_loss.item())
save(actor=actor, critic=critic, actor_target=actor_target)
