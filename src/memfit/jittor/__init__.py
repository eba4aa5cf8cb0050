"""memfit for Jittor: checkpointing, training steps and plans, in the same terms and plan files as for PyTorch.

The first name used imports Jittor; the first time on a machine it is compiled, which takes minutes
(`memfit tools doctor jittor` does it beforehand).

    from memfit import jittor as mj

    hidden = mj.checkpoint(block, hidden)               # recompute a block in the backward pass
    step = mj.Step(workload, microbatch_size=4)         # exact accumulation, clipping, fp16, resume
    plan = mj.plan(workload, budget="300MiB")           # measured, solved, applied, measured again
    step = mj.apply(plan, workload)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
