"""specgen: a model's attention geometry in, a specialized kernel wheel out."""

__version__ = "0.1.0"
