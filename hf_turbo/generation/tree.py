from ..cache.token_tree import *  # noqa
from ..cache.token_tree import MAX_NODES as MAX_NODES, TokenTree as TokenTree, TreeTensors as TreeTensors  # noqa
