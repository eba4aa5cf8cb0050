from . import accelerate as accelerate
from . import lightning as lightning
from . import transformers as transformers
from .trainer_plan import TrainerPlan as TrainerPlan
