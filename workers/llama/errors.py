"""The errors of this package: a model can't be served, or a step can't be computed.

The tree, with the exit code of a worker that can't start because of the error:

    ModelError            the file is missing, damaged or of a kind that is not served     BAD_MODEL
    └─ ModelTooLarge      the weights or the KV cache do not fit this machine              NO_MEMORY
    DecodeFailed          llama.cpp refused or failed a batch                              CRASHED
    AdapterError          a LoRA file is missing, damaged, or not made for this model      (the load is refused)
    StateUnusable         a saved state can't be taken or brought back                     (the call is computed anew)
"""

from __future__ import annotations


class ModelError(Exception):
    """A model can't be served. The message is one line: the file, what is wrong with it, the remedy."""


class ModelTooLarge(ModelError):
    """The model or its KV cache does not fit the memory; the message says how much is needed and how much there is."""


class DecodeFailed(RuntimeError):
    """`llama_decode` refused a batch. The engine reserves cells before it decodes, so this is never expected."""


class StateUnusable(RuntimeError):
    """A sequence's state could not be saved or restored; a sequence to be restored is empty afterwards."""


class AdapterError(Exception):
    """An adapter can't be used. The message is one line: the file, what is wrong with it, the remedy."""
