from .compiled_loss import CompiledLoss as CompiledLoss
from .compiled_loss import PlannedBackend as PlannedBackend
from .joint_rewriter import FUSED_ERROR as FUSED_ERROR
