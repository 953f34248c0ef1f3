"""The exceptions phenoica raises on purpose.

Each message says what is wrong, in which file, row or well, and what to do about it. The command line prints the
message and leaves out the traceback.
"""


class PhenoicaError(Exception):
    """Base of every error a user can mend."""


class ConfigError(PhenoicaError):
    """The configuration is not valid."""


class AddressError(PhenoicaError, ValueError):
    """A well address does not exist on the plate format."""


class MetadataError(PhenoicaError):
    """The well metadata cannot be used."""


class ShardError(PhenoicaError):
    """An image shard cannot be read or does not follow the published layout."""


class ImageError(PhenoicaError):
    """One image cannot be used; the caller quarantines it."""


class ImageImportError(PhenoicaError):
    """Own images cannot be imported as they are listed or named, or with these options."""


class TooManyBadImages(PhenoicaError):
    """More images are bad than `max_bad_fraction` allows."""


class CheckpointError(PhenoicaError):
    """A model checkpoint does not fit the model."""


class StorageError(PhenoicaError):
    """A result cannot be written: the disk is full, or the folder does not allow it."""


class FetchError(PhenoicaError):
    """Weights or data cannot be fetched, or may not be."""


class EmbeddingError(PhenoicaError):
    """Embedding cannot go on: the encoder gave what is no finite number, or a process that decodes was killed."""


class ControlsError(PhenoicaError):
    """A batch or plate lacks the controls that a step needs."""


class SchemaError(PhenoicaError):
    """An AnnData or table does not follow phenoica's schema."""


class FitError(PhenoicaError):
    """A view cannot be fitted to these data."""


class ScoreError(PhenoicaError):
    """A score cannot be computed from these data."""
