"""Mixed precision for PyTorch as composable pure transforms."""

from npuamp_fn.flat import *
from npuamp_fn.loss_scale import *
from npuamp_fn.modules import *
from npuamp_fn.policy import *
from npuamp_fn.transforms.cast import *
from npuamp_fn.transforms.grad import *
from npuamp_fn.transforms.scaling import *
