"""Fake tensors: shapes, dtypes and devices without data."""

from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses import fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
