"""memfit for Jittor: checkpointing, training steps and plans, in the same terms and plan files as for PyTorch.

Importing this package imports Jittor; the first time on a machine it is compiled, which takes minutes
(`memfit tools doctor jittor` does it beforehand).

    from memfit import jittor as mj

    hidden = mj.checkpoint(block, hidden)               # recompute a block in the backward pass
    step = mj.Step(workload, microbatch_size=4)         # exact accumulation, clipping, fp16, resume
    plan = mj.plan(workload, budget="300MiB")           # measured, solved, applied, measured again
    step = mj.apply(plan, workload)
"""

from memfit import frameworks
from memfit.frameworks import jittor as room
from memfit.frameworks.jittor import Step, Workload, apply, checkpoint, load_workload, plan, seed

memory, structure = room.memory, room.structure

__all__ = ["Step", "Workload", "apply", "checkpoint", "load_workload", "memory", "plan", "seed", "structure"]

frameworks.opened("memfit.frameworks.jittor", __name__)
