"""What a model keeps for each token, layer by layer, read from its config.json."""

from tightkv.model_shape.compressible import compressed_layers, skip_reason
from tightkv.model_shape.reader import read_model_shape
from tightkv.model_shape.shape import LayerShape, ModelShape
from tightkv.model_shape.source import is_local
from tightkv.model_shape.weights import estimate_parameters, stored_weights, weights_dtype
