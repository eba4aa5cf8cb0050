from .planning import apply as apply
from .planning import plan as plan
from .profile import measured_peak as measured_peak
from .recompute import checkpoint_every as checkpoint_every
from .workload import Workload as Workload
