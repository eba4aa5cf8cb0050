"""memfit for Jittor: checkpointing, training steps and plans, in the same terms and plan files as for PyTorch.

Importing this package imports Jittor; the first time on a machine it is compiled, which takes minutes
(`memfit tools doctor jittor` does it beforehand).

    from memfit import jittor as mj

    hidden = mj.checkpoint(block, hidden)               # recompute a block in the backward pass
    step = mj.Step(workload, microbatch_size=4)         # exact accumulation, clipping, fp16, resume
    plan = mj.plan(workload, budget="300MiB")           # measured, solved, applied, measured again
    step = mj.apply(plan, workload)
"""

from memfit import doctor

doctor.load()  # before anything here imports jittor

from memfit.jittor import memory, structure  # noqa: E402
from memfit.jittor.checkpoint import checkpoint  # noqa: E402
from memfit.jittor.draws import seed  # noqa: E402
from memfit.jittor.planning import apply, plan  # noqa: E402
from memfit.jittor.step import Step  # noqa: E402
from memfit.jittor.workload import Workload, load_workload  # noqa: E402

__all__ = ["Step", "Workload", "apply", "checkpoint", "load_workload", "memory", "plan", "seed", "structure"]
