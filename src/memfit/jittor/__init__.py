"""memfit for Jittor: checkpointing, training steps and plans, in the same terms and plan files as for PyTorch.

Importing this package imports Jittor; the first time on a machine it is compiled, which takes minutes
(`memfit tools doctor jittor` does it beforehand).

    from memfit import jittor as mj

    hidden = mj.checkpoint(block, hidden)               # recompute a block in the backward pass
    step = mj.Step(workload, microbatch_size=4)         # exact accumulation, clipping, fp16, resume
    plan = mj.plan(workload, budget="300MiB")           # measured, solved, applied, measured again
    step = mj.apply(plan, workload)
"""

from memfit.jittor import memory, structure
from memfit.jittor.checkpointing import checkpoint, seed
from memfit.jittor.planning import apply, plan
from memfit.jittor.step import Step
from memfit.jittor.workload import Workload, load_workload

__all__ = ["Step", "Workload", "apply", "checkpoint", "load_workload", "memory", "plan", "seed", "structure"]
