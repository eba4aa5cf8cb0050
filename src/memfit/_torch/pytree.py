"""Trees of lists, tuples, mappings and registered containers (`torch.utils._pytree`)."""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_is_leaf as tree_is_leaf
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
