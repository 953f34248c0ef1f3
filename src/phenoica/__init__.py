"""Cell-microscopy plates in; disentangled and honestly scored perturbation embeddings out.

Importing the package is cheap: neither torch nor scanpy is loaded until a stage needs it.
"""

__version__ = "0.1.0"
